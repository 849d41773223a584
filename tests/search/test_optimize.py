"""The entry of the search: the golden case, what it says when nothing fits, interruption, progress."""

from __future__ import annotations

import ctypes
import importlib
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scipy.optimize import milp

from pipeplan.cluster import Cluster, Link, Rank, equal_ranks, read_cluster
from pipeplan.errors import InfeasibleError, PlanError
from pipeplan.plan.layout import Partition, Placement
from pipeplan.profile import Profile, read_profile
from pipeplan.profile.types import LayerProfile, LayerTimes, Recomputation
from pipeplan.search import Progress, SearchResult, bounds, optimize
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


@pytest.mark.parametrize("strategy", ["default", "octopipe", "exact"])
@pytest.mark.parametrize("can_recompute", [False, True])
def test_finds_the_only_order_that_fits(strategy: str, can_recompute: bool) -> None:
    """Caps that hold one micro-batch at a time, boundaries included, and not a byte more: a plan; a byte less: none.

    By hand: rank 1 holds both layers of its stage (30 MB, or where they recompute 10 MB and then the other 15 MB of the
    larger one), the activation that came in (8 MB) or the gradient that goes out, and 4 MB of workspace; rank 0 sends
    as much and holds 4 MB.
    """
    times = {
        "gpu": LayerTimes(
            forward_ns=1_000_000,
            backward_ns=2_000_000,
            input_gradient_ns=1_000_000,
            weight_gradient_ns=1_000_000,
        )
    }
    layer = LayerProfile(
        name="layers.0", kind="mlp", num_parameters=0, output_bytes=8_000_000, activation_bytes=4_000_000,
        held_for_w_bytes=5_000_000, workspace_bytes=4_000_000, is_splittable=True, times_by_device=times,
    )  # fmt: skip
    large = replace(layer, name="layers.1", activation_bytes=20_000_000)
    last = replace(layer, name="layers.2", activation_bytes=10_000_000)
    if can_recompute:
        large, last = (replace(each, recomputation=Recomputation(times, 5_000_000)) for each in (large, last))
    profile = Profile(
        model="m", source="measured", micro_batch_size=1, sequence_length=1, dtype="bf16",
        state_bytes_per_parameter=16, count_boundary_buffers=True, layers=(layer, large, last),
    )  # fmt: skip
    count = 3 if strategy == "exact" else 30  # more than the default strategy solves exactly
    needs = (16_000_000, (25_000_000 if can_recompute else 30_000_000) + 12_000_000)

    def search(*caps: int) -> SearchResult:
        cluster = Cluster(ranks=tuple(Rank("gpu", cap) for cap in caps), within_node=Link(5_000, 1.0))
        return optimize(
            profile, cluster, num_micro_batches=count, partition=Partition((1, 2)), work_limit=50_000, strategy=strategy
        )

    assert search(*needs).plan.prediction.peak_memory_bytes_by_rank == needs  # type: ignore[union-attr]
    with pytest.raises(InfeasibleError):
        search(needs[0], needs[1] - 1)
    with pytest.raises(InfeasibleError):
        search(needs[0] - 1, needs[1])


def test_no_time_and_nothing_to_gain(profile: Profile) -> None:
    """A limit of no seconds ends with the best named order; where the bound is reached, no limit is used up."""
    hurried = optimize(profile, equal_ranks(2, "h800-sxm"), num_micro_batches=4, time_limit_s=0)
    assert hurried.best_baseline is not None and hurried.makespan_ns <= hurried.best_baseline.makespan_ns
    alone = optimize(profile, equal_ranks(1, "h800-sxm"), num_micro_batches=1)
    assert alone.makespan_ns == alone.lower_bound_ns
    assert alone.num_ops_tried < 1_000_000


def test_placement_of_more_stages_than_layers(profile: Profile) -> None:
    """A placement that the layers can't fill is one clear error."""
    few = replace(profile, layers=profile.layers[:4])
    with pytest.raises(PlanError, match="names 6 stages; the 4 layers fill at most 4"):
        optimize(few, equal_ranks(2, "h800-sxm"), num_micro_batches=4, placement=Placement((0, 1, 0, 1, 0, 1)))


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


def test_finds_layouts_that_keep_tied_layers_together(profile: Profile) -> None:
    """Two shared weights on three ranks, which no usual placement keeps together; too many ranks are refused."""
    ties = {0: "embedding", 8: "embedding", 1: "other", 4: "other"}
    layers = tuple(replace(layer, tied=ties.get(index)) for index, layer in enumerate(profile.layers[:9]))
    tied = replace(profile, layers=layers)

    def search(num_ranks: int, partition: Partition | None) -> SearchResult:
        return optimize(
            tied, equal_ranks(num_ranks, "h800-sxm"), num_micro_batches=3, partition=partition, colocate_tied=True,
            work_limit=50_000,
        )  # fmt: skip

    for partition in (None, Partition((1,) * 9), Partition((1, 1, 2, 2, 2, 1))):
        plan = search(3, partition).plan
        rank_by_layer = [
            rank
            for rank, size in zip(plan.placement.rank_by_stage, plan.partition.num_layers_by_stage, strict=True)
            for _ in range(size)
        ]
        assert rank_by_layer[0] == rank_by_layer[8]
        assert rank_by_layer[1] == rank_by_layer[4]
        assert set(rank_by_layer) == {0, 1, 2}
    assert search(7, None).plan.num_ranks == 7
    with pytest.raises(InfeasibleError, match="7 groups of layers are left for 8 ranks"):
        search(8, None)


def test_what_highs_prints_stays_out_of_the_output(
    profile: Profile, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """HiGHS prints a line on some problems, past Python's stdout; scripts that read ours must not see it."""
    libc = ctypes.CDLL(None)

    def talkative(*arguments: Any, **options: Any) -> Any:
        libc.puts(b"tmpSolver.run();")
        return milp(*arguments, **options)

    monkeypatch.setattr(bounds, "milp", talkative)
    print("before")
    assert bounds.lower_bound_ns(Problem(profile, equal_ranks(4, "h800-sxm"), 8)) > 0
    print("after")
    libc.fflush(None)
    assert capfd.readouterr().out == "before\nafter\n"


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


@pytest.mark.parametrize("where", ["with_proof", "baseline_result"])
def test_interruption_after_the_search_keeps_the_plan(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while the plan found is proved, or the result is put together, does not lose it."""
    entry = importlib.import_module("pipeplan.search.optimize")
    instance = small_instance(0)
    undisturbed = getattr(entry, where)
    presses = iter([KeyboardInterrupt])

    def interrupt(*arguments: Any) -> Any:
        for press in presses:
            raise press
        return undisturbed(*arguments)

    monkeypatch.setattr(entry, where, interrupt)
    result = optimize(
        instance.profile, instance.cluster, num_micro_batches=instance.num_micro_batches, strategy="exact",
        partition=instance.partition, placement=instance.placement, work_limit=100_000,
    )  # fmt: skip
    assert result.was_interrupted
    assert any("interrupted" in note for note in result.notes)


def test_progress_moves_on(profile: Profile) -> None:
    """Progress never goes back, neither in the budget nor in the best plan."""
    seen: list[Progress] = []
    optimize(profile, equal_ranks(4, "h800-sxm"), num_micro_batches=4, work_limit=3_000_000, on_progress=seen.append)
    fractions = [progress.fraction for progress in seen]
    assert fractions == sorted(fractions)
    best = [progress.best_makespan_ns for progress in seen if progress.best_makespan_ns is not None]
    assert best == sorted(best, reverse=True)
    assert len(seen) > 10
