"""A measured batch beside its prediction: ops by rank and kind, and where the rest of each rank's time goes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from pipeplan.emit.tables import Table, format_ms
from pipeplan.plan.ops import OpKind
from pipeplan.program.trace import RankTrace, Trace
from pipeplan.program.types import Compute, Instruction, Receive, Send, WaitReceive, WaitSend
from pipeplan.simulate import TimedOp, Timeline
from pipeplan.units import ms_from_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedOps:
    """The ops of one kind on one rank: how many, and their mean time as predicted and as measured."""

    rank: int
    kind: OpKind
    count: int
    predicted_ns: float
    measured_ns: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTime:
    """Where the time of one rank went, in nanoseconds.

    Attributes:
        waiting_ns: In waits for messages.
        messaging_ns: Starting sends and posting receives.
        ending_ns: Reductions, the optimizer step and what follows it; waits for other ranks included.
        predicted_idle_ns, idle_ns: Time up to the last op of the batch that no op ran.
    """

    busy_ns: int
    waiting_ns: int
    messaging_ns: int
    ending_ns: int
    predicted_idle_ns: int
    idle_ns: int


def compare_ops(predicted: Timeline, trace: Trace) -> tuple[ComparedOps, ...]:
    """Return the ops of every rank and kind."""
    compared: list[ComparedOps] = []
    for rank, (ops, real) in enumerate(zip(predicted.ops_by_rank, trace.timeline.ops_by_rank, strict=True)):
        expected, found = _durations(ops), _durations(real)
        compared.extend(
            ComparedOps(
                rank=rank,
                kind=kind,
                count=len(found[kind]),
                predicted_ns=fmean(expected[kind]),
                measured_ns=fmean(found[kind]),
            )
            for kind in OpKind
            if kind in expected and kind in found
        )
    return tuple(compared)


def _durations(ops: Iterable[TimedOp]) -> dict[OpKind, list[int]]:
    durations: dict[OpKind, list[int]] = defaultdict(list)
    for timed in ops:
        durations[timed.op.kind].append(timed.end_ns - timed.start_ns)
    return durations


def rank_times(predicted: Timeline, trace: Trace) -> tuple[RankTime, ...]:
    """Return where the time of every rank went."""
    measured = trace.timeline
    return tuple(
        RankTime(
            busy_ns=measured.busy_ns_by_rank[rank],
            waiting_ns=_total_ns(steps, (WaitReceive, WaitSend)),
            messaging_ns=_total_ns(steps, (Send, Receive)),
            ending_ns=steps.finish_ns
            - max((step.end_ns for step in steps.steps if isinstance(step.instruction, Compute)), default=0),
            predicted_idle_ns=predicted.bubble_by_rank[rank].total_ns,
            idle_ns=measured.bubble_by_rank[rank].total_ns,
        )
        for rank, steps in enumerate(trace.ranks)
    )


def _total_ns(rank: RankTrace, kinds: tuple[type[Instruction], ...]) -> int:
    return sum(step.duration_ns for step in rank.steps if isinstance(step.instruction, kinds))


def measured_tables(predicted: Timeline, trace: Trace) -> tuple[Table, Table]:
    """Return the ops of every rank and kind, and where the time of every rank went, as predicted and as measured."""
    ops = tuple(
        (
            f"rank {row.rank}",
            row.kind.name,
            str(row.count),
            format_ms(round(row.predicted_ns)),
            format_ms(round(row.measured_ns)),
            f"{row.measured_ns / row.predicted_ns:.3f}" if row.predicted_ns else "",
        )
        for row in compare_ops(predicted, trace)
    )
    times = tuple(
        (
            f"rank {rank}",
            *map(format_ms, (row.busy_ns, row.waiting_ns, row.messaging_ns, row.ending_ns)),
            format_ms(row.idle_ns),
            format_ms(row.predicted_idle_ns),
        )
        for rank, row in enumerate(rank_times(predicted, trace))
    )
    return (
        Table(
            heading="Ops, predicted and measured",
            columns=("", "op", "count", "predicted (ms)", "measured (ms)", "measured / predicted"),
            rows=ops,
        ),
        Table(
            heading="Where the measured time goes",
            columns=("", "busy (ms)", "waiting", "starting messages", "end of batch", "idle", "predicted idle"),
            rows=times,
            footnote=_sentence(predicted, trace),
        ),
    )


def _sentence(predicted: Timeline, trace: Trace) -> str:
    measured = trace.timeline
    error = predicted.makespan_ns / measured.makespan_ns - 1.0 if measured.makespan_ns else 0.0
    text = (
        f"A batch: {format_ms(predicted.makespan_ns)} ms predicted, {format_ms(measured.makespan_ns)} ms measured "
        f"({error:+.1%}). Idle: {measured.bubble_fraction:.1%} measured, {predicted.bubble_fraction:.1%} predicted."
    )
    if trace.clock_error_ns:
        text += f" Clocks of the ranks agree to {format_ms(trace.clock_error_ns)} ms."
    return text


def measured_summary(predicted: Timeline, trace: Trace) -> dict[str, Any]:
    """Return the same as plain data for scripts: times in ms."""
    measured = trace.timeline
    return {
        "makespan_ms": ms_from_ns(measured.makespan_ns),
        "predicted_makespan_ms": ms_from_ns(predicted.makespan_ns),
        "bubble_fraction": measured.bubble_fraction,
        "clock_error_ms": ms_from_ns(trace.clock_error_ns),
        "ops": [
            {
                "rank": row.rank,
                "kind": row.kind.name,
                "count": row.count,
                "predicted_mean_ms": ms_from_ns(row.predicted_ns),
                "measured_mean_ms": ms_from_ns(row.measured_ns),
            }
            for row in compare_ops(predicted, trace)
        ],
        "ranks": [
            {
                "busy_ms": ms_from_ns(row.busy_ns),
                "waiting_ms": ms_from_ns(row.waiting_ns),
                "messaging_ms": ms_from_ns(row.messaging_ns),
                "ending_ms": ms_from_ns(row.ending_ns),
                "idle_ms": ms_from_ns(row.idle_ns),
                "predicted_idle_ms": ms_from_ns(row.predicted_idle_ns),
            }
            for row in rank_times(predicted, trace)
        ],
    }
