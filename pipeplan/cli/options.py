"""Options that several commands share, and the values they stand for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from pipeplan.cluster import Cluster
    from pipeplan.profile.types import Profile

_CLUSTER = "Cluster (a file, or equal devices)"

ClusterFile = Annotated[
    Path | None, typer.Option("--cluster", help="Cluster file: ranks, links, memory.", rich_help_panel=_CLUSTER)
]
NumRanks = Annotated[
    int | None, typer.Option("--ranks", help="Number of equal pipeline ranks.", rich_help_panel=_CLUSTER)
]
Device = Annotated[
    str | None,
    typer.Option("--device", help="Device type, as the profile names it.", rich_help_panel=_CLUSTER),
]
MemoryGb = Annotated[
    float | None, typer.Option("--memory-gb", help="Memory cap of every rank, in GB.", rich_help_panel=_CLUSTER)
]
LinkLatencyUs = Annotated[
    float | None,
    typer.Option("--link-latency-us", help="Latency of every link, in microseconds.", rich_help_panel=_CLUSTER),
]
LinkGbPerS = Annotated[
    float | None,
    typer.Option("--link-gb-per-s", help="Bandwidth of every link, in GB/s.", rich_help_panel=_CLUSTER),
]
DataParallel = Annotated[
    int | None, typer.Option("--data-parallel", help="Replicas of the pipeline.", rich_help_panel=_CLUSTER)
]
PlanPath = Annotated[Path, typer.Argument(metavar="PLAN", help="A plan folder, or a plan file with --profile.")]
ProfileFile = Annotated[Path | None, typer.Option("--profile", help="Profile to use instead of the plan's own.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print no messages and no progress.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document for scripts.")]


def with_memory_cap(cluster: Cluster, memory_gb: float) -> Cluster:
    """Return the cluster with the same memory cap on every rank.

    Raises:
        ClusterError: The cap is not positive.
    """
    from pipeplan.cluster import memory_bytes_of

    memory_bytes = memory_bytes_of(memory_gb)
    ranks = tuple(replace(rank, memory_bytes=memory_bytes) for rank in cluster.ranks)
    return replace(cluster, ranks=ranks)


def chosen_cluster(
    profile: Profile,
    *,
    cluster_file: Path | None,
    num_ranks: int | None,
    device: str | None,
    memory_gb: float | None,
    link_latency_us: float | None,
    link_gb_per_s: float | None,
    data_parallel: int | None,
) -> Cluster:
    """Return the cluster that the options name.

    Raises:
        ClusterError: Both a file and the shorthand are given, or neither, or the device is left open.
    """
    from pipeplan.cluster import equal_ranks, read_cluster
    from pipeplan.errors import ClusterError

    shorthand = {
        "--ranks": num_ranks,
        "--device": device,
        "--link-latency-us": link_latency_us,
        "--link-gb-per-s": link_gb_per_s,
        "--data-parallel": data_parallel,
    }
    if cluster_file is not None:
        given = [name for name, value in shorthand.items() if value is not None]
        if given:
            raise ClusterError(f"--cluster {cluster_file} and {given[0]} both describe the cluster; give one of them")
        cluster = read_cluster(cluster_file)
        return cluster if memory_gb is None else with_memory_cap(cluster, memory_gb)
    if num_ranks is None:
        raise ClusterError("which ranks? give --cluster FILE, or --ranks N for equal devices")
    if device is None:
        if len(profile.devices) != 1:
            raise ClusterError(f"the profile covers {', '.join(profile.devices)}; say which with --device")
        device = profile.devices[0]
    return equal_ranks(
        num_ranks,
        device,
        memory_gb=memory_gb,
        link_latency_us=link_latency_us,
        link_gb_per_s=link_gb_per_s,
        num_replicas=1 if data_parallel is None else data_parallel,
    )
