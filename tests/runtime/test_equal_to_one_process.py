"""Training under any plan gives the numbers of one process, through the real ``deepspeed`` launcher."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import launching
import pytest
import torch
import toy
from launching import random_order, result_of, write_folder, write_plan

from pipeplan.cluster import equal_ranks
from pipeplan.plan.layout import Partition, Placement
from pipeplan.plan.ops import Order
from pipeplan.plan.orders import (
    folded_placement,
    gpipe,
    interleaved_one_f_one_b,
    looped_placement,
    one_f_one_b,
    zb_h1,
    zb_v,
)
from pipeplan.search.optimize import optimize

pytestmark = pytest.mark.launcher

NUM_STEPS = 3


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training run: a model, where its stages sit, and their order; ``plan`` writes the plan folder."""

    name: str
    write: Callable[[Path], Path]
    num_micro_batches: int
    model: str = "hybrid"
    num_replicas: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    tolerance: float = 1e-5


def ordered(
    name: str, placement: Placement, order: Order, model: str = "hybrid", partition: str | None = None, **rest: Any
) -> Case:
    """Return the case of a given order."""
    tolerance = rest.pop("tolerance", 1e-5)
    options = rest.pop("options", {})
    return Case(
        name=name,
        model=model,
        write=lambda folder: write_folder(
            folder, model, placement, order, Partition.parse(partition) if partition else None, **rest
        ),
        num_micro_batches=launching.num_micro_batches_of(order),
        num_replicas=rest.get("num_replicas", 1),
        options=options,
        tolerance=tolerance,
    )


def optimized(name: str, num_ranks: int, num_micro_batches: int) -> Case:
    """Return the case of a co-optimised plan."""

    def write(folder: Path) -> Path:
        result = optimize(
            launching.profile_of("hybrid"),
            equal_ranks(num_ranks, launching.DEVICE),
            num_micro_batches=num_micro_batches,
            work_limit=200_000,
        )
        return write_plan(folder, result.plan)

    return Case(name=name, write=write, num_micro_batches=num_micro_batches)


def random_case(name: str, placement: str, num_micro_batches: int, seed: int, **rest: Any) -> Case:
    """Return the case of a random placement and order."""
    placed = Placement.parse(placement)
    return ordered(name, placed, random_order(placed, num_micro_batches, seed), **rest)


