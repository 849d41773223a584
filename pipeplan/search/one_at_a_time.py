"""The plan that needs least memory: one micro-batch at a time, recomputing wherever that keeps less.

Nothing in a layout needs less, so its peaks say whether a layout can fit at all. Slow as it is, it is the answer where
caps are so tight that no other order fits, and a start for local search.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from pipeplan.cluster import Cluster
from pipeplan.plan.layout import Partition, Placement
from pipeplan.plan.ops import OpKind
from pipeplan.profile.types import Profile
from pipeplan.search.partition import atom_bounds, split_by_time
from pipeplan.search.problem import Candidate, Constraints, Problem
from pipeplan.simulate import EncodedOrder

IntArray = NDArray[np.int64]
Layout = tuple[Partition, Placement]

ENOUGH = 4  # micro-batches that show the peak; where ops take no time, the next one's boundaries meet the last one's
MOST_LAYOUTS = 2000


def one_at_a_time(problem: Problem, partition: Partition, placement: Placement) -> Candidate:
    """Return the candidate that runs one micro-batch at a time."""
    ranks = np.array(placement.rank_by_stage)
    rounds = []
    for rank in range(problem.num_ranks):
        stages = np.flatnonzero(ranks == rank)
        kinds = np.repeat([int(OpKind.F), int(OpKind.B)], len(stages))
        rounds.append((np.concatenate((stages, stages[::-1])), kinds))
    count = problem.num_micro_batches
    order = EncodedOrder(
        np.concatenate([np.tile(stages, count) for stages, _ in rounds]).astype(np.int64),
        np.concatenate([np.tile(kinds, count) for _, kinds in rounds]).astype(np.int64),
        np.concatenate([np.repeat(np.arange(count), len(stages)) for stages, _ in rounds]).astype(np.int64),
        np.cumsum([0, *(count * len(stages) for stages, _ in rounds)]).astype(np.int64),
    )
    table = problem.table
    saved = table.activation_sums - table.recomputed_activation_sums
    recomputed = tuple(
        stage
        for stage, (first, last) in enumerate(itertools.pairwise(partition.bounds))
        if saved[last] > saved[first] and all(table.is_recomputable(layer) for layer in range(first, last))
    )
    return Candidate(partition=partition, placement=placement, order=order, recomputed_stages=recomputed)


def least_memory_bytes(problem: Problem, partition: Partition, placement: Placement) -> IntArray:
    """Return what each rank needs to run one micro-batch at a time, [num_ranks]."""
    few = _of_few_micro_batches(problem)
    evaluation = few.evaluate(one_at_a_time(few, partition, placement))
    assert evaluation is not None, "one micro-batch at a time never deadlocks"
    return evaluation.peak_bytes_by_rank


def roomiest_layout(
    problem: Problem,
    starts: Callable[[Problem], Iterator[Layout]],
    *,
    within_caps: bool,
    most_layouts: int = MOST_LAYOUTS,
) -> Layout | None:
    """Return the layout whose one-at-a-time plan needs least memory, by descent from the best of ``starts``.

    Args:
        starts: Layouts of a problem to look at first.
        within_caps: Whether what is above the caps counts. Otherwise the heaviest rank's peak does, and caps have no
            say in the result: a cap of that size has it found again.
        most_layouts: Beyond the starts, that the descent looks at.

    Returns:
        ``None`` where no layout keeps layers that share a weight on one rank, if they must be.
    """
    few = _of_few_micro_batches(problem)
    if not within_caps:
        ranks = tuple(dataclasses.replace(rank, memory_bytes=None) for rank in problem.cluster.ranks)
        cluster = dataclasses.replace(problem.cluster, ranks=ranks)
        few = Problem(problem.profile, cluster, few.num_micro_batches, problem.constraints)

    def need(layout: Layout) -> int | None:
        if not few.respects_ties(*layout):
            return None
        evaluation = few.evaluate(one_at_a_time(few, *layout))
        assert evaluation is not None, "one micro-batch at a time never deadlocks"
        return evaluation.excess_bytes if within_caps else int(evaluation.peak_bytes_by_rank.max())

    judged = [(needed, layout) for layout in starts(few) if (needed := need(layout)) is not None]
    if not judged:
        return None
    least, best = min(judged, key=lambda pair: pair[0])
    left = most_layouts
    is_better = True
    while is_better and least > 0:
        is_better = False
        for layout in _neighbours(few, best):
            needed = need(layout)
            left -= 1
            if needed is not None and needed < least:
                least, best, is_better = needed, layout, True
                break
            if left <= 0:
                return best
    return best


def layouts_of_placements(problem: Problem, placements: Sequence[tuple[int, ...]]) -> Iterator[Layout]:
    """Yield placements with what is fixed, or with layers split by time and by memory."""
    layers = problem.profile.layers
    fixed = problem.constraints.partition
    memory = memory_by_layer(problem.profile)
    for ranks in placements:
        if fixed is not None:
            yield fixed, Placement(ranks)
            continue
        for weights in (problem.layer_ns, memory):
            yield split_by_time(layers, weights, len(ranks)), Placement(ranks)


def memory_by_layer(profile: Profile) -> list[int]:
    """Return the states and the activations of one micro-batch of each layer, in bytes."""
    return [
        round(layer.num_parameters * profile.state_bytes_per_parameter) + layer.untrained_bytes + layer.activation_bytes
        for layer in profile.layers
    ]


def fits_on(problem: Problem, cluster: Cluster) -> bool:
    """Return whether layers split by memory over the ranks of ``cluster``, one stage each, fit."""
    other = Problem(problem.profile, cluster, min(problem.num_micro_batches, ENOUGH), Constraints())
    partition = split_by_time(problem.profile.layers, memory_by_layer(problem.profile), cluster.num_ranks)
    evaluation = other.evaluate(one_at_a_time(other, partition, Placement(tuple(range(cluster.num_ranks)))))
    return evaluation is not None and evaluation.fits


def _of_few_micro_batches(problem: Problem) -> Problem:
    return Problem(problem.profile, problem.cluster, min(problem.num_micro_batches, ENOUGH), problem.constraints)


def _neighbours(problem: Problem, layout: Layout) -> Iterator[Layout]:
    """Yield layouts with one group of layers moved between two stages, two ranks exchanged, or a stage cut in two.

    Of a stage cut in two on its rank, one part may recompute though the other can't, and neither needs the workspace of
    both.
    """
    partition, placement = layout
    bounds = atom_bounds(problem.profile.layers)
    if problem.constraints.partition is None:
        atoms = np.diff(np.searchsorted(bounds, partition.bounds))
        for donor, taker in itertools.permutations(range(len(atoms)), 2):
            if atoms[donor] > 1:
                moved = atoms.copy()
                moved[donor] -= 1
                moved[taker] += 1
                edges = np.array(bounds)[np.concatenate(([0], np.cumsum(moved)))]
                yield Partition(tuple(np.diff(edges).tolist())), placement
    if problem.constraints.placement is None and not problem.are_ranks_alike:
        for one, other in itertools.combinations(range(problem.num_ranks), 2):
            swap = {one: other, other: one}
            yield partition, Placement(tuple(swap.get(rank, rank) for rank in placement.rank_by_stage))
    if problem.constraints.partition is None and problem.constraints.placement is None:
        can = [
            all(problem.table.is_recomputable(layer) for layer in range(first, last))
            for first, last in itertools.pairwise(bounds)
        ]
        changes = {cut for cut, before, after in zip(bounds[1:], can, can[1:], strict=False) if before != after}
        for first, last in itertools.pairwise(partition.bounds):
            inside = {cut for cut in changes if first < cut < last}
            if inside:
                yield _cut(layout, inside)
        for cut in sorted({*bounds} - {*partition.bounds}):
            yield _cut(layout, {cut})


def _cut(layout: Layout, cuts: Collection[int]) -> Layout:
    """Return a layout with more stages, cut before the layers ``cuts``; the parts of a stage stay on its rank."""
    partition, placement = layout
    edges = sorted({*partition.bounds, *cuts})
    ranks = (placement.rank_by_stage[bisect.bisect_right(partition.bounds, first) - 1] for first in edges[:-1])
    return Partition(tuple(last - first for first, last in itertools.pairwise(edges))), Placement(tuple(ranks))
