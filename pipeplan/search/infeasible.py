"""Why nothing fits, and what would: the message of ``InfeasibleError``.

A plan can always run one micro-batch at a time. What a rank needs at least is therefore its states, the activations of
one micro-batch through its stages, and its largest workspace; fewer micro-batches don't lower that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pipeplan.plan.layout import Partition, Placement
from pipeplan.profile.types import LayerProfile, Recomputation
from pipeplan.search.baselines import Baseline
from pipeplan.search.one_at_a_time import Layout, fits_on, layouts_of_placements, least_memory_bytes, roomiest_layout
from pipeplan.search.partition import atom_bounds
from pipeplan.search.problem import Constraints, Problem
from pipeplan.search.structures import num_groups_with_ties, placements
from pipeplan.units import gb_from_bytes

FEW_LAYOUTS = 200  # that are looked at before a remedy is named
MOST_NAMED = 3  # ranks


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
    only = (partition, placement) if roomiest is None else None
    remedies = [
        *_room_for_few(problem, needed, only),
        f"give every rank {_gb_up(int(enough.max()) + reserve)} of memory",
    ]
    if only is not None and _can_fit(problem):
        remedies.append("use the default strategy, which finds a layout that fits")
    smaller = _small_enough_micro_batch(problem, only)
    if smaller is not None:
        size = problem.profile.micro_batch_size
        remedies.append(f"use a micro-batch size of {smaller} instead of {size} and profile again")
    more = _enough_ranks(problem) if problem.constraints == Constraints() and roomiest is not None else None
    if more is not None:
        remedies.append(f"use {more} {'such ranks' if problem.are_ranks_alike else 'ranks like rank 0'}")
    if _can_fit_recomputing(problem, only):
        remedies.append("profile with recomputation, which fits if layers then keep no more than their inputs")
    fewer = "the number of micro-batches does not matter, since one at a time is already too much"
    return f"to fit, {', or '.join(remedies)}; {fewer}"


def _room_for_few(problem: Problem, needed: NDArray[np.int64], only: Layout | None) -> list[str]:
    """Return what to give the ranks that lack memory in a layout, where they are few."""
    ranks = list(problem.cluster.ranks)
    given = []
    for rank, usable in enumerate(problem.usable_bytes):
        if usable is not None and needed[rank] > usable:
            room = _up(int(needed[rank]) + problem.cluster.memory_reserve_bytes)
            ranks[rank] = dataclasses.replace(ranks[rank], memory_bytes=room)
            given.append(f"rank {rank} {_gb_up(room)}")
    if len(given) == problem.num_ranks or len(given) > MOST_NAMED:
        return []
    roomier = dataclasses.replace(problem.cluster, ranks=tuple(ranks))
    if not _can_fit(Problem(problem.profile, roomier, problem.num_micro_batches, problem.constraints), only):
        return []
    return [f"give {' and '.join(given)} of memory"]


def _can_fit(problem: Problem, only: Layout | None = None) -> bool:
    """Return whether the layout given, or else one that a search starts from or a few steps from there, fits."""
    num_atoms = len(atom_bounds(problem.profile.layers)) - 1
    closest = only or roomiest_layout(
        problem,
        lambda few: layouts_of_placements(few, placements(few, num_atoms)),
        within_caps=True,
        most_layouts=FEW_LAYOUTS,
    )
    if closest is None:
        return False
    needed = least_memory_bytes(problem, *closest)
    return all(usable is None or needed[rank] <= usable for rank, usable in enumerate(problem.usable_bytes))


def _small_enough_micro_batch(problem: Problem, only: Layout | None) -> int | None:
    """Return the largest half, quarter, ... of the micro-batch size that fits, if any; bytes shrink with the size."""
    size = problem.profile.micro_batch_size
    smaller = size // 2
    while smaller:
        layers = tuple(_shrunk(layer, smaller, size) for layer in problem.profile.layers)
        if _can_fit(_with_layers(problem, layers), only):
            return smaller
        smaller //= 2
    return None


def _shrunk(layer: LayerProfile, size: int, of: int) -> LayerProfile:
    def part(num_bytes: int) -> int:
        return -(-num_bytes * size // of)

    recomputation = layer.recomputation
    if recomputation is not None:
        recomputation = dataclasses.replace(recomputation, activation_bytes=part(recomputation.activation_bytes))
    return dataclasses.replace(
        layer,
        output_bytes=part(layer.output_bytes),
        activation_bytes=part(layer.activation_bytes),
        held_for_w_bytes=part(layer.held_for_w_bytes),
        workspace_bytes=part(layer.workspace_bytes),
        recomputation=recomputation,
    )


def _can_fit_recomputing(problem: Problem, only: Layout | None) -> bool:
    """Return whether it would fit if the layers without such figures could recompute from their inputs."""
    layers = problem.profile.layers
    if all(problem.table.is_recomputable(layer) for layer in range(len(layers))):
        return False
    inputs = (0, *(layer.output_bytes for layer in layers[:-1]))
    recomputing = tuple(
        layer
        if problem.table.is_recomputable(index)
        else dataclasses.replace(
            layer, recomputation=Recomputation(layer.times_by_device, min(inputs[index], layer.activation_bytes))
        )
        for index, layer in enumerate(layers)
    )
    return _can_fit(_with_layers(problem, recomputing), only)


def _with_layers(problem: Problem, layers: tuple[LayerProfile, ...]) -> Problem:
    profile = dataclasses.replace(problem.profile, layers=layers)
    return Problem(profile, problem.cluster, problem.num_micro_batches, problem.constraints)


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


def _up(num_bytes: int) -> int:
    """Return a size that is surely enough: rounded up to three figures."""
    step: int = 10 ** max(0, len(str(num_bytes)) - 3)
    return -(-num_bytes // step) * step


def _gb_up(num_bytes: int) -> str:
    return f"{gb_from_bytes(_up(num_bytes)):.9f}".rstrip("0").rstrip(".") + " GB"


def _short(values: Sequence[int]) -> str:
    text = ",".join(str(value) for value in values)
    return text if len(text) <= 60 else text[:57] + "..."
