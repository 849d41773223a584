"""Contiguous partitions of the layers: DeepSpeed's two, reproduced, and the one that is balanced by time, exactly.

All of them keep layers that must share a stage together, by cutting between *atoms*: a layer and those after it that
keep with it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np
from numba import njit
from numpy.typing import NDArray

from pipeplan.errors import PlanError
from pipeplan.plan.layout import Partition
from pipeplan.profile.types import LayerProfile

IntArray = NDArray[np.int64]


def atom_bounds(layers: Sequence[LayerProfile]) -> tuple[int, ...]:
    """Return the first layer of each atom, then the number of layers."""
    firsts = [index for index, layer in enumerate(layers) if index == 0 or not layer.keep_with_previous]
    return (*firsts, len(layers))


def check_enough_layers(layers: Sequence[LayerProfile], num_stages: int) -> None:
    """Check that the layers can fill the stages.

    Raises:
        PlanError: There are fewer places to cut than stages need.
    """
    num_atoms = len(atom_bounds(layers)) - 1
    if num_atoms >= num_stages:
        return
    together = "" if num_atoms == len(layers) else f", which keep together in {num_atoms} groups"
    raise PlanError(
        f"{len(layers)} layers{together} can't fill {num_stages} stages; use {num_atoms} ranks or fewer, or profile "
        "with --granularity sublayer"
    )


def split_uniform(layers: Sequence[LayerProfile], num_stages: int) -> Partition:
    """Return DeepSpeed's ``uniform`` split: equal numbers of layers, the first stages one more.

    Raises:
        PlanError: There are fewer layers than stages.
    """
    check_enough_layers(layers, num_stages)
    return _cut_by_atoms(layers, num_stages, lambda per_atom: _uniform_bounds(len(per_atom), num_stages), weights=None)


def split_by_parameters(layers: Sequence[LayerProfile], num_stages: int) -> Partition:
    """Return DeepSpeed's ``parameters`` split: the least spread between the largest and the smallest stage.

    The dynamic programme is DeepSpeed's, greedy in the spread, so its largest stage may be larger than need be.

    Raises:
        PlanError: There are fewer layers than stages.
    """
    check_enough_layers(layers, num_stages)
    return _cut_by_atoms(
        layers,
        num_stages,
        lambda per_atom: _least_spread_bounds(per_atom, num_stages).tolist(),
        weights=[layer.num_parameters for layer in layers],
    )


def split_by_time(layers: Sequence[LayerProfile], layer_ns: Sequence[int], num_stages: int) -> Partition:
    """Return the split with the smallest largest stage; among those, the one with the least sum of squares.

    Args:
        layer_ns: Time (or any other weight) of each layer for one micro-batch.

    Raises:
        PlanError: There are fewer layers than stages.
    """
    check_enough_layers(layers, num_stages)
    return _cut_by_atoms(layers, num_stages, lambda per_atom: balanced_bounds(per_atom, num_stages), weights=layer_ns)


def largest_stage_ns(partition: Partition, layer_ns: Sequence[int]) -> int:
    """Return the time of the slowest stage for one micro-batch, in nanoseconds, given each layer's."""
    return max(sum(layer_ns[layer] for layer in partition.layers(stage)) for stage in range(partition.num_stages))


def balanced_bounds(weights: Sequence[int] | IntArray, num_parts: int) -> tuple[int, ...]:
    """Return the bounds of the contiguous split of ``weights`` that ``split_by_time`` describes."""
    prefix = np.zeros(len(weights) + 1, dtype=np.int64)
    np.cumsum(weights, out=prefix[1:])
    bottleneck = _least_bottleneck(prefix, num_parts)
    return tuple(int(bound) for bound in _least_squares_bounds(prefix, num_parts, bottleneck))


