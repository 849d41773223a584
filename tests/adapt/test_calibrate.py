"""Calibration recovers the costs of a machine whose traces the simulator made, and reproduces what it measured."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from pipeplan.adapt.calibrate import calibrate
from pipeplan.cluster import Cluster, Link, Rank, equal_ranks
from pipeplan.errors import ClusterError, ProfileError
from pipeplan.plan.layout import Partition
from pipeplan.plan.ops import Op, OpKind, Order
from pipeplan.plan.orders import folded_placement, looped_placement, one_f_one_b, zb_h1, zb_v
from pipeplan.plan.types import Plan
from pipeplan.profile.types import LayerProfile, LayerTimes, Profile, Recomputation
from pipeplan.program.trace import Trace
from pipeplan.program.types import Compute, Send
from pipeplan.simulate import simulate
from tests.adapt.synthetic import DEVICE, kinds_in, profile_of, trace_of

FORWARD_MS = [1.0, 6.0, 3.0, 9.0, 2.0, 7.0, 4.0, 12.0]
LINK = Link(latency_ns=300_000, gb_per_s=10.0)
OVERHEADS_NS = {
    "F": 300_000,
    "B": 500_000,
    "I": 600_000,
    "W": 400_000,
    "send": 200_000,
    "wait": 100_000,
    "step": 2_000_000,
}


def machine(**changes: object) -> Cluster:
    """Return four ranks with overheads on slow links."""
    return replace(
        equal_ranks(4, DEVICE), within_node=LINK, between_nodes=LINK, host_overhead_ns=OVERHEADS_NS, **changes
    )


def unknowing(cluster: Cluster) -> Cluster:
    """Return the same cluster without overheads and with links that have no latency."""
    link = Link(0, LINK.gb_per_s)
    return replace(cluster, host_overhead_ns={}, within_node=link, between_nodes=link)


def plan_of(order: Order, partition: str = "1,2,3,2", model: str = "synthetic", **options: object) -> Plan:
    """Return the plan of an order with one stage a rank."""
    return Plan(
        model=model,
        num_micro_batches=1 + max(op.micro_batch for ops in order for op in ops),
        partition=Partition.parse(partition),
        placement=looped_placement(order.num_ranks, 1),
        order=order,
        **options,  # type: ignore[arg-type]
    )


def all_kinds(num_micro_batches: int = 8) -> Order:
    """Return ZB-H1 with whole backwards for odd micro-batches: an order with F, B, I and W."""
    return Order.of(
        [
            Op(op.stage, OpKind.B if op.kind is OpKind.I and op.micro_batch % 2 else op.kind, op.micro_batch)
            for op in ops
            if not (op.kind is OpKind.W and op.micro_batch % 2)
        ]
        for ops in zb_h1(4, num_micro_batches)
    )


def slowed(profile: Profile, factors: list[float]) -> Profile:
    """Return the profile with each layer slower by its factor."""

    def scale(times: LayerTimes, factor: float) -> LayerTimes:
        return LayerTimes(
            forward_ns=round(times.forward_ns * factor),
            backward_ns=round(times.backward_ns * factor),
            input_gradient_ns=round((times.input_gradient_ns or 0) * factor),
            weight_gradient_ns=round((times.weight_gradient_ns or 0) * factor),
        )

    layers = [
        replace(layer, times_by_device={DEVICE: scale(layer.times_by_device[DEVICE], factor)})
        for layer, factor in zip(profile.layers, factors, strict=True)
    ]
    return replace(profile, layers=tuple(layers))


def test_overheads_are_recovered() -> None:
    """Where the profile is right, every overhead and the links' latency come out as they are."""
    profile, cluster = profile_of(FORWARD_MS), machine()
    trace = trace_of(plan_of(all_kinds()), profile, cluster)
    assert kinds_in(trace) == set(OpKind)
    found = calibrate([trace], profile, unknowing(cluster))
    for key, expected in OVERHEADS_NS.items():
        assert found.cluster.host_overhead_ns[key] == pytest.approx(expected, rel=0.05), key
    assert found.cluster.within_node is not None
    assert found.cluster.within_node.latency_ns == pytest.approx(LINK.latency_ns, rel=0.05)
    assert found.cluster.within_node.gb_per_s == LINK.gb_per_s
    assert found.notes == ()


def test_a_calibrated_prediction_holds_for_another_plan() -> None:
    """What one plan taught predicts another order on another placement and partition."""
    profile, cluster = profile_of(FORWARD_MS), machine()
    found = calibrate([trace_of(plan_of(all_kinds()), profile, cluster)], profile, unknowing(cluster))
    other = Plan(
        model="synthetic",
        num_micro_batches=8,
        partition=Partition.parse("1,1,1,1,1,1,1,1"),
        placement=folded_placement(4, 2),
        order=zb_v(4, 8),
    )
    truth = simulate(other, profile, cluster).makespan_ns
    before = simulate(other, profile, unknowing(cluster)).makespan_ns
    after = simulate(other, found.profile, found.cluster).makespan_ns
    assert after == pytest.approx(truth, rel=0.005)
    assert abs(before - truth) > 10 * abs(after - truth)