ZERO_1 = {"zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True}

CASES_BY_WORLD: dict[int, list[Case]] = {
    2: [
        ordered("gpipe-2", looped_placement(2, 1), gpipe(2, 4)),
        ordered("1f1b-2", looped_placement(2, 1), one_f_one_b(2, 4)),
        ordered("interleaved-2", looped_placement(2, 2), interleaved_one_f_one_b(2, 2, 4)),
        ordered("v-2", folded_placement(2, 2), zb_v(2, 4)),
        ordered("zb-h1-2", looped_placement(2, 1), zb_h1(2, 4)),
        optimized("optimized-2", 2, 4),
        random_case("random-2", "1,0,0,1,0,1,1", 4, seed=1),
        ordered("tied-2", looped_placement(2, 1), zb_h1(2, 4), "tied"),
        random_case("tied-embedding-above-head-2", "1,0,1,0", 4, seed=2, model="tied"),
        ordered("tied-on-one-rank-2", folded_placement(2, 2), zb_v(2, 4), "tied"),
        ordered("tied-specs-2", looped_placement(2, 1), one_f_one_b(2, 4), "tied", options={"layers": "deepspeed"}),
        ordered(
            "embedding-alone-head-alone-2",
            looped_placement(2, 2),
            interleaved_one_f_one_b(2, 2, 4),
            partition="1,4,4,1",
        ),
        ordered("clipped-2", looped_placement(2, 1), zb_h1(2, 4), "tied", options={"max_norm": 0.1}),
        ordered("recomputed-2", looped_placement(2, 2), interleaved_one_f_one_b(2, 2, 4), recomputed_stages=(0, 2)),
        ordered("recomputed-split-2", looped_placement(2, 1), zb_h1(2, 4), recomputed_stages=(0, 1)),
    ],
    4: [
        ordered("gpipe-4", looped_placement(4, 1), gpipe(4, 6)),
        ordered("1f1b-4", looped_placement(4, 1), one_f_one_b(4, 6)),
        ordered("interleaved-4", looped_placement(4, 2), interleaved_one_f_one_b(4, 2, 8)),
        ordered("v-4", folded_placement(4, 2), zb_v(4, 8)),
        ordered("zb-h1-4", looped_placement(4, 1), zb_h1(4, 6)),
        optimized("optimized-4", 4, 8),
        random_case("random-4", "2,0,3,1,1,0,2,3,0", 6, seed=3),
        random_case("tied-on-three-ranks-4", "3,1,0,2,1", 6, seed=4, model="tied-thrice", partition="3,1,3,2,2"),
        ordered("mixed-boundaries-4", looped_placement(4, 1), zb_h1(4, 6), "mixed"),
        random_case("mixed-boundaries-random-4", "0,2,1,3,0", 6, seed=5, model="mixed"),
        ordered("rank-without-parameters-4", looped_placement(4, 1), one_f_one_b(4, 6), "scaled", partition="2,2,1,1"),
        ordered(
            "rank-without-parameters-zero-4",
            looped_placement(4, 1),
            zb_h1(4, 6),
            "scaled",
            partition="2,2,1,1",
            options={"config": ZERO_1},
        ),
        ordered("replicas-4", looped_placement(2, 1), zb_h1(2, 4), "tied", num_replicas=2),
        ordered(
            "replicas-zero-4",
            looped_placement(2, 2),
            interleaved_one_f_one_b(2, 2, 4),
            "tied",
            num_replicas=2,
            options={"config": ZERO_1},
        ),
    ],
}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Run all cases of a world size in one launch, once; returns where the results lie."""

    @cache
    def run(num_processes: int) -> Path:
        folder = tmp_path_factory.mktemp(f"ranks-{num_processes}")
        cases = [
            {
                "kind": "train",
                "name": case.name,
                "model": case.model,
                "folder": str(case.write(folder / case.name)),
                "num_micro_batches": case.num_micro_batches,
                "num_steps": NUM_STEPS,
                **case.options,
            }
            for case in CASES_BY_WORLD[num_processes]
        ]
        launching.launch(num_processes, cases, folder)
        return folder

    return run


@cache
def reference(model: str, num_micro_batches: int, num_replicas: int, max_norm: float) -> dict[str, Any]:
    """Return the same training in one process."""
    return toy.train_in_one_process(
        model,
        num_steps=NUM_STEPS,
        num_micro_batches=num_micro_batches,
        num_replicas=num_replicas,
        max_norm=max_norm,
    )


@pytest.mark.parametrize(
    ("num_processes", "case"),
    [pytest.param(world, case, id=case.name) for world, cases in CASES_BY_WORLD.items() for case in cases],
)
def test_training_equals_one_process(folder_of: Callable[[int], Path], num_processes: int, case: Case) -> None:
    """Losses, gradients, their norm and the weights after SGD with momentum are those of one process."""
    expected = reference(case.model, case.num_micro_batches, case.num_replicas, case.options.get("max_norm", 1e9))
    results = result_of(folder_of(num_processes), case.name, num_processes)
    seen: set[str] = set()
    for rank, result in enumerate(results):
        assert result["losses"] == pytest.approx(expected["losses"], rel=case.tolerance), f"losses on rank {rank}"
        assert result["norms"] == pytest.approx(expected["norms"], rel=case.tolerance), f"norms on rank {rank}"
        for what in ("gradients", "weights"):
            for name, tensor in result[what].items():
                if what == "gradients" and case.options.get("max_norm"):
                    continue  # seen after clipping
                assert difference(tensor, expected[what][name]) < case.tolerance, f"{what} of {name} on rank {rank}"
        seen |= set(result["weights"])
    assert seen == set(expected["weights"])


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the relative distance of two tensors."""
    return float((found - expected).norm() / expected.norm().clamp_min(1e-12))
