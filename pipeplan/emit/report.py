"""The report of a plan: one HTML file that needs nothing else."""

from __future__ import annotations

from typing import Any

from markupsafe import Markup

from pipeplan import __version__
from pipeplan.cluster import Cluster
from pipeplan.emit.comparison import Comparison
from pipeplan.emit.figure import timeline_svg
from pipeplan.emit.tables import bubble_table, comparison_table, format_ms, memory_table
from pipeplan.emit.templates import render
from pipeplan.plan.types import Plan
from pipeplan.profile.types import Profile
from pipeplan.simulate import MemoryPeak, Timeline
from pipeplan.units import format_gb

_MEMORY_PARTS = (  # name, field, colour: Okabe and Ito's palette again
    ("states", "states", "#0072B2"),
    ("activations", "activations", "#56B4E9"),
    ("held for W", "held_for_w", "#009E73"),
    ("boundaries", "boundaries", "#F0E442"),
    ("workspace", "workspace", "#CC79A7"),
)


def render_report(
    plan: Plan,
    profile: Profile,
    cluster: Cluster,
    timeline: Timeline,
    comparison: Comparison | None,
    launch_line: str,
) -> str:
    """Return the report as one self-contained HTML document."""
    memory = memory_table(timeline, cluster)
    tables = [bubble_table(plan, timeline), memory]
    if comparison is not None:
        tables.insert(0, comparison_table(comparison))
    peaks = timeline.memory_by_rank
    widest = max([peak.total for peak in peaks] + [cluster.usable_bytes(rank) or 0 for rank in range(plan.num_ranks)])
    return render(
        "report.html.j2",
        model=plan.model,
        num_ranks=plan.num_ranks,
        summary=_summary(plan, profile, cluster),
        key_figures=[
            ("a batch, predicted", f"{format_ms(timeline.makespan_ns)} ms"),
            ("bubble", f"{timeline.bubble_fraction:.1%}"),
            ("peak of the heaviest rank", format_gb(max(peak.total for peak in peaks))),
        ],
        timeline_svg=Markup(_inline(timeline_svg((None, timeline)))),  # our own drawing, not input
        tables=tables,
        memory_heading=memory.heading,
        memory_bars=[_bar(peak, widest) for peak in peaks],
        memory_legend=[(name, colour) for name, _, colour in _MEMORY_PARTS],
        notes=() if comparison is None else comparison.notes,
        launch_line=launch_line,
        digest=plan.digest,
        source=profile.source,
        version=__version__,
    )


def _summary(plan: Plan, profile: Profile, cluster: Cluster) -> str:
    devices = sorted({rank.device for rank in cluster.ranks})
    replicas = f", {cluster.num_replicas} replicas" if cluster.num_replicas > 1 else ""
    return (
        f"{profile.num_layers} layers in {plan.num_stages} stages on {', '.join(devices)}{replicas}; "
        f"{plan.num_micro_batches} micro-batches of {profile.micro_batch_size} x {profile.sequence_length} tokens, "
        f"{profile.dtype}."
    )


def _bar(peak: MemoryPeak, widest: int) -> dict[str, Any]:
    parts = [
        {"percent": round(100 * getattr(peak, field) / max(widest, 1), 3), "colour": colour}
        for _, field, colour in _MEMORY_PARTS
    ]
    return {"parts": parts, "total": format_gb(peak.total)}


def _inline(svg: str) -> str:
    """Return the drawing without what only a file of its own needs."""
    return svg[svg.index("<svg") :]
