"""What the launcher runs in the runtime tests: many cases in one launch, results by rank."""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import deepspeed
import torch
import toy
from deepspeed import comm as dist
from deepspeed.pipe import LayerSpec, TiedLayerSpec

import pipeplan.runtime
from pipeplan.errors import PipeplanError
from pipeplan.plan.ops import OpKind
from pipeplan.runtime import trace as runtime_trace
from pipeplan.runtime.process_groups import close_groups

NO_CLIPPING = 1e9  # as in the list of cases
CASE_LIMIT_S = 150  # a case that hangs shows where, and ends the launch


def batches(first: int, replica: int, data: str = "plain") -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield micro-batches from ``first`` on."""
    while True:
        yield toy.micro_batch(first, replica, data)
        first += 1


class Samples(torch.utils.data.Dataset):
    """The samples of the micro-batches one by one, for DeepSpeed's own data loader."""

    def __len__(self) -> int:
        return 100 * toy.SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, labels = toy.micro_batch(index // toy.SAMPLES)
        return inputs[index % toy.SAMPLES], labels[index % toy.SAMPLES]


def config(case: dict[str, Any]) -> dict[str, Any]:
    """Return the DeepSpeed config of a case."""
    return {
        "train_micro_batch_size_per_gpu": toy.SAMPLES,
        "gradient_accumulation_steps": case["num_micro_batches"],
        "gradient_clipping": case.get("max_norm", 1.0),
        "steps_per_print": 10**9,
        **case.get("config", {}),
    }


def layers(case: dict[str, Any]) -> list[Any]:
    """Return the layers of a case, in the form that it asks for."""
    sources = toy.layers_of(case["model"])
    if case.get("form") != "deepspeed":
        return sources
    specs: list[Any] = []
    for index, (kind, source) in enumerate(zip(toy.CLASSES_BY_MODEL[case["model"]], sources, strict=True)):
        if source.tied is not None:
            forward = None if kind is toy.Embedding else toy.head_from_embedding
            specs.append(TiedLayerSpec(source.tied, toy.Embedding, forward_fn=forward))
        elif index % 3 == 0:
            specs.append(source.build())
        else:
            specs.append(LayerSpec(kind))
    return specs


def planned_engine(case: dict[str, Any]) -> Any:
    """Build the engine of a case; plain SGD unless its config names an optimizer."""
    module = pipeplan.runtime.PlannedPipelineModule(
        layers(case),
        loss_fn=toy.loss_function,
        plan=Path(case["folder"]),
        seed_layers=case.get("is_seeded", False),
        seed_fn=torch.manual_seed,
        base_seed=toy.BASE_SEED,
        **case.get("module", {}),
    )
    if case.get("form") == "deepspeed":  # specs build with weights of their own
        reference = toy.build_all(case["model"])
        for index, built in module.module_by_layer.items():
            built.load_state_dict(reference[index].state_dict())
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    optimizer = None
    if "optimizer" not in case.get("config", {}):
        optimizer = torch.optim.SGD(parameters, lr=toy.LEARNING_RATE, momentum=toy.MOMENTUM)
    engine, *_ = pipeplan.runtime.initialize(
        model=module,
        optimizer=optimizer,
        model_parameters=parameters,
        training_data=Samples() if case.get("form") == "deepspeed" else None,
        config=config(case),
    )
    return engine


def named_parameters(engine: Any) -> dict[str, torch.nn.Parameter]:
    """Return this rank's parameters by "LAYER.NAME", tied ones under each of their names."""
    return {
        f"{index}.{name}": parameter
        for index, layer in engine.module.module_by_layer.items()
        for name, parameter in layer.named_parameters()
    }


def note_held(engine: Any) -> set[int]:
    """Return a set that fills with the layers of which anything is held from an I until its W."""
    held: set[int] = set()
    module, add = engine.module, engine._weight_gradients.add

    def noting(key: tuple[int, int], entry: Any) -> None:
        for index in module.layer_indices_by_stage[key[0]]:
            built = module.module_by_layer.get(index)
            if built is not None and any(parameter is entry.weight for parameter in built.parameters()):
                held.add(index)
        add(key, entry)

    engine._weight_gradients.add = noting
    return held


def train(case: dict[str, Any]) -> dict[str, Any]:
    """Train some steps; return what the reference returns, for this rank's layers."""
    engine = planned_engine(case)
    named = named_parameters(engine)
    result: dict[str, Any] = {
        "losses": [],
        "norms": [],
        "gradients": {},
        "evaluations": [],
        "logits": [],
        "unshared": [],
        "held": note_held(engine),
        "split": {op.stage for ops in engine.module.runnable.plan.order for op in ops if op.kind is OpKind.I},
        "bounds": engine.module.runnable.plan.partition.bounds,
    }

    def keep_gradients(*_: Any) -> None:
        if not result["gradients"]:
            result["gradients"] = {name: p.grad.clone() for name, p in named.items() if p.grad is not None}

    if not engine.zero_optimization() and case["max_norm"] == NO_CLIPPING:  # otherwise they are elsewhere, or clipped
        engine.optimizer.register_step_pre_hook(keep_gradients)
    data = None if case["form"] == "deepspeed" else batches(0, engine.grid.data_parallel_id, case["data"])
    for step in range(case["num_steps"]):
        for count in case["evaluations"].get(str(step), []):
            mean, outputs = engine.eval_batch(
                batches(toy.FIRST_EVALUATED, 0), num_micro_batches=count, return_logits=True
            )
            result["evaluations"].append(float(mean))
            result["logits"].append(None if outputs is None else [logits for logits, _ in outputs])
            result["unshared"].append(
                engine.eval_batch(batches(toy.FIRST_EVALUATED, 0), num_micro_batches=count, bcast_loss=False)
            )
        if str(step) in case["counts_by_step"]:
            count = case["counts_by_step"][str(step)]
            engine.set_train_batch_size(count * toy.SAMPLES * engine.grid.data_parallel_size)
        result["losses"].append(float(engine.train_batch(data_iter=data)))
        result["norms"].append(float(engine.get_global_grad_norm()))
    result["weights"] = {name: parameter.detach().clone() for name, parameter in named.items()}
    return result


def trace(case: dict[str, Any]) -> dict[str, Any]:
    """Train two steps and trace the second; ``clock_skew_s`` shifts each rank's clock and puts it on its own host."""
    engine = planned_engine(case)
    skew_ns = round(case.get("clock_skew_s", 0.0) * 1e9) * dist.get_rank()
    if skew_ns:
        engine.recorder.clock = lambda: time.perf_counter_ns() + skew_ns
        runtime_trace.host_identity = lambda: f"host-{dist.get_rank()}"
    data = batches(0, engine.grid.data_parallel_id)
    messages = []
    try:
        engine.trace()
    except PipeplanError as error:
        messages.append(str(error))
    for _ in range(2):
        engine.train_batch(data_iter=data)
    return {"trace": engine.trace(), "messages": messages}


def refuse(case: dict[str, Any]) -> dict[str, Any]:
    """Build an engine that must be refused; return the message."""
    if dist.get_rank() == case.get("odd_rank"):
        case = {**case, "folder": case["odd_folder"]}
    try:
        planned_engine(case)
    except PipeplanError as error:
        return {"refused": type(error).__name__, "message": str(error)}
    return {"refused": None, "message": ""}


KINDS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {"train": train, "trace": trace, "refuse": refuse}


def main(kinds: Mapping[str, Callable[[dict[str, Any]], dict[str, Any]]] = KINDS) -> None:
    """Run every case of the list, one after another."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=0)
    parser.add_argument("--cases", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    deepspeed.init_distributed()
    rank = dist.get_rank()
    for case in json.loads(arguments.cases.read_text()):
        faulthandler.dump_traceback_later(CASE_LIMIT_S, exit=True)
        try:
            result = kinds[case["kind"]](case)
        except Exception:
            traceback.print_exc()
            print(f"case {case['name']} failed on rank {rank}", file=sys.stderr, flush=True)
            raise
        torch.save(result, arguments.cases.parent / f"{case['name']}-{rank}.pt")
        faulthandler.cancel_dump_traceback_later()
        gc.collect()
        dist.barrier()


if __name__ == "__main__":
    main()
    close_groups()
