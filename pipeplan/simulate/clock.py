"""The clock: when every op of an order starts and ends. Compiled; everything that predicts a time calls it.

Every rank runs its ops in order. An op starts when its rank is free and its inputs have arrived. A boundary between two
ranks takes its queue's transfer time, one message at a time in each queue, and overlaps compute.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numba import njit

from pipeplan.plan.types import QueueModel
from pipeplan.simulate.costs import StageCosts
from pipeplan.simulate.dependencies import INPUT_GRADIENT, NOTHING, needed_results
from pipeplan.simulate.encoding import EncodedOrder, IntArray

UNKNOWN = -1


@dataclass(frozen=True, slots=True, eq=False)
class Clocked:
    """When everything happened, in nanoseconds from the start of the batch.

    Attributes:
        start_ns, end_ns: [num_ops], in the layout of the encoded order; ``UNKNOWN`` for ops that never started.
        message_start_ns, message_end_ns: [2, num_stages, num_micro_batches], by result kind, stage that produced it
            and micro-batch; on one rank both are the producer's end.
        num_done: Ops that ran; fewer than all means that the order deadlocks.
        makespan_ns: Latest end of any op.
    """

    start_ns: IntArray
    end_ns: IntArray
    message_start_ns: IntArray
    message_end_ns: IntArray
    num_done: int
    makespan_ns: int


def run_clock(
    costs: StageCosts, order: EncodedOrder, num_micro_batches: int, queue_model: QueueModel = QueueModel.ORDERED_PAIR
) -> Clocked:
    """Return when every op of ``order`` starts and ends; an order that deadlocks leaves ops undone."""
    shape = (2, costs.num_stages, num_micro_batches)
    local_ns = np.full(shape, UNKNOWN, dtype=np.int64)
    message_start_ns = np.full(shape, UNKNOWN, dtype=np.int64)
    message_end_ns = np.full(shape, UNKNOWN, dtype=np.int64)
    start_ns = np.full(order.num_ops, UNKNOWN, dtype=np.int64)
    end_ns = np.full(order.num_ops, UNKNOWN, dtype=np.int64)
    arguments = (
        order.stage, order.kind, order.micro_batch, order.offsets,
        costs.duration_ns, costs.rank_by_stage, costs.forward_transfer_ns, costs.backward_transfer_ns,
        costs.send_ns, costs.wait_ns,
        local_ns, message_start_ns, message_end_ns, start_ns, end_ns,
    )  # fmt: skip
    if queue_model is QueueModel.ORDERED_PAIR:
        num_done = run_ordered_pair_kernel(*arguments)
    else:
        num_done = _run_shared_queues(*arguments, queue_model is QueueModel.SINGLE)
    makespan_ns = int(end_ns.max()) if order.num_ops else 0
    return Clocked(start_ns, end_ns, message_start_ns, message_end_ns, int(num_done), makespan_ns)


@njit(cache=True, inline="always")
def _earliest_start(stage, kind, micro_batch, rank, free, rank_by_stage, wait_ns, num_micro_batches, local, arrival):  # type: ignore[no-untyped-def]
    """Return when an op can start, or ``UNKNOWN`` while an input has no arrival time yet.

    ``local`` and ``arrival`` are flat over result kind, stage and micro-batch: one index costs half of what three do.
    """
    num_stages = rank_by_stage.shape[0]
    boundary_kind, boundary_stage, own_kind, own_stage = needed_results(stage, kind, num_stages)
    if own_kind != NOTHING and local[(own_kind * num_stages + own_stage) * num_micro_batches + micro_batch] < 0:
        return -1
    start = free  # not before the rank's own results, which it made before
    if boundary_kind != NOTHING:
        ready = arrival[(boundary_kind * num_stages + boundary_stage) * num_micro_batches + micro_batch]
        if ready < 0:
            return -1
        start = max(start, ready)
        if rank_by_stage[boundary_stage] != rank:
            start += wait_ns
    return start


@njit(cache=True)
def run_ordered_pair_kernel(  # type: ignore[no-untyped-def]
    stages, kinds, micro_batches, offsets, duration_ns, rank_by_stage, forward_transfer_ns, backward_transfer_ns,
    send_ns, wait_ns, local_ns, message_start_ns, message_end_ns, start_ns, end_ns,
):  # fmt: skip
    """Fill the times of an order with one queue for every ordered pair of ranks; return how many ops ran.

    ``local_ns`` and ``message_end_ns`` come in as ``UNKNOWN``; compiled searches call this with arrays of their own. A
    queue has one producer, which fills it in its own order, so any topological sweep finds the same times.
    """
    num_ranks = offsets.shape[0] - 1
    num_stages = rank_by_stage.shape[0]
    num_micro_batches = local_ns.shape[2]
    plane = num_stages * num_micro_batches
    local, departure, arrival = local_ns.reshape(-1), message_start_ns.reshape(-1), message_end_ns.reshape(-1)
    queue_free = np.zeros((num_ranks, num_ranks), dtype=np.int64)
    free = np.zeros(num_ranks, dtype=np.int64)
    position = offsets[:-1].copy()
    stack = np.empty(num_ranks, dtype=np.int64)
    on_stack = np.ones(num_ranks, dtype=np.bool_)
    for rank in range(num_ranks):
        stack[rank] = num_ranks - 1 - rank
    height = num_ranks
    num_done = 0
    while height > 0:
        height -= 1
        rank = stack[height]
        on_stack[rank] = False
        now = free[rank]
        index = position[rank]
        while index < offsets[rank + 1]:
            stage, kind, micro_batch = stages[index], kinds[index], micro_batches[index]
            # As in _earliest_start; written out, like the branch below, since calls halve the speed of this loop.
            slot = stage * num_micro_batches + micro_batch
            boundary_kind, boundary_stage, own_kind, _ = needed_results(stage, kind, num_stages)
            if own_kind != NOTHING and local[own_kind * plane + slot] < 0:
                break
            start = now
            if boundary_kind != NOTHING:
                ready = arrival[boundary_kind * plane + boundary_stage * num_micro_batches + micro_batch]
                if ready < 0:
                    break
                if ready > start:
                    start = ready
                if rank_by_stage[boundary_stage] != rank:
                    start += wait_ns
            end = start + duration_ns[stage, kind]
            start_ns[index] = start
            end_ns[index] = end
            now = end
            index += 1
            if kind == 3:  # W yields nothing that others wait for
                continue
            if kind == 0:
                target_stage, transfer = stage + 1, forward_transfer_ns[stage]
            else:
                target_stage, transfer = stage - 1, backward_transfer_ns[stage]
                slot += INPUT_GRADIENT * plane
            local[slot] = end
            if target_stage < 0 or target_stage >= num_stages:
                continue
            target = rank_by_stage[target_stage]
            if target == rank:
                departure[slot] = end
                arrival[slot] = end
                continue
            now += send_ns
            begin = max(end, queue_free[rank, target])
            queue_free[rank, target] = begin + transfer
            departure[slot] = begin
            arrival[slot] = begin + transfer
            # Only what its next op waits for lets a rank go on.
            waiting = position[target]
            if (
                not on_stack[target]
                and waiting < offsets[target + 1]
                and stages[waiting] == target_stage
                and micro_batches[waiting] == micro_batch
            ):
                on_stack[target] = True
                stack[height] = target
                height += 1
        num_done += index - position[rank]
        position[rank] = index
        free[rank] = now
    return num_done


@njit(cache=True)
def _run_shared_queues(  # type: ignore[no-untyped-def]
    stages, kinds, micro_batches, offsets, duration_ns, rank_by_stage, forward_transfer_ns, backward_transfer_ns,
    send_ns, wait_ns, local_ns, message_start_ns, message_end_ns, start_ns, end_ns, is_single,
):  # fmt: skip
    """Queues with several producers: ops complete in time order, so that messages enter their queue in time order."""
    num_ranks = offsets.shape[0] - 1
    num_stages = rank_by_stage.shape[0]
    num_micro_batches = local_ns.shape[2]
    local, departure, arrival = local_ns.reshape(-1), message_start_ns.reshape(-1), message_end_ns.reshape(-1)
    queue_free = np.zeros((num_ranks, num_ranks), dtype=np.int64)
    free = np.zeros(num_ranks, dtype=np.int64)
    position = offsets[:-1].copy()
    running_until = np.full(num_ranks, -1, dtype=np.int64)
    num_done = 0
    while True:
        for rank in range(num_ranks):
            index = position[rank]
            if running_until[rank] < 0 and index < offsets[rank + 1]:
                start = _earliest_start(
                    stages[index], kinds[index], micro_batches[index], rank, free[rank], rank_by_stage, wait_ns,
                    num_micro_batches, local, arrival,
                )  # fmt: skip
                if start >= 0:
                    start_ns[index] = start
                    running_until[rank] = start + duration_ns[stages[index], kinds[index]]
        rank = -1
        for candidate in range(num_ranks):
            if running_until[candidate] >= 0 and (rank < 0 or running_until[candidate] < running_until[rank]):
                rank = candidate
        if rank < 0:
            return num_done
        index = position[rank]
        stage, kind, micro_batch = stages[index], kinds[index], micro_batches[index]
        end = running_until[rank]
        end_ns[index] = end
        free[rank] = end
        running_until[rank] = -1
        position[rank] += 1
        num_done += 1
        if kind == 3:
            continue
        slot = stage * num_micro_batches + micro_batch
        if kind == 0:
            target_stage, transfer = stage + 1, forward_transfer_ns[stage]
        else:
            target_stage, transfer = stage - 1, backward_transfer_ns[stage]
            slot += INPUT_GRADIENT * num_stages * num_micro_batches
        local[slot] = end
        if target_stage < 0 or target_stage >= num_stages:
            continue
        target = rank_by_stage[target_stage]
        if target == rank:
            departure[slot] = end
            arrival[slot] = end
            continue
        free[rank] = end + send_ns
        low, high = (0, 0) if is_single else (min(rank, target), max(rank, target))
        begin = max(end, queue_free[low, high])
        queue_free[low, high] = begin + transfer
        departure[slot] = begin
        arrival[slot] = begin + transfer
