"""What every strategy must hold: its plan is verified, predicts the truth, fits, and is not below the bound."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from pipeplan.cluster import Cluster
from pipeplan.errors import InfeasibleError, PlanError
from pipeplan.plan.layout import Partition, Placement
from pipeplan.profile.types import Profile
from pipeplan.program.verify import verify_plan
from pipeplan.search import STRATEGIES, SearchResult, optimize
from pipeplan.simulate import simulate
from tests.strategies import DEVICES, clusters, profiles

WORK_LIMIT = 200_000
EXACT_WORK_LIMIT = 10_000  # counts partial orders too, which take longer than ops
# Shrinking a failure would search thousands of times; the first failing problem is small enough to read.
LEAN = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], phases=[Phase.explicit, Phase.generate])


@st.composite
def problems(draw: st.DrawFn) -> tuple[Profile, Cluster, int]:
    """A small problem with anything in it: tied and recomputable layers, mixed ranks, caps, any micro-batches."""
    num_ranks = draw(st.integers(1, 3))
    profile = draw(
        profiles(
            min_layers=num_ranks,
            max_layers=7,
            devices=DEVICES,
            recomputable=draw(st.booleans()),
            tied=draw(st.booleans()),
        )
    )
    cluster = draw(clusters(num_ranks=num_ranks, devices=DEVICES))
    if draw(st.booleans()):
        cap = draw(st.integers(20, 400)) * 1_000_000
        ranks = tuple(type(rank)(rank.device, cap, rank.node, rank.slowdown) for rank in cluster.ranks)
        cluster = Cluster(
            ranks=ranks,
            within_node=cluster.within_node,
            between_nodes=cluster.between_nodes,
            host_overhead_ns=cluster.host_overhead_ns,
        )
    return profile, cluster, draw(st.integers(1, 4))


def check_result(result: SearchResult, profile: Profile, cluster: Cluster) -> None:
    """Check what must hold of every result."""
    verify_plan(result.plan, profile, cluster)
    timeline = simulate(result.plan, profile, cluster)
    assert result.plan.prediction == timeline.prediction
    assert timeline.makespan_ns >= result.lower_bound_ns
    for rank, memory in enumerate(timeline.memory_by_rank):
        usable = cluster.usable_bytes(rank)
        assert usable is None or memory.total <= usable
    for baseline in result.baselines:
        assert baseline.makespan_ns >= result.lower_bound_ns
        assert baseline.plan.prediction is not None


@pytest.mark.parametrize("strategy", STRATEGIES)
@settings(LEAN, max_examples=12)
@given(problem=problems())
def test_every_plan_is_what_it_claims(strategy: str, problem: tuple[Profile, Cluster, int]) -> None:
    """Every strategy's plan passes the verifier and a new simulation, keeps the caps, and is not below the bound."""
    profile, cluster, num_micro_batches = problem
    work_limit = EXACT_WORK_LIMIT if strategy == "exact" else WORK_LIMIT
    arguments = {"num_micro_batches": num_micro_batches, "work_limit": work_limit}
    try:
        result = optimize(profile, cluster, strategy=strategy, **arguments)  # type: ignore[arg-type]
    except InfeasibleError as error:
        assert "rank" in str(error)
        return
    except PlanError as error:
        assert strategy == "exact" and "too large" in str(error)
        return
    check_result(result, profile, cluster)
    best = result.best_baseline
    if strategy != "octopipe":  # a faithful baseline itself, which may be worse than others
        assert best is None or result.makespan_ns <= best.makespan_ns


@settings(LEAN, max_examples=8)
@given(problem=problems(), seed=st.integers(0, 3))
def test_same_question_same_plan(problem: tuple[Profile, Cluster, int], seed: int) -> None:
    """The same inputs, seed and work limit give the same plan."""
    profile, cluster, num_micro_batches = problem

    def search() -> SearchResult | str:
        try:
            return optimize(profile, cluster, num_micro_batches=num_micro_batches, work_limit=WORK_LIMIT, seed=seed)
        except InfeasibleError as error:
            return str(error)

    one, other = search(), search()
    if isinstance(one, str):
        assert one == other
    else:
        assert isinstance(other, SearchResult)
        assert one.plan == other.plan
        assert one.is_deterministic


@settings(LEAN, max_examples=8)
@given(data=st.data())
def test_keeps_what_is_fixed(data: st.DataObject) -> None:
    """A fixed partition and a fixed placement, together or alone, come back in the plan."""
    profile = data.draw(profiles(min_layers=5, max_layers=7))
    cluster = data.draw(clusters(num_ranks=2))
    num_stages = data.draw(st.integers(2, 5))
    sizes = [1] * num_stages
    sizes[data.draw(st.integers(0, num_stages - 1))] += profile.num_layers - num_stages
    partition = Partition(tuple(sizes)) if data.draw(st.booleans()) else None
    middle = tuple(data.draw(st.lists(st.integers(0, 1), min_size=num_stages - 2, max_size=num_stages - 2)))
    placement = Placement((0, *middle, 1)) if data.draw(st.booleans()) else None
    result = optimize(
        profile, cluster, num_micro_batches=3, work_limit=WORK_LIMIT, partition=partition, placement=placement
    )
    check_result(result, profile, cluster)
    assert partition is None or result.plan.partition == partition
    assert placement is None or result.plan.placement == placement
