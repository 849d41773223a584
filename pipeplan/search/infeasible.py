"""Why nothing fits, and what would: the message of ``InfeasibleError``.

A plan can always run one micro-batch at a time. What a rank needs at least is therefore its states, the activations of
one micro-batch through its stages, and its largest workspace; fewer micro-batches don't lower that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from pipeplan.plan.layout import Partition, Placement
from pipeplan.search.baselines import Baseline
from pipeplan.search.one_at_a_time import fits_on, least_memory_bytes
from pipeplan.search.partition import atom_bounds
from pipeplan.search.problem import Problem
from pipeplan.search.structures import num_groups_with_ties
from pipeplan.units import gb_from_bytes


def explain_infeasible(
    problem: Problem,
    partition: Partition,
    placement: Placement,
    *,
    roomiest: tuple[Partition, Placement] | None = None,
    failure: str = "no plan fits",
) -> str:
    """Return the message: the rank that lacks most under the layout that came closest, and what would fit.

    Args:
        roomiest: The layout whose heaviest rank needs least, for the cap that would do; the closest if not given.
        failure: What the message starts with, where less was tried than every plan.
    """
    if not problem.respects_ties(partition, placement):
        return _explain_ties(problem)
    needed = least_memory_bytes(problem, partition, placement)
    lacking = [
        (int(needed[rank]) - usable, rank) for rank, usable in enumerate(problem.usable_bytes) if usable is not None
    ]
    missing, rank = max(lacking, key=lambda pair: (pair[0], -pair[1]), default=(0, 0))
    usable = problem.usable_bytes[rank]
    if missing <= 0 or usable is None:
        return (
            f"{failure} within the limit, though every rank has room for one micro-batch at a time; raise the work or "
            "time limit"
        )
    reserve = problem.cluster.memory_reserve_bytes
    reserved = f" (after the reserve of {_gb(reserve)})" if reserve else ""
    closest = (
        f"{failure}: rank {rank} needs at least {_gb(int(needed[rank]))} to run one micro-batch at a time and may "
        f"use {_gb(usable)}{reserved}, {_gb(missing)} too little, in the layout that comes closest "
        f"({_short(partition.num_layers_by_stage)} layers on ranks {_short(placement.rank_by_stage)})"
    )
    return f"{closest}; {_remedies(problem, partition, placement, roomiest)}"


def _explain_ties(problem: Problem) -> str:
    num_groups = num_groups_with_ties(problem)
    if problem.constraints.placement is None and num_groups < problem.num_ranks:
        return (
            f"with the layers that share a weight on one rank, {num_groups} groups of layers are left for "
            f"{problem.num_ranks} ranks; drop --colocate-tied, or use {num_groups} ranks or fewer"
        )
    return (
        "no layout found keeps the layers that share a weight on one rank; drop --colocate-tied, or fix a partition "
        "and placement that do"
    )


def explain_no_named_order(problem: Problem, known: Sequence[Baseline]) -> str:
    """Return why none of ``known`` can be the answer: there are none, or none keeps within the caps."""
    if not known:
        fixed = problem.constraints
        given = [
            *([] if fixed.partition is None else [f"partition {_short(fixed.partition.num_layers_by_stage)}"]),
            *([] if fixed.placement is None else [f"placement {_short(fixed.placement.rank_by_stage)}"]),
            *(["tied layers on one rank"] if fixed.colocate_tied else []),
        ]
        return f"no named order has {' and '.join(given)}; use the default strategy, which makes an order for any"
    closest = min(known, key=lambda each: each.evaluation.excess_bytes)
    peaks = closest.evaluation.peak_bytes_by_rank
    missing, rank, usable = max(
        (int(peaks[rank]) - usable, rank, usable)
        for rank, usable in enumerate(problem.usable_bytes)
        if usable is not None
    )
    return (
        f"no named order fits: the closest, {closest.name} with the {closest.split} split, needs "
        f"{_gb(int(peaks[rank]))} on rank {rank}, which may use {_gb(usable)}, {_gb(missing)} too little; the default "
        "strategy also searches orders that need less"
    )


def _remedies(
    problem: Problem, partition: Partition, placement: Placement, roomiest: tuple[Partition, Placement] | None
) -> str:
    reserve = problem.cluster.memory_reserve_bytes
    needed = least_memory_bytes(problem, partition, placement)
    enough = needed if roomiest is None else least_memory_bytes(problem, *roomiest)
    remedies = [f"give every rank {_gb_up(int(enough.max()) + reserve)} of memory"]
    states = problem.table.stage_costs(partition, placement).state_bytes
    caps = np.array([2**62 if usable is None else usable for usable in problem.usable_bytes])
    if problem.profile.micro_batch_size > 1 and bool((states + (needed - states) // 2 <= caps).all()):
        remedies.append(f"halve the micro-batch size ({problem.profile.micro_batch_size}) and profile again")
    is_free = problem.constraints == type(problem.constraints)() and roomiest is not None
    more = _enough_ranks(problem) if is_free else None
    if more is not None:
        remedies.append(f"use {more} such ranks")
    if not problem.table.can_recompute:
        remedies.append("profile with recomputation, which keeps less from forward to backward")
    fewer = "the number of micro-batches does not matter, since one at a time is already too much"
    return f"to fit, {', or '.join(remedies)}; {fewer}"


def _enough_ranks(problem: Problem) -> int | None:
    """Return the smallest number of ranks like rank 0 on which a contiguous split fits, if any."""
    cluster = problem.cluster
    most = min(len(atom_bounds(problem.profile.layers)) - 1, 8 * problem.num_ranks)
    for num_ranks in range(problem.num_ranks + 1, most + 1):
        if fits_on(problem, dataclasses.replace(cluster, ranks=(cluster.ranks[0],) * num_ranks, link_by_pair={})):
            return num_ranks
    return None


def _gb(num_bytes: int) -> str:
    return f"{gb_from_bytes(num_bytes):.3g} GB" if num_bytes >= 1e6 else f"{num_bytes} bytes"


def _gb_up(num_bytes: int) -> str:
    """Return a size that is surely enough: rounded up to three figures."""
    size = gb_from_bytes(num_bytes)
    step = 10.0 ** (np.floor(np.log10(max(size, 1e-9))) - 2)
    return f"{np.ceil(size / step) * step:.6g} GB"


def _short(values: Sequence[int]) -> str:
    text = ",".join(str(value) for value in values)
    return text if len(text) <= 60 else text[:57] + "..."
