"""``pipeplan quickstart``: the whole way once, on this machine's CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pipeplan.cli.options import Json, Quiet


def quickstart(
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Plan folder to write.")] = Path(
        "plans/quickstart"
    ),
    steps: Annotated[int, typer.Option("--steps", min=2, help="Training steps of each run.")] = 8,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Profile a tiny model, plan for 2 ranks, train with DeepSpeed, and compare with stock DeepSpeed.

    Takes some minutes the first time: DeepSpeed compiles its CPU communication once, which needs a C++ compiler.

    Example: pipeplan quickstart
    """
    from pipeplan.cli.console import print_json, print_message, print_result, progress
    from pipeplan.cli.render import rich_table
    from pipeplan.quickstart.steps import run_quickstart
    from pipeplan.quickstart.table import quickstart_summary, quickstart_table

    with progress("starting", quiet=quiet) as update:

        def say(text: str) -> None:
            update(text)
            if not quiet:
                print_message(text)

        result = run_quickstart(output, steps, say)
    if json:
        print_json(quickstart_summary(result))
    else:
        print_result(rich_table(quickstart_table(result)))
    if not quiet:
        print_message(f"{output} holds the plan; train with it again:\n  {result.launch_line}")
