"""Weights shared by several layers: one parameter on a rank, equal copies with summed gradients across ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from deepspeed import comm as dist
from deepspeed.pipe import TiedLayerSpec
from torch import nn

from pipeplan.errors import ModelError


@dataclass(frozen=True, slots=True)
class TiedKey:
    """One key of shared weights.

    Attributes:
        attributes_by_layer: Dotted names of the shared weights inside each layer of the key; the i-th of every
            layer is the same weight.
    """

    key: str
    attributes_by_layer: dict[int, tuple[str, ...]]

    @property
    def first_layer(self) -> int:
        """The layer whose initial weights count."""
        return min(self.attributes_by_layer)


def find_tied_keys(layers: Sequence[Any]) -> tuple[TiedKey, ...]:
    """Return the keys of shared weights by first occurrence, the same order on every rank.

    Raises:
        ModelError: Two layers of one key share different numbers of weights.
    """
    found: dict[str, dict[int, tuple[str, ...]]] = {}
    for index, layer in enumerate(layers):
        if isinstance(layer, TiedLayerSpec):
            key, attributes = layer.key, tuple(layer.tied_weight_attr)
        elif getattr(layer, "tied", None) is not None and not isinstance(layer, nn.Module):
            key, attributes = layer.tied, tuple(layer.tied_weight_attr)
        else:
            continue
        found.setdefault(key, {})[index] = attributes
    for key, attributes_by_layer in found.items():
        if len({len(attributes) for attributes in attributes_by_layer.values()}) > 1:
            raise ModelError(
                f"the layers of tied key {key!r} share different numbers of weights: "
                + ", ".join(f"layer {index} {list(names)}" for index, names in attributes_by_layer.items())
            )
    return tuple(TiedKey(key, attributes_by_layer) for key, attributes_by_layer in found.items())


def get_parameter(module: nn.Module, name: str) -> nn.Parameter:
    """Return the parameter of a dotted name."""
    return module.get_parameter(name)


def share_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Put ``parameter`` in the place of the one of a dotted name."""
    owner_name, _, attribute = name.rpartition(".")
    owner = module.get_submodule(owner_name)
    if getattr(owner, attribute).shape != parameter.shape:
        raise ModelError(
            f"tied weight {name!r} has shape {list(getattr(owner, attribute).shape)}, but the layer that it is tied to "
            f"has {list(parameter.shape)}"
        )
    setattr(owner, attribute, parameter)


class TiedWeights:
    """The shared weights of one key that this rank holds, and the ranks it shares them with.

    Attributes:
        source: Global rank of the first layer's owner, whose initial weights the others take.
    """

    def __init__(self, weights: Sequence[nn.Parameter], ranks: Sequence[int], source: int, group: Any) -> None:
        self.weights = tuple(weights)
        self.ranks = tuple(ranks)
        self.source = source
        self.group = group

    def broadcast(self) -> None:
        """Take the weights of the first layer's owner; collective over the owners."""
        for weight in self.weights:
            dist.broadcast(weight.data, src=self.source, group=self.group)

    def sum_gradients(self, gradient_of: Callable[[nn.Parameter], Any]) -> None:
        """Sum the gradients over the owners; collective over the owners."""
        for weight in self.weights:
            if weight.requires_grad:
                dist.all_reduce(gradient_of(weight), group=self.group)
