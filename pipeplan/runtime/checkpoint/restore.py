"""Puts a checkpoint into layers that were built here, and into their optimizer, after checking that it fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pipeplan.errors import CheckpointError, nearest
from pipeplan.runtime.checkpoint.optimizer import (
    Expected,
    Located,
    Restoration,
    algorithm_of,
    apply_hyperparameters,
)
from pipeplan.runtime.checkpoint.types import LayerState, Outline, Weight, WeightState


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The layers of this process, and what is known of the whole model.

    Attributes:
        modules: The layers that hold weights, by index.
        layer_names: Of every layer of the model; ``None`` where they aren't known.
        owner_by_tied: Shared weights of the model, each with its first occurrence.
        located: The optimizer to restore; ``None`` restores weights only.
        restores_state: Whether the optimizer's state is restored, or only its copies of the weights.
        is_strict: Whether the layers' weights must be the checkpoint's, none more and none less.
    """

    modules: Mapping[int, nn.Module]
    num_layers: int
    layer_names: Sequence[str | None] | None
    owner_by_tied: Mapping[Weight, Weight]
    located: Located | None = None
    restores_state: bool = True
    is_strict: bool = True


def source_of(target: Target, layer: int, name: str) -> Weight:
    """Return which weight of the checkpoint a weight of the target comes from."""
    return target.owner_by_tied.get((layer, name), (layer, name))


def needed_layers(target: Target) -> list[int]:
    """Return the layers of the checkpoint that the target reads, shared weights' first layers included."""
    return sorted(
        {source_of(target, layer, name)[0] for layer, module in target.modules.items() for name in module.state_dict()}
        | set(target.modules)
    )


def check_outline(outline: Outline, target: Target, where: str) -> None:
    """Check that a checkpoint is of the target's model and optimizer.

    Raises:
        CheckpointError: Names the first layer or weight that differs, or why the optimizer state can't be used.
    """
    if len(outline.layers) != target.num_layers:
        raise CheckpointError(
            f"{where} is of a model with {len(outline.layers)} layers, but this one has {target.num_layers}; it is a "
            "checkpoint of another model, or of one cut into other layers"
        )
    for index, (layer, name) in enumerate(zip(outline.layers, target.layer_names or (), strict=False)):
        if layer.name is not None and name is not None and layer.name != name:
            raise CheckpointError(
                f"{where}: layer {index} is {layer.name!r}, but {name!r} in this model; it is a checkpoint of another "
                "model, or of one cut into other layers"
            )
    for index, module in sorted(target.modules.items()):
        _check_layer(outline, index, module, target, where)
    if target.located is not None and target.restores_state:
        _check_optimizer(outline, target.located, where)


def _check_layer(outline: Outline, index: int, module: nn.Module, target: Target, where: str) -> None:
    saved = outline.layers[index].weights
    own = {name: value for name, value in module.state_dict().items() if isinstance(value, Tensor)}
    label = _label(outline, index)
    for name, value in own.items():
        layer, source = source_of(target, index, name)
        weight = outline.layers[layer].weights.get(source)
        if weight is None:
            if target.is_strict:
                raise CheckpointError(
                    f"{where} holds no weight {name!r} of {label}{nearest(name, saved)}; it is a checkpoint of another "
                    "model, or its frozen weights were left out (load_module_strict=False keeps this model's)"
                )
        elif weight.shape != tuple(value.shape):
            raise CheckpointError(
                f"{where}: weight {name!r} of {label} has shape {list(weight.shape)}, but {list(value.shape)} in this "
                "model; it is a checkpoint of another model"
            )
        if outline.owner_by_tied.get((index, name), (index, name)) != (layer, source):
            raise CheckpointError(
                f"{where}: weight {name!r} of {label} is shared with other layers there or here, but not in both; it "
                "is a checkpoint of another model"
            )
    unknown = sorted(set(saved) - set(own))
    if unknown and target.is_strict:
        raise CheckpointError(
            f"{where} holds weight {unknown[0]!r} of {label}, which this model doesn't have{nearest(unknown[0], own)}"
        )


def _check_optimizer(outline: Outline, located: Located, where: str) -> None:
    if outline.optimizer is None:
        raise CheckpointError(
            f"{where} holds no optimizer state; load the weights alone with load_module_only=True (--init in an "
            "emitted train.py)"
        )
    algorithm = algorithm_of(located.optimizer)
    if algorithm != outline.optimizer:
        raise CheckpointError(
            f"{where} was trained with {outline.optimizer}, but the optimizer here is {algorithm} "
            f"({type(located.optimizer).__name__}); use {outline.optimizer}, or load the weights alone with "
            "load_optimizer_states=False"
        )


