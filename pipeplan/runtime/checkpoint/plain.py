"""Checkpoints in one process with plain torch: no DeepSpeed, no plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pipeplan.errors import CheckpointError
from pipeplan.runtime.checkpoint.capture import capture_layer, number_groups
from pipeplan.runtime.checkpoint.files import (
    check_files,
    check_tag,
    find_folder,
    new_checkpoint,
    optimizer_file,
    read_optimizer,
    read_training_state,
    read_weights,
    weights_file,
    write_layer,
    write_training_state,
)
from pipeplan.runtime.checkpoint.manifest import read_manifest, write_manifest
from pipeplan.runtime.checkpoint.optimizer import algorithm_of, locate_plain
from pipeplan.runtime.checkpoint.restore import Target, check_numbers, check_outline, named_weights, restore_layers
from pipeplan.runtime.checkpoint.types import Checkpoint, LayerState, Outline, Progress, Weight

Layers = Sequence[nn.Module | Callable[[Any], Any]]


def read_checkpoint(folder: Path, tag: str | None = None) -> Checkpoint:
    """Return a checkpoint, weights and optimizer state by layer and name, whatever plan or process wrote it.

    Args:
        folder: What was given to ``save_checkpoint``, or the checkpoint's own folder.
        tag: Which checkpoint; the latest if not given.

    Raises:
        CheckpointError: There is none, or a file of it is missing or damaged.
    """
    folder = find_folder(folder, tag)
    outline, bytes_by_file = read_manifest(folder)
    check_files(list(bytes_by_file), bytes_by_file, folder)
    training_state = read_training_state(folder)
    return Checkpoint(
        outline=outline,
        layers=tuple(
            LayerState(
                weights=read_weights(index, folder) if weights_file(index) in bytes_by_file else {},
                optimizer=read_optimizer(index, folder) if optimizer_file(index) in bytes_by_file else {},
            )
            for index in range(len(outline.layers))
        ),
        lr_scheduler=training_state.get("lr_scheduler"),
        client_state=client_state_of(training_state),
    )


def write_checkpoint(checkpoint: Checkpoint, folder: Path, tag: str | None = None) -> Path:
    """Write a checkpoint that loads under any plan; returns its own folder, ``folder/tag``.

    Args:
        tag: Its name; ``global_stepN`` if not given, as DeepSpeed names it.

    Raises:
        CheckpointError: It can't be written; then nothing is there.
    """
    tag = check_tag(f"global_step{checkpoint.outline.progress.steps}" if tag is None else tag)
    with new_checkpoint(folder, tag) as partial:
        bytes_by_file: dict[str, int] = {}
        for index, layer in enumerate(checkpoint.layers):
            bytes_by_file |= write_layer(layer, index, partial)
        state = training_state(
            checkpoint.outline.progress, checkpoint.lr_scheduler, checkpoint.client_state, num_replicas=1
        )
        bytes_by_file |= write_training_state(state, partial)
        write_manifest(checkpoint.outline, bytes_by_file, partial)
    return folder / tag


def capture_checkpoint(
    layers: Layers,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    model: str | None = None,
    layer_names: Sequence[str] | None = None,
    progress: Progress | None = None,
    lr_scheduler: Any = None,
    client_state: Mapping[str, Any] | None = None,
) -> Checkpoint:
    """Return the state of a model that one process trains; its tensors are the model's own, not copies.

    Args:
        layers: Every layer in model order; weights that are the same object in two layers are shared.
        optimizer: Steps the weights themselves; ``None`` takes the weights only.
        layer_names: As in the profile, to be compared when the checkpoint is loaded.
    """
    modules = _modules_of(layers)
    owner_by_tied = find_tied_weights(modules)
    located = None if optimizer is None else locate_plain(optimizer)
    captured = [
        capture_layer(
            index,
            modules.get(index),
            located,
            owner_by_tied,
            name=None if layer_names is None else layer_names[index],
        )
        for index in range(len(layers))
    ]
    outlines, groups = number_groups([(one.outline, one.settings_by_weight) for one in captured])
    return Checkpoint(
        outline=Outline(
            layers=outlines,
            progress=progress or Progress(),
            model=model,
            optimizer=None if optimizer is None else algorithm_of(optimizer),
            groups=groups,
            owner_by_tied=owner_by_tied,
        ),
        layers=tuple(one.state for one in captured),
        lr_scheduler=None if lr_scheduler is None else lr_scheduler.state_dict(),
        client_state=dict(client_state or {}),
    )


def restore_checkpoint(
    checkpoint: Checkpoint,
    layers: Layers,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    layer_names: Sequence[str] | None = None,
    lr_scheduler: Any = None,
) -> None:
    """Put a checkpoint into a model that one process trains.

    Args:
        optimizer: ``None`` restores the weights only.

    Raises:
        CheckpointError: It is of another model or optimizer; then nothing has changed.
    """
    modules = _modules_of(layers)
    target = Target(
        modules=modules,
        num_layers=len(layers),
        layer_names=layer_names,
        owner_by_tied=find_tied_weights(modules),
        located=None if optimizer is None else locate_plain(optimizer),
    )
    check_outline(checkpoint.outline, target, "the checkpoint")
    check_numbers(
        checkpoint.outline,
        target,
        lambda layer: {name: state.numbers for name, state in checkpoint.layers[layer].optimizer.items()},
    )
    restore_layers(checkpoint.outline, target, checkpoint.layers.__getitem__)
    if lr_scheduler is not None and checkpoint.lr_scheduler is not None:
        lr_scheduler.load_state_dict(dict(checkpoint.lr_scheduler))


def find_tied_weights(modules: Mapping[int, nn.Module]) -> dict[Weight, Weight]:
    """Return the weights that are the same object as one of an earlier layer, each with the first."""
    first_by_id: dict[int, Weight] = {}
    tied: dict[Weight, Weight] = {}
    for index, name, weight in named_weights(modules):
        first = first_by_id.setdefault(id(weight), (index, name))
        if first != (index, name):
            tied[index, name] = first
    return tied


_OWN_KEYS = (
    "module",
    "optimizer",
    "lr_scheduler",
    "buffer_names",
    "skipped_steps",
    "global_steps",
    "global_samples",
    "dp_world_size",
    "mp_world_size",
    "pipeplan",
)


def training_state(
    progress: Progress,
    lr_scheduler: Mapping[str, Any] | None,
    client_state: Mapping[str, Any],
    *,
    num_replicas: int,
    loss_scale: Mapping[str, int | float] | None = None,
) -> dict[str, Any]:
    """Return what DeepSpeed expects beside the layer files, and the script's own state.

    Raises:
        CheckpointError: The script's state uses a name that DeepSpeed needs.
    """
    for key in client_state:
        if key in _OWN_KEYS:
            raise CheckpointError(f"client_state uses the key {key!r}, which the checkpoint needs itself; rename it")
    return {
        "module": None,  # the layer files hold it
        "optimizer": None,  # the optimizer files hold it
        "lr_scheduler": lr_scheduler,
        "buffer_names": [],
        "skipped_steps": progress.skipped_steps,
        "global_steps": progress.steps,
        "global_samples": progress.samples,
        "dp_world_size": num_replicas,
        "mp_world_size": 1,
        "pipeplan": {"loss_scale": dict(loss_scale or {})},
        **client_state,
    }


def client_state_of(training_state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the script's own state."""
    return {key: value for key, value in training_state.items() if key not in _OWN_KEYS}


def _modules_of(layers: Layers) -> dict[int, nn.Module]:
    return {index: layer for index, layer in enumerate(layers) if isinstance(layer, nn.Module)}
