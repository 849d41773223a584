"""What a checkpoint holds: weights and optimizer state by layer and name, whatever plan wrote it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

Weight = tuple[int, str]
"""A weight of the model: (layer, name inside the layer)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightState:
    """What the optimizer keeps for one weight.

    Attributes:
        tensors: Such as ``exp_avg``; of the weight's shape.
        numbers: Such as ``step``.
        master: The fp32 weight that is stepped, where the model's own is kept in 16 bits.
    """

    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    numbers: Mapping[str, int | float] = field(default_factory=dict)
    master: Tensor | None = None

    @property
    def is_fresh(self) -> bool:
        """Whether the optimizer has not stepped the weight yet."""
        return not self.tensors and not self.numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerState:
    """One layer.

    Attributes:
        weights: Parameters and buffers by name, shared ones too, in the precision that the model ran in.
        optimizer: By the name of the weight; a shared weight is listed in the first of its layers only.
    """

    weights: Mapping[str, Any]
    optimizer: Mapping[str, WeightState] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightOutline:
    """What is known of a weight without reading it.

    Attributes:
        group: Its entry of ``Outline.groups``; ``None`` where no optimizer steps it.
    """

    dtype: str
    shape: tuple[int, ...]
    group: int | None = None

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerOutline:
    """What is known of a layer without reading it."""

    name: str | None = None
    weights: Mapping[str, WeightOutline] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far training had come.

    Attributes:
        micro_batches: Run by each data-parallel replica; dropout seeds count them.
    """

    steps: int = 0
    samples: int = 0
    skipped_steps: int = 0
    micro_batches: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """What is known of a checkpoint without reading its tensors.

    Attributes:
        plan_digest: Of the plan that it was trained with; ``None`` for one process.
        optimizer: The algorithm whose state is saved; ``None`` where only weights are.
        groups: Hyperparameters of each group of weights.
        owner_by_tied: Shared weights, each with the first of its occurrences, which holds the state.
    """

    layers: tuple[LayerOutline, ...]
    progress: Progress = Progress()
    model: str | None = None
    plan_digest: str | None = None
    optimizer: str | None = None
    groups: tuple[Mapping[str, Any], ...] = ()
    owner_by_tied: Mapping[Weight, Weight] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A whole checkpoint in memory.

    Attributes:
        layers: In model order, one entry for each of ``outline.layers``.
        lr_scheduler: State of the learning-rate scheduler.
        client_state: What the script gave to ``save_checkpoint``.
    """

    outline: Outline
    layers: tuple[LayerState, ...]
    lr_scheduler: Mapping[str, Any] | None = None
    client_state: Mapping[str, Any] = field(default_factory=dict)
