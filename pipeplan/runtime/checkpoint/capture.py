"""Takes the state of layers and of their optimizer, the part of a checkpoint that one process holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from pipeplan.runtime.checkpoint.optimizer import Located, Slot, distinct, hyperparameters, read_part
from pipeplan.runtime.checkpoint.restore import layer_weights
from pipeplan.runtime.checkpoint.types import LayerOutline, LayerState, Weight, WeightOutline, WeightState

Whole = Callable[[Tensor, Slot, nn.Parameter], Tensor]
"""Returns a whole tensor of a weight's shape from this process's part of it."""


@dataclass(frozen=True, slots=True)
class Captured:
    """A layer's state, its outline without groups, and the hyperparameters of each of its optimized weights."""

    state: LayerState
    outline: LayerOutline
    settings_by_weight: Mapping[str, Mapping[str, Any]]


def capture_layer(
    index: int,
    module: nn.Module | None,
    located: Located | None,
    owner_by_tied: Mapping[Weight, Weight],
    *,
    name: str | None,
    whole: Whole | None = None,
    leaves_out_frozen: bool = False,
) -> Captured:
    """Return the state of a layer; collective over whom ``whole`` asks.

    Raises:
        CheckpointError: The optimizer keeps something that can't be told apart by weight.
    """
    if module is None:
        return Captured(LayerState(weights={}), LayerOutline(name=name), {})
    weights = layer_weights(module, leaves_out_frozen=leaves_out_frozen)
    optimizer: dict[str, WeightState] = {}
    settings: dict[str, Mapping[str, Any]] = {}
    for weight_name, weight in module.named_parameters():
        slot = None if located is None else located.slot(weight)
        if located is None or slot is None or (index, weight_name) in owner_by_tied:
            continue
        state = read_part(located, slot, f"weight {weight_name!r} of layer {index}")
        if state.master is not None and weight.element_size() == state.master.element_size():
            state = replace(state, master=None)  # the weight itself is as good
        if whole is not None:
            state = replace(
                state,
                tensors={key: whole(part, slot, weight) for key, part in sorted(state.tensors.items())},
                master=None if state.master is None else whole(state.master, slot, weight),
            )
        optimizer[weight_name] = state
        settings[weight_name] = hyperparameters(slot.group)
    outline = LayerOutline(
        name=name,
        weights={
            key: WeightOutline(dtype=str(value.dtype).removeprefix("torch."), shape=tuple(value.shape))
            for key, value in weights.items()
            if isinstance(value, Tensor)
        },
    )
    return Captured(LayerState(weights=weights, optimizer=optimizer), outline, settings)


def number_groups(
    layers: list[tuple[LayerOutline, Mapping[str, Mapping[str, Any]]]],
) -> tuple[tuple[LayerOutline, ...], tuple[Mapping[str, Any], ...]]:
    """Return the outlines with the group of each weight, and the groups: different hyperparameters by occurrence."""
    groups = distinct([settings for _, by_weight in layers for settings in by_weight.values()])
    numbered = [
        replace(
            outline,
            weights={
                name: replace(weight, group=groups.index(by_weight[name]) if name in by_weight else None)
                for name, weight in outline.weights.items()
            },
        )
        for outline, by_weight in layers
    ]
    return tuple(numbered), tuple(groups)
