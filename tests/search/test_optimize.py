"""The entry of the search: the golden case, what it says when nothing fits, interruption, progress."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from pipeplan.cluster import Cluster, equal_ranks, read_cluster
from pipeplan.errors import InfeasibleError, PlanError
from pipeplan.plan.layout import Partition, Placement
from pipeplan.profile import Profile, read_profile
from pipeplan.search import Progress, optimize
from pipeplan.search.exact import exact_plan
from pipeplan.search.problem import Problem
from pipeplan.search.structures import placements
from tests.benchmarks.exact_instances import small_instance
from tests.benchmarks.planner import bench_profile, first_ranks, in_lumps

GOLDEN = Path(__file__).parent.parent / "golden" / "nemotron-nano-9b-v2.yaml"
CLUSTERS = Path(__file__).parent.parent / "benchmarks" / "clusters"
OCTOPIPE_NS = 89_870 * 10_000


@pytest.fixture(scope="module")
def profile() -> Profile:
    """The golden profile."""
    return read_profile(GOLDEN)


def test_beats_the_published_plan(profile: Profile) -> None:
    """With a fraction of the default work, the golden case without a cap is faster than OctoPipe's published plan."""
    result = optimize(profile, equal_ranks(4, "h800-sxm"), num_micro_batches=8, work_limit=15_000_000)
    assert result.lower_bound_ns <= result.makespan_ns < OCTOPIPE_NS


def test_beats_every_baseline_within_the_memory_of_1f1b(profile: Profile) -> None:
    """Where 1F1B just fits, every rank stays within the cap and the plan is faster than each schedule that fits."""
    result = optimize(profile, equal_ranks(4, "h800-sxm", memory_gb=56), num_micro_batches=8, work_limit=20_000_000)
    assert result.plan.prediction is not None
    assert max(result.plan.prediction.peak_memory_bytes_by_rank) <= 56e9
    assert result.best_baseline is not None
    assert result.gain is not None and result.gain > 0.05


def test_says_what_would_fit(profile: Profile) -> None:
    """A cap that no plan meets: the message names rank, need, lack and a cap; that cap works, a smaller one doesn't."""
    with pytest.raises(InfeasibleError) as caught:
        optimize(profile, equal_ranks(4, "h800-sxm", memory_gb=10), num_micro_batches=8, work_limit=1_000_000)
    message = str(caught.value)
    assert re.search(r"rank \d needs at least .* GB .* may use 10 GB, .* GB too little", message)
    suggested = re.search(r"give every rank ([\d.]+) GB", message)
    assert suggested is not None
    cap = float(suggested[1])
    optimize(profile, equal_ranks(4, "h800-sxm", memory_gb=cap), num_micro_batches=8, work_limit=1_000_000)


def test_fewer_layers_than_ranks(profile: Profile) -> None:
    """More ranks than layers is one clear error."""
    with pytest.raises(PlanError, match="58 layers can't fill 60 stages"):
        optimize(profile, equal_ranks(60, "h800-sxm"), num_micro_batches=8)


def test_no_named_order_for_a_placement(profile: Profile) -> None:
    """A placement that no named order has, asked of the named orders alone, without caps: an error, and what to do."""
    placement = Placement((1, 0, 0, 1))
    with pytest.raises(PlanError, match=r"no named order has placement 1,0,0,1; use the default strategy"):
        optimize(profile, equal_ranks(2, "h800-sxm"), num_micro_batches=8, placement=placement, strategy="baselines")
    result = optimize(
        profile, equal_ranks(2, "h800-sxm"), num_micro_batches=8, placement=placement, work_limit=1_000_000
    )
    assert result.plan.placement == placement


def test_named_orders_that_do_not_fit(profile: Profile) -> None:
    """Where no named order fits, the message says which comes closest and that the default strategy may find a plan."""
    cluster = equal_ranks(4, "h800-sxm", memory_gb=30)
    with pytest.raises(InfeasibleError, match=r"closest, .* needs .* GB on rank \d, which may use 30 GB, .* default"):
        optimize(profile, cluster, num_micro_batches=8, strategy="baselines")
    assert optimize(profile, cluster, num_micro_batches=8, work_limit=1_000_000).makespan_ns > 0


@pytest.mark.parametrize("strategy", ["default", "octopipe"])
def test_tied_layers_that_a_fixed_layout_parts(strategy: str, profile: Profile) -> None:
    """A fixed layout that parts layers which must sit together, without caps, is one clear error."""
    first, *body, last = profile.layers
    first, last = replace(first, tied="embedding"), replace(last, tied="embedding")
    tied = replace(profile, layers=(first, *body, last))
    with pytest.raises(InfeasibleError, match="keeps the layers that share a weight on one rank"):
        optimize(
            tied,
            equal_ranks(2, "h800-sxm"),
            num_micro_batches=4,
            placement=Placement((0, 1)),
            colocate_tied=True,
            work_limit=100_000,
            strategy=strategy,
        )


