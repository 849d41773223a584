"""Which layers of a model may have their backward split into I (input gradients) and W (weight gradients)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from pipeplan.errors import ModelError
from pipeplan.model.types import LayerSource


def splittable_layers(layers: Sequence[Any]) -> tuple[bool, ...]:
    """Return, for each layer, whether its weight gradients may be put off until W.

    A layer says so in its attribute ``is_splittable``. Where that is missing or ``None``, all layers may but the head,
    which is the last one with weights, and what stands behind it. With a large vocabulary a head that is split holds
    the gradient of its logits, often the largest tensor of the model, for every micro-batch between its I and its W,
    and gains next to nothing for it (``tests/benchmarks/estimate.py`` shows one case).

    Args:
        layers: ``LayerSource``, ``nn.Module``, DeepSpeed's ``LayerSpec`` and ``TiedLayerSpec``, or functions.

    Raises:
        ModelError: ``is_splittable`` of a layer is something else.
    """
    head = max((index for index, layer in enumerate(layers) if _may_have_weights(layer)), default=len(layers))
    found = []
    for index, layer in enumerate(layers):
        own = getattr(layer, "is_splittable", None)
        if own is not None and not isinstance(own, bool):
            name = getattr(layer, "name", type(layer).__name__)
            raise ModelError(f"layer {index} ({name}): is_splittable is {own!r}; set True, False or None")
        found.append(index < head if own is None else own)
    return tuple(found)


def _may_have_weights(layer: Any) -> bool:
    if isinstance(layer, LayerSource):
        return layer.num_parameters != 0  # None: only building it tells
    if isinstance(layer, nn.Module):
        return next(layer.parameters(), None) is not None
    return hasattr(layer, "build")
