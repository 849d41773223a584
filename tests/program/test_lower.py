"""Lowering: literal programs, and properties of random ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeplan.cluster import Cluster
from pipeplan.errors import PlanError
from pipeplan.plan.findings import RefusedError
from pipeplan.plan.layout import Partition, Placement
from pipeplan.plan.ops import Op, OpKind, Order
from pipeplan.plan.orders import NAMED_ORDERS, NamedOrder, one_f_one_b
from pipeplan.plan.types import Plan, QueueModel
from pipeplan.profile.types import LayerTimes, Profile
from pipeplan.program.lower import lower
from pipeplan.program.types import Compute, Receive, Send, WaitReceive, WaitSend
from pipeplan.program.verify import verify, verify_plan
from tests.program.examples import PAIR_PLAN, PAIR_PROFILE, V_PLAN, V_PROFILE, devices, equal_layers, plan_of
from tests.program.interpreter import interpret
from tests.strategies import planned

TAIL = "reduce-tied reduce-replicas step"

PAIR_LINES = {
    QueueModel.ORDERED_PAIR: [
        f"R1<0 0F0 S0>0 0F1 S0>1 R1<1 !0>0 !0>1 ?1<0 0B0 R1<2 0F2 S0>2 ?1<1 0B1 !0>2 ?1<2 0B2 {TAIL}",
        f"R0>0 R0>1 ?0>0 1F0 1B0 S1<0 R0>2 ?0>1 1F1 1B1 S1<1 !1<0 !1<1 ?0>2 1F2 1B2 S1<2 !1<2 {TAIL}",
    ],
    QueueModel.PAIR: [
        f"0F0 S0>0 0F1 S0>1 R1<0 R1<1 !0>0 !0>1 ?1<0 0B0 0F2 S0>2 R1<2 ?1<1 0B1 !0>2 ?1<2 0B2 {TAIL}",
        f"R0>0 R0>1 ?0>0 1F0 1B0 S1<0 ?0>1 1F1 1B1 S1<1 R0>2 !1<0 !1<1 ?0>2 1F2 1B2 S1<2 !1<2 {TAIL}",
    ],
}


@pytest.mark.parametrize("queue_model", [QueueModel.ORDERED_PAIR, QueueModel.PAIR])
def test_two_ranks_lower_to_the_expected_instructions(queue_model: QueueModel) -> None:
    """1F1B on two ranks: sends after their producer, receives a few ops ahead, waits where they cost nothing."""
    assert lower(PAIR_PLAN, PAIR_PROFILE, devices(2), queue_model).lines() == PAIR_LINES[queue_model]


def test_v_placement_hands_over_on_one_rank_without_messages() -> None:
    """Stages 1 and 2 share rank 1: their boundary appears in no instruction."""
    program = lower(V_PLAN, V_PROFILE, devices(2))
    words = " ".join(program.lines()).split()
    assert not [word for word in words if word[1:] in {"1>0", "1>1", "1>2", "2<0", "2<1", "2<2"}]
    assert program.lines()[1].startswith("R0>0 R0>1 ?0>0 1F0 2F0 S2>0")


def test_receive_ahead_moves_receives_only() -> None:
    """With 0 ops ahead, every receive is posted right before its wait; the ops stay where they are."""
    late = lower(PAIR_PLAN, PAIR_PROFILE, devices(2), receive_ahead=0)
    for steps in late.instructions_by_rank:
        for position, step in enumerate(steps):
            if isinstance(step, WaitReceive):
                before = [other for other in steps[:position] if not isinstance(other, WaitSend)]
                assert before[-1] == Receive(step.message)
    early = lower(PAIR_PLAN, PAIR_PROFILE, devices(2), receive_ahead=100)
    for line, expected in zip(early.lines(), ["R1<0 R1<1 R1<2 ", "R0>0 R0>1 R0>2 "], strict=True):
        assert line.startswith(expected)


@pytest.mark.parametrize("queue_model", QueueModel)
def test_sends_in_flight_do_not_grow_with_the_micro_batches(queue_model: QueueModel) -> None:
    """Sent tensors are let go soon: as many are kept at M = 32 as at M = 8."""

    def most_kept(num_micro_batches: int) -> tuple[int, int]:
        plan = Plan(
            model="equal",
            num_micro_batches=num_micro_batches,
            partition=Partition((1,) * 4),
            placement=Placement((0, 1, 2, 3)),
            order=one_f_one_b(4, num_micro_batches),
        )
        program = lower(plan, equal_layers(4), devices(4), queue_model)
        sends = receives = 0
        for steps in program.instructions_by_rank:
            for count in range(len(steps)):
                prefix = steps[:count]
                sends = max(sends, sum(isinstance(s, Send) - isinstance(s, WaitSend) for s in prefix))
                receives = max(receives, sum(isinstance(s, Receive) - isinstance(s, WaitReceive) for s in prefix))
        return sends, receives

    assert most_kept(32) == most_kept(8)
    assert max(most_kept(8)) <= 4


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(case=planned(), queue_model=st.sampled_from(QueueModel), receive_ahead=st.integers(0, 6))
def test_any_valid_order_lowers_to_a_program_that_finishes(
    case: tuple[Plan, Profile, Cluster], queue_model: QueueModel, receive_ahead: int
) -> None:
    """Random layouts, orders and costs: the program passes the verifier and a literal interpreter, op for op."""
    plan, profile, cluster = case
    program = lower(plan, profile, cluster, queue_model, receive_ahead=receive_ahead)
    verify(program, plan, profile, cluster)
    ran = interpret(program, queue_model)
    for rank, ops in enumerate(plan.order):
        assert [op for op in ran if plan.placement.rank_by_stage[op.stage] == rank] == list(ops)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(case=planned())
def test_a_program_for_one_queue_also_runs_with_more_queues(case: tuple[Plan, Profile, Cluster]) -> None:
    """What is lowered for a stricter queue model finishes under the looser ones."""
    plan, profile, cluster = case
    program = lower(plan, profile, cluster, QueueModel.SINGLE)
    for queue_model in (QueueModel.PAIR, QueueModel.ORDERED_PAIR):
        verify(program, plan, profile, cluster, queue_model)
        interpret(program, queue_model)


def test_a_looser_lowering_is_caught_under_a_stricter_queue_model() -> None:
    """The ordered-pair program of 1F1B on two ranks posts both ends out of turn for one shared queue."""
    program = lower(PAIR_PLAN, PAIR_PROFILE, devices(2))
    verify(program, PAIR_PLAN, PAIR_PROFILE, devices(2))
    for queue_model in (QueueModel.PAIR, QueueModel.SINGLE):
        with pytest.raises(RefusedError, match="deadlock, a circle of"):
            verify(program, PAIR_PLAN, PAIR_PROFILE, devices(2), queue_model)


@pytest.mark.parametrize("named", NAMED_ORDERS, ids=lambda named: named.name)
@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
def test_named_orders_finish_for_any_number_of_micro_batches(named: NamedOrder, num_ranks: int) -> None:
    """Fewer micro-batches than stages, as many, one more, and odd ones: every named order lowers and verifies."""
    for num_micro_batches in sorted({1, 2, num_ranks - 1, num_ranks, num_ranks + 1, 2 * num_ranks - 1}):
        placement = named.placement(num_ranks)
        plan = Plan(
            model="equal",
            num_micro_batches=num_micro_batches,
            partition=Partition((1,) * placement.num_stages),
            placement=placement,
            order=named.build(num_ranks, num_micro_batches),
        )
        for queue_model in QueueModel:
            verify_plan(plan, equal_layers(placement.num_stages), devices(num_ranks), queue_model)


def test_lowering_is_deterministic() -> None:
    """The same plan gives the same digest, whatever was lowered before."""
    first = lower(V_PLAN, V_PROFILE, devices(2)).digest
    lower(PAIR_PLAN, PAIR_PROFILE, devices(2))
    assert lower(V_PLAN, V_PROFILE, devices(2)).digest == first


def test_zero_durations_keep_dependencies_in_order() -> None:
    """Ops that take no time end together; the message order still follows the dependencies."""
    profile = equal_layers(3)
    free = Cluster(ranks=devices(3).ranks)
    times = {"gpu": LayerTimes(forward_ns=0, backward_ns=0, input_gradient_ns=0, weight_gradient_ns=0)}
    profile = replace(profile, layers=tuple(replace(layer, times_by_device=times) for layer in profile.layers))
    plan = plan_of(["2F0 2F1 2B0 2B1", "1F0 1F1 1B0 1B1", "0F0 0F1 0B0 0B1"], "2,1,0", 2)
    for queue_model in QueueModel:
        interpret(lower(plan, profile, free, queue_model), queue_model)


def test_a_plan_of_another_model_is_refused() -> None:
    """Layer counts are compared before anything is lowered."""
    with pytest.raises(PlanError, match="covers 2 layers; the profile has 4"):
        lower(PAIR_PLAN, V_PROFILE, devices(2))


def test_compute_only_where_one_rank_holds_all() -> None:
    """One rank needs no messages at all."""
    order = Order.of([[Op(0, OpKind.F, 0), Op(1, OpKind.F, 0), Op(1, OpKind.B, 0), Op(0, OpKind.B, 0)]])
    plan = Plan(
        model="equal",
        num_micro_batches=1,
        partition=Partition((1, 1)),
        placement=Placement((0, 0)),
        order=order,
    )
    (steps,) = lower(plan, equal_layers(2), devices(1)).instructions_by_rank
    assert [step for step in steps if not isinstance(step, Compute)] == list(steps[-3:])


@pytest.mark.parametrize("queue_model", QueueModel)
def test_waits_for_sends_do_not_close_a_circle(queue_model: QueueModel) -> None:
    """Rank 1 puts W before it takes the next forward: neither rank may wait for its send before its next op."""
    plan = plan_of(["0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1I0 1W0 1F1 1B1 1F2 1B2"], "0,1", 3)
    program = lower(plan, PAIR_PROFILE, devices(2), queue_model, receive_ahead=0)
    verify(program, plan, PAIR_PROFILE, devices(2))
    interpret(program, queue_model)
