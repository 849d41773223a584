"""``pipeplan calibrate``: from measured traces to costs that predict them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipeplan.cli.options import ClusterFile, Json, ProfileFile, Quiet

if TYPE_CHECKING:
    from pipeplan.emit.tables import Table
    from pipeplan.plan.folder import LoadedPlan

TracePaths = Annotated[
    list[Path], typer.Argument(metavar="TRACE...", help="Traces that train.py --trace wrote; several give medians.")
]


def calibrate(
    traces: TracePaths,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="Folder for the new profile.yaml and cluster.yaml.")
    ],
    plan: Annotated[
        Path | None, typer.Option("--plan", help="Plan that was traced; default: the folder that holds the trace.")
    ] = None,
    profile: ProfileFile = None,
    cluster: ClusterFile = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Turn measured traces into host overheads and link latencies of the cluster and corrected times of the profile.

    Predictions with the files written agree with what was measured; optimize again with them.

    Example: pipeplan calibrate plans/NAME/trace.yaml -o calibrated
    """
    from pipeplan.adapt.calibrate import calibrate as calibrate_costs
    from pipeplan.adapt.summary import calibration_summary
    from pipeplan.cli.console import print_json, print_message, print_result
    from pipeplan.cli.render import rich_table
    from pipeplan.cluster import write_cluster
    from pipeplan.errors import FileFormatError
    from pipeplan.plan.folder import CLUSTER_FILE, PLAN_FILE, PROFILE_FILE
    from pipeplan.profile.file import write_profile
    from pipeplan.program.trace import read_trace

    if (output / PLAN_FILE).is_file():
        raise FileFormatError(
            f"{output} holds a plan, which keeps the costs it was made for; name another folder with -o"
        )
    measured = [read_trace(path) for path in traces]
    loaded = _load(plan or traces[0].parent, profile, cluster, is_named=plan is not None)
    result = calibrate_costs(measured, loaded.profile, loaded.cluster)
    write_profile(result.profile, output / PROFILE_FILE)
    write_cluster(result.cluster, output / CLUSTER_FILE)
    summary = calibration_summary(result, loaded.cluster)
    if json:
        print_json(summary)
    else:
        print_result(rich_table(_table(summary)))
    if not quiet:
        for note in result.notes:
            print_message(f"note: {note}")
        print_message(f"wrote {output / PROFILE_FILE} and {output / CLUSTER_FILE}")


def _load(path: Path, profile: Path | None, cluster: Path | None, *, is_named: bool) -> LoadedPlan:
    from pipeplan.errors import FileFormatError
    from pipeplan.plan.folder import PLAN_FILE, load_plan

    if not is_named and not (path / PLAN_FILE).is_file():
        raise FileFormatError(f"{path} holds no plan; say with --plan PLAN which plan the trace is of")
    return load_plan(path, profile, cluster, allow_other_costs=True)


def _table(summary: dict[str, Any]) -> Table:
    from pipeplan.emit.tables import Table

    def row(name: str, change: dict[str, float | None]) -> tuple[str, str, str]:
        before, after = ("none" if value is None else f"{value:,.0f} us" for value in change.values())
        return name, before, after

    rows = [row(f"overhead of {key}", change) for key, change in summary["host_overheads_us"].items()]
    rows += [row(f"latency {name.replace('_', ' ')}", change) for name, change in summary["link_latencies_us"].items()]
    rows += [(f"times of {kind}", "1.000", f"{factor:.3f}") for kind, factor in summary["time_factors"].items()]
    measured, before, after = (summary[f"{key}_ms"] for key in ("measured", "predicted_before", "predicted_after"))
    return Table(
        heading="Calibration",
        columns=("", "before", "after"),
        rows=tuple(rows),
        footnote=(
            f"A batch took {measured:,.2f} ms. Predicted before: {before:,.2f} ms ({before / measured - 1:+.1%}), "
            f"now: {after:,.2f} ms ({after / measured - 1:+.1%})."
        ),
    )