@pytest.mark.parametrize("source", ["measured", "estimated"])
def test_stage_sums_match_what_was_measured(source: str) -> None:
    """A profile that is wrong layer by layer is corrected so that every stage takes what it was measured to take."""
    profile, cluster = profile_of(FORWARD_MS, source=source), machine()
    truth = slowed(profile, [1.3, 1.1, 0.8, 1.2, 1.25, 1.0, 0.9, 1.15])
    trace = trace_of(plan_of(all_kinds()), truth, cluster)
    found = calibrate([trace], profile, unknowing(cluster))
    predicted = simulate(trace.plan, found.profile, found.cluster)
    for ours, real in zip(predicted.ops_by_rank, trace.timeline.ops_by_rank, strict=True):
        for timed, measured in zip(ours, real, strict=True):
            assert timed.op == measured.op
            assert timed.end_ns - timed.start_ns == pytest.approx(measured.end_ns - measured.start_ns, abs=2_000)
    assert found.after_ns == pytest.approx(trace.finish_ns, rel=0.005)
    assert found.measured_ns == trace.finish_ns


def test_an_estimate_that_is_off_as_a_whole_is_no_overhead() -> None:
    """An estimated profile 25 % too quick is corrected by a factor; the overheads stay those of the machine."""
    profile, cluster = profile_of(FORWARD_MS, source="estimated"), machine()
    truth = slowed(profile, [1.25] * len(FORWARD_MS))
    found = calibrate([trace_of(plan_of(all_kinds()), truth, cluster)], profile, unknowing(cluster))
    for kind in OpKind:
        assert found.factor_by_kind[kind] == pytest.approx(1.25, rel=0.02)
        assert found.cluster.host_overhead_ns[kind.name] == pytest.approx(OVERHEADS_NS[kind.name], rel=0.2)


def test_traces_of_two_partitions_tell_layers_apart() -> None:
    """A layer that shares its stage with others in one trace and has its own in another gets its own time."""
    profile = profile_of([4.0, 4.0, 4.0, 4.0, 4.0])
    cluster = replace(equal_ranks(2, DEVICE), host_overhead_ns={})
    truth = slowed(profile, [1.0, 1.0, 1.5, 1.0, 1.0])
    traces = [trace_of(plan_of(one_f_one_b(2, 4), partition), truth, cluster) for partition in ("2,3", "3,2")]
    found = calibrate(traces, profile, cluster).profile
    times = [layer.times_by_device[DEVICE].forward_ns / 4e6 for layer in found.layers]
    assert times[2] == pytest.approx(1.5, rel=0.02)
    assert times[0] == pytest.approx(1.0, rel=0.02)


def test_slower_layers_that_look_like_an_overhead() -> None:
    """Stages of one size can't tell slower layers from an overhead, which is said; smaller stages beside them can."""
    profile, cluster = profile_of([4.0] * 8), replace(machine(), host_overhead_ns={})
    truth = slowed(profile, [1.1] * 8)
    even = trace_of(plan_of(all_kinds(), "2,2,2,2"), truth, cluster)
    uneven = trace_of(plan_of(all_kinds(), "1,3,3,1"), truth, cluster)
    alone = calibrate([even], profile, cluster)
    assert alone.cluster.host_overhead_ns["F"] > 500_000
    assert "plan with smaller stages" in alone.notes[0]
    both = calibrate([even, uneven], profile, cluster)
    assert both.cluster.host_overhead_ns["F"] < 100_000
    assert both.notes == ()


def test_traces_that_tell_the_layers_from_the_overhead() -> None:
    """Where a trace says what the layers took, stages of one size are enough, to a tenth of a millisecond."""
    profile, cluster = profile_of([4.0] * 8), machine()
    truth = slowed(profile, [1.1] * 8)
    even = trace_of(plan_of(all_kinds(), "2,2,2,2"), truth, cluster, tells_layers=True)
    found = calibrate([even], profile, unknowing(cluster))
    assert found.notes == ()
    for kind in OpKind:
        assert found.factor_by_kind[kind] == pytest.approx(1.1, rel=0.015)
        assert found.cluster.host_overhead_ns[kind.name] == pytest.approx(OVERHEADS_NS[kind.name], abs=103_000)
    uneven = trace_of(plan_of(all_kinds(), "1,3,3,1"), truth, cluster, tells_layers=True)
    found = calibrate([uneven], profile, unknowing(cluster))
    for kind in OpKind:
        assert found.factor_by_kind[kind] == pytest.approx(1.1, rel=0.003)
        assert found.cluster.host_overhead_ns[kind.name] == pytest.approx(OVERHEADS_NS[kind.name], abs=30_000)
    silent = trace_of(plan_of(all_kinds(), "2,2,2,2"), truth, cluster)
    assert "plan with smaller stages" in calibrate([even, silent], profile, unknowing(cluster)).notes[0]


