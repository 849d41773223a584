"""Profiling on all ranks of a launch: each device type by the ranks that stand for it, merged into one profile."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pipeplan.cluster import Cluster, read_cluster
from pipeplan.errors import ClusterError, LaunchError
from pipeplan.files import digest
from pipeplan.model.types import ModelLayers
from pipeplan.profile.file import profile_document, profile_from_document, write_profile
from pipeplan.profile.measure import OnLayer, recorded_name
from pipeplan.profile.merge import merge_profiles
from pipeplan.profile.resume import (
    KeptProfile,
    OnMessage,
    Settings,
    check_updatable,
    forget_partial,
    measure_what_is_new,
    partial_path,
    read_partials,
    read_to_update,
    with_other_devices,
)
from pipeplan.profile.sharing import SharedLayers
from pipeplan.profile.types import Profile
from pipeplan.runtime.board import Board, join, leaving_together


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What the ranks are to do, the same on all of them.

    Attributes:
        open_model: Reads the model; on each rank, from its own disk.
        finish: Completes the merged profile before it is written.
        device_names: Device type of each rank, or one for all; by default each rank's own device says.
        cluster_file: Says the device types instead; only rank 0 needs to have it.
        time_limit_s: Of measuring; by default the settings' budget for each layer.
        is_update: As in ``measure_resumably``; only rank 0 needs to have the profile.
    """

    output: Path
    settings: Settings
    open_model: Callable[[], ModelLayers]
    finish: Callable[[Profile], Profile]
    device_names: Sequence[str] = ()
    cluster_file: Path | None = None
    time_limit_s: float | None = None
    is_update: bool = False


def profile_on_ranks(
    task: Task,
    *,
    on_error: Callable[[str], None],
    on_layer: OnLayer | None = None,
    on_message: OnMessage = lambda text: None,
) -> Profile | None:
    """Measure a model on every process of the launch and write the merged profile on rank 0.

    The ranks of one device type share its layers. What each of them has measured lies in a file of its own beside the
    output, on the disk of its node; a later launch, also of other ranks, goes on from all of them.

    Args:
        on_error: Called on a rank that fails, with a sentence that names it; the others end without a word.
        on_layer: Called before each layer that this rank comes to.

    Returns:
        The profile on rank 0, ``None`` elsewhere.

    Raises:
        LaunchError: Something went wrong on some rank.
    """
    try:
        board = join()
    except LaunchError as error:
        on_error(str(error))
        raise
    with leaving_together(board, on_error):
        return profile_on_board(board, task, on_layer=on_layer, on_message=on_message)


def profile_on_board(
    board: Board, task: Task, *, on_layer: OnLayer | None = None, on_message: OnMessage = lambda text: None
) -> Profile | None:
    """Do what ``profile_on_ranks`` does, among the ranks that share ``board``; raises what went wrong on this one."""
    if task.settings.device == "cuda":
        _use_own_gpu()
    type_by_rank = _device_types(board, task)
    model = task.open_model()
    _check_same(board, _description(model, task.settings))
    kept, existing = _gather_kept(board, task, on_message if board.rank == 0 else lambda text: None)
    if existing is not None and board.rank == 0:
        check_updatable(existing, model, task.settings, [one for one in type_by_rank if one is not None])
    device_type = type_by_rank[board.rank]
    if device_type is not None:
        is_first = type_by_rank.index(device_type) == board.rank
        found = _measure(
            board,
            model,
            task,
            device_type,
            type_by_rank.count(device_type),
            kept,
            on_layer,
            on_message if is_first else lambda text: None,
        )
        if is_first:
            board.post(f"profile/{device_type}", _encode(found))
    written = None
    if board.rank == 0:
        device_types = [one for one in dict.fromkeys(type_by_rank) if one is not None]
        profiles = [_decode(board.read(f"profile/{one}"), f"the profile of {one}") for one in device_types]
        merged = merge_profiles(profiles, [f"the profile of {one}" for one in device_types])
        written = task.finish(merged if existing is None else with_other_devices(merged, existing))
        write_profile(written, task.output)
    board.gather("written", b"")
    forget_partial(task.output)
    return written


def _use_own_gpu() -> None:
    """Measure on the GPU that the launcher means for this process."""
    local_rank, num_gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if torch.cuda.is_available():
        if local_rank >= num_gpus:
            raise LaunchError(f"there are {num_gpus} GPUs for more processes on this node; launch one for each GPU")
        torch.cuda.set_device(local_rank)


