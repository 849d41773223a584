"""What the launcher runs for ``emulated.py``: every case in turn, each timed over several batches."""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import deepspeed
import real_model
import torch
from deepspeed import comm as dist
from deepspeed.pipe import LayerSpec, PipelineModule
from emulated_layers import EmulatedLayer, build_arguments, set_priority

import pipeplan.runtime
from pipeplan.model.factory import layers_from_factory
from pipeplan.model.types import LayerSource
from pipeplan.plan.folder import PROFILE_FILE
from pipeplan.profile.file import read_profile
from pipeplan.profile.types import Profile
from pipeplan.program.trace import write_trace

_NUM_WARM_UPS = 2
_CASE_LIMIT_S = 120
_PAUSE_S = 0.2  # between batches that compute for real; see set_priority


def micro_batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield what emulated layers take."""
    while True:
        yield torch.zeros(1, 1), torch.zeros(1)


def real_micro_batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield what the real model takes."""
    while True:
        yield real_model.sample_batch(1, real_model.NUM_TOKENS, 0)


def loss_function(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return something to differentiate."""
    return outputs[0, 0] + labels.mean()


def planned_module(case: dict[str, Any], profile: Profile) -> torch.nn.Module:
    """Return the module of our engine."""
    sources = [
        LayerSource(
            name=layer.name,
            kind=layer.kind,
            build=lambda layer=layer, incoming=incoming: EmulatedLayer(layer, incoming),
            identity=layer.name,
        )
        for layer, incoming in build_arguments(profile)
    ]
    module = pipeplan.runtime.PlannedPipelineModule(sources, loss_fn=loss_function, plan=Path(case["folder"]))
    for stage, layers in module.functions_by_stage.items():
        for layer in layers:
            layer.costs.stage = stage
    return module


def stock_module(case: dict[str, Any], profile: Profile) -> torch.nn.Module:
    """Return the module of stock DeepSpeed; a partition may be given layer by layer."""
    specs = [LayerSpec(EmulatedLayer, layer, incoming) for layer, incoming in build_arguments(profile)]
    bounds = case.get("bounds")
    kind = PipelineModule if bounds is None else _FixedPipelineModule
    _FixedPipelineModule.bounds = bounds
    return kind(
        specs,
        num_stages=dist.get_world_size(),
        loss_fn=loss_function,
        partition_method=case.get("partition_method", "uniform"),
    )


class _FixedPipelineModule(PipelineModule):
    """Stock DeepSpeed cut where our plan cuts, so that only the engines differ."""

    bounds: list[int] | None = None

    def _partition_layers(self, method: str = "uniform") -> None:
        assert self.bounds is not None
        self.parts = self.bounds
        self._set_bounds(start=self.parts[self.stage_id], stop=self.parts[self.stage_id + 1])


def run(case: dict[str, Any]) -> None:
    """Time a case; rank 0 writes ``NAME.json`` and the traces."""
    profile = read_profile(Path(case["folder"]) / PROFILE_FILE)
    is_planned = case["engine"] == "planned"
    if case.get("real"):
        model = layers_from_factory("real_model:factory", Path(__file__).parent)
        module = pipeplan.runtime.PlannedPipelineModule(
            model.layers, loss_fn=model.loss_function, plan=Path(case["folder"])
        )
    else:
        module = (planned_module if is_planned else stock_module)(case, profile)
    parameters = list(module.parameters())
    initialize: Callable[..., Any] = pipeplan.runtime.initialize if is_planned else deepspeed.initialize
    engine, *_ = initialize(
        model=module,
        optimizer=torch.optim.SGD(parameters, lr=1e-3),
        model_parameters=parameters,
        config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": case["num_micro_batches"],
            "gradient_clipping": 1.0,
            "steps_per_print": 10**9,
        },
    )
    is_real = case.get("real", False)
    data = real_micro_batches() if is_real else micro_batches()
    is_quiet = set_priority(is_raised=True)
    step_ms, traces, cpu_s = [], [], 0.0
    for number in range(_NUM_WARM_UPS + case["num_steps"]):
        if is_real:
            time.sleep(_PAUSE_S)
        dist.barrier()
        start, start_cpu = time.perf_counter(), time.process_time()
        engine.train_batch(data_iter=data)
        elapsed = torch.tensor([time.perf_counter() - start])
        used = torch.tensor([time.process_time() - start_cpu])
        dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)
        dist.all_reduce(used)
        if number >= _NUM_WARM_UPS:
            step_ms.append(float(elapsed) * 1000)
            cpu_s += float(used)
            if is_planned:
                traces.append(engine.trace())
    set_priority(is_raised=False)
    if dist.get_rank() == 0:
        for number, trace in enumerate(traces):
            write_trace(trace, Path(case["output"]) / f"{case['name']}-{number}.trace.yaml")
    peaks: list[int] = [0] * dist.get_world_size()
    if case.get("memory"):
        dist.all_gather_object(peaks, peak_tensor_bytes(lambda: engine.train_batch(data_iter=data)))
    if dist.get_rank() == 0:
        result = {
            "step_ms": step_ms,
            "busy_cores": cpu_s * 1000 / sum(step_ms),
            "peak_bytes_by_rank": peaks,
            "is_quiet": is_quiet,
            "bounds": [int(part) for part in module.parts],
        }
        (Path(case["output"]) / f"{case['name']}.json").write_text(json.dumps(result))


def peak_tensor_bytes(function: Callable[[], Any]) -> int:
    """Return how many bytes of tensors are alive at most while ``function`` runs, beyond those alive before.

    Counted by the allocator itself: the profiler reports every allocation and release of the CPU allocator.
    """
    gc.collect()
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        function()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def main() -> None:
    """Run the cases of a list."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=0)
    parser.add_argument("--cases", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    deepspeed.init_distributed()
    for case in json.loads(arguments.cases.read_text()):
        faulthandler.dump_traceback_later(_CASE_LIMIT_S, exit=True)
        run(case)
        faulthandler.cancel_dump_traceback_later()
        gc.collect()
        dist.barrier()


if __name__ == "__main__":
    main()
