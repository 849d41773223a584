"""What the quickstart prints: predicted and measured time a step, and the loss beside one process."""

from __future__ import annotations

from typing import Any

from pipeplan.emit.tables import Table
from pipeplan.quickstart.steps import NUM_MICRO_BATCHES, NUM_RANKS, QuickstartResult, TrainedRun

_RUN_FIELDS = ("predicted_ms", "measured_ms", "losses")


def quickstart_table(result: QuickstartResult) -> Table:
    """Return one row a run; losses are of the first and the last step."""
    runs = (result.one_process, result.stock, result.planned)
    return Table(
        heading=f"{len(result.planned.losses)} steps of {NUM_MICRO_BATCHES} micro-batches, {NUM_RANKS} ranks",
        columns=("", "predicted (ms a step)", "measured", "first loss", "last loss", "largest difference"),
        rows=tuple(_row(run, result.one_process) for run in runs),
        highlighted=len(runs) - 1,
        footnote=(
            "Difference: of a step's loss from one process, relative. Predictions come from the profile alone and "
            "leave out what the engine costs on the host; two ranks on few cores also disturb each other."
        ),
    )


def _row(run: TrainedRun, truth: TrainedRun) -> tuple[str, ...]:
    difference = "" if run is truth else f"{run.largest_difference(truth):.1e}"
    times = ("" if value is None else f"{value:.1f}" for value in (run.predicted_ms, run.measured_ms))
    return (run.name, *times, f"{run.losses[0]:.6f}", f"{run.losses[-1]:.6f}", difference)


def quickstart_summary(result: QuickstartResult) -> dict[str, Any]:
    """Return the same figures as plain data."""
    runs = {"pipeplan": result.planned, "stock": result.stock, "one_process": result.one_process}
    return {
        "folder": str(result.folder),
        "launch": result.launch_line,
        **{name: {field: getattr(run, field) for field in _RUN_FIELDS} for name, run in runs.items()},
    }
