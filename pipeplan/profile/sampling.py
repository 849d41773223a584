"""Timing one piece of work many times: clocks, and when to stop."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import torch

ResultT = TypeVar("ResultT")

_MAD_TO_SIGMA = 1.4826  # of a normal distribution
_FLUSH_BYTES = 256 * 2**20  # larger than the last-level cache of any GPU so far


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingBudget:
    """When to stop measuring one layer.

    Attributes:
        target_error: Stop when the standard error of every median is below this share of it.
        seconds_per_layer: Stop after this long even so, but not before ``min_rounds``.
        num_warm_up: Rounds that are thrown away.
    """

    num_warm_up: int = 2
    min_rounds: int = 5
    max_rounds: int = 40
    target_error: float = 0.01
    seconds_per_layer: float = 3.0

    def shared(self, seconds: float, num_layers: int) -> SamplingBudget:
        """Return the budget for ``num_layers`` layers within ``seconds`` altogether."""
        return replace(self, seconds_per_layer=seconds / num_layers)


DEFAULT_BUDGET = SamplingBudget()


@dataclass(frozen=True, slots=True)
class Samples:
    """Measured durations of one op, in nanoseconds."""

    durations_ns: tuple[int, ...]

    @property
    def median_ns(self) -> int:
        """The median duration."""
        return round(statistics.median(self.durations_ns))

    @property
    def relative_spread(self) -> float:
        """Spread as a share of the median: the scaled median absolute deviation, deaf to single outliers."""
        median = statistics.median(self.durations_ns)
        if median == 0:
            return 0.0
        deviation = statistics.median(abs(duration - median) for duration in self.durations_ns)
        return _MAD_TO_SIGMA * deviation / median

    @property
    def relative_error(self) -> float:
        """Standard error of the median as a share of it, from the spread.

        It counts the samples as independent: how much a shared machine drifts from one second to the next is not in it.
        """
        return float(self.relative_spread / len(self.durations_ns) ** 0.5)


class Clock(Protocol):
    """Times work on one device."""

    def time(self, work: Callable[[], ResultT]) -> tuple[ResultT, int]:
        """Run ``work`` and return its result and how long the device took, in nanoseconds."""


class CpuClock:
    """Wall-clock time of work that runs in this thread."""

    def time(self, work: Callable[[], ResultT]) -> tuple[ResultT, int]:
        """Run ``work`` and return its result and duration in nanoseconds."""
        start_ns = time.perf_counter_ns()
        result = work()
        return result, time.perf_counter_ns() - start_ns


class CudaClock:
    """Time between two events on the current stream.

    Before each run a buffer larger than the cache is cleared: weights then come from memory, as they do in a pipeline,
    and the host gets ahead of the device, so that launches are not counted.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=device)

    def time(self, work: Callable[[], ResultT]) -> tuple[ResultT, int]:
        """Run ``work`` and return its result and duration in nanoseconds."""
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._flush.zero_()
        start.record()
        result = work()
        end.record()
        end.synchronize()
        return result, round(start.elapsed_time(end) * 1e6)


def clock_for(device: torch.device) -> Clock:
    """Return the clock of a device."""
    return CudaClock(device) if device.type == "cuda" else CpuClock()


def sample(run_round: Callable[[], dict[str, int]], budget: SamplingBudget) -> dict[str, Samples]:
    """Call ``run_round``, which returns nanoseconds by op, until every median is known well enough or time is up.

    Rounds interleave the ops, so that a slow moment of the machine touches all of them alike.
    """
    for _ in range(budget.num_warm_up):
        run_round()
    durations_by_op: dict[str, list[int]] = {}
    end_s = time.monotonic() + budget.seconds_per_layer
    for number in range(1, budget.max_rounds + 1):
        for op, duration_ns in run_round().items():
            durations_by_op.setdefault(op, []).append(duration_ns)
        if number < budget.min_rounds:
            continue
        samples = [Samples(tuple(durations)) for durations in durations_by_op.values()]
        if time.monotonic() >= end_s or all(one.relative_error <= budget.target_error for one in samples):
            break
    return {op: Samples(tuple(durations)) for op, durations in durations_by_op.items()}
