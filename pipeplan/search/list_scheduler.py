"""A list scheduler that keeps to memory caps and can't stall: from costs and a few numbers to an order.

Time runs forward over all ranks at once; whenever a rank is free it takes the most urgent op that is ready. Urgency is
a due time: of stage s and micro-batch m, ``due_forward[s] + pace * m`` (or ``due_backward``). How many micro-batches
may be between F and backward of a stage is limited (``limit``), and so is memory. W runs where the rank would idle,
when too much of it has piled up, or when its memory is needed.

No stall: a forward is admitted only if afterwards the micro-batches in flight could still be finished one after the
other, oldest first (the banker's rule, on every rank in the same sequence). Where holding on to W's inputs would break
a cap, the backward runs whole.

Times here decide an order; what the order really takes, the clock says.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

FAR = np.int64(1) << np.int64(62)
STALLED = -1
TOO_LITTLE_MEMORY = -2
TOO_LONG = -3


class Rules(NamedTuple):
    """What the scheduler goes by.

    Attributes:
        due_forward_ns, due_backward_ns: [num_stages], due times of micro-batch 0.
        pace_ns: How much later each further micro-batch is due.
        limit: [num_stages], micro-batches that may be in flight.
        is_fused: [num_stages], whether the backward runs whole (B).
        patience: Share of an op's length that a rank would rather idle, if a more urgent op then arrives.
        w_fit: Share of a W that must fit before the next arrival; 0 starts W whenever the rank idles.
        w_backlog_ns: W that may pile up on a rank before it goes ahead of forwards.
    """

    due_forward_ns: NDArray[np.int64]
    due_backward_ns: NDArray[np.int64]
    pace_ns: int
    limit: NDArray[np.int64]
    is_fused: NDArray[np.bool_]
    patience: float
    w_fit: float
    w_backlog_ns: int


class Listing(NamedTuple):
    """Room for an order while it is built: packed ops, [num_ranks, most ops a rank can have], and their numbers."""

    ops: NDArray[np.int64]
    counts: NDArray[np.int64]


@njit(cache=True, inline="always")
def pack(stage, kind, micro_batch):  # type: ignore[no-untyped-def]
    """Return an op as one integer."""
    return (stage << 34) | (kind << 32) | micro_batch


@njit(cache=True)
def list_schedule(costs, rules, num_micro_batches, stages_of_rank, stage_offsets, longest_ns, listing):  # type: ignore[no-untyped-def]
    """Return the makespan of the order written to ``listing``; ``STALLED`` or ``TOO_LITTLE_MEMORY`` if there is none.

    Gives up with ``TOO_LONG`` as soon as a rank can't be done by ``longest_ns``.

    ``stages_of_rank`` holds the stages of rank r at [stage_offsets[r], stage_offsets[r + 1]), ascending.
    """
    num_stages = costs.rank_by_stage.shape[0]
    num_ranks = stage_offsets.shape[0] - 1
    last_stage = num_stages - 1
    duration = costs.duration_ns
    rank_of = costs.rank_by_stage
    activation, held = costs.activation_bytes, costs.held_bytes

    forward_ready = np.full((num_stages, num_micro_batches), FAR, dtype=np.int64)
    backward_ready = np.full((num_stages, num_micro_batches), FAR, dtype=np.int64)
    forward_ready[0, :] = 0
    next_forward = np.zeros(num_stages, dtype=np.int64)
    next_backward = np.zeros(num_stages, dtype=np.int64)
    next_weight = np.zeros(num_stages, dtype=np.int64)
    ran_whole = np.zeros((num_stages, num_micro_batches), dtype=np.bool_)
    free = np.zeros(num_ranks, dtype=np.int64)
    wake = np.full(num_ranks, FAR, dtype=np.int64)
    queue_free = np.zeros((num_ranks, num_ranks), dtype=np.int64)
    room = costs.capacity_bytes.copy()  # what is left under the cap
    pending_bytes = np.zeros(num_ranks, dtype=np.int64)  # held for W that could run now
    pending_ns = np.zeros(num_ranks, dtype=np.int64)
    full = np.zeros(num_ranks, dtype=np.int64)
    left_ns = costs.tail_ns.copy()  # what each rank still has to do
    for stage in range(num_stages):
        full[rank_of[stage]] += activation[stage]
        left_ns[rank_of[stage]] += num_micro_batches * (
            duration[stage, 0]
            + (duration[stage, 1] if rules.is_fused[stage] else duration[stage, 2] + duration[stage, 3])
        )
    for rank in range(num_ranks):
        if full[rank] > room[rank]:
            return TOO_LITTLE_MEMORY
        listing.counts[rank] = 0
    wake[rank_of[0]] = 0

    num_left = 2 * num_stages * num_micro_batches  # forwards and backwards
    num_weights_left = 0
    makespan = np.int64(0)
    while num_left > 0 or num_weights_left > 0:
        now = FAR
        rank = -1
        for other in range(num_ranks):
            if wake[other] < now:
                now = wake[other]
                rank = other
        if rank < 0:
            return STALLED
        if now + left_ns[rank] > longest_ns:
            return TOO_LONG

        best_stage, best_kind, best_due = -1, 0, FAR
        soon, soon_due = FAR, FAR  # the next arrival, and the due time of the most urgent op to come
        soon_of_due = FAR
        blocked_due = FAR  # a ready forward that only waits for W's memory
        for index in range(stage_offsets[rank], stage_offsets[rank + 1]):
            stage = stages_of_rank[index]
            micro_batch = next_backward[stage]
            if micro_batch < next_forward[stage]:
                ready = backward_ready[stage, micro_batch]
                if ready < FAR:
                    due = rules.due_backward_ns[stage] + rules.pace_ns * micro_batch
                    if ready <= now:
                        if due < best_due:
                            best_stage, best_kind, best_due = stage, 2, due
                    else:
                        soon = min(soon, ready)
                        if due < soon_due:
                            soon_due, soon_of_due = due, ready
            micro_batch = next_forward[stage]
            if micro_batch < num_micro_batches and micro_batch - next_backward[stage] < rules.limit[stage]:
                ready = forward_ready[stage, micro_batch]
                if ready < FAR:
                    due = rules.due_forward_ns[stage] + rules.pace_ns * micro_batch
                    if ready > now:
                        soon = min(soon, ready)
                        if due < soon_due:
                            soon_due, soon_of_due = due, ready
                    elif (due < best_due or due < blocked_due) and _is_safe(
                        stage, index, rank, activation, room[rank] + pending_bytes[rank], full[rank],
                        next_forward, next_backward, stages_of_rank, stage_offsets,
                    ):  # fmt: skip
                        if activation[stage] > room[rank]:
                            blocked_due = min(blocked_due, due)
                        elif due < best_due:
                            best_stage, best_kind, best_due = stage, 0, due

        run_weight = False
        if pending_ns[rank] > 0 or num_weights_left > 0:
            if blocked_due < best_due and pending_bytes[rank] > 0:
                run_weight = True
            elif best_stage >= 0:
                run_weight = best_kind == 0 and pending_ns[rank] > rules.w_backlog_ns
        patience_ns = rules.patience * duration[best_stage, best_kind] if best_stage >= 0 else 0.0
        if best_stage >= 0 and not run_weight and soon_due < best_due and soon_of_due - now <= patience_ns:
            best_stage = -1
        if best_stage < 0 or run_weight:
            gap = soon - now
            weight_stage = -1
            weight_ns = np.int64(0)
            smallest_stage = -1
            smallest_ns = FAR
            for index in range(stage_offsets[rank], stage_offsets[rank + 1]):
                stage = stages_of_rank[index]
                micro_batch = next_weight[stage]
                while micro_batch < next_backward[stage] and ran_whole[stage, micro_batch]:
                    micro_batch += 1
                next_weight[stage] = micro_batch
                if micro_batch >= next_backward[stage]:
                    continue
                length = duration[stage, 3]
                if length < smallest_ns:
                    smallest_ns, smallest_stage = length, stage
                if (run_weight or length <= gap) and (weight_stage < 0 or length > weight_ns):
                    weight_ns, weight_stage = length, stage
            if weight_stage < 0 and smallest_stage >= 0 and gap >= rules.w_fit * smallest_ns:
                weight_stage = smallest_stage
            if weight_stage >= 0:
                stage = weight_stage
                micro_batch = next_weight[stage]
                next_weight[stage] += 1
                listing.ops[rank, listing.counts[rank]] = pack(stage, 3, micro_batch)
                listing.counts[rank] += 1
                free[rank] = now + duration[stage, 3]
                makespan = max(makespan, free[rank] + costs.tail_ns[rank])
                room[rank] += held[stage]
                pending_bytes[rank] -= held[stage]
                pending_ns[rank] -= duration[stage, 3]
                left_ns[rank] -= duration[stage, 3]
                num_weights_left -= 1
                wake[rank] = free[rank]
                continue
            if best_stage < 0:
                wake[rank] = soon
                continue

        stage, kind = best_stage, best_kind
        if kind == 2 and (rules.is_fused[stage] or held[stage] - activation[stage] > room[rank]):
            kind = 1
        start = now
        if kind == 0:
            micro_batch = next_forward[stage]
            next_forward[stage] += 1
            room[rank] -= activation[stage]
            left_ns[rank] -= duration[stage, 0]
            target_stage, transfer = stage + 1, costs.forward_transfer_ns[stage]
            if stage > 0 and rank_of[stage - 1] != rank:
                start += costs.wait_ns
        else:
            micro_batch = next_backward[stage]
            next_backward[stage] += 1
            room[rank] += activation[stage]
            if not rules.is_fused[stage]:
                left_ns[rank] -= duration[stage, 2]
            if kind == 2:
                room[rank] -= held[stage]
                pending_bytes[rank] += held[stage]
                pending_ns[rank] += duration[stage, 3]
                num_weights_left += 1
            else:
                ran_whole[stage, micro_batch] = True
                left_ns[rank] -= duration[stage, 1 if rules.is_fused[stage] else 3]
            target_stage, transfer = stage - 1, costs.backward_transfer_ns[stage]
            if stage < last_stage and rank_of[stage + 1] != rank:
                start += costs.wait_ns
        listing.ops[rank, listing.counts[rank]] = pack(stage, kind, micro_batch)
        listing.counts[rank] += 1
        end = start + duration[stage, kind]
        makespan = max(makespan, end + costs.tail_ns[rank])
        num_left -= 1
        after = end
        if kind == 0 and stage == last_stage:
            backward_ready[stage, micro_batch] = end
        elif target_stage >= 0:
            target = rank_of[target_stage]
            arrival = end
            if target != rank:
                after += costs.send_ns
                begin = max(end, queue_free[rank, target])
                arrival = begin + transfer
                queue_free[rank, target] = arrival
            if kind == 0:
                forward_ready[target_stage, micro_batch] = arrival
            else:
                backward_ready[target_stage, micro_batch] = arrival
            if target != rank:
                wake[target] = min(wake[target], max(free[target], arrival))
        free[rank] = after
        wake[rank] = after
    return makespan


@njit(cache=True)
def _is_safe(  # type: ignore[no-untyped-def]
    stage, index, rank, activation, room, full, next_forward, next_backward, stages_of_rank, stage_offsets
):  # fmt: skip
    """Return whether the micro-batches in flight on ``rank`` can still be finished one by one after one more forward.

    ``room`` counts what W could free. The rank's first stage finishes a micro-batch last, so the oldest one in flight
    is the next backward of that stage.
    """
    room -= activation[stage]
    if room < 0:
        return False
    if room >= full:
        return True
    first, last = stage_offsets[rank], stage_offsets[rank + 1]
    lowest = stages_of_rank[first]
    newest = next_forward[lowest] - 1
    if stage == lowest:
        newest += 1
    for micro_batch in range(next_backward[lowest], newest + 1):
        needed = 0
        occupied = 0
        for each in range(first, last):
            other = stages_of_rank[each]
            done = next_forward[other]
            if each == index:
                done += 1
            if micro_batch >= done:
                needed += activation[other]
            elif micro_batch >= next_backward[other]:
                occupied += activation[other]
        if needed > room:
            return False
        room += occupied
        if room >= full:
            return True
    return True
