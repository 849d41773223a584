"""Checkpoints of a planned engine: every rank writes or reads its layers, and all succeed or all raise.

What can fail on one rank (a full disk, a missing file, another model) is exchanged before anybody goes on, so that no
rank waits for one that has raised.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from deepspeed import comm as dist
from deepspeed.utils import logger
from safetensors import SafetensorError
from torch import Tensor, nn

from pipeplan.errors import CheckpointError, PipeplanError
from pipeplan.runtime.checkpoint.capture import capture_layer, number_groups
from pipeplan.runtime.checkpoint.files import (
    LATEST,
    TRAINING_STATE,
    check_files,
    check_tag,
    commit_folder,
    find_folder,
    optimizer_file,
    partial_folder,
    read_numbers,
    read_optimizer,
    read_training_state,
    read_weights,
    start_folder,
    weights_file,
    write_layer,
    write_training_state,
)
from pipeplan.runtime.checkpoint.manifest import MANIFEST, read_manifest, write_manifest
from pipeplan.runtime.checkpoint.optimizer import Slot, algorithm_of
from pipeplan.runtime.checkpoint.plain import client_state_of, training_state
from pipeplan.runtime.checkpoint.restore import (
    Target,
    check_numbers,
    check_outline,
    needed_layers,
    restore_layers,
)
from pipeplan.runtime.checkpoint.types import LayerOutline, LayerState, Outline, Progress, Weight, WeightOutline
from pipeplan.runtime.checkpoint.wrappers import forget_links, locate, loss_scale_of, restore_loss_scale

ResultT = TypeVar("ResultT")
Described = tuple[LayerOutline, Mapping[str, Mapping[str, Any]]]  # a layer, and the hyperparameters of its weights


def save_planned(
    engine: Any,
    save_folder: Path,
    tag: str | None,
    client_state: Mapping[str, Any],
    *,
    is_latest: bool,
    leaves_out_frozen: bool,
) -> Path:
    """Write a checkpoint of the engine's model; collective. Returns its folder, which is complete.

    Raises:
        CheckpointError: It can't be written, on any rank; then an older one of that name still stands.
    """
    is_writer = dist.get_rank() == 0
    tag = _same_tag(f"global_step{engine.global_steps}" if tag is None else str(tag))
    _agreed(lambda: start_folder(save_folder, tag) if is_writer else None)
    partial = partial_folder(save_folder, tag)
    try:
        _agreed(lambda: _check_visible(partial))
        outlines, sizes = _write_own_layers(engine, partial, leaves_out_frozen)
        _agreed(lambda: _write_rest(engine, partial, outlines, sizes, client_state) if is_writer else None)
        _agreed(lambda: commit_folder(save_folder, tag, is_latest=is_latest) if is_writer else None)
    except CheckpointError:
        if is_writer:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    return save_folder / tag


def load_planned(
    engine: Any,
    load_folder: Path,
    tag: str | None,
    *,
    is_strict: bool,
    loads_optimizer: bool,
    loads_scheduler: bool,
    loads_weights_only: bool,
) -> tuple[str | None, dict[str, Any]]:
    """Load a checkpoint that any plan or process wrote; collective.

    A folder that DeepSpeed itself wrote gives its weights, with ``loads_weights_only``.

    Returns:
        The checkpoint's folder and the script's own state.

    Raises:
        CheckpointError: It doesn't fit, on any rank; then nothing has changed. Only a file that is damaged in its
            middle is found later; the engine must not be used then.
    """
    folder = _same_folder(load_folder, tag)
    if not (folder / MANIFEST).is_file() and (folder / TRAINING_STATE).is_file():
        return _load_deepspeed(engine, folder, loads_weights_only=loads_weights_only, is_strict=is_strict)
    outline, bytes_by_file = _agreed(lambda: read_manifest(folder))
    target = _agreed(
        lambda: _target_of(engine, is_strict=is_strict, restores_state=loads_optimizer and not loads_weights_only)
    )
    content = _agreed(lambda: _check(outline, bytes_by_file, target, folder))

    def read(layer: int) -> LayerState:
        return LayerState(
            weights=read_weights(layer, folder) if weights_file(layer) in bytes_by_file else {},
            optimizer=read_optimizer(layer, folder)
            if target.restores_state and optimizer_file(layer) in bytes_by_file
            else {},
        )

    _agreed(lambda: restore_layers(outline, target, read))
    if engine.optimizer is not None:
        forget_links(engine.optimizer)
    if not loads_weights_only:
        _restore_progress(engine, outline.progress, content, loads_scheduler=loads_scheduler)
    if outline.plan_digest not in (None, engine.module.runnable.plan.digest) and dist.get_rank() == 0:
        logger.info(f"checkpoint {folder} was written under another plan; its layers moved to their new ranks")
    return str(folder), client_state_of(content)


# Saving.


def _write_own_layers(
    engine: Any, folder: Path, leaves_out_frozen: bool
) -> tuple[dict[int, Described], dict[str, int]]:
    """Write this rank's share of the layers; return all layers and the sizes of all files, on every rank.

    The replicas of a pipeline rank hold the same layers and gather their parts of the optimizer state, so a rank
    that can't write goes on gathering.
    """
    module = engine.module
    located = None if engine.optimizer is None else _agreed(lambda: locate(engine.optimizer))
    owner_by_tied = _owner_by_tied(module)
    names = _layer_names(module)
    num_replicas, replica = engine.grid.data_parallel_size, engine.grid.data_parallel_id
    whole = _gatherer(engine)
    outlines: dict[int, Described] = {}
    sizes: dict[str, int] = {}
    error: str | None = None
    for index in sorted(module.module_by_layer):
        try:
            captured = capture_layer(
                index,
                module.module_by_layer[index],
                located,
                owner_by_tied,
                name=names[index],
                whole=whole,
                leaves_out_frozen=leaves_out_frozen,
            )
            if replica == 0:
                outlines[index] = (captured.outline, captured.settings_by_weight)
            if index % num_replicas == replica and error is None:
                sizes |= write_layer(captured.state, index, folder)
        except CheckpointError as failure:  # the replicas have the same kind of optimizer, and stop here too
            error = str(failure)
            break
        except (OSError, RuntimeError, SafetensorError) as failure:
            error = f"rank {dist.get_rank()} can't write to {folder}: {failure}"
    reports = _exchange((outlines, sizes, error))
    for _, _, failed in reports:
        if failed is not None:
            raise CheckpointError(failed)
    return (
        {index: outline for own, _, _ in reports for index, outline in own.items()},
        {name: size for _, own, _ in reports for name, size in own.items()},
    )


def _write_rest(
    engine: Any,
    folder: Path,
    outlines: Mapping[int, Described],
    sizes: dict[str, int],
    client_state: Mapping[str, Any],
) -> None:
    module = engine.module
    names = _layer_names(module)
    layers, groups = number_groups(
        [outlines.get(index, (LayerOutline(name=names[index]), {})) for index in range(len(names))]
    )
    progress = Progress(
        steps=engine.global_steps,
        samples=engine.global_samples,
        skipped_steps=engine.skipped_steps,
        micro_batches=engine._num_micro_batches_run,
    )
    outline = Outline(
        layers=layers,
        progress=progress,
        model=module.runnable.plan.model,
        plan_digest=module.runnable.plan.digest,
        optimizer=None if engine.optimizer is None else algorithm_of(locate(engine.optimizer).optimizer),
        groups=groups,
        owner_by_tied=_owner_by_tied(module),
    )
    scheduler = engine.lr_scheduler
    content = training_state(
        progress,
        None if scheduler is None else scheduler.state_dict(),
        client_state,
        num_replicas=engine.grid.data_parallel_size,
        loss_scale=loss_scale_of(engine.optimizer),
    )
    sizes |= write_training_state(content, folder)
    write_manifest(outline, sizes, folder)


def _gatherer(engine: Any) -> Callable[[Tensor, Slot, nn.Parameter], Tensor]:
    """Return what puts a weight's tensor together from the parts that the replicas hold; it is collective over them."""
    group, num_replicas = engine.grid.get_data_parallel_group(), engine.grid.data_parallel_size

    def whole(part: Tensor, slot: Slot, weight: nn.Parameter) -> Tensor:
        if not slot.is_flat:
            return part
        if num_replicas == 1:
            return part.view(weight.shape)
        gathered = torch.zeros(weight.numel(), dtype=part.dtype, device=part.device)
        gathered.narrow(0, slot.weight_start, slot.num_elements).copy_(part)
        # As bytes: the others add zero, and a sum of numbers would turn -0.0 into 0.0.
        dist.all_reduce(gathered.view(torch.int32 if gathered.element_size() == 4 else torch.uint8), group=group)
        return gathered.view(weight.shape)

    return whole


