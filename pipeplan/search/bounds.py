"""Lower bounds: no plan of a problem can be faster, whatever its partition, placement and order.

Three arguments, the largest counts:

- *work*: every layer must run on some rank, whole; ranks that hold later stages can't start before the layers in front
  have run once. A small integer programme (HiGHS) spreads the layers over the ranks as evenly as whole layers allow.
- *bottleneck*: one rank runs all micro-batches through the largest layer, after the first has come there and before the
  last gradient has gone back.
- *chain*: one micro-batch runs forward and backward through all layers.

Transfers, memory and the reductions after the last op are left out, so the bound may be out of reach.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import warnings
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import lil_matrix

from pipeplan.search.partition import atom_bounds
from pipeplan.search.problem import Problem

FloatArray = NDArray[np.float64]

NODE_LIMIT = 200  # deterministic, unlike a time limit; symmetric ranks make proofs long and gain next to nothing


def lower_bound_ns(problem: Problem) -> int:
    """Return a makespan that no plan can beat, in nanoseconds."""
    forward, backward, whole = _atom_times(problem)
    step_ns = problem.cluster.host_overhead_ns.get("step", 0)
    best = max(
        _work_ns(problem, forward, backward, whole),
        _bottleneck_ns(problem, forward.min(axis=0), backward.min(axis=0), whole.min(axis=0)),
        float(forward.min(axis=0).sum() + backward.min(axis=0).sum()),
    )
    if any(rank.slowdown != 1.0 for rank in problem.cluster.ranks):
        # Slowed-down times are rounded to whole nanoseconds a stage and op: at most half of one off, each.
        best -= 1.5 * problem.num_micro_batches * (len(atom_bounds(problem.profile.layers)) - 1)
    return max(0, int(np.ceil(best * (1.0 - 1e-9) - 0.5))) + step_ns


def _atom_times(problem: Problem) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Return F, the part of the backward that the stage before waits for, and F + whole backward.

    Each [num_ranks, num_atoms]: sums over the layers of an atom, each layer with the cheapest of B, of I + W, and of
    both with recomputation.
    """
    firsts = np.array(atom_bounds(problem.profile.layers)[:-1], dtype=np.int64)
    rows = []
    for rank in problem.cluster.ranks:
        ways = []
        for sums in (problem.table.device_sums(rank.device), problem.table.recomputed_device_sums(rank.device)):
            times = np.diff(sums, axis=0).astype(np.float64) * rank.slowdown
            forward, backward = times[:, 0], np.minimum(times[:, 1], times[:, 2])
            ways.append((forward, backward, forward + np.minimum(times[:, 1], times[:, 2] + times[:, 3])))
        rows.append([np.add.reduceat(each, firsts) for each in np.min(ways, axis=0)])
    forward, backward, whole = np.array(rows).transpose(1, 0, 2)
    return forward, backward, whole


@contextlib.contextmanager
def _quiet_stdout() -> Iterator[None]:
    """Keep what HiGHS prints, a line left over from debugging, out of the output that scripts read."""
    flush = ctypes.CDLL(None).fflush
    sys.stdout.flush()
    flush(None)
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        yield
    finally:
        flush(None)
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)


def _bottleneck_ns(problem: Problem, forward: FloatArray, backward: FloatArray, whole: FloatArray) -> float:
    count = problem.num_micro_batches
    before = np.concatenate(([0.0], np.cumsum(forward)))[:-1]
    back = np.concatenate(([0.0], np.cumsum(backward)))[:-1]
    return float(max((before + count * whole).max(), (before + count * (forward + backward) + back).max()))


def _work_ns(problem: Problem, forward: FloatArray, backward: FloatArray, whole: FloatArray) -> float:
    """Return the least possible largest end of any rank when whole atoms are spread over the ranks.

    Sort the ranks by the first stage that each holds. The k-th holds none of the first k atoms in its first stage, so
    it starts after they have run; unless W can be put last, it must also end before their backwards. Which rank is the
    k-th is open, so that these waits only count where all ranks are equal.
    """
    num_ranks = len(whole)
    count = problem.num_micro_batches
    overhead = problem.table.overhead_ns
    waits = np.zeros(num_ranks)
    are_equal = bool((whole == whole[0]).all() and (forward == forward[0]).all())
    if are_equal:
        waits = np.concatenate(([0.0], np.cumsum(forward[0])))[:num_ranks]
        if not problem.table.can_split(0, problem.profile.num_layers):
            waits = waits + np.concatenate(([0.0], np.cumsum(backward[0])))[:num_ranks]
    base = waits + count * float(overhead[0] + min(overhead[1], overhead[2] + overhead[3]))
    kinds, group = np.unique(whole.T, axis=0, return_inverse=True)
    amounts = np.bincount(group.ravel(), minlength=len(kinds))
    # Unknowns: the end, then how many atoms of each kind each rank takes.
    num_kinds = len(kinds)
    scale = count * float(whole.max()) or 1.0
    size = 1 + num_kinds * num_ranks
    rows = lil_matrix((num_ranks + num_kinds, size))
    low, high = np.zeros(num_ranks + num_kinds), np.zeros(num_ranks + num_kinds)
    for rank in range(num_ranks):
        rows[rank, 0] = 1.0
        for kind in range(num_kinds):
            rows[rank, 1 + kind * num_ranks + rank] = -count * kinds[kind, rank] / scale
        low[rank], high[rank] = base[rank] / scale, np.inf
    for kind in range(num_kinds):
        for rank in range(num_ranks):
            rows[num_ranks + kind, 1 + kind * num_ranks + rank] = 1.0
        low[num_ranks + kind] = high[num_ranks + kind] = amounts[kind]
    goal = np.zeros(size)
    goal[0] = 1.0
    whole_numbers = np.ones(size)
    whole_numbers[0] = 0.0
    with warnings.catch_warnings(), _quiet_stdout():
        warnings.simplefilter("ignore")  # running out of nodes is expected: the bound so far counts
        solved = milp(
            goal,
            constraints=LinearConstraint(rows.tocsr(), low, high),
            integrality=whole_numbers,
            bounds=Bounds(np.zeros(size), np.full(size, np.inf)),
            options={"node_limit": NODE_LIMIT, "mip_rel_gap": 1e-6},
        )
    bound: float | None = getattr(solved, "mip_dual_bound", None)
    fractional = float((amounts @ kinds.min(axis=1)) * count + base.sum()) / num_ranks
    if bound is None or not np.isfinite(bound):
        return fractional
    return max(fractional, float(bound) * scale)