def _cut_by_atoms(
    layers: Sequence[LayerProfile],
    num_stages: int,
    cut: Callable[[IntArray], Sequence[int]],
    *,
    weights: Sequence[int] | None,
) -> Partition:
    """Return the partition that ``cut`` makes of the atoms, given the sum of weights of each."""
    bounds = atom_bounds(layers)
    per_layer = np.ones(len(layers), dtype=np.int64) if weights is None else np.array(weights, dtype=np.int64)
    per_atom = np.add.reduceat(per_layer, np.array(bounds[:-1], dtype=np.int64))
    cuts = [bounds[atom] for atom in cut(per_atom)]
    return Partition(tuple(after - before for before, after in itertools.pairwise(cuts)))


def _uniform_bounds(num_items: int, num_parts: int) -> tuple[int, ...]:
    size, left_over = divmod(num_items, num_parts)
    return tuple(part * size + min(part, left_over) for part in range(num_parts + 1))


@njit(cache=True)
def _least_spread_bounds(weights: IntArray, num_parts: int) -> IntArray:
    num_items = len(weights)
    prefix = np.zeros(num_items + 1, dtype=np.float64)
    prefix[1:] = np.cumsum(weights)
    largest = np.full((num_items + 1, num_parts + 1), np.inf)
    smallest = np.full((num_items + 1, num_parts + 1), np.inf)
    spread = np.full((num_items + 1, num_parts + 1), np.inf)
    previous = np.zeros((num_items + 1, num_parts + 1), dtype=np.int64)
    largest[0, 0] = 0.0
    for end in range(1, num_items + 1):
        for part in range(1, min(end, num_parts) + 1):
            for start in range(part - 1, end):  # the last of equals wins, as in DeepSpeed
                load = prefix[end] - prefix[start]
                high = max(largest[start, part - 1], load)
                low = min(smallest[start, part - 1], load)
                if high - low <= spread[end, part]:
                    spread[end, part] = high - low
                    largest[end, part] = high
                    smallest[end, part] = low
                    previous[end, part] = start
    bounds = np.empty(num_parts + 1, dtype=np.int64)
    bounds[num_parts] = num_items
    for part in range(num_parts, 0, -1):
        bounds[part - 1] = previous[bounds[part], part]
    return bounds


def _least_bottleneck(prefix: IntArray, num_parts: int) -> int:
    """Return the smallest load that the largest of ``num_parts`` contiguous parts can have, by bisection."""
    low = int(np.max(np.diff(prefix), initial=0))
    high = int(prefix[-1])
    while low < high:
        middle = (low + high) // 2
        if _num_parts_within(prefix, middle) <= num_parts:
            high = middle
        else:
            low = middle + 1
    return low


def _num_parts_within(prefix: IntArray, limit: int) -> int:
    count, position = 0, 0
    while position < len(prefix) - 1:
        position = int(np.searchsorted(prefix, prefix[position] + limit, side="right")) - 1
        count += 1
    return count


@njit(cache=True)
def _least_squares_bounds(prefix: IntArray, num_parts: int, bottleneck: int) -> IntArray:
    """Return bounds of non-empty parts no larger than ``bottleneck`` with the least sum of squared loads."""
    num_items = len(prefix) - 1
    cost = np.full((num_parts + 1, num_items + 1), np.inf)
    previous = np.zeros((num_parts + 1, num_items + 1), dtype=np.int64)
    cost[0, 0] = 0.0
    for part in range(1, num_parts + 1):
        for end in range(part, num_items - (num_parts - part) + 1):
            for start in range(end - 1, part - 2, -1):
                load = prefix[end] - prefix[start]
                if load > bottleneck:
                    break
                squares = cost[part - 1, start] + float(load) * float(load)
                if squares < cost[part, end]:
                    cost[part, end] = squares
                    previous[part, end] = start
    bounds = np.empty(num_parts + 1, dtype=np.int64)
    bounds[num_parts] = num_items
    for part in range(num_parts, 0, -1):
        bounds[part - 1] = previous[part, bounds[part]]
    return bounds