def test_one_rank_with_a_fixed_partition(profile: Profile) -> None:
    """All stages of a fixed partition go to the one rank there is."""
    result = optimize(
        profile,
        equal_ranks(1, "h800-sxm"),
        num_micro_batches=2,
        partition=Partition((20, 20, 18)),
        work_limit=100_000,
    )
    assert result.plan.placement == Placement((0, 0, 0))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_small_fixed_layouts_are_proved(seed: int) -> None:
    """The default search proves its plan for a small fixed layout, as the exact solver alone does."""
    instance = small_instance(seed)
    result = optimize(
        instance.profile,
        instance.cluster,
        num_micro_batches=instance.num_micro_batches,
        partition=instance.partition,
        placement=instance.placement,
    )
    alone = exact_plan(
        instance.profile,
        instance.cluster,
        instance.num_micro_batches,
        partition=instance.partition,
        placement=instance.placement,
    )
    assert alone.is_proved
    assert result.is_optimal
    assert result.is_deterministic
    assert result.makespan_ns == result.lower_bound_ns == alone.makespan_ns


def test_tiny_problems_get_the_best_of_all_small_layouts() -> None:
    """Where one of three ranks has half the memory, the plan is as good as an exhaustive search's, proof included."""
    profile = in_lumps(bench_profile("nemotron-h-8b"), 5)
    cluster = first_ranks(read_cluster(CLUSTERS / "one-small.yaml"), 3)
    exact = exact_plan(profile, cluster, 3)
    assert exact.is_proved
    result = optimize(profile, cluster, num_micro_batches=3, work_limit=10_000_000)
    assert result.makespan_ns <= exact.makespan_ns
    assert result.lower_bound_ns <= exact.makespan_ns


def test_ranks_with_little_memory_may_hold_one_late_stage(profile: Profile) -> None:
    """Unequal memory adds placements where the smallest rank comes last and once; equal memory adds none."""
    small, large = equal_ranks(1, "h800-sxm", memory_gb=40).ranks, equal_ranks(2, "h800-sxm", memory_gb=80).ranks
    unequal = Problem(profile, Cluster(ranks=(*small, *large)), 8)
    found = placements(unequal, profile.num_layers)
    assert (1, 2, 1, 2, 0) in found
    assert (1, 2, 2, 1, 0) in found
    equal = placements(Problem(profile, Cluster(ranks=(*large, *large)), 8), profile.num_layers)
    assert all(ranks[:4] == (0, 1, 2, 3) for ranks in equal)


def test_unknown_strategy(profile: Profile) -> None:
    """An unknown strategy names the nearest known one."""
    with pytest.raises(PlanError, match="did you mean 'octopipe'"):
        optimize(profile, equal_ranks(4, "h800-sxm"), num_micro_batches=8, strategy="octopype")


def test_octopipe_as_published_and_mended(profile: Profile) -> None:
    """Trying all phases finds a better plan within the same work; other strategies have no phases to try."""
    cluster = equal_ranks(4, "h800-sxm", memory_gb=92)
    plain, mended = (
        optimize(profile, cluster, num_micro_batches=8, strategy="octopipe", try_all_phases=each, work_limit=6_000_000)
        for each in (False, True)
    )
    assert mended.makespan_ns < plain.makespan_ns
    assert 0 < plain.num_ops_tried < mended.num_ops_tried
    with pytest.raises(PlanError, match="only the strategy octopipe has phases"):
        optimize(profile, cluster, num_micro_batches=8, try_all_phases=True)


def test_interruption_of_octopipe_is_told(profile: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the middle of the three phases returns the best plan so far and says so."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("pipeplan.search.octopipe_moves.Moves.rearrange", interrupt)
    result = optimize(profile, equal_ranks(4, "h800-sxm"), num_micro_batches=8, strategy="octopipe")
    assert result.was_interrupted
    assert "interrupted" in result.notes[0]


def test_interruption_keeps_the_best(profile: Profile) -> None:
    """Ctrl-C in the middle returns the best plan so far and says so."""
    seen: list[Progress] = []

    def interrupt(progress: Progress) -> None:
        seen.append(progress)
        if len(seen) == 5:
            raise KeyboardInterrupt

    result = optimize(
        profile, equal_ranks(4, "h800-sxm"), num_micro_batches=8, work_limit=50_000_000, on_progress=interrupt
    )
    assert result.was_interrupted
    assert not result.is_deterministic
    assert any("interrupted" in note for note in result.notes)
    assert result.best_baseline is not None
    assert result.makespan_ns <= result.best_baseline.makespan_ns


def test_progress_moves_on(profile: Profile) -> None:
    """Progress never goes back, neither in the budget nor in the best plan."""
    seen: list[Progress] = []
    optimize(profile, equal_ranks(4, "h800-sxm"), num_micro_batches=4, work_limit=3_000_000, on_progress=seen.append)
    fractions = [progress.fraction for progress in seen]
    assert fractions == sorted(fractions)
    best = [progress.best_makespan_ns for progress in seen if progress.best_makespan_ns is not None]
    assert best == sorted(best, reverse=True)
    assert len(seen) > 10
