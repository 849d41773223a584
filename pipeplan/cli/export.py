"""``pipeplan export``: a plan in another tool's format."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from pipeplan.cli.options import ClusterFile, PlanPath, ProfileFile, Quiet

# The values of pipeplan.formats.convert.Format, whose import the help text can't pay for.
FormatName = Literal["torch-csv", "megatron-layout", "octopipe", "pipeplan"]


def export(
    plan: PlanPath,
    to: Annotated[FormatName, typer.Option("--to", help="Format to write.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="File to write; standard output if not given.")
    ] = None,
    profile: ProfileFile = None,
    cluster: ClusterFile = None,
    quiet: Quiet = False,
) -> None:
    """Write a plan for another tool.

    torch-csv is the order, for torch's _PipelineScheduleRuntime; megatron-layout is the partition, for
    --pipeline-model-parallel-layout; octopipe is all of it with predicted times; pipeplan is
    plan.yaml alone.

    Example: pipeplan export plans/NAME --to torch-csv -o schedule.csv
    """
    from pipeplan.cli.console import print_message
    from pipeplan.files import write_text
    from pipeplan.formats.convert import Format, export_plan
    from pipeplan.plan.folder import load_plan

    text = export_plan(load_plan(plan, profile, cluster), Format(to))
    if output is None:
        typer.echo(text, nl=False)
        return
    write_text(output, text)
    if not quiet:
        print_message(f"wrote {output}")
