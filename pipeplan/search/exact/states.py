"""States of the exact search as rows of integers: where a partial order stands, and the least it can still lead to.

A row holds, in this order: forwards, backwards and pending W of each stage; the mask of ranks that wait; when each rank
is free; the end of the batch on the ranks that are done; when each queue is free; when each forward input and each
gradient arrived. Rows with the same counts and mask are comparable: the one that is nowhere later makes the other
superfluous, since whatever completes the other completes it at least as early.
"""

from __future__ import annotations

from numba import njit

from pipeplan.search.exact.one_machine import preemptive_bound

KIND_WAIT = 4  # beside the numbers of OpKind


@njit(cache=True)
def num_key_columns(num_stages):  # type: ignore[no-untyped-def]
    """Return how many columns hold counts and the mask."""
    return 3 * num_stages + 1


def num_columns(num_stages: int, num_ranks: int, num_micro_batches: int) -> int:
    """Return the length of a row."""
    return 3 * num_stages + 1 + num_ranks + 1 + num_ranks * num_ranks + 2 * num_stages * num_micro_batches


@njit(cache=True)
def fill_heads(row, shop, forward_head, backward_head):  # type: ignore[no-untyped-def]
    """Write the least start of every op that is left, going through ranks that are never busy with another stage."""
    num_stages, num_ranks, num_micro_batches = shop.num_stages, shop.num_ranks, shop.num_micro_batches
    free = 3 * num_stages + 1
    forward_arrival = free + num_ranks + 1 + num_ranks * num_ranks
    backward_arrival = forward_arrival + num_stages * num_micro_batches
    ranks = shop.rank_by_stage
    for k in range(num_micro_batches):
        for s in range(num_stages):
            if k < row[s]:
                continue
            head = row[free + ranks[s]]
            if s > 0:
                if k < row[s - 1]:
                    head = max(head, row[forward_arrival + s * num_micro_batches + k])
                else:
                    head = max(head, forward_head[s - 1, k] + shop.lead[s - 1, 0])
            if k > row[s]:
                head = max(head, forward_head[s, k - 1] + shop.occupied[s, 0])
            earlier = k - shop.in_flight_limit[s]
            if earlier >= row[num_stages + s]:
                head = max(head, backward_head[s, earlier] + shop.backward_least[s])
            forward_head[s, k] = head
        for s in range(num_stages - 1, -1, -1):
            if k < row[num_stages + s]:
                continue
            head = row[free + ranks[s]]
            if s < num_stages - 1:
                if k < row[num_stages + s + 1]:
                    head = max(head, row[backward_arrival + s * num_micro_batches + k])
                else:
                    head = max(head, backward_head[s + 1, k] + shop.backward_lead[s + 1])
            if k >= row[s]:
                head = max(head, forward_head[s, k] + shop.occupied[s, 0])
            if k > row[num_stages + s]:
                head = max(head, backward_head[s, k - 1] + shop.backward_least[s])
            backward_head[s, k] = head


@njit(cache=True)
def bound_state(row, shop, forward_head, backward_head, jobs, limit):  # type: ignore[no-untyped-def]
    """Return (least end of the batch, sum of the least ends of the ranks); may stop early from ``limit`` on.

    Fills the heads.
    """
    num_stages, num_ranks, num_micro_batches = shop.num_stages, shop.num_ranks, shop.num_micro_batches
    free = 3 * num_stages + 1
    fill_heads(row, shop, forward_head, backward_head)
    best = row[free + num_ranks]
    total = best - best
    heads, lengths, tails = jobs[0], jobs[1], jobs[2]
    for rank in range(num_ranks):
        count = 0
        for s in range(num_stages):
            if shop.rank_by_stage[s] != rank:
                continue
            for k in range(row[s], num_micro_batches):
                heads[count] = forward_head[s, k]
                lengths[count] = shop.occupied[s, 0]
                tails[count] = shop.forward_tail[s, k]
                count += 1
            rest = shop.rest_least[s]
            for k in range(row[num_stages + s], num_micro_batches):
                heads[count] = backward_head[s, k]
                lengths[count] = shop.backward_least[s]
                tails[count] = shop.backward_tail[s, k]
                count += 1
                if rest > 0:
                    heads[count] = backward_head[s, k] + shop.backward_least[s]
                    lengths[count] = rest
                    tails[count] = shop.tail[rank]
                    count += 1
            pending = row[2 * num_stages + s]
            if pending > 0:
                heads[count] = row[free + rank]
                lengths[count] = pending * shop.duration[s, 3]
                tails[count] = shop.tail[rank]
                count += 1
        if count > 0:
            bound = preemptive_bound(heads, lengths, tails, count)
            total += bound
            best = max(best, bound)
            if best >= limit:
                break
    return best, total


