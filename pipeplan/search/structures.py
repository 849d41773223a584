"""Which placements are worth searching: stages looped over the ranks or folded back and forth, in laps and parts."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from pipeplan.plan.orders import folded_placement, looped_placement
from pipeplan.search.partition import atom_bounds, split_by_time
from pipeplan.search.problem import Problem

MAX_LAPS = 6
FEW_USUAL = 6  # beside placements made for unequal memory
MOST_TIED = 4  # placements made for tied layers
SMALL_SHARE = 0.8  # of the largest memory: what counts as little


def placements(problem: Problem, num_atoms: int) -> list[tuple[int, ...]]:
    """Return the placements to start from, ranks by stage, the most promising first; only the fixed one if there is.

    More laps mean shorter ramps but more transfers and a larger search; an extra stage on the first rank of the next
    lap takes the head off the last one.
    """
    fixed = problem.constraints
    if fixed.placement is not None:
        return [fixed.placement.rank_by_stage]
    num_ranks = problem.num_ranks
    most = num_atoms if fixed.partition is None else fixed.partition.num_stages
    least = num_ranks if fixed.partition is None else fixed.partition.num_stages
    found: list[tuple[int, ...]] = []
    # Laps beyond the usual only where a fixed partition has so many stages.
    for laps in range(1, max(MAX_LAPS, 0 if fixed.partition is None else -(-most // num_ranks)) + 1):
        for layout in (looped_placement, folded_placement):
            whole = layout(num_ranks, laps).rank_by_stage
            after = layout(num_ranks, laps + 1).rank_by_stage
            found.extend((whole, (*whole, after[len(whole)])))
            if fixed.partition is not None and len(whole) < most < len(after):
                found.append(after[:most])
    unique = [ranks for ranks in dict.fromkeys(found) if least <= len(ranks) <= most]
    plain = [ranks for ranks in unique if _is_plain(ranks)]
    usual = sorted(plain or unique, key=lambda ranks: _promise(ranks, num_ranks))
    tied = _ties_together(problem, usual, most) if fixed.colocate_tied and problem.table.tied_layers else []
    small_last = [ranks for ranks in _small_ranks_last(problem) if least <= len(ranks) <= most]
    if small_last:
        del usual[FEW_USUAL:]
    return list(dict.fromkeys([*small_last, *tied, *usual]))


def _small_ranks_last(problem: Problem) -> list[tuple[int, ...]]:
    """Return placements for ranks of unequal memory: those with least hold one late stage, the others any number.

    Activations of the last stages are kept only briefly, so a rank with little memory does its share of work there.
    """
    usable = [float("inf") if cap is None else float(cap) for cap in problem.usable_bytes]
    roomy = [rank for rank, cap in enumerate(usable) if cap >= SMALL_SHARE * max(usable)]
    small = sorted(set(range(len(usable))) - set(roomy), key=lambda rank: -usable[rank])
    if not small:
        return []
    found: list[tuple[int, ...]] = []
    for laps in (2, 1, 3):
        for layout in (looped_placement, folded_placement):
            whole = layout(len(roomy), laps).rank_by_stage
            after = layout(len(roomy), laps + 1).rank_by_stage
            found.extend(
                (*(roomy[index] for index in after[:count]), *small) for count in range(len(whole), len(after))
            )
    return found


def num_groups_with_ties(problem: Problem) -> int:
    """Return how many groups of layers can go to different ranks, where those that share a weight stay together."""
    fixed = problem.constraints.partition
    bounds = atom_bounds(problem.profile.layers) if fixed is None else fixed.bounds
    return len(set(_groups(problem, bounds)))


def _groups(problem: Problem, bounds: Sequence[int]) -> list[int]:
    """Return a group for each part of the layers, the first part of the group: parts that share weights are in one."""
    group = list(range(len(bounds) - 1))
    for _, layers in problem.table.tied_layers.values():
        joined = {group[bisect.bisect_right(bounds, layer) - 1] for layer in layers}
        group = [min(joined) if each in joined else each for each in group]
    return group


def _ties_together(problem: Problem, usual: list[tuple[int, ...]], most: int) -> list[tuple[int, ...]]:
    """Return placements that keep layers which share a weight on one rank, with the layers balanced by time.

    Every number of stages up to the first few that leave enough groups of stages for the ranks is tried; the finest
    split leaves most.
    """
    num_ranks = problem.num_ranks
    fixed = problem.constraints.partition
    lengths = [len(ranks) for ranks in usual] + list(range(num_ranks, most + 1))
    found: list[tuple[int, ...]] = []
    for num_stages in dict.fromkeys(lengths):
        if len(found) >= MOST_TIED:
            break
        partition = fixed or split_by_time(problem.profile.layers, problem.layer_ns, num_stages)
        if partition.num_stages != num_stages:
            continue
        group = _groups(problem, partition.bounds)
        firsts = sorted(set(group))
        if len(firsts) < num_ranks:
            continue
        for layout in (looped_placement, folded_placement):
            in_turn = layout(num_ranks, -(-len(firsts) // num_ranks)).rank_by_stage
            rank_by_group = dict(zip(firsts, in_turn, strict=False))
            found.append(tuple(rank_by_group[each] for each in group))
    return list(dict.fromkeys(found))


def _promise(ranks: tuple[int, ...], num_ranks: int) -> tuple[int, int]:
    laps, left_over = divmod(len(ranks), num_ranks)
    order = (2, 1, 3, 4, 5, 6)
    return (order.index(laps) if laps in order else len(order)) + (2 if left_over else 0), laps


def _is_plain(ranks: tuple[int, ...]) -> bool:
    """Return whether no extra stage merely repeats the rank of the stage before at the very end."""
    return len(ranks) < 2 or ranks[-1] != ranks[-2]
