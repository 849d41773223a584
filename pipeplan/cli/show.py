"""``pipeplan show``: a plan's timeline, bubbles and memory, with the baselines beside it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipeplan.cli.options import ClusterFile, Json, PlanPath, ProfileFile, Quiet

if TYPE_CHECKING:
    from rich.console import RenderableType

    from pipeplan.plan.types import Plan
    from pipeplan.program.trace import Trace


def show(
    plan: PlanPath,
    profile: ProfileFile = None,
    cluster: ClusterFile = None,
    measured: Annotated[
        Path | None, typer.Option("--measured", metavar="TRACE", help="Measured trace of this plan, put beside it.")
    ] = None,
    svg: Annotated[
        Path | None, typer.Option("--svg", metavar="FILE", help="Write the timeline as a figure for a paper.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option("--trace", metavar="FILE", help="Write the timeline as a trace for Perfetto.")
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Show when every rank does what, where it idles, and where its memory goes at the peak.

    Example: pipeplan show plans/NAME --svg timeline.svg
    """
    from pipeplan.cli.console import print_json, print_message, print_result, result_console
    from pipeplan.cli.render import rich_table, timeline_text
    from pipeplan.emit.comparison import compare_with_baselines
    from pipeplan.emit.figure import timeline_svg
    from pipeplan.emit.measured import measured_summary, measured_tables
    from pipeplan.emit.summary import comparison_summary, timeline_summary
    from pipeplan.emit.tables import bubble_table, comparison_table, memory_table
    from pipeplan.files import write_text
    from pipeplan.formats.trace import write_trace
    from pipeplan.plan.folder import load_plan
    from pipeplan.simulate import simulate

    loaded = load_plan(plan, profile, cluster)
    timeline = simulate(loaded.plan, loaded.profile, loaded.cluster)
    comparison = compare_with_baselines(loaded.plan, timeline, loaded.profile, loaded.cluster)
    reality = None if measured is None else _read_trace_of(measured, loaded.plan)
    if svg is not None:
        panels = [(None, timeline)] if reality is None else [("predicted", timeline), ("measured", reality.timeline)]
        write_text(svg, timeline_svg(*panels))
    if trace is not None:
        write_text(trace, write_trace(timeline))
    if json:
        summary = timeline_summary(loaded.plan, timeline) | {"comparison": comparison_summary(comparison)}
        if reality is not None:
            summary["measured"] = measured_summary(timeline, reality)
        print_json(summary)
    else:
        width = result_console().width
        parts: list[RenderableType] = [
            timeline_text(timeline, width),
            rich_table(comparison_table(comparison)),
            rich_table(bubble_table(loaded.plan, timeline)),
            rich_table(memory_table(timeline, loaded.cluster)),
        ]
        if reality is not None:
            tables = measured_tables(timeline, reality)
            parts[1:1] = [timeline_text(reality.timeline, width), *map(rich_table, tables)]
        print_result(*parts)
    for path in (svg, trace):
        if path is not None and not quiet:
            print_message(f"wrote {path}")


def _read_trace_of(path: Path, plan: Plan) -> Trace:
    from pipeplan.errors import PlanError
    from pipeplan.program.trace import read_trace

    trace = read_trace(path)
    if trace.plan_digest != plan.digest:
        raise PlanError(
            f"{path} is the trace of another plan ({trace.plan_digest[:19]}…); train with this one to get its"
        )
    return trace