def test_hiccups_do_not_matter() -> None:
    """Single ops that take far too long, as on a shared machine, leave the result as it is."""
    profile, cluster = profile_of(FORWARD_MS), machine()
    clean = trace_of(plan_of(all_kinds(16)), profile, cluster)
    found = calibrate([disturbed(clean)], profile, unknowing(cluster))
    for kind in OpKind:
        assert found.cluster.host_overhead_ns[kind.name] == pytest.approx(OVERHEADS_NS[kind.name], rel=0.05)


def disturbed(trace: Trace) -> Trace:
    """Return the trace with one op in six and one send in six late by up to 40 ms; what follows is late as well."""
    rng = random.Random(5)
    ranks = []
    for rank in trace.ranks:
        late_ns, steps = 0, []
        for step in rank.steps:
            start_ns = step.start_ns + late_ns
            if isinstance(step.instruction, Compute | Send) and rng.random() < 1 / 6:
                late_ns += rng.randrange(40_000_000)
            steps.append(replace(step, start_ns=start_ns, end_ns=step.end_ns + late_ns))
        ranks.append(replace(rank, steps=tuple(steps), finish_ns=rank.finish_ns + late_ns))
    return replace(trace, ranks=tuple(ranks))


def test_kinds_without_ops_follow_their_relatives_and_are_named() -> None:
    """A 1F1B trace says nothing about halves: they take B's overhead and factor, and the user is told."""
    profile, cluster = profile_of(FORWARD_MS), machine()
    truth = slowed(profile, [1.2] * len(FORWARD_MS))
    found = calibrate([trace_of(plan_of(one_f_one_b(4, 8)), truth, cluster)], profile, unknowing(cluster))
    overheads = found.cluster.host_overhead_ns
    assert overheads["I"] == overheads["W"] == overheads["B"]
    assert "no I, W in the trace" in found.notes[0]
    for layer, before in zip(found.profile.layers, profile.layers, strict=True):
        times, old = layer.times_by_device[DEVICE], before.times_by_device[DEVICE]
        factor = times.backward_ns / old.backward_ns
        assert times.input_gradient_ns == pytest.approx((old.input_gradient_ns or 0) * factor, abs=1)


def test_slower_ranks_are_told_from_slower_layers() -> None:
    """A rank's known slowdown is taken out before its layers are corrected."""
    profile = profile_of(FORWARD_MS)
    cluster = replace(machine(), ranks=(Rank(DEVICE), Rank(DEVICE, slowdown=1.5), Rank(DEVICE), Rank(DEVICE)))
    found = calibrate([trace_of(plan_of(all_kinds()), profile, cluster)], profile, unknowing(cluster))
    for layer, before in zip(found.profile.layers, profile.layers, strict=True):
        assert layer.times_by_device[DEVICE].forward_ns == pytest.approx(
            before.times_by_device[DEVICE].forward_ns, rel=0.02
        )


def test_recomputed_stages_correct_the_figures_with_recomputation() -> None:
    """A stage that recomputes is compared with the figures for that; the others' plain figures are corrected."""
    profile = profile_of(FORWARD_MS)
    plain = {layer.name: layer.times_by_device[DEVICE] for layer in profile.layers}

    def recomputable(layer: LayerProfile, factor: float) -> LayerProfile:
        times = plain[layer.name]
        repeated = replace(
            times,
            forward_ns=round(times.forward_ns * factor),
            backward_ns=round((times.backward_ns + times.forward_ns) * factor),
        )
        return replace(layer, recomputation=Recomputation({DEVICE: repeated}, 1))

    profile = replace(profile, layers=tuple(recomputable(layer, 1.0) for layer in profile.layers))
    truth = replace(profile, layers=tuple(recomputable(layer, 1.4) for layer in profile.layers))
    cluster = machine()
    trace = trace_of(plan_of(one_f_one_b(4, 8), recomputed_stages=(1, 3)), truth, cluster)
    found = calibrate([trace], profile, unknowing(cluster))
    predicted = simulate(trace.plan, found.profile, found.cluster)
    for ours, real in zip(predicted.busy_ns_by_rank, trace.timeline.busy_ns_by_rank, strict=True):
        assert ours == pytest.approx(real, rel=1e-3)


def test_traces_of_something_else_are_refused() -> None:
    """A trace of other layers or other ranks is refused with both counts."""
    profile, cluster = profile_of(FORWARD_MS), machine()
    trace = trace_of(plan_of(all_kinds()), profile, cluster)
    with pytest.raises(ProfileError, match="8 layers"):
        calibrate([trace], profile_of([1.0, 2.0]), cluster)
    with pytest.raises(ClusterError, match="4 ranks"):
        calibrate([trace], profile, equal_ranks(2, DEVICE))
