"""Why nothing fits, and what would: the message of ``InfeasibleError``.

A plan can always run one micro-batch at a time. What a rank needs at least is therefore its states, the activations of
one micro-batch through its stages, and its largest workspace; fewer micro-batches don't lower that.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pipeplan.errors import PlanError
from pipeplan.plan.layout import Partition, Placement
from pipeplan.search.baselines import Baseline
from pipeplan.search.partition import split_by_time
from pipeplan.search.problem import Problem
from pipeplan.units import gb_from_bytes

IntArray = NDArray[np.int64]


def least_memory_bytes(problem: Problem, partition: Partition, placement: Placement) -> IntArray:
    """Return what each rank needs to run one micro-batch at a time, boundaries included, [num_ranks]."""
    costs = problem.table.stage_costs(partition, placement)
    needed = costs.state_bytes.copy()
    workspace = np.zeros_like(needed)
    boundaries = np.zeros_like(needed)
    for stage, rank in enumerate(placement.rank_by_stage):
        needed[rank] += max(int(costs.activation_bytes[stage]), 0)
        workspace[rank] = max(workspace[rank], int(costs.workspace_bytes[stage]))
        before = int(costs.boundary_bytes[stage - 1]) if stage else 0
        boundaries[rank] = max(boundaries[rank], before + int(costs.boundary_bytes[stage]))
    needed += workspace
    return needed + boundaries if problem.profile.count_boundary_buffers else needed


def explain_infeasible(
    problem: Problem, partition: Partition, placement: Placement, failure: str = "no plan fits"
) -> str:
    """Return the message: the rank that lacks most under the layout that came closest, and what would fit.

    Args:
        failure: What the message starts with, where less was tried than every plan.
    """
    if not problem.respects_ties(partition, placement):
        return (
            "no layout found keeps the layers that share a weight on one rank; drop --colocate-tied, or fix a "
            "partition and placement that do"
        )
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
    return f"{closest}; {_remedies(problem, partition, placement)}"


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


def _remedies(problem: Problem, partition: Partition, placement: Placement) -> str:
    reserve = problem.cluster.memory_reserve_bytes
    needed = least_memory_bytes(problem, partition, placement)
    remedies = [f"give every rank {_gb_up(int(needed.max()) + reserve)} of memory"]
    states = problem.table.stage_costs(partition, placement).state_bytes
    caps = np.array([2**62 if usable is None else usable for usable in problem.usable_bytes])
    if problem.profile.micro_batch_size > 1 and bool((states + (needed - states) // 2 <= caps).all()):
        remedies.append(f"halve the micro-batch size ({problem.profile.micro_batch_size}) and profile again")
    more = _enough_ranks(problem)
    if more is not None and problem.constraints == type(problem.constraints)():
        remedies.append(f"use {more} such ranks")
    if not problem.table.can_recompute:
        remedies.append("profile with recomputation, which keeps less from forward to backward")
    fewer = "the number of micro-batches does not matter, since one at a time is already too much"
    return f"to fit, {', or '.join(remedies)}; {fewer}"


def _enough_ranks(problem: Problem) -> int | None:
    """Return the smallest number of ranks like rank 0 on which a contiguous split fits, if any."""
    layers = problem.profile.layers
    usable = problem.usable_bytes[0]
    if usable is None:
        return None
    per_layer = [
        round(layer.num_parameters * problem.profile.state_bytes_per_parameter) + layer.activation_bytes
        for layer in layers
    ]
    for num_ranks in range(problem.num_ranks + 1, min(len(layers), 8 * problem.num_ranks) + 1):
        try:
            partition = split_by_time(layers, per_layer, num_ranks)
        except PlanError:  # fewer places to cut than ranks: no more to try
            return None
        heaviest = max(
            sum(per_layer[index] for index in partition.layers(stage))
            + max(layers[index].workspace_bytes for index in partition.layers(stage))
            for stage in range(num_ranks)
        )
        if heaviest <= usable:
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
