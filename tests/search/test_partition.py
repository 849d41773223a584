"""Contiguous splits: DeepSpeed's reproduced, time-balanced ones exact, and nothing lost."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from pipeplan.errors import PlanError
from pipeplan.plan.layout import Partition
from pipeplan.profile import read_profile
from pipeplan.profile.types import LayerProfile, LayerTimes
from pipeplan.search.partition import (
    atom_bounds,
    balanced_bounds,
    largest_stage_ns,
    split_by_parameters,
    split_by_time,
    split_uniform,
)

GOLDEN = Path(__file__).parent.parent / "golden" / "nemotron-nano-9b-v2.yaml"


def layers_of(weights: list[int], together: tuple[int, ...] = ()) -> list[LayerProfile]:
    """Return layers with the given parameters and times; those at ``together`` keep with the one before."""
    return [
        LayerProfile(
            name=f"layer{index}",
            kind="any",
            num_parameters=weight,
            output_bytes=1,
            activation_bytes=1,
            held_for_w_bytes=1,
            times_by_device={"any": LayerTimes(forward_ns=weight, backward_ns=0)},
            keep_with_previous=index in together,
        )
        for index, weight in enumerate(weights)
    ]


def test_golden_case() -> None:
    """The published splits of the golden case come out, and the largest stage of the best one is 10,939 ticks."""
    layers = read_profile(GOLDEN).layers
    layer_ns = [layer.times("h800-sxm").forward_ns + layer.times("h800-sxm").backward_ns for layer in layers]
    assert split_uniform(layers, 4) == Partition((15, 15, 14, 14))
    assert split_by_parameters(layers, 4) == Partition((12, 17, 17, 12))
    best = split_by_time(layers, layer_ns, 4)
    assert best == Partition((15, 16, 15, 12))
    assert largest_stage_ns(best, layer_ns) == 10_939 * 10_000


def test_time_balanced_beats_least_spread() -> None:
    """[1,3,2,1,1,1,1] into 4: the largest load is 3; the least spread, which DeepSpeed looks for, has 4."""
    weights = [1, 3, 2, 1, 1, 1, 1]
    layers = layers_of(weights)
    assert largest_stage_ns(split_by_time(layers, weights, 4), weights) == 3
    assert largest_stage_ns(split_by_parameters(layers, 4), weights) == 4


@pytest.mark.parametrize(("num_layers", "num_stages"), [(5, 4), (42, 16), (38, 8), (30, 4), (40, 16), (61, 16)])
def test_nothing_is_lost(num_layers: int, num_stages: int) -> None:
    """Counts that don't divide lose no layer and leave no stage empty (``Partition`` refuses empty ones)."""
    weights = np.random.default_rng(num_layers).integers(1, 100, num_layers).tolist()
    layers = layers_of(weights)
    for partition in (
        split_uniform(layers, num_stages),
        split_by_parameters(layers, num_stages),
        split_by_time(layers, weights, num_stages),
    ):
        assert partition.num_stages == num_stages
        assert partition.num_layers == num_layers


@pytest.mark.parametrize("together", [(), (3,)])
def test_fewer_layers_than_stages(together: tuple[int, ...]) -> None:
    """Seven layers into eight stages, or fewer once some keep together, is refused with the number that would do."""
    layers = layers_of([1] * (8 if together else 7), together)
    for split in (split_uniform, split_by_parameters):
        with pytest.raises(PlanError, match=r"can't fill 8 stages; use 7 ranks or fewer"):
            split(layers, 8)
    with pytest.raises(PlanError, match="can't fill 8 stages"):
        split_by_time(layers, [1] * len(layers), 8)


@pytest.mark.parametrize("seed", range(20))
def test_balanced_is_exact(seed: int) -> None:
    """No other contiguous split has a smaller largest load, nor with the same one a smaller sum of squares."""
    rng = np.random.default_rng(seed)
    weights = rng.integers(0, 20, int(rng.integers(4, 10))).tolist()
    num_parts = int(rng.integers(1, 5))

    def quality(bounds: tuple[int, ...]) -> tuple[int, int]:
        loads = [sum(weights[a:b]) for a, b in itertools.pairwise(bounds)]
        return max(loads), sum(load * load for load in loads)

    best = min(
        quality((0, *cuts, len(weights))) for cuts in itertools.combinations(range(1, len(weights)), num_parts - 1)
    )
    assert quality(balanced_bounds(weights, num_parts)) == best


@pytest.mark.parametrize("num_stages", [2, 3, 5])
def test_keeps_together(num_stages: int) -> None:
    """No split separates a layer from the one it keeps with."""
    weights = [5, 1, 9, 2, 2, 7, 1, 3, 8, 1]
    layers = layers_of(weights, (1, 2, 6, 9))
    assert atom_bounds(layers) == (0, 3, 4, 5, 7, 8, 10)
    for partition in (
        split_uniform(layers, num_stages),
        split_by_parameters(layers, num_stages),
        split_by_time(layers, weights, num_stages),
    ):
        partition.check(layers)


@pytest.mark.parametrize("seed", range(8))
def test_equals_deepspeed(seed: int) -> None:
    """``uniform`` and ``parameters`` cut where DeepSpeed's own functions cut."""
    utils = pytest.importorskip("deepspeed.runtime.utils")
    rng = np.random.default_rng(seed)
    weights = rng.integers(0, 50, int(rng.integers(8, 30))).tolist()
    num_stages = int(rng.integers(2, 8))
    layers = layers_of(weights)
    assert list(split_uniform(layers, num_stages).bounds) == list(utils.partition_uniform(len(weights), num_stages))
    assert list(split_by_parameters(layers, num_stages).bounds) == [
        int(bound) for bound in utils.partition_balanced(weights, num_stages)
    ]
