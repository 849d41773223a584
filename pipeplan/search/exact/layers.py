"""Layers of states: expanding one, keeping the undominated, cutting a layer to the most promising.

A layer holds the states with the same number of op units left to run (B counts as two, since I and W are two), so that
all ways to the same counts meet in one layer.

Branching follows Giffler and Thompson (1960): on a rank whose op X could end at T without hindering anything, some best
completion starts another op before T, or runs X. X must be harmless to move ahead: an op that adds memory is only where
memory can't run out any more. Where an op that is not available yet may start before T, the rank may also wait for it.
With queues in which messages wait for each other, moving an op ahead may delay another's message; then every available
op of every rank is tried.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from pipeplan.search.exact.states import (
    KIND_WAIT,
    bound_state,
    fill_heads,
    fits,
    input_arrival,
    is_nowhere_later,
    may_run_out,
    num_key_columns,
    run_op,
)
from pipeplan.simulate.encoding import IntArray

EMPTY = -1
NEVER = 1 << 60


@dataclass(slots=True, eq=False)
class Layer:
    """States with the same number of op units done, and how each came about.

    Attributes:
        rows: [capacity, num_columns].
        bounds, sums: [capacity], least end of the batch, and the sum of the ranks' least ends.
        parents, actions: [capacity], index in the parent's layer; kind * num_stages + stage, or for a wait the rank.
        is_alive: [capacity], whether no later state dominates it.
        table, following: Hash table of counts: first state of each slot, next state with the same counts.
        count: [1], number of states, dead ones included.
    """

    rows: IntArray
    bounds: IntArray
    sums: IntArray
    parents: IntArray
    actions: IntArray
    is_alive: NDArray[np.bool_]
    table: IntArray
    following: IntArray
    count: IntArray

    @property
    def arrays(self) -> tuple[NDArray[Any], ...]:
        """What compiled loops take."""
        return (
            self.rows, self.bounds, self.sums, self.parents, self.actions, self.is_alive, self.table, self.following,
            self.count,
        )  # fmt: skip

    @classmethod
    def empty(cls, capacity: int, num_columns: int) -> Layer:
        """Return a layer without states."""
        slots = 1 << (2 * capacity - 1).bit_length()
        return cls(
            rows=np.zeros((capacity, num_columns), dtype=np.int64),
            bounds=np.zeros(capacity, dtype=np.int64),
            sums=np.zeros(capacity, dtype=np.int64),
            parents=np.zeros(capacity, dtype=np.int64),
            actions=np.zeros(capacity, dtype=np.int64),
            is_alive=np.zeros(capacity, dtype=np.bool_),
            table=np.full(slots, EMPTY, dtype=np.int64),
            following=np.zeros(capacity, dtype=np.int64),
            count=np.zeros(1, dtype=np.int64),
        )

    def clear(self) -> None:
        """Forget all states."""
        self.count[0] = 0
        self.table.fill(EMPTY)

    def keep_best(self, width: int, num_stages: int) -> int | None:
        """Drop the dead and all but the best ``width`` states; return the least bound dropped alive, if any.

        Half of them are best by the bound, half by the sum: the busiest rank alone misleads where another is late.
        """
        count = int(self.count[0])
        alive = np.flatnonzero(self.is_alive[:count])
        by_promise = alive
        if len(alive) > width:
            by_promise = alive[_in_turn(self.bounds[alive], self.sums[alive])]
        kept, dropped = by_promise[:width], by_promise[width:]
        least_dropped = int(self.bounds[dropped].min()) if len(dropped) else None
        for column in (self.rows, self.bounds, self.sums, self.parents, self.actions):
            column[: len(kept)] = column[kept]
        self.is_alive[: len(kept)] = True
        self.table.fill(EMPTY)
        self.count[0] = len(kept)
        _rebuild_table(self.rows, self.table, self.following, len(kept), num_stages)
        return least_dropped


def _in_turn(bounds: IntArray, sums: IntArray) -> IntArray:
    """Return the indices by bound and by sum in turn, each once."""
    both = np.empty(2 * len(bounds), dtype=np.int64)
    both[0::2], both[1::2] = np.lexsort((sums, bounds)), np.lexsort((bounds, sums))
    _, first = np.unique(both, return_index=True)
    return both[np.sort(first)]


@njit(cache=True)
def _slot_of(row, table, rows, num_keys):  # type: ignore[no-untyped-def]
    """Return the slot of the row's counts, or the empty one where they belong."""
    code = np.uint64(1469598103934665603)
    for column in range(num_keys):
        code = (code ^ np.uint64(row[column])) * np.uint64(1099511628211)
    code ^= code >> np.uint64(29)
    mask = table.shape[0] - 1
    slot = np.int64(code & np.uint64(mask))
    while table[slot] != EMPTY:
        other = rows[table[slot]]
        for column in range(num_keys):
            if other[column] != row[column]:
                break
        else:
            return slot
        slot = (slot + 1) & mask
    return slot


