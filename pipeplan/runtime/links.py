"""Measuring the links between the ranks of a launch, over process groups like those that plans run on."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator

from pipeplan.cluster import Cluster, Node, Rank, read_cluster
from pipeplan.errors import LaunchError, PipeplanError
from pipeplan.profile.links import Pair, Transfer
from pipeplan.profile.measure import device_name_of
from pipeplan.runtime.process_groups import calm_down_at_exit, close_groups
from pipeplan.runtime.shared_memory import release_shared_buffers

SIZES_BYTES = tuple(2**power for power in range(10, 27, 2))  # 1 KB to 64 MB
_ACK_BYTES = 8
_NUM_WARM_UP = 2
_MIN_ROUNDS, _MAX_ROUNDS = 4, 40
_SECONDS_PER_SIZE = 0.05

Measured = dict[Pair, list[Transfer]]


def measure_links(
    cluster_file: Path | None, *, on_pair: Callable[[int, int], None] | None = None
) -> tuple[Cluster, Measured] | None:
    """Measure every ordered pair of pipeline ranks; collective over all processes of the launch.

    One pair at a time, so that no transfer disturbs another. With replicas, the first one is measured.

    Args:
        cluster_file: The cluster whose links are measured; without one, each process is a rank on its own device.
        on_pair: Called on rank 0 before each pair, with its number and the number of pairs.

    Returns:
        On rank 0 the cluster and the transfers by (source, target) rank; ``None`` elsewhere.

    Raises:
        LaunchError: The launch has another number of processes than the cluster needs, or only one.
    """
    device = _own_device()
    deepspeed.init_distributed(dist_backend=get_accelerator().communication_backend_name())
    calm_down_at_exit()
    cluster = _cluster_of_launch(cluster_file, device)
    global_ranks = [rank * cluster.num_replicas for rank in range(cluster.num_ranks)]
    if len(global_ranks) < 2:
        raise LaunchError("links need at least 2 ranks; launch more processes")
    pairs = [(source, target) for source in range(cluster.num_ranks) for target in range(cluster.num_ranks)]
    pairs = [(source, target) for source, target in pairs if source != target]
    measured: Measured = {}
    for number, (source, target) in enumerate(pairs):
        if on_pair is not None and dist.get_rank() == 0:
            on_pair(number, len(pairs))
        transfers = _measure_pair(global_ranks[source], global_ranks[target], device)
        if transfers:
            measured[source, target] = transfers
    everything: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everything, measured)
    is_first = dist.get_rank() == 0
    close_groups()
    if not is_first:
        return None
    return cluster, {pair: transfers for part in everything for pair, transfers in part.items()}


def _own_device() -> torch.device:
    accelerator = get_accelerator()
    if accelerator.device_name() != "cpu":
        accelerator.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device(accelerator.current_device_name())


def _cluster_of_launch(cluster_file: Path | None, device: torch.device) -> Cluster:
    """Return the cluster, the same on every process.

    Raises:
        LaunchError: A process can't read the file, or the cluster is for another number of processes.
    """
    described: dict[str, Any] = {"host": socket.gethostname(), "error": None}
    cluster: Cluster | None = None
    is_cuda = device.type == "cuda"
    described |= {
        "device": device_name_of(device),
        "memory_bytes": torch.cuda.get_device_properties(device).total_memory if is_cuda else None,
    }
    if cluster_file is not None:
        try:
            cluster = read_cluster(cluster_file)
            needed = cluster.num_ranks * cluster.num_replicas
            if needed != dist.get_world_size():
                described["error"] = (
                    f"{cluster_file} is for {cluster.num_ranks} ranks x {cluster.num_replicas} replicas = {needed} "
                    f"processes, but {dist.get_world_size()} were launched"
                )
        except PipeplanError as error:
            described["error"] = str(error)
    everyone: list[dict[str, Any]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, described)
    release_shared_buffers()
    for rank, one in enumerate(everyone):
        if one["error"] is not None:
            raise LaunchError(f"rank {rank}: {one['error']}")
    return cluster or _described_cluster(everyone)


def _described_cluster(everyone: Sequence[dict[str, Any]]) -> Cluster:
    hosts = list(dict.fromkeys(one["host"] for one in everyone))
    return Cluster(
        ranks=tuple(Rank(one["device"], one["memory_bytes"], hosts.index(one["host"])) for one in everyone),
        nodes={node: Node(host, sum(one["host"] == host for one in everyone)) for node, host in enumerate(hosts)},
    )


def _measure_pair(source: int, target: int, device: torch.device) -> list[Transfer]:
    """Return one-way times from ``source`` to ``target``; collective, empty on every process but ``source``.

    A message is answered by a few bytes. What the answer takes is half of a round trip of two such answers, and never
    more than the message itself.
    """
    own = dist.get_rank()
    forth, back = dist.new_group([source, target]), dist.new_group([source, target])
    transfers: list[Transfer] = []
    if own in (source, target):
        largest = torch.zeros(max(SIZES_BYTES), dtype=torch.uint8, device=device)

        def round_trip_ns(num_bytes: int) -> int:
            message, answer = largest[:num_bytes], largest[:_ACK_BYTES]
            _synchronize()
            start_ns = time.perf_counter_ns()
            if own == source:
                dist.isend(message, target, group=forth).wait()
                dist.irecv(answer, target, group=back).wait()
            else:
                dist.irecv(message, source, group=forth).wait()
                dist.isend(answer, source, group=back).wait()
            _synchronize()
            return time.perf_counter_ns() - start_ns

        def typical_ns(num_bytes: int) -> int:
            for _ in range(_NUM_WARM_UP):
                duration_ns = round_trip_ns(num_bytes)
            # Both ends must run the same number of rounds: the source says how many.
            wanted = torch.tensor([_num_rounds(duration_ns)], dtype=torch.int64, device=device)
            if own == source:
                dist.send(wanted, target, group=forth)
            else:
                dist.recv(wanted, source, group=forth)
            durations_ns = sorted(round_trip_ns(num_bytes) for _ in range(int(wanted.item())))
            return durations_ns[len(durations_ns) // 4]  # what disturbs a transfer only makes it longer

        answer_ns = typical_ns(_ACK_BYTES) / 2
        for num_bytes in SIZES_BYTES:
            both_ways_ns = typical_ns(num_bytes)
            transfers.append(Transfer(num_bytes, max(both_ways_ns - answer_ns, both_ways_ns / 2)))
    dist.barrier()
    for group in (forth, back):
        if own in (source, target):
            torch.distributed.destroy_process_group(group)  # communicators are scarce, and pairs are many
    return transfers if own == source else []


def _num_rounds(duration_ns: int) -> int:
    return min(_MAX_ROUNDS, max(_MIN_ROUNDS, round(_SECONDS_PER_SIZE * 1e9 / max(duration_ns, 1))))


def _synchronize() -> None:
    if get_accelerator().device_name() != "cpu":
        get_accelerator().synchronize()