def _check_visible(folder: Path) -> None:
    if not folder.is_dir():
        raise CheckpointError(
            f"rank {dist.get_rank()} doesn't see {folder}, which rank 0 has made; save to a folder that all nodes share"
        )


# Loading.


def _check(outline: Outline, bytes_by_file: Mapping[str, int], target: Target, folder: Path) -> dict[str, Any]:
    """Check everything that this rank is going to read; return the training state, which is read already."""
    check_outline(outline, target, f"checkpoint {folder}")
    layers = needed_layers(target)
    needed = [TRAINING_STATE]
    needed += [weights_file(layer) for layer in layers if outline.layers[layer].weights]
    if target.restores_state and target.located is not None:
        needed += [
            optimizer_file(layer)
            for layer in layers
            if any(weight.group is not None for weight in outline.layers[layer].weights.values())
        ]
    check_files(needed, bytes_by_file, folder)
    check_numbers(outline, target, lambda layer: read_numbers(layer, folder))
    return read_training_state(folder)


def _target_of(engine: Any, *, is_strict: bool, restores_state: bool) -> Target:
    module = engine.module
    return Target(
        modules=module.module_by_layer,
        num_layers=len(_layer_names(module)),
        layer_names=_layer_names(module),
        owner_by_tied=_owner_by_tied(module),
        located=None if engine.optimizer is None else locate(engine.optimizer),
        restores_state=restores_state,
        is_strict=is_strict,
    )


