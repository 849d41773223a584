"""Every case that the runtime tests launch; one launch runs all of one number of processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import launching
from launching import random_order, write_folder, write_plan

from pipeplan.cluster import equal_ranks
from pipeplan.formats.torch_csv import read_torch_csv
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
from tests.torch_schedules import NUM_RANKS, dump, torch_schedules

NUM_STEPS = 3
NO_CLIPPING = 1e9  # the norm is computed, and nothing is clipped


@dataclass(frozen=True, kw_only=True)
class Training:
    """A training run that one process repeats.

    Attributes:
        write: Writes the plan folder under the given path and returns it.
        is_seeded: Whether every layer's forward is seeded by micro-batch and layer (dropout).
        evaluations: Numbers of micro-batches to evaluate before a step.
        form: "sources" of pipeplan.model, or "deepspeed" for modules, LayerSpec, TiedLayerSpec and a data set.
        data: What ``toy.micro_batch`` yields.
        configured: Micro-batches a batch as the DeepSpeed config says; as planned if not given.
        counts_by_step: Micro-batches a batch from a step on, set while training.
        module: Further arguments of the module.
        config: Further keys of the DeepSpeed config.
    """

    name: str
    num_processes: int
    write: Callable[[Path], Path]
    num_micro_batches: int
    model: str = "hybrid"
    num_replicas: int = 1
    max_norm: float = NO_CLIPPING
    is_bf16: bool = False
    is_seeded: bool = False
    evaluations: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    form: str = "sources"
    data: str = "plain"
    configured: int | None = None
    counts_by_step: Mapping[int, int] = field(default_factory=dict)
    module: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)

    def to_worker(self, folder: Path) -> dict[str, Any]:
        """Return what the worker reads."""
        return {
            "kind": "train",
            "name": self.name,
            "model": self.model,
            "folder": str(self.write(folder / self.name)),
            "num_micro_batches": self.configured or self.num_micro_batches,
            "num_steps": NUM_STEPS,
            "max_norm": self.max_norm,
            "is_seeded": self.is_seeded,
            "evaluations": {str(step): list(counts) for step, counts in self.evaluations.items()},
            "form": self.form,
            "data": self.data,
            "counts_by_step": {str(step): count for step, count in self.counts_by_step.items()},
            "module": dict(self.module),
            "config": dict(self.config),
        }

    @property
    def all_counts_by_step(self) -> dict[int, int]:
        """Micro-batches of every step."""
        count = self.configured or self.num_micro_batches
        counts = {}
        for step in range(NUM_STEPS):
            count = counts[step] = self.counts_by_step.get(step, count)
        return counts


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """A launch that must be refused on every rank.

    Attributes:
        says: What the message must hold.
        odd_rank: A rank that is given another plan folder than the others.
    """

    name: str
    num_processes: int
    error: str
    says: tuple[str, ...]
    placement: Placement
    order: Order
    model: str = "hybrid"
    planned_model: str = "hybrid"
    num_micro_batches: int = 4
    odd_rank: int | None = None
    config: Mapping[str, Any] = field(default_factory=dict)

    def to_worker(self, folder: Path) -> dict[str, Any]:
        """Return what the worker reads."""
        case: dict[str, Any] = {
            "kind": "refuse",
            "name": self.name,
            "model": self.model,
            "folder": str(write_folder(folder / self.name, self.planned_model, self.placement, self.order)),
            "num_micro_batches": self.num_micro_batches,
            "config": dict(self.config),
        }
        if self.odd_rank is not None:
            odd = write_folder(folder / f"{self.name}-odd", self.planned_model, self.placement, gpipe(2, 4))
            case |= {"odd_rank": self.odd_rank, "odd_folder": str(odd)}
        return case


def ordered(
    name: str,
    num_processes: int,
    placement: Placement,
    order: Order,
    *,
    model: str = "hybrid",
    partition: str | None = None,
    num_replicas: int = 1,
    recomputed_stages: tuple[int, ...] = (),
    **rest: Any,
) -> Training:
    """Return the case of a given order."""

    def write(folder: Path) -> Path:
        return write_folder(
            folder,
            model,
            placement,
            order,
            Partition.parse(partition) if partition else None,
            num_replicas=num_replicas,
            recomputed_stages=recomputed_stages,
        )

    return Training(
        name=name,
        num_processes=num_processes,
        write=write,
        num_micro_batches=launching.num_micro_batches_of(order),
        model=model,
        num_replicas=num_replicas,
        **rest,
    )


def random_case(
    name: str, num_processes: int, placement: str, num_micro_batches: int, seed: int, **rest: Any
) -> Training:
    """Return the case of a random order on a given placement."""
    placed = Placement.parse(placement)
    return ordered(name, num_processes, placed, random_order(placed, num_micro_batches, seed), **rest)


def optimized(name: str, num_ranks: int, num_micro_batches: int) -> Training:
    """Return the case of a co-optimised plan."""

    def write(folder: Path) -> Path:
        profile = launching.profile_of("hybrid")
        cluster = equal_ranks(num_ranks, launching.DEVICE)
        return write_plan(
            folder, optimize(profile, cluster, num_micro_batches=num_micro_batches, work_limit=200_000).plan
        )

    return Training(name=name, num_processes=num_ranks, write=write, num_micro_batches=num_micro_batches)


def imported_from_torch() -> tuple[Training, ...]:
    """Return a case for each of torch's own schedules, taken from the CSV that torch writes of it."""
    cases = []
    for schedule in torch_schedules(8):
        outline = read_torch_csv(dump(schedule), "schedule.csv")
        name = f"torch-{type(schedule).__name__.removeprefix('Schedule').lower()}-{NUM_RANKS}"
        cases.append(ordered(name, NUM_RANKS, outline.placement, outline.order))
    return tuple(cases)


