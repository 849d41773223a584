"""``pipeplan import``: another tool's plan as a plan folder that trains."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pipeplan.cli.export import FormatName
from pipeplan.cli.options import (
    ClusterFile,
    DataParallel,
    Device,
    Json,
    LinkGbPerS,
    LinkLatencyUs,
    MemoryGb,
    NumRanks,
    Quiet,
    chosen_cluster,
)


def import_plan(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File of the other tool, or a plan.yaml.")],
    source: Annotated[FormatName, typer.Option("--from", help="Format of the file.")],
    profile: Annotated[Path, typer.Option("--profile", metavar="PROFILE", help="Profile of the model.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Plan folder to write.")],
    partition: Annotated[
        str | None,
        typer.Option("--partition", metavar="4,5,5,3", help="Layers of each stage, where the file has none."),
    ] = None,
    micro_batches: Annotated[
        int | None, typer.Option("--micro-batches", min=1, help="Micro-batches, where the file has no order.")
    ] = None,
    ds_config: Annotated[
        Path | None,
        typer.Option("--ds-config", metavar="BASE.json", help="DeepSpeed config whose settings to keep."),
    ] = None,
    cluster: ClusterFile = None,
    ranks: NumRanks = None,
    device: Device = None,
    memory_gb: MemoryGb = None,
    link_latency_us: LinkLatencyUs = None,
    link_gb_per_s: LinkGbPerS = None,
    data_parallel: DataParallel = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Verify another tool's plan, or one written by hand, and write everything that trains with it.

    pipeplan is this tool's own plan.yaml, which may be written by hand.
    A torch-csv has no partition: give one, or stages are balanced by time. A megatron-layout has no order: it gets
    1F1B, interleaved where ranks hold several stages. Without a cluster, ranks are equal and links are free.

    Example: pipeplan import schedule.csv --from torch-csv --profile profile.yaml -o plans/imported
    """
    from dataclasses import replace

    from pipeplan.cli.console import print_json, print_message
    from pipeplan.cluster import read_cluster
    from pipeplan.emit.ds_config import read_base_config
    from pipeplan.emit.folder import check_replaceable, emit_plan_folder, launch_line
    from pipeplan.emit.summary import timeline_summary
    from pipeplan.formats.convert import Format, read_outline
    from pipeplan.formats.outline import complete_plan
    from pipeplan.plan.layout import Partition
    from pipeplan.profile import read_profile
    from pipeplan.program.verify import verify, verify_plan
    from pipeplan.simulate import simulate
    from pipeplan.units import ms_from_ns

    base = None if ds_config is None else read_base_config(ds_config)
    check_replaceable(output)
    costs = read_profile(profile)
    outline = read_outline(
        file,
        Format(source),
        costs,
        profile,
        num_ranks=ranks if cluster is None else read_cluster(cluster).num_ranks,
        num_micro_batches=micro_batches,
    )
    where = chosen_cluster(
        costs,
        cluster_file=cluster,
        num_ranks=outline.order.num_ranks if cluster is None else None,
        device=device,
        memory_gb=memory_gb,
        link_latency_us=link_latency_us,
        link_gb_per_s=link_gb_per_s,
        data_parallel=data_parallel,
    )
    plan = complete_plan(outline, costs, where, None if partition is None else Partition.parse(partition))
    program = verify_plan(plan, costs, where).program
    timeline = simulate(plan, costs, where)
    plan = replace(plan, prediction=timeline.prediction)
    emit_plan_folder(output, verify(program, plan, costs, where), costs, where, base_ds_config=base)
    if json:
        print_json({"folder": str(output), **timeline_summary(plan, timeline)})
    elif not quiet:
        print_message(
            f"verified, {ms_from_ns(timeline.makespan_ns):.1f} ms predicted; wrote {output}; train with it:\n"
            f"  {launch_line(output, where)}"
        )
