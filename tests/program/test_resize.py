"""A plan's order carried over to other numbers of micro-batches."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeplan.cluster import equal_ranks
from pipeplan.errors import PlanError
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
from pipeplan.plan.types import Plan
from pipeplan.profile.types import LayerProfile, LayerTimes, Profile
from pipeplan.program.lower import time_ops
from pipeplan.program.resize import most_kept_by_stage, overlap_rounds, repeat_order, resize_plan
from pipeplan.program.verify import verify_plan
from pipeplan.simulate import CostTable, simulate
from tests.strategies import planned


def _uniform(num_layers: int) -> Profile:
    times = LayerTimes(forward_ns=1000, backward_ns=2000, input_gradient_ns=1000, weight_gradient_ns=1000)
    return Profile(
        model="uniform",
        source="estimated",
        micro_batch_size=1,
        sequence_length=16,
        dtype="fp32",
        state_bytes_per_parameter=16.0,
        layers=tuple(
            LayerProfile(
                name=str(index),
                kind="mlp",
                num_parameters=0,
                output_bytes=0,
                activation_bytes=1000,
                held_for_w_bytes=1000,
                times_by_device={"gpu": times},
            )
            for index in range(num_layers)
        ),
    )


def _plan(placement: Placement, order: Order, num_micro_batches: int) -> Plan:
    return Plan(
        model="uniform",
        num_micro_batches=num_micro_batches,
        partition=Partition((1,) * placement.num_stages),
        placement=placement,
        order=order,
    )


@settings(deadline=None)
@given(planned(), st.integers(1, 12))
def test_any_number_of_micro_batches_verifies(given: tuple, num_micro_batches: int) -> None:
    """Whatever the plan and the number, the order carried over runs every op once, finishes, and fits like it."""
    plan, profile, cluster = given
    resized = resize_plan(plan, num_micro_batches, profile, cluster)
    assert resized.num_micro_batches == num_micro_batches
    assert verify_plan(resized, profile, cluster).plan is resized
    if profile.count_boundary_buffers:
        return  # rounds one after the other may have more boundaries in flight where they meet
    before = simulate(plan, profile, cluster).memory_by_rank
    after = simulate(resized, profile, cluster).memory_by_rank
    assert all(one.total <= other.total for one, other in zip(after, before, strict=True))


@settings(deadline=None)
@given(planned(), st.integers(1, 12), st.booleans())
def test_overlapped_rounds_keep_no_more_micro_batches(given: tuple, num_micro_batches: int, limits_ranks: bool) -> None:
    """The list scheduler keeps to what each stage held, and finishes on every plan unless ranks are limited, too."""
    plan, profile, cluster = given
    times = time_ops(plan, profile, cluster, plan.queue_model)
    costs = CostTable(profile, cluster).stage_costs(plan.partition, plan.placement, plan.recomputed_stages)
    order = overlap_rounds(plan, times, costs, num_micro_batches, limits_ranks=limits_ranks)
    if order is None:
        assert limits_ranks
        return
    assert order.num_ops == repeat_order(plan.order, plan.num_micro_batches, num_micro_batches).num_ops
    most = most_kept_by_stage(plan.order)
    assert all(count <= most[key] for key, count in most_kept_by_stage(order).items())
    resized = replace(plan, num_micro_batches=num_micro_batches, order=order)
    simulate(resized, profile, cluster)  # raises where it deadlocks


@pytest.mark.parametrize("build", [gpipe, one_f_one_b])
@pytest.mark.parametrize("num_micro_batches", [1, 2, 3, 5])
def test_fewer_micro_batches_of_a_named_order_are_that_order(build, num_micro_batches: int) -> None:
    """GPipe and 1F1B without their last micro-batches are GPipe and 1F1B."""
    assert repeat_order(build(4, 8), 8, num_micro_batches) == build(4, num_micro_batches)


@pytest.mark.parametrize(
    ("placement", "build"),
    [
        (looped_placement(4, 1), lambda count: one_f_one_b(4, count)),
        (looped_placement(4, 2), lambda count: interleaved_one_f_one_b(4, 2, count)),
        (looped_placement(4, 1), lambda count: zb_h1(4, count)),
        (folded_placement(4, 2), lambda count: zb_v(4, count)),
    ],
)
@pytest.mark.parametrize("num_micro_batches", [16, 24])
def test_more_micro_batches_of_a_named_order_are_nearly_as_fast(placement, build, num_micro_batches: int) -> None:
    """Carried over from 8 micro-batches, a named order takes at most 5 % more than itself built for that number."""
    profile, cluster = _uniform(placement.num_stages), equal_ranks(4, "gpu")
    resized = resize_plan(_plan(placement, build(8), 8), num_micro_batches, profile, cluster)
    built = _plan(placement, build(num_micro_batches), num_micro_batches)
    found_ns = simulate(resized, profile, cluster).makespan_ns
    assert found_ns <= 1.05 * simulate(built, profile, cluster).makespan_ns


def test_no_micro_batch_is_refused() -> None:
    """A batch of nothing is an error that says so."""
    plan = _plan(looped_placement(2, 1), one_f_one_b(2, 4), 4)
    with pytest.raises(PlanError, match="at least one micro-batch, got 0"):
        resize_plan(plan, 0, _uniform(2), equal_ranks(2, "gpu"))