ZERO_1 = {"zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True}
# DeepSpeed averages over the replicas in bf16 unless told otherwise.
BF16 = {
    **ZERO_1,
    "bf16": {"enabled": True},
    "data_types": {"grad_accum_dtype": "fp32"},
    "communication_data_type": "fp32",
}
BF16_IMMEDIATE = {**BF16, "bf16": {"enabled": True, "immediate_grad_update": True}}

TRAINING: tuple[Training, ...] = (
    # the orders, on 2 and 4 ranks
    ordered("gpipe-2", 2, looped_placement(2, 1), gpipe(2, 4)),
    ordered("1f1b-2", 2, looped_placement(2, 1), one_f_one_b(2, 4)),
    ordered("interleaved-2", 2, looped_placement(2, 2), interleaved_one_f_one_b(2, 2, 4)),
    ordered("v-2", 2, folded_placement(2, 2), zb_v(2, 4)),
    ordered("zb-h1-2", 2, looped_placement(2, 1), zb_h1(2, 4)),
    optimized("optimized-2", 2, 4),
    random_case("random-2", 2, "1,0,0,1,0,1,1", 4, seed=1),
    ordered("gpipe-4", 4, looped_placement(4, 1), gpipe(4, 6)),
    ordered("1f1b-4", 4, looped_placement(4, 1), one_f_one_b(4, 6)),
    ordered("interleaved-4", 4, looped_placement(4, 2), interleaved_one_f_one_b(4, 2, 8)),
    ordered("v-4", 4, folded_placement(4, 2), zb_v(4, 8)),
    ordered("zb-h1-4", 4, looped_placement(4, 1), zb_h1(4, 6)),
    optimized("optimized-4", 4, 8),
    random_case("random-4", 4, "2,0,3,1,1,0,2,3,0", 6, seed=3),
    # layers that say themselves whether they are split
    random_case("own-splits-2", 2, "1,0,0,1,0", 4, seed=2, model="own-splits"),
    # tied weights
    ordered("tied-2", 2, looped_placement(2, 1), zb_h1(2, 4), model="tied"),
    random_case("tied-embedding-above-head-2", 2, "1,0,1,0", 4, seed=2, model="tied"),
    ordered("tied-on-one-rank-2", 2, folded_placement(2, 2), zb_v(2, 4), model="tied"),
    ordered("tied-specs-2", 2, looped_placement(2, 1), one_f_one_b(2, 4), model="tied", form="deepspeed"),
    random_case("tied-on-three-ranks-4", 4, "3,1,0,2,0", 6, seed=4, model="tied-thrice", partition="3,2,3,2,1"),
    # stages and ranks at the edge
    ordered(
        "embedding-alone-head-alone-2", 2, looped_placement(2, 2), interleaved_one_f_one_b(2, 2, 4), partition="1,4,4,1"
    ),
    ordered(
        "rank-without-parameters-4", 4, looped_placement(4, 1), one_f_one_b(4, 6), model="scaled", partition="2,2,1,1"
    ),
    ordered(
        "rank-without-parameters-zero-4",
        4,
        looped_placement(4, 1),
        zb_h1(4, 6),
        model="scaled",
        partition="2,2,1,1",
        config=ZERO_1,
    ),
    # boundaries of mixed dtypes
    ordered("mixed-boundaries-4", 4, looped_placement(4, 1), zb_h1(4, 6), model="mixed"),
    random_case("mixed-boundaries-random-4", 4, "0,2,1,3,0", 6, seed=5, model="mixed"),
    # clipping, recomputation, dropout, evaluation
    ordered("clipped-2", 2, looped_placement(2, 1), zb_h1(2, 4), model="tied", max_norm=0.1),
    ordered("recomputed-2", 2, looped_placement(2, 2), interleaved_one_f_one_b(2, 2, 4), recomputed_stages=(0, 2)),
    ordered("recomputed-split-2", 2, looped_placement(2, 1), zb_h1(2, 4), recomputed_stages=(0, 1)),
    random_case("dropout-2", 2, "1,0,0,1", 4, seed=6, model="dropout", is_seeded=True, recomputed_stages=(1,)),
    random_case(
        "dropout-reentrant-2",
        2,
        "1,0,0,1",
        4,
        seed=6,
        model="dropout",
        is_seeded=True,
        recomputed_stages=(0, 1, 3),
        module={"reentrant_recompute": True},
    ),
    ordered(
        "recomputed-split-reentrant-2",
        2,
        looped_placement(2, 1),
        zb_h1(2, 4),
        recomputed_stages=(0, 1),
        module={"reentrant_recompute": True},
    ),
    ordered("evaluated-2", 2, folded_placement(2, 2), zb_v(2, 8), evaluations={0: (2,), 1: (5, 1)}),
    # another number of micro-batches than planned
    ordered("more-in-the-config-2", 2, folded_placement(2, 2), zb_v(2, 4), configured=6),
    random_case("changing-2", 2, "1,0,0,1,0", 4, seed=8, counts_by_step={1: 7, 2: 3}),
    # shapes that differ between micro-batches, and for one micro-batch between batches; padded labels
    random_case("lengths-2", 2, "1,0,0,1", 4, seed=9, data="lengths", module={"dynamic_shapes": True}),
    ordered(
        "lengths-4",
        4,
        looped_placement(4, 1),
        zb_h1(4, 5),
        model="mixed",
        data="lengths",
        module={"dynamic_shapes": True},
    ),
    ordered("padded-2", 2, looped_placement(2, 1), one_f_one_b(2, 4), data="padded"),
    ordered(
        "padded-by-tokens-2",
        2,
        folded_placement(2, 2),
        zb_v(2, 4),
        data="padded",
        module={"loss_reduction": "tokens"},
    ),
    ordered(
        "padded-by-tokens-replicas-4",
        4,
        looped_placement(2, 1),
        zb_h1(2, 4),
        num_replicas=2,
        data="padded",
        module={"loss_reduction": "tokens"},
    ),
    # replicas, ZeRO-1, bf16
    ordered("replicas-4", 4, looped_placement(2, 1), zb_h1(2, 4), model="tied", num_replicas=2),
    ordered(
        "replicas-zero-4",
        4,
        looped_placement(2, 2),
        interleaved_one_f_one_b(2, 2, 4),
        model="tied",
        num_replicas=2,
        max_norm=0.1,
        config=ZERO_1,
    ),
    ordered(
        "replicas-bf16-4",
        4,
        looped_placement(2, 1),
        zb_h1(2, 4),
        model="tied",
        num_replicas=2,
        max_norm=0.1,
        is_bf16=True,
        config=BF16,
    ),
    # the orders of torch's own schedules
    *imported_from_torch(),
    random_case("bf16-immediate-2", 2, "1,0,0,1", 4, seed=7, is_bf16=True, config=BF16_IMMEDIATE),
)

REFUSALS: tuple[Refusal, ...] = (
    Refusal(
        name="another-plan-on-rank-1",
        num_processes=2,
        error="LaunchError",
        says=("rank 1 holds another plan", "rank 0", "copy one plan folder"),
        placement=looped_placement(2, 1),
        order=one_f_one_b(2, 4),
        odd_rank=1,
    ),
    Refusal(
        name="more-ranks-than-launched",
        num_processes=2,
        error="LaunchError",
        says=("4 processes", "2 were launched"),
        placement=looped_placement(4, 1),
        order=one_f_one_b(4, 4),
    ),
    Refusal(
        name="more-replicas-than-planned",
        num_processes=4,
        error="LaunchError",
        says=("2 pipeline ranks x 1 data-parallel replicas", "4 were launched", "data_parallel"),
        placement=looped_placement(2, 1),
        order=one_f_one_b(2, 4),
    ),
    Refusal(
        name="another-layer-count",
        num_processes=2,
        error="ModelError",
        says=("builds 6 layers", "is for 10", "'hybrid'"),
        placement=looped_placement(2, 1),
        order=one_f_one_b(2, 4),
        model="scaled",
    ),
    Refusal(
        name="another-model",
        num_processes=2,
        error="ModelError",
        says=("layer 0 of the script is '0.embedding'", "made for '0.packing'", "'mixed'"),
        placement=looped_placement(2, 1),
        order=one_f_one_b(2, 4),
        model="scaled",
        planned_model="mixed",
    ),
    Refusal(
        name="config-of-another-plan",
        num_processes=2,
        error="LaunchError",
        says=("DeepSpeed config", "another plan"),
        placement=looped_placement(2, 1),
        order=one_f_one_b(2, 4),
        config={"pipeplan": {"digest": "sha256:0"}},
    ),
    Refusal(
        name="zero-2",
        num_processes=2,
        error="LaunchError",
        says=("ZeRO stage 2", "zero_optimization.stage 1"),
        placement=looped_placement(2, 1),
        order=one_f_one_b(2, 4),
        config={"zero_optimization": {"stage": 2}},
    ),
    Refusal(
        name="recomputation-in-the-config",
        num_processes=2,
        error="LaunchError",
        says=("activation_checkpoint_interval", "recompute"),
        placement=looped_placement(2, 1),
        order=one_f_one_b(2, 4),
        config={"pipeline": {"activation_checkpoint_interval": 1}},
    ),
)

CASES = (*TRAINING, *REFUSALS)
