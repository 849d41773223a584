"""Lower bounds: no plan of a problem can be faster."""

from __future__ import annotations

import numpy as np

from pipeplan.search.problem import Problem


def lower_bound_ns(problem: Problem) -> int:
    """Return a makespan that no plan can beat."""
    best = np.min([_layer_work(problem, rank) for rank in range(problem.num_ranks)], axis=0)
    return -(-int(best.sum()) * problem.num_micro_batches // problem.num_ranks)


def _layer_work(problem: Problem, rank: int) -> np.ndarray:
    sums = problem.table.device_sums(problem.cluster.ranks[rank].device)
    times = np.diff(sums, axis=0) * problem.cluster.ranks[rank].slowdown
    return times[:, 0] + np.minimum(times[:, 1], times[:, 2] + times[:, 3])
