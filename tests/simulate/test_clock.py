"""The compiled clock and memory walk against a slow simulation written another way, and against published formulas."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeplan.cluster import Cluster, Link, Rank, equal_ranks
from pipeplan.errors import PlanError, ProfileError
from pipeplan.plan.layout import Partition, Placement
from pipeplan.plan.ops import Op, OpKind, Order
from pipeplan.plan.types import Plan, QueueModel
from pipeplan.profile.types import LayerProfile, LayerTimes, Profile, Recomputation
from pipeplan.simulate import ResultKind, needs, result_of, simulate
from tests.simulate.test_golden import one_f_one_b


def layer(
    index: int, *, times: tuple[int, int, int, int] = (10, 20, 12, 8), size: int = 5, **more: object
) -> LayerProfile:
    forward, backward, input_gradient, weight_gradient = times
    fields: dict[str, object] = {
        "name": f"l{index}",
        "kind": "mlp",
        "num_parameters": 3,
        "output_bytes": size,
        "activation_bytes": 7,
        "held_for_w_bytes": 4,
        "times_by_device": {
            "x": LayerTimes(
                forward_ns=forward,
                backward_ns=backward,
                input_gradient_ns=input_gradient,
                weight_gradient_ns=weight_gradient,
            )
        },
    }
    return LayerProfile(**{**fields, **more})  # type: ignore[arg-type]


def profile_of(layers: list[LayerProfile], *, count_boundary_buffers: bool = False) -> Profile:
    return Profile(
        model="m",
        source="estimated",
        micro_batch_size=1,
        sequence_length=1,
        dtype="fp32",
        state_bytes_per_parameter=16,
        layers=tuple(layers),
        count_boundary_buffers=count_boundary_buffers,
    )


@st.composite
def cases(draw: st.DrawFn) -> tuple[Plan, Profile, Cluster]:
    """Random costs, placement, links and a random valid order (a random topological sort of the ops)."""
    num_ranks = draw(st.integers(1, 4))
    num_stages = draw(st.integers(num_ranks, num_ranks + 3))
    num_micro_batches = draw(st.integers(1, 4))
    number = st.integers(0, 30)
    layers = [
        layer(
            index,
            times=draw(st.tuples(number, number, number, number)),
            size=draw(st.integers(0, 20)),
            activation_bytes=draw(number),
            held_for_w_bytes=draw(number),
            workspace_bytes=draw(number),
            untrained_bytes=draw(number),
        )
        for index in range(num_stages)
    ]
    ranks = draw(
        st.permutations(
            list(range(num_ranks)) + [draw(st.integers(0, num_ranks - 1)) for _ in range(num_stages - num_ranks)]
        )
    )
    waiting: list[Op] = []
    for stage in range(num_stages):
        for micro_batch in range(num_micro_batches):
            kinds = draw(st.sampled_from(["FB", "FIW"]))
            waiting.extend(Op(stage, OpKind[kind], micro_batch) for kind in kinds)
    ops_by_rank: list[list[Op]] = [[] for _ in range(num_ranks)]
    done: set[object] = set()
    while waiting:
        ready = [op for op in waiting if all(result in done for result in needs(op, num_stages))]
        op = draw(st.sampled_from(ready))
        waiting.remove(op)
        done.add(result_of(op))
        ops_by_rank[ranks[op.stage]].append(op)
    link = draw(st.none() | st.builds(Link, st.integers(0, 5), st.sampled_from([0.5, 1.0, 2.0])))
    overheads = draw(st.fixed_dictionaries({key: st.integers(0, 3) for key in ("F", "B", "I", "W", "send", "wait")}))
    cluster = Cluster(
        ranks=tuple(Rank("x", slowdown=draw(st.sampled_from([1.0, 2.0]))) for _ in range(num_ranks)),
        within_node=link,
        host_overhead_ns=overheads,
    )
    plan = Plan(
        model="m",
        num_micro_batches=num_micro_batches,
        partition=Partition((1,) * num_stages),
        placement=Placement(tuple(ranks)),
        order=Order.of(ops_by_rank),
        queue_model=draw(st.sampled_from(list(QueueModel))),
    )
    return plan, profile_of(layers, count_boundary_buffers=draw(st.booleans())), cluster


def slow_simulation(plan: Plan, profile: Profile, cluster: Cluster) -> dict[Op, tuple[int, int]]:
    """Advance time tick by tick; every tick, deliver, finish and start whatever can be."""
    start: dict[Op, int] = {}
    end: dict[Op, int] = {}
    arrived: dict[tuple[str, int, int], int] = {}
    queue_free: dict[object, int] = {}
    position = [0] * cluster.num_ranks
    free = [0] * cluster.num_ranks
    ranks = plan.placement.rank_by_stage
    overhead = cluster.host_overhead_ns
    total = plan.order.num_ops
    column = {
        OpKind.F: "forward_ns",
        OpKind.B: "backward_ns",
        OpKind.I: "input_gradient_ns",
        OpKind.W: "weight_gradient_ns",
    }
    now = 0
    finished: set[Op] = set()
    while len(finished) < total:
        changed = True
        while changed:
            changed = False
            # Finish ops in the order of their ranks, and queue what they yield.
            for rank, ops in enumerate(plan.order):
                if position[rank] < len(ops):
                    op = ops[position[rank]]
                    if op in end and end[op] == now and op not in finished:
                        finished.add(op)
                        position[rank] += 1
                        free[rank] = now
                        changed = True
                        name = "F" if op.kind is OpKind.F else "G"
                        target = op.stage + 1 if name == "F" else op.stage - 1
                        if op.kind is not OpKind.W and 0 <= target < plan.num_stages:
                            key = (name, op.stage, op.micro_batch)
                            if ranks[target] == rank:
                                arrived[key] = now
                            else:
                                free[rank] = now + overhead["send"]
                                pair = (rank, ranks[target])
                                queue: object = {
                                    QueueModel.ORDERED_PAIR: pair,
                                    QueueModel.PAIR: frozenset(pair),
                                    QueueModel.SINGLE: None,
                                }[plan.queue_model]
                                size = profile.layers[op.stage if name == "F" else target].output_bytes
                                begin = max(now, queue_free.get(queue, 0))
                                queue_free[queue] = begin + cluster.transfer_ns(*pair, size)
                                arrived[key] = queue_free[queue]
            for rank, ops in enumerate(plan.order):
                if position[rank] == len(ops):
                    continue
                op = ops[position[rank]]
                if op in start:
                    continue
                inputs: list[int | None] = []
                wait = 0
                if op.kind is OpKind.F and op.stage > 0:
                    inputs.append(arrived.get(("F", op.stage - 1, op.micro_batch)))
                    wait = overhead["wait"] * (ranks[op.stage - 1] != rank)
                if op.kind in (OpKind.B, OpKind.I) and op.stage + 1 < plan.num_stages:
                    inputs.append(arrived.get(("G", op.stage + 1, op.micro_batch)))
                    wait = overhead["wait"] * (ranks[op.stage + 1] != rank)
                if any(moment is None for moment in inputs):
                    continue
                begin = max([free[rank], *(moment for moment in inputs if moment is not None)]) + wait
                start[op] = begin
                duration = getattr(profile.layers[op.stage].times_by_device["x"], column[op.kind])
                end[op] = begin + round(duration * cluster.ranks[rank].slowdown) + overhead[op.kind.name]
                changed = True
        now += 1
    return {op: (start[op], end[op]) for op in start}


@settings(max_examples=150, deadline=None)
@given(cases())
def test_clock_equals_slow_simulation(case: tuple[Plan, Profile, Cluster]) -> None:
    """Every op starts and ends when a tick-by-tick simulation says."""
    plan, profile, cluster = case
    timeline = simulate(plan, profile, cluster)
    expected = slow_simulation(plan, profile, cluster)
    for ops in timeline.ops_by_rank:
        for timed in ops:
            assert (timed.start_ns, timed.end_ns) == expected[timed.op], timed.op


@settings(max_examples=150, deadline=None)
@given(cases())
def test_memory_equals_replay(case: tuple[Plan, Profile, Cluster]) -> None:
    """The peak of every rank equals a replay that adds up what is alive at every moment."""
    plan, profile, cluster = case
    timeline = simulate(plan, profile, cluster)
    ranks = plan.placement.rank_by_stage
    start = {timed.op: timed.start_ns for ops in timeline.ops_by_rank for timed in ops}
    end = {timed.op: timed.end_ns for ops in timeline.ops_by_rank for timed in ops}
    moved = {(t.kind, t.source_stage, t.micro_batch): (t.start_ns, t.end_ns) for t in timeline.transfers}
    for rank, ops in enumerate(plan.order):
        messages: list[tuple[int, int, int]] = []  # from, to, bytes
        for op in (
            op for ops_ in plan.order for op in ops_ if op.kind is not OpKind.W and profile.count_boundary_buffers
        ):
            forward = op.kind is OpKind.F
            target = op.stage + (1 if forward else -1)
            if not 0 <= target < plan.num_stages:
                continue
            size = profile.layers[op.stage if forward else target].output_bytes
            kind = ResultKind.FORWARD if forward else ResultKind.INPUT_GRADIENT
            begin, arrival = moved.get((kind, op.stage, op.micro_batch), (end[op], end[op]))
            if ranks[target] == rank:
                if forward:
                    until = start[Op(target, OpKind.F, op.micro_batch)]
                else:
                    until = next(
                        end[o] for o in (Op(target, k, op.micro_batch) for k in (OpKind.B, OpKind.I)) if o in end
                    )
                messages.append((begin, until, size))
            if ranks[op.stage] == rank and ranks[target] != rank:
                messages.append((end[op], arrival, size))
        peak, alive = 0, 0
        for op in ops:
            profile_layer = profile.layers[op.stage]
            if op.kind is OpKind.F:
                alive += profile_layer.activation_bytes
            for moment in {start[op], end[op], *(f for f, _, _ in messages if start[op] <= f <= end[op])}:
                # A buffer released at the very moment when the op starts is gone; at the end it still counts.
                in_flight = sum(b for f, u, b in messages if f <= moment and (u > moment or (u == moment > start[op])))
                peak = max(peak, alive + in_flight + profile_layer.workspace_bytes)
            if op.kind is not OpKind.F and op.kind is not OpKind.W:
                alive -= profile_layer.activation_bytes
            if op.kind is OpKind.I:
                alive += profile_layer.held_for_w_bytes
                in_flight = sum(b for f, u, b in messages if f <= end[op] < u)
                peak = max(peak, alive + in_flight)
            if op.kind is OpKind.W:
                alive -= profile_layer.held_for_w_bytes
        got = timeline.memory_by_rank[rank]
        frozen = sum(profile.layers[stage].untrained_bytes for stage in plan.placement.stages(rank))
        assert got.states == frozen + sum(3 * 16 for stage in plan.placement.stages(rank))
        # Buffers may also peak while the rank is idle, which this replay does not look at.
        assert got.total - got.states >= peak
        if not profile.count_boundary_buffers:
            assert got.total - got.states == peak


@pytest.mark.parametrize(("num_ranks", "num_micro_batches"), [(2, 1), (2, 3), (4, 4), (4, 8), (8, 5)])
def test_published_bubble_and_memory_of_1f1b(num_ranks: int, num_micro_batches: int) -> None:
    """1F1B takes (M + P - 1)(F + B) on equal stages and keeps min(P - r, M) micro-batches on rank r."""
    layers = [layer(index) for index in range(num_ranks)]
    plan = Plan(
        model="m",
        num_micro_batches=num_micro_batches,
        partition=Partition((1,) * num_ranks),
        placement=Placement(tuple(range(num_ranks))),
        order=one_f_one_b(num_ranks, num_micro_batches),
    )
    timeline = simulate(plan, profile_of(layers), equal_ranks(num_ranks, "x"))
    assert timeline.makespan_ns == (num_micro_batches + num_ranks - 1) * 30
    assert [peak.activations for peak in timeline.memory_by_rank] == [
        7 * min(num_ranks - rank, num_micro_batches) for rank in range(num_ranks)
    ]
    assert timeline.bubble_fraction == pytest.approx((num_ranks - 1) / (num_micro_batches + num_ranks - 1))
    for rank, bubble in enumerate(timeline.bubble_by_rank):
        assert bubble.ramp_up_ns == 10 * rank
        assert bubble.ramp_down_ns == 20 * rank
        assert bubble.total_ns + timeline.busy_ns_by_rank[rank] == timeline.makespan_ns


def test_tied_weights_are_charged_once_a_rank_and_reduced_between_ranks() -> None:
    """A tied weight on two ranks costs an all-reduce after the last op; on one rank it is stored once."""
    layers = [layer(0, tied="e", num_parameters=100), layer(1), layer(2, tied="e", num_parameters=100)]
    cluster = replace(equal_ranks(2, "x"), within_node=Link(1, 1.0))
    profile = profile_of(layers)

    def run(placement: tuple[int, ...], order: list[str]) -> tuple[int, int, list[int]]:
        plan = Plan(
            model="m",
            num_micro_batches=1,
            partition=Partition((1, 1, 1)),
            placement=Placement(placement),
            order=Order.parse(order),
        )
        timeline = simulate(plan, profile, cluster)
        return timeline.makespan_ns, timeline.last_op_ns, [peak.states for peak in timeline.memory_by_rank]

    apart = run((0, 0, 1), ["0F0 1F0 1B0 0B0", "2F0 2B0"])
    together = run((0, 1, 0), ["0F0 2F0 2B0 0B0", "1F0 1B0"])
    assert apart[0] - apart[1] == 2 * 1 + 400  # 2 (n - 1) latencies, 2 (n - 1) / n of 100 fp32 gradients at 1 byte/ns
    assert together[0] == together[1]
    assert apart[2] == [103 * 16, 100 * 16]
    assert together[2] == [100 * 16, 3 * 16]


def test_recomputed_stage_takes_its_own_figures() -> None:
    """A recomputed stage runs with the recomputation times and keeps the recomputation bytes."""
    times = {"x": LayerTimes(forward_ns=10, backward_ns=31, input_gradient_ns=23, weight_gradient_ns=8)}
    layers = [layer(0, recomputation=Recomputation(times, 2)), layer(1)]
    plan = Plan(
        model="m",
        num_micro_batches=1,
        partition=Partition((1, 1)),
        placement=Placement((0, 1)),
        order=Order.parse(["0F0 0B0", "1F0 1B0"]),
        recomputed_stages=(0,),
    )
    timeline = simulate(plan, profile_of(layers), equal_ranks(2, "x"))
    assert timeline.busy_ns_by_rank == (41, 30)
    assert [peak.activations for peak in timeline.memory_by_rank] == [2, 7]
    with pytest.raises(ProfileError, match="'l1' has no 'recompute'"):
        simulate(replace(plan, recomputed_stages=(1,)), profile_of(layers), equal_ranks(2, "x"))


def test_deadlock_is_an_error_that_names_the_stuck_ops() -> None:
    """An order that can't finish is refused, not simulated in part."""
    plan = Plan(
        model="m",
        num_micro_batches=1,
        partition=Partition((1, 1)),
        placement=Placement((0, 1)),
        order=Order.parse(["0B0 0F0", "1F0 1B0"]),
    )
    with pytest.raises(PlanError, match="0B0 on rank 0, 1F0 on rank 1"):
        simulate(plan, profile_of([layer(0), layer(1)]), equal_ranks(2, "x"))
