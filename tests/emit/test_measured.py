"""Prediction and reality side by side."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipeplan.cluster import Link, equal_ranks
from pipeplan.emit.measured import compare_ops, measured_summary, measured_tables, rank_times
from pipeplan.plan.layout import Partition
from pipeplan.plan.ops import OpKind
from pipeplan.plan.orders import looped_placement, zb_h1
from pipeplan.plan.types import Plan
from pipeplan.program.trace import Trace
from pipeplan.simulate import Timeline, simulate
from tests.adapt.synthetic import DEVICE, profile_of, trace_of


@pytest.fixture
def both() -> tuple[Timeline, Trace]:
    """A prediction without overheads, and the trace of a machine that has them and is slower on rank 1."""
    profile = profile_of([4.0, 5.0, 6.0])
    plan = Plan(
        model="synthetic",
        num_micro_batches=4,
        partition=Partition((2, 1)),
        placement=looped_placement(2, 1),
        order=zb_h1(2, 4),
    )
    cluster = equal_ranks(2, DEVICE)
    overheads = {"F": 100_000, "I": 200_000, "W": 0, "send": 50_000, "wait": 20_000, "step": 300_000}
    link = Link(500_000, 100.0)
    slow = replace(
        cluster,
        ranks=(cluster.ranks[0], replace(cluster.ranks[1], slowdown=1.5)),
        within_node=link,
        host_overhead_ns=overheads,
    )
    return simulate(plan, profile, cluster), trace_of(plan, profile, slow)


def test_ops_are_compared_by_rank_and_kind(both: tuple[Timeline, Trace]) -> None:
    """Means are those of the costs that made the two timelines."""
    found = {(row.rank, row.kind): row for row in compare_ops(*both)}
    assert set(found) == {(rank, kind) for rank in (0, 1) for kind in (OpKind.F, OpKind.I, OpKind.W)}
    assert all(row.count == 4 for row in found.values())
    assert found[0, OpKind.F].predicted_ns == 9_000_000
    assert found[0, OpKind.F].measured_ns == 9_100_000
    assert found[1, OpKind.I].predicted_ns == 6_600_000
    assert found[1, OpKind.I].measured_ns == 6_600_000 * 1.5 + 200_000


def test_time_of_a_rank_adds_up(both: tuple[Timeline, Trace]) -> None:
    """Busy time, waits, messages and the end of the batch fill a rank's batch, but for gaps before its first steps."""
    predicted, trace = both
    for rank, row in enumerate(rank_times(predicted, trace)):
        gaps_ns = trace.ranks[rank].steps[0].start_ns
        total_ns = row.busy_ns + row.waiting_ns + row.messaging_ns + row.ending_ns + gaps_ns
        assert total_ns == pytest.approx(trace.ranks[rank].finish_ns, abs=50_000)
        assert row.idle_ns == trace.timeline.bubble_by_rank[rank].total_ns
        assert row.predicted_idle_ns == predicted.bubble_by_rank[rank].total_ns


def test_tables_and_data_agree(both: tuple[Timeline, Trace]) -> None:
    """The tables' figures are those of the summary for scripts; the footnote says by how much the prediction is off."""
    predicted, trace = both
    ops, times = measured_tables(predicted, trace)
    summary = measured_summary(predicted, trace)
    assert len(ops.rows) == len(summary["ops"]) == 6
    assert len(times.rows) == len(summary["ranks"]) == 2
    assert float(ops.rows[0][4]) == pytest.approx(summary["ops"][0]["measured_mean_ms"], abs=0.01)
    error = predicted.makespan_ns / trace.finish_ns - 1
    assert times.footnote is not None
    assert f"({error:+.1%})" in times.footnote
