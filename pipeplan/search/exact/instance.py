"""An instance of the exact solver: a fixed layout as a job shop with memory, and what can be computed once for it.

Micro-batches are interchangeable, so each stage may run its forwards, its backwards and its W in micro-batch order
without loss: take any order, and let the k-th forward (backward, W) that stage s runs be that of micro-batch k. The
k-th forward of s to start needs the k-th output of s - 1 to arrive; in the given order, the k forwards that start no
later than it had k different outputs by then, so the k-th output to arrive was there. The same holds for backwards
(whether a slot holds B or I stays with the slot) and for W after I. Which kind of op runs when on which rank stays the
same, and with it the memory of the rank and the queues of messages. So a state of the search needs counts per stage,
not sets of micro-batches.

Only the bytes of boundaries in flight depend on exact times, which may become earlier by renumbering. The solver
counts those that are held in any case while an op runs; its bound is then that of a slightly relaxed cap, and every
order that it returns is checked against the real one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numba import njit

from pipeplan.plan.ops import OpKind
from pipeplan.search.exact.one_machine import preemptive_bound
from pipeplan.simulate.costs import StageCosts
from pipeplan.simulate.encoding import IntArray

UNLIMITED = np.int64(1) << 60
UNREACHABLE = -(np.int64(1) << 60)


class Instance(NamedTuple):
    """Arrays that the compiled search reads (which is why it is a tuple); times in nanoseconds, memory in bytes.

    An op *occupies* its rank from the wait for its message to the end of its send; ``lead`` is the time from the start
    of that to the arrival of its result at the neighbouring stage.

    Attributes:
        occupied: [num_stages, 4].
        before_end, lead: [num_stages, 4], from the start of the occupation to the end of the op, and to the arrival.
        may_fuse, may_split: [num_stages], whether B is allowed, whether I and W are.
        backward_least: [num_stages], least occupation until the gradient is there.
        rest_least: [num_stages], what is then left of the least total occupation by the backward.
        backward_lead: [num_stages], least lead of the backward.
        in_flight_limit: [num_stages], most micro-batches between F and backward on the stage.
        usable: [num_ranks], the cap less the states.
        transient: [num_stages, 4], bytes on top of activations while the op runs.
        tail: [num_ranks], from the end of the last op of a rank to the end of the batch.
        forward_tail, backward_tail: [num_stages, num_micro_batches], least time from the end of the op's occupation to
            the end of the batch.
        queues_never_wait: Whether no message ever waits for the one before it, in any order.
    """

    num_stages: int
    num_ranks: int
    num_micro_batches: int
    rank_by_stage: IntArray
    duration: IntArray
    occupied: IntArray
    before_end: IntArray
    lead: IntArray
    transfer: IntArray
    may_fuse: IntArray
    may_split: IntArray
    backward_least: IntArray
    rest_least: IntArray
    backward_lead: IntArray
    in_flight_limit: IntArray
    activation: IntArray
    held: IntArray
    usable: IntArray
    transient: IntArray
    tail: IntArray
    forward_tail: IntArray
    backward_tail: IntArray
    queues_never_wait: bool


def build_instance(
    costs: StageCosts,
    num_micro_batches: int,
    usable_bytes_by_rank: Sequence[int | None],
    can_split_by_stage: Sequence[bool],
    tail_ns_by_rank: Sequence[int],
    *,
    count_boundaries: bool,
) -> Instance:
    """Return the instance; an ``in_flight_limit`` below 1 means that no order fits.

    Where I and W together take no longer than B and hold no more, B is never better and is left out.
    """
    num_stages, ranks, duration = costs.num_stages, costs.rank_by_stage, costs.duration_ns
    transfer = np.stack([costs.forward_transfer_ns, costs.backward_transfer_ns], axis=1)
    occupied, before_end, lead = duration.copy(), duration.copy(), duration.copy()
    for stage in range(num_stages):
        receives_forward = stage > 0 and ranks[stage - 1] != ranks[stage]
        receives_backward = stage < num_stages - 1 and ranks[stage + 1] != ranks[stage]
        for kind, receives, sends in (
            (OpKind.F, receives_forward, receives_backward),
            (OpKind.B, receives_backward, receives_forward),
            (OpKind.I, receives_backward, receives_forward),
        ):
            before_end[stage, kind] += costs.wait_ns if receives else 0
            occupied[stage, kind] = before_end[stage, kind] + (costs.send_ns if sends else 0)
            lead[stage, kind] = before_end[stage, kind] + (transfer[stage, int(kind != OpKind.F)] if sends else 0)
    may_split = np.array(can_split_by_stage, dtype=np.int64)
    together = occupied[:, OpKind.I] + occupied[:, OpKind.W]
    split_is_better = (together <= occupied[:, OpKind.B]) & (costs.held_bytes <= costs.activation_bytes)
    may_fuse = 1 - may_split * split_is_better
    backward_least = np.where(
        may_split == 1,
        np.where(may_fuse == 1, np.minimum(occupied[:, OpKind.B], occupied[:, OpKind.I]), occupied[:, OpKind.I]),
        occupied[:, OpKind.B],
    )
    total_least = np.where(
        may_split == 1,
        np.where(may_fuse == 1, np.minimum(occupied[:, OpKind.B], together), together),
        occupied[:, OpKind.B],
    )
    usable = np.array(
        [
            UNLIMITED if cap is None else cap - state
            for cap, state in zip(usable_bytes_by_rank, costs.state_bytes.tolist(), strict=True)
        ],
        dtype=np.int64,
    )
    transient = _transient_bytes(costs, count_boundaries=count_boundaries)
    backward_lead = lead[:, OpKind.B] - occupied[:, OpKind.B] + backward_least
    rest_least = np.maximum(total_least - backward_least, 0)
    in_flight_limit = _in_flight_limits(costs, usable, transient, num_micro_batches)
    tail = np.array(tail_ns_by_rank, dtype=np.int64)
    forward_tail, backward_tail = _tails(
        num_micro_batches, ranks, occupied, lead, backward_least, rest_least, backward_lead,
        np.maximum(in_flight_limit, 1), tail, costs.send_ns,
    )  # fmt: skip
    return Instance(
        num_stages=num_stages,
        num_ranks=costs.num_ranks,
        num_micro_batches=num_micro_batches,
        rank_by_stage=ranks,
        duration=duration,
        occupied=occupied,
        before_end=before_end,
        lead=lead,
        transfer=transfer,
        may_fuse=may_fuse,
        may_split=may_split,
        backward_least=backward_least,
        rest_least=rest_least,
        backward_lead=backward_lead,
        in_flight_limit=in_flight_limit,
        activation=costs.activation_bytes,
        held=costs.held_bytes,
        usable=usable,
        transient=transient,
        tail=tail,
        forward_tail=forward_tail,
        backward_tail=backward_tail,
        queues_never_wait=_queues_never_wait(costs, may_fuse, may_split),
    )


def _transient_bytes(costs: StageCosts, *, count_boundaries: bool) -> IntArray:
    """Return what is held while each op runs, [num_stages, 4]: workspace, and the boundaries held in any case."""
    transient = np.repeat(costs.workspace_bytes[:, None], 4, axis=1)
    if count_boundaries:
        boundary = costs.boundary_bytes
        to_previous = np.concatenate([[0], boundary[:-1]])
        transient[:, OpKind.F] += boundary
        transient[:, OpKind.B] += boundary + to_previous
        transient[:, OpKind.I] += boundary + to_previous
    return transient


def _in_flight_limits(costs: StageCosts, usable: IntArray, transient: IntArray, num_micro_batches: int) -> IntArray:
    limits = np.empty(costs.num_stages, dtype=np.int64)
    for stage, rank in enumerate(costs.rank_by_stage):
        room = int(usable[rank]) - int(transient[stage, OpKind.F])
        activation = int(costs.activation_bytes[stage])
        limits[stage] = num_micro_batches if activation == 0 and room >= 0 else room // max(activation, 1)
    return np.minimum(limits, num_micro_batches)


def _queues_never_wait(costs: StageCosts, may_fuse: IntArray, may_split: IntArray) -> bool:
    """Return whether every transfer is over before its rank can have produced another message for the same queue."""
    longest: dict[tuple[int, int], int] = {}
    shortest: dict[tuple[int, int], int] = {}
    ranks = costs.rank_by_stage.tolist()
    for stage, rank in enumerate(ranks):
        backward_ns = [int(costs.duration_ns[stage, OpKind.B])] if may_fuse[stage] else []
        backward_ns += [int(costs.duration_ns[stage, OpKind.I])] if may_split[stage] else []
        for target, transfer_ns, produced_ns in (
            (stage + 1, costs.forward_transfer_ns[stage], [int(costs.duration_ns[stage, OpKind.F])]),
            (stage - 1, costs.backward_transfer_ns[stage], backward_ns),
        ):
            if 0 <= target < len(ranks) and ranks[target] != rank:
                queue = (rank, ranks[target])
                longest[queue] = max(longest.get(queue, 0), int(transfer_ns))
                shortest[queue] = min(shortest.get(queue, int(UNLIMITED)), *produced_ns)
    return all(longest[queue] <= shortest[queue] + costs.send_ns for queue in longest)


@njit(cache=True)
def _tails(  # type: ignore[no-untyped-def]
    num_micro_batches, rank_by_stage, occupied, lead, backward_least, rest_least, backward_lead, in_flight_limit, tail,
    send_ns,
):  # fmt: skip
    """Return the tails of F and of the backward, each a one-machine bound over what must follow, on every rank.

    Ops are taken in reverse, so that the tails of all that follow an op are known when they are needed.
    """
    num_stages = rank_by_stage.shape[0]
    num_ranks = tail.shape[0]
    forward_tail = np.zeros((num_stages, num_micro_batches), dtype=np.int64)
    backward_tail = np.zeros((num_stages, num_micro_batches), dtype=np.int64)
    forward_at = np.empty((num_stages, num_micro_batches), dtype=np.int64)
    backward_at = np.empty((num_stages, num_micro_batches), dtype=np.int64)
    num_jobs = 3 * num_stages * num_micro_batches
    heads = np.empty(num_jobs, dtype=np.int64)
    lengths = np.empty(num_jobs, dtype=np.int64)
    tails = np.empty(num_jobs, dtype=np.int64)
    for micro_batch in range(num_micro_batches - 1, -1, -1):
        for step in range(2 * num_stages):
            is_backward = step < num_stages
            stage = step if is_backward else 2 * num_stages - 1 - step
            # Longest ways from the end of the op's occupation to the start of each later one's.
            sends = (stage > 0 and rank_by_stage[stage - 1] != rank_by_stage[stage]) if is_backward else (
                stage < num_stages - 1 and rank_by_stage[stage + 1] != rank_by_stage[stage]
            )  # fmt: skip
            for k in range(micro_batch, num_micro_batches):
                for s in range(num_stages):
                    start = -(1 << 60)
                    if k == micro_batch and not is_backward and s == stage:
                        forward_at[s, k] = -occupied[s, 0]
                        continue
                    if s > 0 and (k > micro_batch or not is_backward):
                        start = max(start, forward_at[s - 1, k] + lead[s - 1, 0])
                    if k > micro_batch:
                        start = max(start, forward_at[s, k - 1] + occupied[s, 0])
                    earlier = k - in_flight_limit[s]
                    if earlier >= micro_batch:
                        start = max(start, backward_at[s, earlier] + backward_least[s])
                    forward_at[s, k] = start if start >= -(1 << 50) else -(1 << 60)
                for s in range(num_stages - 1, -1, -1):
                    if k == micro_batch and is_backward and s == stage:
                        backward_at[s, k] = -backward_least[s]
                        continue
                    start = forward_at[s, k] + occupied[s, 0]
                    if s < num_stages - 1:
                        start = max(start, backward_at[s + 1, k] + backward_lead[s + 1])
                    if k > micro_batch:
                        start = max(start, backward_at[s, k - 1] + backward_least[s])
                    backward_at[s, k] = start if start >= -(1 << 50) else -(1 << 60)
            own_rank = rank_by_stage[stage]
            best = tail[own_rank] - (send_ns if sends else 0)
            for rank in range(num_ranks):
                count = 0
                for s in range(num_stages):
                    if rank_by_stage[s] != rank:
                        continue
                    for k in range(micro_batch, num_micro_batches):
                        is_self = k == micro_batch and s == stage
                        if forward_at[s, k] > -(1 << 50) and not (is_self and not is_backward):
                            heads[count], lengths[count], tails[count] = (
                                forward_at[s, k],
                                occupied[s, 0],
                                forward_tail[s, k],
                            )
                            count += 1
                        if backward_at[s, k] > -(1 << 50):
                            if not (is_self and is_backward):
                                heads[count], lengths[count] = backward_at[s, k], backward_least[s]
                                tails[count] = backward_tail[s, k]
                                count += 1
                            if rest_least[s] > 0:
                                heads[count], lengths[count] = backward_at[s, k] + backward_least[s], rest_least[s]
                                tails[count] = tail[rank]
                                count += 1
                if count > 0:
                    best = max(best, preemptive_bound(heads, lengths, tails, count))
            if is_backward:
                backward_tail[stage, micro_batch] = best
            else:
                forward_tail[stage, micro_batch] = best
    return forward_tail, backward_tail