def check_numbers(
    outline: Outline, target: Target, numbers_of: Callable[[int], Mapping[str, Mapping[str, int | float]]]
) -> None:
    """Check that the target's optimizer can hold the state of its weights.

    Args:
        numbers_of: Returns the saved numbers of a layer's weights.

    Raises:
        CheckpointError: Weights that it steps together were stepped differently, or with other settings.
    """
    if target.located is not None and target.restores_state:
        Restoration(target.located).check(_expected(outline, target, target.located, numbers_of))


def _expected(
    outline: Outline,
    target: Target,
    located: Located,
    numbers_of: Callable[[int], Mapping[str, Mapping[str, int | float]]],
) -> Iterator[Expected]:
    known: dict[int, Mapping[str, Mapping[str, int | float]]] = {}
    for index, name, weight in named_weights(target.modules):
        slot = located.slot(weight)
        layer, source = source_of(target, index, name)
        saved = outline.layers[layer].weights.get(source)
        if slot is None or saved is None:
            continue
        if saved.group is not None and layer not in known:
            known[layer] = numbers_of(layer)
        yield Expected(
            name=f"{name} of {_label(outline, index)}",
            slot=slot,
            numbers={} if saved.group is None else known[layer].get(source, {}),
            settings=None if saved.group is None else outline.groups[saved.group],
        )


def restore_layers(outline: Outline, target: Target, read: Callable[[int], LayerState]) -> None:
    """Copy the checkpoint into the target, which was checked; one layer is held at a time.

    Args:
        read: Returns the weights and the optimizer state of a layer.
    """
    restoration = Restoration(target.located) if target.located is not None else None
    readers: dict[int, list[int]] = {}  # layers of the target, by the layer of the checkpoint that they read
    for index, module in target.modules.items():
        for layer in {index} | {source_of(target, index, name)[0] for name in module.state_dict()}:
            readers.setdefault(layer, []).append(index)
    for layer in sorted(readers):
        state = read(layer)
        for index in readers[layer]:
            _restore_layer(outline, target, index, layer, state, restoration)
    if restoration is not None:
        restoration.finish()
    if target.located is not None and target.restores_state and len(outline.groups) == 1:
        for group in target.located.optimizer.param_groups:  # that of a rank without weights, too
            apply_hyperparameters(group, outline.groups[0])


@torch.no_grad()
def _restore_layer(
    outline: Outline, target: Target, index: int, layer: int, state: LayerState, restoration: Restoration | None
) -> None:
    module = target.modules[index]
    weights = dict(module.named_parameters())
    own = module.state_dict(keep_vars=True)
    for name, value in own.items():
        source_layer, source = source_of(target, index, name)
        if source_layer != layer or source not in state.weights:
            continue
        saved = state.weights[source]
        if not isinstance(value, Tensor):
            continue
        entry = state.optimizer.get(source)
        best = saved if entry is None or entry.master is None else entry.master
        value.copy_(best)
        slot = None if restoration is None or name not in weights else target.located.slot(weights[name])  # type: ignore[union-attr]
        if slot is not None and restoration is not None:
            group = outline.layers[layer].weights[source].group
            restoration.put(
                slot,
                best,
                (entry or WeightState()) if target.restores_state else None,
                outline.groups[group] if target.restores_state and group is not None else None,
            )


def named_weights(modules: Mapping[int, nn.Module]) -> Iterator[tuple[int, str, nn.Parameter]]:
    """Yield (layer, name, weight) in model order."""
    for index in sorted(modules):
        for name, weight in modules[index].named_parameters():
            yield index, name, weight


def layer_weights(module: nn.Module, *, leaves_out_frozen: bool = False) -> dict[str, Any]:
    """Return the parameters and buffers of a layer by name."""
    frozen = {name for name, weight in module.named_parameters() if not weight.requires_grad}
    return {name: value for name, value in module.state_dict().items() if not (leaves_out_frozen and name in frozen)}


def _label(outline: Outline, index: int) -> str:
    name = outline.layers[index].name
    return f"layer {index}" if name is None else f"layer {index} ({name})"
