"""``pipeplan show``: a plan's timeline, bubbles and memory, with the baselines beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pipeplan.cli.options import ClusterFile, Json, PlanPath, ProfileFile, Quiet


def show(
    plan: PlanPath,
    profile: ProfileFile = None,
    cluster: ClusterFile = None,
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
    from pipeplan.emit.summary import comparison_summary, timeline_summary
    from pipeplan.emit.tables import bubble_table, comparison_table, memory_table
    from pipeplan.files import write_text
    from pipeplan.formats.trace import write_trace
    from pipeplan.plan.folder import load_plan
    from pipeplan.simulate import simulate

    loaded = load_plan(plan, profile, cluster)
    timeline = simulate(loaded.plan, loaded.profile, loaded.cluster)
    comparison = compare_with_baselines(loaded.plan, timeline, loaded.profile, loaded.cluster)
    if svg is not None:
        write_text(svg, timeline_svg(timeline))
    if trace is not None:
        write_text(trace, write_trace(timeline))
    if json:
        print_json(timeline_summary(loaded.plan, timeline) | {"comparison": comparison_summary(comparison)})
    else:
        print_result(
            timeline_text(timeline, result_console().width),
            rich_table(comparison_table(comparison)),
            rich_table(bubble_table(loaded.plan, timeline)),
            rich_table(memory_table(timeline, loaded.cluster)),
        )
    for path in (svg, trace):
        if path is not None and not quiet:
            print_message(f"wrote {path}")