def _device_types(board: Board, task: Task) -> list[str | None]:
    """Return the device type that each rank measures, the same on all of them; ``None`` where it rests.

    Raises:
        LaunchError: The cluster file or the names are for another number of ranks.
        ClusterError: The file leaves a device type without a rank to measure it on.
    """
    own = recorded_name(task.settings.device, None)
    detected = [one.decode() for one in board.gather("device", own.encode())]
    if board.rank == 0:
        names: list[str | None] = list(task.device_names)
        if task.cluster_file is not None:
            names = device_types_of(read_cluster(task.cluster_file), board.num_ranks, str(task.cluster_file))
        if len(names) == 1:
            names *= board.num_ranks
        if names and len(names) != board.num_ranks:
            raise LaunchError(
                f"--device-name names {len(names)} device types, but {board.num_ranks} processes were launched; name "
                "one for each rank, or one for all"
            )
        board.post("device types", json.dumps(names or detected).encode())
    found: list[str | None] = json.loads(board.read("device types"))
    return found


def device_types_of(cluster: Cluster, num_processes: int, where: str) -> list[str | None]:
    """Return the device type that each process of a launch on ``cluster`` measures; ``None`` where it rests.

    The cluster slows ranks down relative to the times of their type, so a slowed rank must not measure them.

    Raises:
        LaunchError: The cluster is for another number of processes.
        ClusterError: All ranks of a type are slowed.
    """
    needed = cluster.num_ranks * cluster.num_replicas
    if needed != num_processes:
        raise LaunchError(
            f"{where} is for {cluster.num_ranks} ranks x {cluster.num_replicas} replicas = {needed} processes, but "
            f"{num_processes} were launched"
        )
    measuring = {rank.device for rank in cluster.ranks if rank.slowdown == 1.0}
    for rank in cluster.ranks:
        if rank.device not in measuring:
            raise ClusterError(
                f"{where}: every rank with device {rank.device!r} has a slowdown, so none of them can measure its "
                "times; take the slowdowns out, and what is measured includes them"
            )
    return [
        rank.device if rank.slowdown == 1.0 else None for rank in cluster.ranks for _ in range(cluster.num_replicas)
    ]


def _description(model: ModelLayers, settings: Settings) -> dict[str, Any]:
    return {
        "model": model.name,
        **settings.conditions(),
        "seed": settings.seed,
        "number of layers": len(model.layers),
        **{f"layer {index}": f"{layer.name} ({layer.kind})" for index, layer in enumerate(model.layers)},
        **{f"the inside of layer {layer.name}": digest(layer.identity) for layer in model.layers},
    }


def _check_same(board: Board, own: dict[str, Any]) -> None:
    """Check on every rank that it is to do what rank 0 does; returns when all have.

    Raises:
        LaunchError: It is not; names the first difference.
    """
    if board.rank == 0:
        board.post("description", json.dumps(own).encode())
    of_rank_0 = json.loads(board.read("description"))
    for what in dict.fromkeys([*of_rank_0, *own]):
        here, there = own.get(what), of_rank_0.get(what)
        if here != there:
            raise LaunchError(
                f"{what} is {here} here, but {there} on rank 0; all ranks must run the same command with the same "
                "model and software"
            )
    board.gather("same", b"")


def _gather_kept(board: Board, task: Task, on_message: OnMessage) -> tuple[list[KeptProfile], KeptProfile | None]:
    """Return what earlier runs left on the disks of all ranks, and the profile to update; the same on all ranks.

    Raises:
        ProfileError: There is nothing to update.
    """
    existing = None
    if task.is_update:
        if board.rank == 0:
            to_update = read_to_update(task.output)
            board.post("update", _encode(to_update.profile))
        existing = KeptProfile(str(task.output), _decode(board.read("update"), task.output))
    own = [(one.where, profile_document(one.profile)) for one in read_partials(task.output, on_message)]
    where_by_content: dict[str, str] = {}
    for part in board.gather("kept", json.dumps(own).encode()):
        for where, document in json.loads(part):
            where_by_content.setdefault(json.dumps(document), where)  # one file may lie before several ranks
    kept = [
        KeptProfile(where, profile_from_document(json.loads(content), where))
        for content, where in where_by_content.items()
    ]
    return ([] if existing is None else [existing]) + kept, existing


def _measure(
    board: Board,
    model: ModelLayers,
    task: Task,
    device_type: str,
    num_sharing: int,
    kept: Sequence[KeptProfile],
    on_layer: OnLayer | None,
    on_message: OnMessage,
) -> Profile:
    def get_on(index: int, name: str) -> None:
        board.get_on()
        if on_layer is not None:
            on_layer(index, name)

    settings = task.settings.within(task.time_limit_s, model, num_sharing)
    device = torch.device("cpu") if settings.device == "cpu" else torch.device("cuda", torch.cuda.current_device())
    return measure_what_is_new(
        model,
        settings,
        device_type,
        kept,
        partial_path(task.output, f"{re.sub(r'[^A-Za-z0-9.-]+', '-', device_type)}-{board.rank}"),
        sharing=SharedLayers(board, device_type, model, device) if num_sharing > 1 else None,
        on_layer=get_on,
        on_message=on_message,
    )


def _encode(profile: Profile) -> bytes:
    return json.dumps(profile_document(profile)).encode()


def _decode(content: bytes, where: Path | str) -> Profile:
    return profile_from_document(json.loads(content), where)
