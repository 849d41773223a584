"""Layers that take the time and keep the memory that a profile says, so that schedules can be timed without GPUs.

A layer sleeps until its profiled time is over, a little real compute included, and allocates what the profile says that
it keeps: from F to B, or from F to I and from I to W. Ranks then overlap on few cores as they would on devices.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import wrap_torch_function

from pipeplan.deferral.ops import RECOGNISERS, Call
from pipeplan.profile.types import LayerProfile, LayerTimes, Profile

DEVICE = "emulated"
_SPIN_NS = 30_000  # by about this, sleeping overshoots on an idle machine
_WIDTH = 32  # of the real matrix product in every layer and op
_PARAMETERS_PER_WEIGHT = 100_000  # of the profiled model, for one real weight


def emulated_profile(profile: Profile, *, num_stages: int, stage_forward_ms: float, num_bytes: float) -> Profile:
    """Return the profile of the emulated model: times and bytes scaled, ties left out.

    Args:
        stage_forward_ms: Mean forward time of a stage when the model is cut into ``num_stages``.
        num_bytes: Factor on all bytes.
    """
    (device,) = profile.devices
    mean_ns = sum(layer.times_by_device[device].forward_ns for layer in profile.layers) / num_stages
    factor = stage_forward_ms * 1e6 / mean_ns
    layers: list[LayerProfile] = []
    incoming = 4
    for layer in profile.layers:
        outgoing = _whole_floats(layer.output_bytes * num_bytes)
        layers.append(
            replace(
                layer,
                times_by_device={DEVICE: _scaled(layer.times_by_device[device], factor, is_first=not layers)},
                recomputation=None,
                tied=None,
                output_bytes=outgoing,
                # What the layers really keep besides: their input until B or I, input and output gradient until W.
                activation_bytes=max(_whole_floats(layer.activation_bytes * num_bytes), incoming),
                held_for_w_bytes=max(_whole_floats(layer.held_for_w_bytes * num_bytes), incoming + outgoing),
                workspace_bytes=0,
            )
        )
        incoming = outgoing
    return replace(
        profile,
        layers=tuple(layers),
        source="measured",
        state_bytes_per_parameter=4 / _PARAMETERS_PER_WEIGHT,  # gradients; the rest is there before a batch
        count_boundary_buffers=True,
        model_source=None,
        extra={},
    )


def _scaled(times: LayerTimes, factor: float, *, is_first: bool) -> LayerTimes:
    halves = times.input_gradient_ns, times.weight_gradient_ns
    input_ns, weight_ns = (None if half is None else round(half * factor) for half in halves)
    return LayerTimes(
        forward_ns=round(times.forward_ns * factor),
        backward_ns=round(times.backward_ns * factor),
        # Tokens take no gradient: the first layer has no input half.
        input_gradient_ns=0 if is_first and input_ns is not None else input_ns,
        weight_gradient_ns=weight_ns,
    )


def _whole_floats(num_bytes: float) -> int:
    return max(4, round(num_bytes / 4) * 4)


@dataclass(slots=True, eq=False)
class _Costs:
    times: LayerTimes
    stash_bytes: int
    held_bytes: int
    num_outputs: int
    stage: int = 0


class _Device:
    """The emulated device: the layers of one op take their times back to back.

    What Python does between two layers of an op is part of a measured layer's time and so of the emulated one's. What
    the engine does before an op's first layer and after its last is not.
    """

    def __init__(self) -> None:
        self._op: tuple[str, int] = ("", -1)
        self._seen: set[int] = set()
        self._free_ns = 0

    def deadline_ns(self, kind: str, costs: _Costs, duration_ns: int) -> int:
        """Return when a layer is done that starts now, or when the layer before it in the same op was done."""
        if self._op != (kind, costs.stage) or id(costs) in self._seen:  # an op runs each of its layers once
            self._op = (kind, costs.stage)
            self._seen.clear()
            self._free_ns = time.perf_counter_ns()
        self._seen.add(id(costs))
        self._free_ns += duration_ns
        return self._free_ns


_DEVICE = _Device()


class EmulatedLayer(nn.Module):
    """One layer of an emulated model; takes and returns a row of floats.

    Args:
        incoming_bytes: What the layer before it hands over.
    """

    def __init__(self, layer: LayerProfile, incoming_bytes: int) -> None:
        super().__init__()
        self.costs = _Costs(
            times=layer.times_by_device[DEVICE],
            stash_bytes=layer.activation_bytes - incoming_bytes,
            held_bytes=layer.held_for_w_bytes - incoming_bytes - layer.output_bytes,
            num_outputs=layer.output_bytes // 4,
        )
        self.weight = nn.Parameter(torch.zeros(max(1, layer.num_parameters // _PARAMETERS_PER_WEIGHT)))

    def forward(self, data: Tensor) -> Tensor:
        return emulated_op(data, self.weight, self.costs)


def build_arguments(profile: Profile) -> list[tuple[LayerProfile, int]]:
    """Return the arguments of every layer's constructor."""
    incoming = [4, *(layer.output_bytes for layer in profile.layers)]
    return list(zip(profile.layers, incoming, strict=False))


