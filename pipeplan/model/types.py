"""What is trained: a list of layers, each of which can be built alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

LossFunction = Callable[[Any, Any], Tensor]
"""``loss_function(outputs, labels)``: a scalar from what the last layer returned and the batch's labels."""

SampleBatch = Callable[[int, int, int], tuple[Any, Any]]
"""``sample_batch(micro_batch_size, sequence_length, seed)``: the inputs of the first layer, and labels."""


class CheckpointFormat(Protocol):
    """How the weights of single layers are read from and written to checkpoint files."""

    def load(self, modules: Mapping[int, nn.Module], folder: Path) -> None:
        """Copy weights from the checkpoint in ``folder`` into built layers, given by their index.

        Raises:
            ModelError: A tensor is missing, unexpected or of another shape; names it.
            FileFormatError: The folder holds no checkpoint, or a file of it can't be read.
        """

    def tensors(self, index: int, module: nn.Module) -> dict[str, Tensor]:
        """Return the weights of ``module``, which is layer ``index``, under the checkpoint's own names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSource:
    """One layer of a model, not yet built.

    A built layer takes one argument, what the layer before it returned (the first takes the inputs of the
    batch), and returns one value; both are a tensor or a pytree of tensors.

    Attributes:
        kind: Such as ``mamba``, ``attention``, ``moe``, ``mlp``, ``embedding``, ``norm``, ``head``, or several joined
            by ``+``; for display and per-kind efficiency.
        build: Builds this layer alone, with its weights, on the CPU; the same weights in every process.
        identity: Layers of equal identity cost the same, so that one of them is measured for all.
        num_parameters: Trainable parameters, shared ones included; ``None`` when only building the layer tells.
        num_tied_parameters: How many of them are shared under ``tied``.
        tied: Key of weights shared with the other layers of the same key.
        tied_weight_attr: Dotted names, inside the built layer, of the weights shared under ``tied``; the i-th name of
            each layer of that key is the same weight. A single ``weight`` in a ``TiedLayerSpec``.
        keep_with_previous: Whether the layer must share a stage with the one before it.
        is_splittable: Whether its weight gradients may be put off until W; where not, its whole backward runs in I.
            ``None``: unless it is the head; see ``pipeplan.model.splitting``.
        weight_names: Name of each weight inside the built layer → its name in the whole model.
    """

    name: str
    kind: str
    build: Callable[[], nn.Module | Callable[[Any], Any]]
    identity: str
    num_parameters: int | None = None
    num_tied_parameters: int = 0
    tied: str | None = None
    tied_weight_attr: tuple[str, ...] = ()
    keep_with_previous: bool = False
    is_splittable: bool | None = None
    weight_names: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLayers:
    """A model as its layers in order, with everything that training it needs.

    Attributes:
        source: How to build the model again: the profile's ``model_source``; see ``pipeplan.model.source``.
        vocab_size: Number of token ids that the inputs may hold; ``None`` when the model doesn't read tokens, or
            does not say.
        checkpoint: ``None`` when there is no file format for single layers (a factory's model).
    """

    name: str
    layers: tuple[LayerSource, ...]
    loss_function: LossFunction
    sample_batch: SampleBatch
    source: Mapping[str, Any]
    vocab_size: int | None = None
    checkpoint: CheckpointFormat | None = None

    @property
    def num_parameters(self) -> int | None:
        """Parameters of the whole model, shared ones counted once; ``None`` when a layer does not say."""
        total = 0
        seen: set[str] = set()
        for layer in self.layers:
            if layer.num_parameters is None:
                return None
            total += layer.num_parameters
            if layer.tied is not None:
                if layer.tied in seen:
                    total -= layer.num_tied_parameters
                seen.add(layer.tied)
        return total