@njit(cache=True)
def _rebuild_table(rows, table, following, count, num_stages):  # type: ignore[no-untyped-def]
    num_keys = num_key_columns(num_stages)
    for index in range(count):
        slot = _slot_of(rows[index], table, rows, num_keys)
        following[index] = table[slot]
        table[slot] = index


@njit(cache=True)
def _add(row, bound, total, parent, action, shop, layer):  # type: ignore[no-untyped-def]
    """Add a state unless another makes it superfluous; those that it makes superfluous die."""
    rows, bounds, sums, parents, actions, is_alive, table, following, count = layer
    slot = _slot_of(row, table, rows, num_key_columns(shop.num_stages))
    other = table[slot]
    while other != EMPTY:
        if is_alive[other]:
            if is_nowhere_later(rows[other], row, shop):
                return
            if is_nowhere_later(row, rows[other], shop):
                is_alive[other] = False
        other = following[other]
    index = count[0]
    rows[index] = row
    bounds[index], sums[index], parents[index], actions[index] = bound, total, parent, action
    is_alive[index] = True
    following[index] = table[slot]
    table[slot] = index
    count[0] = index + 1


@njit(cache=True)
def expand(first, last, shop, limit, here, one_on, two_on, tally):  # type: ignore[no-untyped-def]
    """Expand the states of ``here`` from ``first`` to ``last`` into the layers one and two op units further.

    Layers are tuples of their arrays. Waits are added to ``here`` itself. Stops when a layer may be full and returns
    the first state that is not expanded. ``tally`` counts the children and keeps the least bound of waits that found no
    room.
    """
    rows, bounds, sums, parents, actions, is_alive = here[0], here[1], here[2], here[3], here[4], here[5]
    count = here[8]
    num_stages = shop.num_stages
    mask, free = 3 * num_stages, 3 * num_stages + 1
    num_jobs = 4 * num_stages * shop.num_micro_batches
    jobs = np.empty((3, num_jobs), dtype=np.int64)
    forward_head = np.empty((num_stages, shop.num_micro_batches), dtype=np.int64)
    backward_head = np.empty((num_stages, shop.num_micro_batches), dtype=np.int64)
    child = np.empty(rows.shape[1], dtype=np.int64)
    index = first
    max_children = 4 * num_stages
    while index < min(count[0], last):
        if one_on[8][0] + max_children > one_on[0].shape[0] or two_on[8][0] + max_children > two_on[0].shape[0]:
            return index
        if not is_alive[index] or bounds[index] >= limit:
            index += 1
            continue
        row = rows[index]
        fill_heads(row, shop, forward_head, backward_head)
        if shop.queues_never_wait:
            rank, horizon, wait_until = _choose_rank(row, shop, forward_head, backward_head)
        else:
            rank, horizon, wait_until = 0, NEVER, NEVER
        for s in range(num_stages):
            here_rank = shop.rank_by_stage[s]
            if shop.queues_never_wait and here_rank != rank:
                continue
            for kind in range(4):
                if not _is_open(row, shop, s, kind):
                    continue
                if max(row[free + here_rank], input_arrival(row, shop, s, kind)) >= horizon:
                    continue
                child[:] = row
                run_op(child, shop, s, kind)
                tally[0] += 1
                bound, total = bound_state(child, shop, forward_head, backward_head, jobs, limit)
                if bound >= limit:
                    continue
                layer = two_on if kind == 1 else one_on
                _add(child, bound, total, index, kind * num_stages + s, shop, layer)
        if rank >= 0 and wait_until < horizon:
            child[:] = row
            child[mask] |= 1 << rank
            child[free + rank] = max(child[free + rank], wait_until)
            bound, total = bound_state(child, shop, forward_head, backward_head, jobs, limit)
            if bound < limit and count[0] == rows.shape[0]:
                tally[1] = min(tally[1], bound)
            elif bound < limit:
                new = count[0]
                rows[new] = child
                bounds[new], sums[new], parents[new] = bound, total, index
                actions[new] = KIND_WAIT * num_stages + rank
                is_alive[new] = True
                count[0] = new + 1
        index += 1
    return index


