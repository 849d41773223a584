"""Sampling: robust figures, and when to stop."""

from __future__ import annotations

import itertools

import pytest

from pipeplan.profile.sampling import Samples, SamplingBudget, sample


def test_spread_is_deaf_to_one_outlier() -> None:
    """The median and its spread don't follow a single slow run."""
    samples = Samples((100, 101, 99, 100, 5000))
    assert samples.median_ns == 100
    assert samples.relative_spread == pytest.approx(1.4826 * 1 / 100)


def test_equal_samples_have_no_spread() -> None:
    """No spread, also where the median is zero."""
    assert Samples((7, 7, 7)).relative_spread == 0
    assert Samples((0, 0, 9)).relative_spread == 0


def test_warm_up_is_thrown_away_and_steady_times_end_early() -> None:
    """Warm-up rounds never reach the samples; steady ones stop at the minimum."""
    durations = itertools.chain([10**9, 10**9], itertools.repeat(100))
    found = sample(lambda: {"F": next(durations)}, SamplingBudget(num_warm_up=2, min_rounds=4))
    assert found == {"F": Samples((100,) * 4)}


def test_unsteady_times_are_repeated() -> None:
    """One unsteady op keeps all of them going, to the cap."""
    durations = itertools.cycle([100, 150, 200])
    found = sample(lambda: {"F": 5, "B": next(durations)}, SamplingBudget(num_warm_up=0, min_rounds=3, max_rounds=11))
    assert {op: len(samples.durations_ns) for op, samples in found.items()} == {"F": 11, "B": 11}


def test_the_time_limit_ends_it_but_not_before_the_minimum() -> None:
    """With no time at all the minimum is still measured; a shared limit is divided."""
    durations = itertools.cycle([100, 200])
    budget = SamplingBudget(num_warm_up=0, min_rounds=3, seconds_per_layer=5).shared(0.0, num_layers=4)
    assert len(sample(lambda: {"F": next(durations)}, budget)["F"].durations_ns) == 3
