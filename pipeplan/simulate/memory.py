"""The memory formula: what every rank holds over time. Compiled; everything that predicts a peak calls it.

Activations live from the start of F to the end of B or I; at the end of I, what W needs takes their place and lives
until the end of W. Workspace lives while its op runs; with recomputation it includes the activations of one layer,
which are there again. A boundary lives on its source from the producer's end to the end of the transfer, on its target
from the start of the transfer until its consumer starts (an activation, which from then on is among the activations of
the stage) or ends (a gradient); on one rank, from the producer's end to there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numba import njit

from pipeplan.simulate.clock import Clocked
from pipeplan.simulate.costs import StageCosts
from pipeplan.simulate.encoding import EncodedOrder, IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPeak:
    """What one rank holds when it holds most, in bytes."""

    states: int
    activations: int
    held_for_w: int
    boundaries: int
    workspace: int

    @property
    def total(self) -> int:
        """Everything."""
        return self.states + self.activations + self.held_for_w + self.boundaries + self.workspace


def peak_memory(
    costs: StageCosts, order: EncodedOrder, clocked: Clocked, *, count_boundaries: bool
) -> tuple[MemoryPeak, ...]:
    """Return the peak of every rank with what it consists of."""
    peaks = []
    for rank in range(order.num_ranks):
        times, deltas = _boundary_events(costs, order, clocked, rank) if count_boundaries else _NO_EVENTS
        first, last = int(order.offsets[rank]), int(order.offsets[rank + 1])
        activations, held, boundaries, workspace = _walk(
            order.stage[first:last], order.kind[first:last], clocked.start_ns[first:last], clocked.end_ns[first:last],
            costs.activation_bytes, costs.held_bytes, costs.workspace_bytes, times, deltas,
        )  # fmt: skip
        peaks.append(
            MemoryPeak(
                states=int(costs.state_bytes[rank]),
                activations=int(activations),
                held_for_w=int(held),
                boundaries=int(boundaries),
                workspace=int(workspace),
            )
        )
    return tuple(peaks)


def peak_bytes_by_rank(costs: StageCosts, order: EncodedOrder, clocked: Clocked, *, count_boundaries: bool) -> IntArray:
    """Return the peak of every rank in bytes, [num_ranks]."""
    if not count_boundaries:
        peaks: IntArray = order_peaks_kernel(
            order.stage, order.kind, order.offsets, costs.activation_bytes, costs.held_bytes, costs.workspace_bytes
        )
        return costs.state_bytes + peaks
    by_rank = peak_memory(costs, order, clocked, count_boundaries=True)
    return np.array([peak.total for peak in by_rank], dtype=np.int64)


_NO_EVENTS = (np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))


def _boundary_events(costs: StageCosts, order: EncodedOrder, clocked: Clocked, rank: int) -> tuple[IntArray, IntArray]:
    """Return times and byte changes of the boundaries on ``rank``, by time, allocations before releases."""
    times, deltas = _collect_boundary_events(
        order.stage, order.kind, order.micro_batch, order.offsets, costs.rank_by_stage, costs.boundary_bytes,
        clocked.start_ns, clocked.end_ns, clocked.message_start_ns, clocked.message_end_ns, rank,
    )  # fmt: skip
    by_time = np.lexsort((-deltas, times))
    return times[by_time], deltas[by_time]


@njit(cache=True)
def _collect_boundary_events(  # type: ignore[no-untyped-def]
    stages, kinds, micro_batches, offsets, rank_by_stage, boundary_bytes, start_ns, end_ns, message_start_ns,
    message_end_ns, rank,
):  # fmt: skip
    num_stages = rank_by_stage.shape[0]
    first, last = offsets[rank], offsets[rank + 1]
    times = np.empty(4 * (last - first), dtype=np.int64)
    deltas = np.empty(4 * (last - first), dtype=np.int64)
    count = 0
    for index in range(first, last):
        stage, kind, micro_batch = stages[index], kinds[index], micro_batches[index]
        if kind == 3 or start_ns[index] < 0:
            continue
        # What the op consumes.
        result, source = (0, stage - 1) if kind == 0 else (1, stage + 1)
        if 0 <= source < num_stages:
            size = boundary_bytes[source] if kind == 0 else boundary_bytes[stage]
            times[count], deltas[count] = message_start_ns[result, source, micro_batch], size
            times[count + 1], deltas[count + 1] = (start_ns[index] if kind == 0 else end_ns[index]), -size
            count += 2
        # What it sends away.
        target = stage + 1 if kind == 0 else stage - 1
        if 0 <= target < num_stages and rank_by_stage[target] != rank:
            size = boundary_bytes[stage] if kind == 0 else boundary_bytes[target]
            result = 0 if kind == 0 else 1
            times[count], deltas[count] = end_ns[index], size
            times[count + 1], deltas[count + 1] = message_end_ns[result, stage, micro_batch], -size
            count += 2
    return times[:count], deltas[:count]


@njit(cache=True)
def _walk(  # type: ignore[no-untyped-def]
    stages, kinds, start_ns, end_ns, activation_bytes, held_bytes, workspace_bytes, event_times, event_deltas
):
    """Return (activations, held, boundaries, workspace) at the moment when their sum is largest."""
    activations, held, boundaries, event = 0, 0, 0, 0
    peak = (0, 0, 0, 0)
    peak_total = -1
    for index in range(stages.shape[0]):
        stage, kind = stages[index], kinds[index]
        for is_end in range(2):
            moment = end_ns[index] if is_end else start_ns[index]
            workspace = workspace_bytes[stage] if is_end else 0
            while event < event_times.shape[0] and event_times[event] <= moment:
                boundaries += event_deltas[event]
                event += 1
                if activations + held + boundaries + workspace > peak_total:
                    peak_total = activations + held + boundaries + workspace
                    peak = (activations, held, boundaries, workspace)
            if not is_end and kind == 0:
                activations += activation_bytes[stage]
            total = activations + held + boundaries + workspace_bytes[stage]
            if total > peak_total:
                peak_total = total
                peak = (activations, held, boundaries, workspace_bytes[stage])
            if is_end and (kind == 1 or kind == 2):
                activations -= activation_bytes[stage]
                if kind == 2:
                    held += held_bytes[stage]
                    if activations + held + boundaries > peak_total:
                        peak_total = activations + held + boundaries
                        peak = (activations, held, boundaries, 0)
            if is_end and kind == 3:
                held -= held_bytes[stage]
    return peak


@njit(cache=True)
def order_peaks_kernel(stages, kinds, offsets, activation_bytes, held_bytes, workspace_bytes):  # type: ignore[no-untyped-def]
    """Return the peak of every rank without states and boundaries; needs no times. Compiled searches call it too."""
    num_ranks = offsets.shape[0] - 1
    peaks = np.zeros(num_ranks, dtype=np.int64)
    for rank in range(num_ranks):
        current, peak = 0, 0
        for index in range(offsets[rank], offsets[rank + 1]):
            stage, kind = stages[index], kinds[index]
            if kind == 0:
                current += activation_bytes[stage]
            peak = max(peak, current + workspace_bytes[stage])
            if kind == 1:
                current -= activation_bytes[stage]
            elif kind == 2:
                current += held_bytes[stage] - activation_bytes[stage]
                peak = max(peak, current)
            elif kind == 3:
                current -= held_bytes[stage]
        peaks[rank] = peak
    return peaks
