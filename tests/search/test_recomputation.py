"""Recomputation that a profile has only for some layers or device types: used there, and nowhere else."""

from __future__ import annotations

import numpy as np
import pytest

from pipeplan.cluster import Cluster, Rank, equal_ranks
from pipeplan.errors import InfeasibleError, ProfileError
from pipeplan.plan.layout import Partition
from pipeplan.plan.orders import NAMED_ORDERS
from pipeplan.profile.types import LayerProfile, LayerTimes, Profile, Recomputation
from pipeplan.search import SearchResult, optimize
from pipeplan.search.instance import build_instance
from pipeplan.search.order_search import Ordering, build_bench, makespan_of, search_order
from pipeplan.search.problem import Constraints, Problem
from pipeplan.search.randomness import random_state
from pipeplan.simulate import encode_order, simulate

MB = 1_000_000
TIMES = LayerTimes(
    forward_ns=1_000_000, backward_ns=2_000_000, input_gradient_ns=1_000_000, weight_gradient_ns=1_000_000
)


def layer(index: int, recomputes_on: tuple[str, ...]) -> LayerProfile:
    """A layer that keeps 20 MB, or 2 MB where it recomputes."""
    return LayerProfile(
        name=f"layers.{index}", kind="mlp", num_parameters=0, output_bytes=0, activation_bytes=20 * MB,
        held_for_w_bytes=0, times_by_device={"a": TIMES, "b": TIMES},
        recomputation=Recomputation(dict.fromkeys(recomputes_on, TIMES), 2 * MB) if recomputes_on else None,
    )  # fmt: skip


def profile_of(*recomputes_on: tuple[str, ...]) -> Profile:
    """A profile by the device types on which each layer recomputes."""
    return Profile(
        model="m", source="measured", micro_batch_size=1, sequence_length=1, dtype="bf16",
        state_bytes_per_parameter=0, layers=tuple(layer(index, each) for index, each in enumerate(recomputes_on)),
    )  # fmt: skip


@pytest.mark.parametrize("can_recompute", [(0, 2, 3), (1, 2)])
def test_of_some_layers(can_recompute: tuple[int, ...]) -> None:
    """One rank recomputes the layers that can: 44 MB instead of 80 do, and not a byte less.

    By hand: layers 0 and 1 keep 22 MB, 2 and 3 keep 4 MB and one of them has 18 MB again; or 0 and 3 keep 40 MB in the
    last forward, and 1 and 2 keep 4 MB.
    """
    profile = profile_of(*(("a",) if index in can_recompute else () for index in range(4)))
    needed = 44 * MB

    def search(cap: int) -> SearchResult:
        return optimize(profile, Cluster(ranks=(Rank("a", cap),)), num_micro_batches=3, work_limit=30_000)

    timeline = simulate(search(needed).plan, profile, Cluster(ranks=(Rank("a", needed),)))
    assert timeline.memory_by_rank[0].total == needed
    with pytest.raises(InfeasibleError):
        search(needed - 1)


@pytest.mark.parametrize("strategy", ["default", "octopipe"])
def test_of_some_device_types(strategy: str) -> None:
    """A device type without figures never recomputes: one micro-batch is 20 MB on each rank."""
    profile = profile_of(("a",), ("a",))

    def search(cap: int) -> SearchResult:
        ranks = (Rank("a", cap), Rank("b", cap))
        return optimize(profile, Cluster(ranks=ranks), num_micro_batches=3, work_limit=30_000, strategy=strategy)

    assert search(20 * MB).plan.recomputed_stages == ()
    with pytest.raises(InfeasibleError):
        search(20 * MB - 1)


def test_a_plan_that_recomputes_where_it_has_no_figures() -> None:
    """A plan that recomputes on a device type without figures is refused by name, not given the times without."""
    problem = Problem(profile_of(("a",), ("a",)), Cluster(ranks=(Rank("a"), Rank("b"))), 2)
    problem.table.stage_costs((1, 1), (0, 1), (0,))
    with pytest.raises(ProfileError, match=r"stage 1 .* 'layers\.1' has no 'recompute' figures for b"):
        problem.table.stage_costs((1, 1), (0, 1), (1,))


def test_boundaries_stay_where_stages_can_recompute() -> None:
    """The search of an order and its boundaries gives no layer without figures to a stage that recomputes."""
    num_micro_batches, sizes = 4, (2, 6)
    problem = Problem(
        profile_of(*[("a",)] * 3, *[()] * 5), equal_ranks(2, "a"), num_micro_batches, Constraints(partition=None)
    )
    instance = build_instance(problem)
    named = next(each for each in NAMED_ORDERS if each.name == "1F1B")
    order = encode_order(named.build(2, num_micro_batches))
    ordering = Ordering(
        np.array(sizes, dtype=np.int64), order.stage.copy(), order.kind.copy(), order.micro_batch.copy()
    )
    bench = build_bench(
        instance, ordering, np.array([0, 1], dtype=np.int64), np.array([True, False]), order.offsets.copy(),
        np.zeros(2, dtype=np.int64),
    )  # fmt: skip
    score = makespan_of(instance, ordering, bench)
    best, scores = ordering.copy(), np.array([score, score])
    search_order(instance, ordering, best, scores, bench, 1.0, 200, 1e-6, 1e-6, random_state(0))
    assert scores[1] < score
    assert Partition(tuple(best.atoms.tolist())) == Partition((3, 5))
