"""The entry of the search: the golden case, what it says when nothing fits, interruption, progress."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pipeplan.cluster import equal_ranks
from pipeplan.errors import InfeasibleError, PlanError
from pipeplan.profile import Profile, read_profile
from pipeplan.search import Progress, optimize

GOLDEN = Path(__file__).parent.parent / "golden" / "nemotron-nano-9b-v2.yaml"
OCTOPIPE_NS = 89_870 * 10_000


@pytest.fixture(scope="module")
def profile() -> Profile:
    """The golden profile."""
    return read_profile(GOLDEN)


def test_beats_the_published_plan(profile: Profile) -> None:
    """With a fraction of the default work, the golden case without a cap is faster than OctoPipe's published plan."""
    result = optimize(profile, equal_ranks(4, "h800-sxm"), num_micro_batches=8, work_limit=40_000_000)
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


def test_unknown_strategy(profile: Profile) -> None:
    """An unknown strategy names the nearest known one."""
    with pytest.raises(PlanError, match="did you mean 'octopipe'"):
        optimize(profile, equal_ranks(4, "h800-sxm"), num_micro_batches=8, strategy="octopype")


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
