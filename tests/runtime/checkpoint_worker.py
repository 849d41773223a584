"""What the launcher runs in the checkpoint tests: engines that load, train and save."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed
import torch
import toy
import worker
from deepspeed.pipe import LayerSpec, PipelineModule

from pipeplan.errors import PipeplanError
from pipeplan.runtime.process_groups import close_groups


def resume(case: dict[str, Any]) -> dict[str, Any]:
    """Load what ``load`` names, save it again at once, train ``num_steps`` from there on, and save that too."""
    engine = worker.planned_engine(case)
    result: dict[str, Any] = {"losses": [], "client_state": None, "steps": 0}
    if "load" in case:
        _, result["client_state"] = engine.load_checkpoint(case["load"])
        result["steps"] = engine.global_steps
        engine.save_checkpoint(case["save"], tag="loaded", client_state=result["client_state"])
    first = engine.global_steps * case["num_micro_batches"]
    data = worker.batches(first, engine.grid.data_parallel_id)
    for _ in range(case["num_steps"]):
        result["losses"].append(float(engine.train_batch(data_iter=data)))
    engine.save_checkpoint(Path(case["save"]), client_state={"from": case["name"]})
    return result


def refuse(case: dict[str, Any]) -> dict[str, Any]:
    """Try to load; return the message, the weights, and whether they stayed as they were."""
    engine = worker.planned_engine(case)
    before = [parameter.detach().clone() for parameter in engine.module.parameters()]
    message = ""
    try:
        engine.load_checkpoint(case["load"], **case.get("options", {}))
    except PipeplanError as error:
        message = f"{type(error).__name__}: {error}"
    after = list(engine.module.parameters())
    return {
        "message": message,
        "is_unchanged": all(torch.equal(one, other) for one, other in zip(before, after, strict=True)),
        "weights": {name: value.detach().clone() for name, value in worker.named_parameters(engine).items()},
        "steps": engine.global_steps,
    }


def fail_to_save(case: dict[str, Any]) -> dict[str, Any]:
    """Try to save; return the message."""
    engine = worker.planned_engine(case)
    try:
        engine.save_checkpoint(case["save"])
    except PipeplanError as error:
        return {"message": str(error)}
    return {"message": ""}


def read_with_deepspeed(case: dict[str, Any]) -> dict[str, Any]:
    """Load the weights into a stock ``PipelineModule``; return this rank's."""
    module = PipelineModule(
        [LayerSpec(kind) for kind in toy.CLASSES_BY_MODEL[case["model"]]],
        num_stages=case["num_stages"],
        loss_fn=toy.loss_function,
        partition_method="uniform",
    )
    engine, *_ = deepspeed.initialize(
        model=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=toy.LEARNING_RATE),
        config=worker.config(case),
    )
    engine.load_checkpoint(case["load"], load_module_only=True)
    weights: dict[str, torch.Tensor] = {}
    for index, layer in enumerate(module.forward_funcs, module._local_start):
        weights |= {f"{index}.{name}": value.clone() for name, value in layer.state_dict().items()}
    engine.save_checkpoint(case["save"], tag="stock")
    return {"weights": weights}


if __name__ == "__main__":
    worker.main(
        {
            "resume": resume,
            "refuse": refuse,
            "fail-to-save": fail_to_save,
            "read-with-deepspeed": read_with_deepspeed,
        }
    )
    close_groups()
