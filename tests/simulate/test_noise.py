"""Noise: the clock's own times where there is none, and what probability theory says where there is."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given, settings

from pipeplan.cluster import Cluster, Link, equal_ranks
from pipeplan.errors import PipeplanError, PlanError
from pipeplan.plan.layout import Partition, Placement
from pipeplan.plan.ops import Order
from pipeplan.plan.types import Plan
from pipeplan.profile.types import Profile
from pipeplan.simulate import noisy_makespans, simulate
from tests.simulate.test_clock import layer, profile_of
from tests.strategies import planned

SPREAD = 0.3


def plan_of(placement: tuple[int, ...], order: list[str]) -> Plan:
    num_micro_batches = 1 + max(op.micro_batch for ops in Order.parse(order) for op in ops)
    return Plan(
        model="m",
        num_micro_batches=num_micro_batches,
        partition=Partition((1,) * len(placement)),
        placement=Placement(placement),
        order=Order.parse(order),
    )


@settings(max_examples=300, deadline=None)
@given(planned(recomputed=True))
def test_without_noise_every_sample_is_the_clock(case: tuple[Plan, Profile, Cluster]) -> None:
    """At a spread of zero, every batch takes what the simulator says, under every queue model."""
    plan, profile, cluster = case
    noisy = noisy_makespans(plan, profile, cluster, spread=0.0, num_samples=2)
    assert noisy.makespan_ns.tolist() == [simulate(plan, profile, cluster).makespan_ns] * 2
    assert (noisy.waiting_ns, noisy.standard_error_ns) == (0, 0)


def test_reductions_start_at_the_last_op_not_after_its_send() -> None:
    """Tied weights are reduced when the last ops of both ranks end, even where sending on takes longer than that."""
    profile = profile_of([layer(0, tied="e", num_parameters=100), layer(1, tied="e", num_parameters=100)])
    plan = plan_of((0, 1), ["0F0 0B0", "1F0 1B0"])
    cluster = replace(equal_ranks(2, "x"), within_node=Link(1, 1.0), host_overhead_ns={"send": 1_000})
    noisy = noisy_makespans(plan, profile, cluster, spread=0.0, num_samples=2)
    assert noisy.makespan_ns.tolist() == [simulate(plan, profile, cluster).makespan_ns] * 2


@settings(max_examples=50, deadline=None)
@given(planned())
def test_noise_never_helps_on_average(case: tuple[Plan, Profile, Cluster]) -> None:
    """The longest path is convex in the times, so that its mean is at least that of the means (Jensen)."""
    plan, profile, cluster = case
    noisy = noisy_makespans(plan, profile, cluster, spread=SPREAD, num_samples=200)
    assert noisy.waiting_ns >= -6 * noisy.standard_error_ns - 1


def test_chain_has_the_variance_of_its_sum() -> None:
    """One rank, or one micro-batch over two: the mean is planned, variances of ops and messages add up, none shared."""
    times = (1_000_000, 2_000_000, 0, 0)
    profile = profile_of([layer(0, times=times, size=0), layer(1, times=times, size=0)])
    cluster = replace(
        equal_ranks(2, "x"),
        within_node=Link(3_000_000, 1.0),
        host_overhead_ns={"B": 500_000, "send": 70_000, "wait": 90_000, "step": 40_000},
    )
    one_rank = plan_of((0, 0), ["0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1"])
    ops_ns = [1_000_000, 1_000_000, 2_500_000, 2_500_000]  # host overhead included
    for plan, where, varying_ns in (
        (one_rank, replace(cluster, ranks=cluster.ranks[:1]), ops_ns * 2),
        (plan_of((0, 1), ["0F0 0B0", "1F0 1B0"]), cluster, [*ops_ns, 3_000_000, 3_000_000]),
    ):
        noisy = noisy_makespans(plan, profile, where, spread=SPREAD, num_samples=20_000)
        expected_ns = SPREAD * math.hypot(*varying_ns)
        assert noisy.makespan_ns.std() == pytest.approx(expected_ns, rel=0.03)
        assert noisy.standard_error_ns == pytest.approx(expected_ns / math.sqrt(20_000), rel=0.03)
        assert abs(noisy.waiting_ns) < 4 * noisy.standard_error_ns


def test_two_ranks_wait_as_long_as_the_maximum_of_two_factors() -> None:
    """Two W at once take d max(X, Y) of log-normal X and Y: mean 2 d Phi(s / sqrt 2), quantile q where F(x)^2 = q."""
    work_ns = 1_000_000
    profile = profile_of([layer(index, times=(0, 0, 0, work_ns), size=0) for index in range(2)])
    plan = plan_of((0, 1), ["0F0 0I0 0W0", "1F0 1I0 1W0"])
    noisy = noisy_makespans(plan, profile, equal_ranks(2, "x"), spread=SPREAD, num_samples=20_000)
    s = math.sqrt(math.log(1 + SPREAD**2))
    normal = NormalDist(-(s**2) / 2, s)
    assert noisy.planned_ns == work_ns
    expected_ns = 2 * work_ns * NormalDist().cdf(s / math.sqrt(2))
    assert abs(noisy.mean_ns - expected_ns) < 4 * noisy.standard_error_ns
    assert noisy.waiting_ns == pytest.approx(expected_ns - work_ns, rel=0.03)
    for share in (0.5, 0.95):
        assert noisy.quantile_ns(share) == pytest.approx(work_ns * math.exp(normal.inv_cdf(share**0.5)), rel=0.02)
    assert noisy.worst_ns == noisy.makespan_ns.max() > noisy.quantile_ns(0.95)


def test_seed_decides_the_draws() -> None:
    """The same seed gives the same times, another seed others."""
    plan = plan_of((0, 1), ["0F0 0B0", "1F0 1B0"])
    profile = profile_of([layer(index, times=(1_000_000, 2_000_000, 0, 0)) for index in range(2)])

    def draw(seed: int) -> list[int]:
        noisy = noisy_makespans(plan, profile, equal_ranks(2, "x"), spread=0.1, num_samples=10, seed=seed)
        return [int(time_ns) for time_ns in noisy.makespan_ns]

    assert draw(1) == draw(1)
    assert not np.isin(draw(1), draw(2)).any()


def test_what_cannot_be_is_refused() -> None:
    """Per cent for shares, too few samples and faulty orders are errors that say so."""
    profile = profile_of([layer(0), layer(1)])
    plan = plan_of((0, 1), ["0F0 0B0", "1F0 1B0"])
    for spread in (-0.1, 10.0, math.nan, math.inf):
        with pytest.raises(PipeplanError, match=r"0\.1 for 10 %"):
            noisy_makespans(plan, profile, equal_ranks(2, "x"), spread=spread)
    with pytest.raises(PipeplanError, match="at least 2 samples, got 1"):
        noisy_makespans(plan, profile, equal_ranks(2, "x"), spread=0.1, num_samples=1)
    with pytest.raises(PlanError, match="runs once"):
        noisy_makespans(
            replace(plan, order=Order.parse(["0F0 0F0 0B0", "1F0 1B0"])), profile, equal_ranks(2, "x"), spread=0.1
        )
