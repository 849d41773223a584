"""Running one layer forward and backward the way the runtime does, timed and watched."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipeplan.deferral import WeightGradientStore, defer_weight_gradients
from pipeplan.profile.held import PeakMeter, tensors_in
from pipeplan.profile.sampling import Clock, Samples

_NUM_OVERHEAD_ROUNDS = 30


@dataclass(slots=True)
class Pass:
    """Forward and backward of one layer on inputs of their own, as the runtime would run them."""

    run: Callable[[Any], Any]
    inputs: Any
    output_gradients: list[Tensor]
    outputs: Any = None

    def forward(self) -> None:
        """Run F and keep the graph."""
        self.outputs = self.run(self.inputs)

    def backward(self) -> None:
        """Run B, or I inside a deferral; nothing where no output has a gradient."""
        roots = [tensor for tensor in tensors_in(self.outputs) if tensor.requires_grad]
        self.outputs = None
        if roots:
            torch.autograd.backward(roots, self.output_gradients)


def signature(value: Any) -> str:
    """Return what of a layer's inputs decides its cost: dtypes, shapes, and which of them take a gradient."""
    return ", ".join(describe(tensor) for tensor in tensors_in(value))


def describe(tensor: Tensor) -> str:
    """Return dtype and shape as text, such as ``bfloat16[1, 4096, 512]``; says so where floats take no gradient."""
    text = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
    return text if tensor.requires_grad or not tensor.is_floating_point() else f"{text} without gradient"


def measure_bytes(one: Pass, device: torch.device, *, is_splittable: bool) -> tuple[int, int]:
    """Return the bytes held from I to W, 0 for a layer that is not to be split, and the workspace."""
    meter = PeakMeter(device)
    store = WeightGradientStore() if is_splittable else None
    with meter.recording():
        with meter.watch(), deferring(store):
            one.forward()
        with meter.watch(), deferring(store):
            one.backward()
        if store is None:
            return 0, meter.workspace_bytes
        held_bytes = store.held_bytes(0)
        with meter.watch():
            store.run(0)
    return held_bytes, meter.workspace_bytes


def deferring(store: WeightGradientStore | None) -> AbstractContextManager[Any]:
    """Defer to ``store``, under key 0, if there is one."""
    return nullcontext() if store is None else defer_weight_gradients(store, 0)


def timed_round(
    start: Callable[[], Pass], clock: Clock, overhead_ns_by_op: Mapping[str, int], *, is_splittable: bool
) -> Callable[[], dict[str, int]]:
    """Return a function that times F, B, I and W once, less the overhead of the calls.

    I and W are left out where nothing can be deferred, or the layer is not to be split.

    Two passes are under way: F of the other one comes between F and B, as in a stage the rest of a micro-batch does.
    Backward right after forward would find in the cache what the stage has long had to put aside.
    """
    store = WeightGradientStore()
    can_split = is_splittable

    def run_round() -> dict[str, int]:
        nonlocal can_split
        durations: dict[str, int] = {}

        def time(op: str, work: Callable[[], Any]) -> None:
            _, duration_ns = clock.time(work)
            durations[op] = max(0, duration_ns - overhead_ns_by_op.get(op, 0))

        def input_half() -> None:
            with defer_weight_gradients(store, 0):
                split.backward()

        whole, split = start(), start()
        time("F", whole.forward)
        with deferring(store if can_split else None):
            split.forward()
        time("B", whole.backward)
        if can_split:
            time("I", input_half)
            can_split = 0 in store
            if can_split:
                time("W", lambda: store.run(0))
            else:
                del durations["I"]
        return durations

    return run_round


def call_overhead_ns(clock: Clock, device: torch.device) -> dict[str, int]:
    """Return what F, B, I and W cost where there is nothing to do.

    A stage pays it once an op, whatever its number of layers, so it belongs to the cluster's host overheads and not to
    any layer; left in, it would make the layers of a small model add up to more than the model.
    """
    value = torch.zeros(1, device=device, requires_grad=True)
    gradient = torch.zeros(1, device=device)
    store = WeightGradientStore()

    def input_half() -> None:
        with defer_weight_gradients(store, 0):
            one.backward()

    durations: dict[str, list[int]] = {"F": [], "B": [], "I": []}
    for _ in range(_NUM_OVERHEAD_ROUNDS):
        for op in ("B", "I"):
            one = Pass(lambda value: value.view_as(value), value, [gradient])
            durations["F"].append(clock.time(one.forward)[1])
            durations[op].append(clock.time(one.backward if op == "B" else input_half)[1])
    overhead = {op: Samples(tuple(found)).median_ns for op, found in durations.items()}
    return {**overhead, "W": overhead["B"]}  # W is one call of the engine too


@contextmanager
def without_collection() -> Iterator[None]:
    """Keep Python's garbage collector out of what is timed."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def gradient_of(output: Tensor) -> Tensor:
    """Return a gradient to start a backward from; small, since parameters accumulate it round after round."""
    return torch.ones_like(output) if output.dim() == 0 else torch.randn_like(output) * 1e-3