def _restore_progress(engine: Any, progress: Progress, content: Mapping[str, Any], *, loads_scheduler: bool) -> None:
    engine.global_steps = progress.steps
    engine.global_samples = progress.samples
    engine.skipped_steps = progress.skipped_steps
    engine._num_micro_batches_run = progress.micro_batches
    if loads_scheduler and engine.lr_scheduler is not None and content.get("lr_scheduler") is not None:
        engine.lr_scheduler.load_state_dict(content["lr_scheduler"])
    restore_loss_scale(engine.optimizer, content.get("pipeplan", {}).get("loss_scale", {}))


def _load_deepspeed(
    engine: Any, folder: Path, *, loads_weights_only: bool, is_strict: bool
) -> tuple[str, dict[str, Any]]:
    """Take the weights from the layer files of a checkpoint that DeepSpeed itself wrote."""
    if not loads_weights_only:
        raise CheckpointError(
            f"{folder} was written by DeepSpeed itself, whose optimizer state only fits the ranks that wrote it; take "
            "the weights alone with load_module_only=True"
        )

    def read_and_check() -> tuple[Target, Outline, dict[int, dict[str, Any]]]:
        target = _target_of(engine, is_strict=is_strict, restores_state=False)
        states = {
            layer: read_weights(layer, folder)
            for layer in needed_layers(target)
            if (folder / weights_file(layer)).is_file()
        }
        outline = _outline_of_weights(states, target)
        check_outline(outline, target, f"checkpoint {folder}")
        return target, outline, states

    target, outline, states = _agreed(read_and_check)
    _agreed(lambda: restore_layers(outline, target, lambda layer: LayerState(weights=states.get(layer, {}))))
    if engine.optimizer is not None:
        forget_links(engine.optimizer)
    return str(folder), {}


