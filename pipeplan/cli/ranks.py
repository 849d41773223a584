"""``pipeplan profile MODEL --ranks``: all ranks of a launch measure, each its share."""

from __future__ import annotations

import os
import sys
from contextlib import redirect_stdout
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from pipeplan.runtime.profiling import Task


def profile_ranks(task: Task, *, json: bool, quiet: bool) -> None:
    """Measure on every process of the launch; rank 0 writes and prints the profile, whoever fails says why."""
    from pipeplan.cli.console import print_message, progress
    from pipeplan.cli.costs import report_profile
    from pipeplan.errors import LaunchError
    from pipeplan.profile.resume import partial_paths
    from pipeplan.runtime.profiling import profile_on_ranks

    is_first = os.environ["RANK"] == "0"
    if is_first and not quiet and task.settings.device == "cpu":
        _warn_of_too_few_cores()
    try:
        with progress("measuring", quiet=quiet or not is_first) as describe, redirect_stdout(sys.stderr):
            found = profile_on_ranks(
                task,
                on_error=lambda sentence: print_message(f"error: {sentence}"),
                on_layer=lambda index, name: describe(f"measuring {name} on several ranks"),
                on_message=(lambda text: None) if quiet else print_message,
            )
    except BaseException as error:
        if is_first and not quiet and partial_paths(task.output):
            print_message(f"what was measured is kept beside {task.output}; the same command goes on from there")
        if isinstance(error, LaunchError) and not os.environ.get("PIPEPLAN_DEBUG"):
            raise typer.Exit(1) from error
        raise
    if found is not None:
        report_profile(found, task.output, json=json, quiet=quiet)


def _warn_of_too_few_cores() -> None:
    """Say when the ranks of this node are more than its cores can run at once."""
    import torch

    from pipeplan.cli.console import print_message

    num_ranks, num_threads = int(os.environ.get("LOCAL_SIZE", "1")), torch.get_num_threads()
    num_cores = len(os.sched_getaffinity(0))
    if num_ranks * num_threads > num_cores:
        print_message(
            f"warning: {num_ranks} ranks with --threads {num_threads} measure at once on {num_cores} cores, so their "
            "times come out too long; launch fewer"
        )