@njit(cache=True)
def _is_open(row, shop, stage, kind):  # type: ignore[no-untyped-def]
    """Return whether the next op of that stage and kind can be appended now."""
    if kind == 1 and shop.may_fuse[stage] == 0:
        return False
    if kind == 2 and shop.may_split[stage] == 0:
        return False
    return input_arrival(row, shop, stage, kind) >= 0 and fits(row, shop, stage, kind)


@njit(cache=True)
def _choose_rank(row, shop, forward_head, backward_head):  # type: ignore[no-untyped-def]
    """Return (rank to branch on, ops that start before this come next, earliest start of an op to wait for).

    The rank is the one whose first op could end first; -1 where no rank that doesn't wait has an op.
    """
    num_stages, num_ranks = shop.num_stages, shop.num_ranks
    mask, free = 3 * num_stages, 3 * num_stages + 1
    chosen, first_end, horizon = -1, NEVER, NEVER
    for rank in range(num_ranks):
        if (row[mask] >> rank) & 1:
            continue
        is_scarce = may_run_out(row, shop, rank)
        end_here, horizon_here = NEVER, NEVER
        for s in range(num_stages):
            if shop.rank_by_stage[s] != rank:
                continue
            for group in range(3):  # F, backward, W
                latest, is_harmless = 0, True
                for kind in range(4):
                    if (0 if kind == 0 else (2 if kind == 3 else 1)) != group:
                        continue
                    if (kind == 1 and shop.may_fuse[s] == 0) or (kind == 2 and shop.may_split[s] == 0):
                        continue
                    if not _is_open(row, shop, s, kind):
                        is_harmless = False
                        continue
                    start = max(row[free + rank], input_arrival(row, shop, s, kind))
                    end = start + max(shop.occupied[s, kind], 1)
                    end_here = min(end_here, end)
                    latest = max(latest, end)
                    if is_scarce and (kind == 0 or (kind == 2 and shop.held[s] > shop.activation[s])):
                        is_harmless = False
                if is_harmless and latest > 0:
                    horizon_here = min(horizon_here, latest)
        if end_here < first_end:
            chosen, first_end, horizon = rank, end_here, horizon_here
    wait_until = NEVER
    if chosen >= 0:
        for s in range(num_stages):
            if shop.rank_by_stage[s] != chosen:
                continue
            if row[s] < shop.num_micro_batches and input_arrival(row, shop, s, 0) < 0 and fits(row, shop, s, 0):
                wait_until = min(wait_until, forward_head[s, row[s]])
            if row[num_stages + s] < shop.num_micro_batches and input_arrival(row, shop, s, 1) < 0:
                wait_until = min(wait_until, backward_head[s, row[num_stages + s]])
    return chosen, horizon, wait_until