def _outline_of_weights(states: Mapping[int, Mapping[str, Any]], target: Target) -> Outline:
    """Return the outline of layer files without a manifest; what is shared is taken to be as in the target."""
    return Outline(
        layers=tuple(
            LayerOutline(
                weights={
                    name: WeightOutline(dtype=str(value.dtype), shape=tuple(value.shape))
                    for name, value in states.get(index, {}).items()
                    if isinstance(value, Tensor)
                }
            )
            for index in range(target.num_layers)
        ),
        owner_by_tied=target.owner_by_tied,
    )


# Both.


def _owner_by_tied(module: Any) -> dict[Weight, Weight]:
    """Return the shared weights of the whole model, each with its first occurrence."""
    return {
        (layer, name): (tied.first_layer, first)
        for tied in module.tied_keys
        for layer, names in sorted(tied.attributes_by_layer.items())
        if layer != tied.first_layer
        for name, first in zip(names, tied.attributes_by_layer[tied.first_layer], strict=True)
    }


def _layer_names(module: Any) -> list[str | None]:
    known = module.runnable.layer_names
    return [None] * module.runnable.plan.partition.num_layers if known is None else list(known)


def _same_tag(tag: str) -> str:
    _agreed(lambda: check_tag(tag))
    tags = _exchange(tag)
    for rank, other in enumerate(tags):
        if other != tags[0]:
            raise CheckpointError(f"rank {rank} saves checkpoint {other!r}, but rank 0 {tags[0]!r}; use one tag")
    return tag


def _same_folder(load_folder: Path, tag: str | None) -> Path:
    """Return the checkpoint's folder as rank 0 finds it, which every rank must see."""
    found, failure = _attempt(lambda: find_folder(load_folder, tag))
    folder = _exchange(_message(failure) if failure is not None else found)[0]
    if isinstance(folder, str):
        raise CheckpointError(folder)
    seen: Path = folder[0]
    _agreed(lambda: _check_seen(seen))
    return seen


def _check_seen(folder: Path) -> None:
    if not folder.is_dir():
        raise CheckpointError(
            f"rank {dist.get_rank()} doesn't see checkpoint {folder}, which rank 0 does; copy it to every node, or "
            "load from a folder that all nodes share"
        )


def has_latest(load_folder: Path) -> bool:
    """Return whether rank 0 finds a checkpoint that may be loaded without naming its tag; collective."""
    found: bool = _exchange((load_folder / LATEST).is_file() or (load_folder / MANIFEST).is_file())[0]
    return found


def _agreed(act: Callable[[], ResultT]) -> ResultT:
    """Return what ``act`` returns here if it raised on no rank; collective.

    Raises:
        CheckpointError: The error of the lowest rank that raised.
    """
    result, failure = _attempt(act)
    errors = _exchange(None if failure is None else _message(failure))
    if failure is not None and not isinstance(failure, (PipeplanError, OSError)):
        raise failure  # a fault of ours: its traceback tells more
    for error in errors:
        if error is not None:
            raise CheckpointError(error)
    assert result is not None
    return result[0]


def _attempt(act: Callable[[], ResultT]) -> tuple[tuple[ResultT] | None, Exception | None]:
    """Return what ``act`` returns, in a tuple, or what it raises: the others must hear of it before we go on."""
    try:
        return (act(),), None
    except Exception as error:
        return None, error


def _message(error: Exception) -> str:
    return str(error) if isinstance(error, PipeplanError) else f"rank {dist.get_rank()}: {error}"


def _exchange(own: Any) -> list[Any]:
    """Return what every rank has; collective."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    return gathered
