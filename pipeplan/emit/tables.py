"""The figures of a plan as tables of text: one content, for the terminal and for the report."""

from __future__ import annotations

from dataclasses import dataclass

from pipeplan.cluster import Cluster
from pipeplan.emit.comparison import ComparedPlan, Comparison
from pipeplan.plan.types import Plan, Prediction
from pipeplan.simulate import NoisyMakespans, Timeline
from pipeplan.units import format_gb, ms_from_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A heading, column names and rows of text; the first column is a label, the others are figures.

    Attributes:
        highlighted: Index of the row to stress, if any.
        footnote: A sentence below the table, if any.
    """

    heading: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    highlighted: int | None = None
    footnote: str | None = None


def format_ms(value_ns: float) -> str:
    """Return milliseconds with four significant digits or one decimal, whichever is finer."""
    value = ms_from_ns(value_ns)
    return f"{value:,.1f}" if value >= 100 else f"{value:.3g}" if value < 0.1 else f"{value:.2f}"


def comparison_table(comparison: Comparison) -> Table:
    """Return the baselines, the bound and the plan: time, bubble, memory of the heaviest rank, ratio to the plan."""
    plan = comparison.plan
    rows = [_compared(row, plan) for row in comparison.best_by_order]
    rows.append(_compared(plan, plan))
    highlighted = len(rows) - 1
    if comparison.lower_bound_ns is not None:
        ratio = _ratio(comparison.lower_bound_ns, plan)
        rows.append(("lower bound", "", format_ms(comparison.lower_bound_ns), "", "", ratio, ""))
    return Table(
        heading="Comparison",
        columns=("plan", "split", "time (ms)", "bubble", "peak memory", "time / plan's", "fits"),
        rows=tuple(rows),
        highlighted=highlighted,
        footnote=" ".join([comparison.verdict, *_gap_sentence(comparison)]),
    )


def _gap_sentence(comparison: Comparison) -> list[str]:
    of_layout = " of this partition and placement" if comparison.is_bound_of_layout else ""
    if comparison.is_optimal:
        return [f"It is proved to be the best possible{of_layout}."]
    if comparison.gap is None:
        return []
    return [f"No plan{of_layout} can take less than the lower bound; this one is {comparison.gap:.1%} above it."]


def _compared(row: ComparedPlan, plan: ComparedPlan) -> tuple[str, ...]:
    return (
        row.name,
        row.split or "",
        format_ms(row.makespan_ns),
        f"{row.bubble_fraction:.1%}",
        format_gb(row.peak_memory_bytes),
        _ratio(row.makespan_ns, plan),
        "yes" if row.fits else "no",
    )


def _ratio(time_ns: int, plan: ComparedPlan) -> str:
    """Return a time as a multiple of the plan's; nothing where the plan takes none, as under a profile of zeros."""
    return f"{time_ns / plan.makespan_ns:.3f}" if plan.makespan_ns else ""


def bubble_table(plan: Plan, timeline: Timeline) -> Table:
    """Return the busy and idle time of every rank."""
    rows = []
    for rank, (bubble, busy_ns) in enumerate(zip(timeline.bubble_by_rank, timeline.busy_ns_by_rank, strict=True)):
        share = bubble.total_ns / timeline.last_op_ns if timeline.last_op_ns else 0.0
        times = (busy_ns, bubble.ramp_up_ns, bubble.inner_ns, bubble.ramp_down_ns)
        stages = plan.placement.stages(rank)
        num_layers = sum(plan.partition.num_layers_by_stage[stage] for stage in stages)
        rows.append((f"rank {rank}", str(len(stages)), str(num_layers), *map(format_ms, times), f"{share:.1%}"))
    return Table(
        heading="Bubbles",
        columns=("", "stages", "layers", "busy (ms)", "ramp-up", "inner", "ramp-down", "bubble"),
        rows=tuple(rows),
        footnote=f"Idle {timeline.bubble_fraction:.1%} of all ranks' time, of {format_ms(timeline.makespan_ns)} ms.",
    )


def memory_table(timeline: Timeline, cluster: Cluster) -> Table:
    """Return where the memory of every rank goes at its peak; the heaviest rank is stressed."""
    peaks = timeline.memory_by_rank
    rows = []
    for rank, peak in enumerate(peaks):
        cap = cluster.usable_bytes(rank)
        parts = (peak.states, peak.activations, peak.held_for_w, peak.boundaries, peak.workspace, peak.total)
        rows.append((f"rank {rank}", *map(format_gb, parts), "no cap" if cap is None else format_gb(cap)))
    totals = [peak.total for peak in peaks]
    heaviest = totals.index(max(totals))
    return Table(
        heading="Memory at its peak",
        columns=("", "states", "activations", "held for W", "boundaries", "workspace", "peak", "cap"),
        rows=tuple(rows),
        highlighted=heaviest,
        footnote=f"Rank {heaviest} is the heaviest, {format_gb(totals[heaviest])}.",
    )


def noise_table(noisy: NoisyMakespans) -> Table:
    """Return what a batch takes under noise, beside what it takes without."""
    times = {
        "mean": noisy.mean_ns,
        "median": noisy.quantile_ns(0.5),
        "95th percentile": noisy.quantile_ns(0.95),
        f"worst of {noisy.num_samples:,}": noisy.worst_ns,
    }
    rows = [("without noise", format_ms(noisy.planned_ns), "")]
    for name, time_ns in times.items():
        change = time_ns / noisy.planned_ns - 1.0 if noisy.planned_ns else 0.0
        rows.append((name, format_ms(time_ns), f"{change:+.1%}"))
    return Table(
        heading=f"Under {noisy.spread:.1%} noise",
        columns=("", "time (ms)", "change"),
        rows=tuple(rows),
        footnote=(
            f"Of the mean, {format_ms(noisy.waiting_ns)} ms (standard error {format_ms(noisy.standard_error_ns)}) "
            "are added waiting."
        ),
    )


def change_sentence(recorded: Prediction, timeline: Timeline) -> str:
    """Return how a prediction compares with the one that the plan records."""
    change = timeline.makespan_ns / recorded.makespan_ns - 1.0 if recorded.makespan_ns else 0.0
    now, then = format_ms(timeline.makespan_ns), format_ms(recorded.makespan_ns)
    if timeline.makespan_ns == recorded.makespan_ns:
        return f"{now} ms a batch, as the plan records."
    return f"{now} ms a batch; the plan records {then} ms ({change:+.1%})."