@njit(cache=True)
def fits(row, shop, stage, kind):  # type: ignore[no-untyped-def]
    """Return whether the rank has room for the op now, and can still bring its oldest micro-batch to its end after."""
    num_stages = shop.num_stages
    rank = shop.rank_by_stage[stage]
    usable = shop.usable[rank]
    kept, held = 0, 0
    oldest = shop.num_micro_batches
    for s in range(num_stages):
        oldest = min(oldest, row[num_stages + s])
    needed = 0
    for s in range(num_stages):
        if shop.rank_by_stage[s] != rank:
            continue
        kept += (row[s] - row[num_stages + s]) * shop.activation[s]
        held += row[2 * num_stages + s] * shop.held[s]
        if row[s] <= oldest and oldest < shop.num_micro_batches and not (kind == 0 and s == stage and row[s] == oldest):
            needed += shop.activation[s]
    if kind == 0:
        kept += shop.activation[stage]
        # No backward can run before the oldest micro-batch has run forward everywhere; only W can make room for it.
        if kept + needed > usable:
            return False
    if kept + held + shop.transient[stage, kind] > usable:
        return False
    return not (kind == 2 and kept - shop.activation[stage] + held + shop.held[stage] > usable)


@njit(cache=True)
def may_run_out(row, shop, rank):  # type: ignore[no-untyped-def]
    """Return whether any order of what is left could need more memory on ``rank`` than there is."""
    num_stages = shop.num_stages
    most, transient = 0, 0
    for s in range(num_stages):
        if shop.rank_by_stage[s] == rank:
            most += (shop.num_micro_batches - row[num_stages + s]) * max(shop.activation[s], shop.held[s])
            most += row[2 * num_stages + s] * shop.held[s]
            for kind in range(4):
                transient = max(transient, shop.transient[s, kind])
    return most + transient > shop.usable[rank]


@njit(cache=True)
def input_arrival(row, shop, stage, kind):  # type: ignore[no-untyped-def]
    """Return when the next op of that kind has its input, or -1 while it is not on its way or nothing is left."""
    num_stages, num_ranks, num_micro_batches = shop.num_stages, shop.num_ranks, shop.num_micro_batches
    arrivals = 3 * num_stages + 2 + num_ranks + num_ranks * num_ranks
    if kind == 0:
        k = row[stage]
        if k == num_micro_batches or (stage > 0 and row[stage - 1] <= k):
            return -1
        return row[arrivals + stage * num_micro_batches + k]
    if kind == 3:
        return 0 if row[2 * num_stages + stage] > 0 else -1
    k = row[num_stages + stage]
    if k >= row[stage] or (stage < num_stages - 1 and row[num_stages + stage + 1] <= k):
        return -1
    return row[arrivals + (num_stages + stage) * num_micro_batches + k]


@njit(cache=True)
def run_op(row, shop, stage, kind):  # type: ignore[no-untyped-def]
    """Append the next op of that stage and kind to the partial order in ``row``."""
    num_stages, num_ranks, num_micro_batches = shop.num_stages, shop.num_ranks, shop.num_micro_batches
    ranks = shop.rank_by_stage
    mask, free = 3 * num_stages, 3 * num_stages + 1
    queues = free + num_ranks + 1
    arrivals = queues + num_ranks * num_ranks
    rank = ranks[stage]
    start = max(row[free + rank], input_arrival(row, shop, stage, kind))
    end = start + shop.before_end[stage, kind]
    row[free + rank] = start + shop.occupied[stage, kind]
    if kind == 3:
        row[2 * num_stages + stage] -= 1
    else:
        if kind == 0:
            k, target = row[stage], stage + 1
            row[stage] += 1
        else:
            k, target = row[num_stages + stage], stage - 1
            row[num_stages + stage] += 1
            if kind == 2:
                row[2 * num_stages + stage] += 1
        if 0 <= target < num_stages:
            there = ranks[target]
            row[mask] &= ~(1 << there)
            if there != rank:
                begin = end
                transfer = shop.transfer[stage, 0 if kind == 0 else 1]
                if not shop.queues_never_wait:
                    queue = queues + rank * num_ranks + there
                    begin = max(end, row[queue])
                    row[queue] = begin + transfer
                end_of_message = begin + transfer
                half = 0 if kind == 0 else num_stages
                row[arrivals + (half + target) * num_micro_batches + k] = end_of_message
    for s in range(num_stages):
        if ranks[s] == rank and (row[num_stages + s] < num_micro_batches or row[2 * num_stages + s] > 0):
            return
    row[free + num_ranks] = max(row[free + num_ranks], end + shop.tail[rank])


@njit(cache=True)
def is_nowhere_later(a, b, shop):  # type: ignore[no-untyped-def]
    """Return whether everything that is still to come can start in ``a`` as early as in ``b``; same counts."""
    num_stages, num_ranks, num_micro_batches = shop.num_stages, shop.num_ranks, shop.num_micro_batches
    free = 3 * num_stages + 1
    arrivals = free + num_ranks + 1 + num_ranks * num_ranks
    for column in range(free, free + num_ranks + 1):
        if a[column] > b[column]:
            return False
    if not shop.queues_never_wait:
        for rank in range(num_ranks):
            for there in range(num_ranks):
                column = free + num_ranks + 1 + rank * num_ranks + there
                if a[column] > max(b[column], b[free + rank]):
                    return False
    for s in range(num_stages):
        b_free = b[free + shop.rank_by_stage[s]]
        if s > 0:
            for k in range(a[s], a[s - 1]):
                column = arrivals + s * num_micro_batches + k
                if a[column] > max(b[column], b_free):
                    return False
        if s < num_stages - 1:
            for k in range(a[num_stages + s], a[num_stages + s + 1]):
                column = arrivals + (num_stages + s) * num_micro_batches + k
                if a[column] > max(b[column], b_free):
                    return False
    return True
