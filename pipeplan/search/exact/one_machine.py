"""The one-machine bound: jobs with heads and tails on one rank, run preemptively by longest tail (Jackson)."""

from __future__ import annotations

import numpy as np
from numba import njit


@njit(cache=True)
def preemptive_bound(heads, lengths, tails, count):  # type: ignore[no-untyped-def]
    """Return the optimum of 1 | preemptive, heads | max(end + tail) for the first ``count`` jobs.

    Jackson's preemptive schedule: of the jobs that have arrived, run the one with the longest tail (Carlier, 1982).
    """
    by_head = np.empty(count, dtype=np.int64)
    left = np.empty(count, dtype=np.int64)
    for job in range(count):
        left[job] = lengths[job]
        place = job
        while place > 0 and heads[by_head[place - 1]] > heads[job]:
            by_head[place] = by_head[place - 1]
            place -= 1
        by_head[place] = job
    waiting = np.empty(count, dtype=np.int64)  # ascending tails, so that the last is next
    num_waiting = 0
    arrived = 0
    now = heads[by_head[0]]
    best = now
    while arrived < count or num_waiting > 0:
        if num_waiting == 0 and heads[by_head[arrived]] > now:
            now = heads[by_head[arrived]]
        while arrived < count and heads[by_head[arrived]] <= now:
            job = by_head[arrived]
            arrived += 1
            place = num_waiting
            while place > 0 and tails[waiting[place - 1]] > tails[job]:
                waiting[place] = waiting[place - 1]
                place -= 1
            waiting[place] = job
            num_waiting += 1
        job = waiting[num_waiting - 1]
        until = now + left[job]
        if arrived < count and heads[by_head[arrived]] < until:
            until = heads[by_head[arrived]]
        left[job] -= until - now
        now = until
        if left[job] == 0:
            num_waiting -= 1
            best = max(best, now + tails[job])
    return best