def work_until(deadline_ns: int) -> None:
    """Compute a little, then sleep until the deadline."""
    matrix = torch.ones(_WIDTH, _WIDTH)
    matrix @ matrix
    left_ns = deadline_ns - time.perf_counter_ns()
    if left_ns > _SPIN_NS:
        time.sleep((left_ns - _SPIN_NS) / 1e9)
    while time.perf_counter_ns() < deadline_ns:
        pass


def _row(data: Tensor, num_floats: int) -> Tensor:
    """Return a row whose values nobody reads but the first: filling it would be compute that nobody profiled."""
    row = data.new_empty(1, num_floats)
    row[0, 0] = 0.0
    return row


def _allocate(num_bytes: int) -> Tensor:
    return torch.empty(max(num_bytes, 0), dtype=torch.uint8)


@wrap_torch_function(lambda data, weight, costs: (data, weight))
def emulated_op(data: Tensor, weight: Tensor, costs: _Costs) -> Tensor:
    """Run the layer: F now, B in the backward. Under deferral, I in the backward and W later."""
    return _Whole.apply(data, weight, costs)


class _Whole(torch.autograd.Function):
    """F and B."""

    @staticmethod
    def forward(ctx: Any, data: Tensor, weight: Tensor, costs: _Costs) -> Tensor:
        deadline_ns = _DEVICE.deadline_ns("F", costs, costs.times.forward_ns)
        ctx.save_for_backward(data, weight)
        ctx.costs, ctx.stash = costs, _allocate(costs.stash_bytes)
        output = _row(data, costs.num_outputs)
        work_until(deadline_ns)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        # a layer that isn't split runs B in an op I, back to back with the others' I
        deadline_ns = _DEVICE.deadline_ns("I", ctx.costs, ctx.costs.times.backward_ns)
        data, weight = ctx.saved_tensors
        data_gradient = torch.empty_like(data) if ctx.needs_input_grad[0] else None
        weight_gradient = torch.zeros_like(weight)
        work_until(deadline_ns)
        ctx.stash = None
        return data_gradient, weight_gradient, None


class _Halves:
    """F, I and W of one call, as the deferral runs them."""

    casts_under_autocast = False

    def __init__(self, costs: _Costs) -> None:
        self._costs = costs
        self._stash: Tensor | None = None

    def output(self, data: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        deadline_ns = _DEVICE.deadline_ns("F", self._costs, self._costs.times.forward_ns)
        self._stash = _allocate(self._costs.stash_bytes)
        output = _row(data, self._costs.num_outputs)
        work_until(deadline_ns)
        return output

    def data_gradient(self, gradient: Tensor, data: Tensor, weight: Tensor) -> Tensor:
        assert self._costs.times.input_gradient_ns is not None
        deadline_ns = _DEVICE.deadline_ns("I", self._costs, self._costs.times.input_gradient_ns)
        data_gradient = torch.empty_like(data)
        work_until(deadline_ns)
        self._stash = None
        self._stash = _allocate(self._costs.held_bytes)
        return data_gradient

    def weight_gradient(self, gradient: Tensor, data: Tensor, weight: Tensor) -> Tensor:
        assert self._costs.times.weight_gradient_ns is not None
        deadline_ns = _DEVICE.deadline_ns("W", self._costs, self._costs.times.weight_gradient_ns)
        weight_gradient = torch.zeros_like(weight)
        work_until(deadline_ns)
        self._stash = None
        return weight_gradient

    def bias_gradient(self, gradient: Tensor) -> Tensor:
        raise NotImplementedError("emulated layers have no bias")


def _recognise(data: Tensor, weight: Tensor, costs: _Costs) -> Call:
    return Call(_Halves(costs), data, weight)


RECOGNISERS[emulated_op] = _recognise


def set_priority(*, is_raised: bool) -> bool:
    """Let every thread of this process go before ordinary ones, or end that; return whether the system allowed it.

    Raised, what else runs on the machine disturbs the timings little. Linux stops such threads for a moment once they
    have taken 95 % of a second, so who computes must pause.
    """
    policy, parameter = (os.SCHED_FIFO, os.sched_param(1)) if is_raised else (os.SCHED_OTHER, os.sched_param(0))
    try:
        for thread in Path("/proc/self/task").iterdir():
            os.sched_setscheduler(int(thread.name), policy, parameter)
    except OSError:
        return False
    return True
