"""Optimizer state by weight: out of an optimizer and into one, however it flattens and shards its weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pipeplan.errors import CheckpointError
from pipeplan.runtime.checkpoint.types import WeightState

# How a step is computed, or a count that its state holds already; not what is computed.
_NO_HYPERPARAMETERS = frozenset({"params", "foreach", "fused", "capturable", "differentiable", "step"})

_ALGORITHM_BY_CLASS = {
    "DeepSpeedCPUAdagrad": "Adagrad",
    "DeepSpeedCPULion": "Lion",
    "FusedLion": "Lion",
    "FusedLamb": "Lamb",
}
_ADAM_CLASSES = ("Adam", "AdamW", "FusedAdam", "DeepSpeedCPUAdam")


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """Where an optimizer keeps what belongs to one weight, or to this process's part of it.

    Attributes:
        owner: What is stepped and has the state: the weight itself, or a flat tensor of many weights.
        group: The parameter group of ``owner``.
        start: Where in the flat ``owner`` the part begins.
        weight_start: Where in the flattened weight the part begins.
        num_elements: Size of the part; 0 if all of the weight is elsewhere.
        is_flat: Whether ``owner`` is an fp32 copy, flat and perhaps shared by several weights.
    """

    owner: Tensor
    group: dict[str, Any]
    start: int
    weight_start: int
    num_elements: int
    is_flat: bool

    def part_of(self, tensor: Tensor) -> Tensor:
        """Return the part of a tensor of the owner's size, as a view of it."""
        return tensor.view(-1).narrow(0, self.start, self.num_elements)


@dataclass(frozen=True, slots=True)
class Located:
    """An optimizer and the slots of its weights, by ``id`` of the weight."""

    optimizer: torch.optim.Optimizer
    slot_by_id: Mapping[int, Slot]

    def slot(self, weight: nn.Parameter) -> Slot | None:
        """Return where the state of a weight is; ``None`` if it isn't optimized."""
        return self.slot_by_id.get(id(weight))


def locate_plain(optimizer: torch.optim.Optimizer) -> Located:
    """Locate the state of an optimizer that steps the weights themselves."""
    return Located(
        optimizer,
        {
            id(weight): Slot(
                owner=weight, group=group, start=0, weight_start=0, num_elements=weight.numel(), is_flat=False
            )
            for group in optimizer.param_groups
            for weight in group["params"]
        },
    )


def algorithm_of(optimizer: torch.optim.Optimizer) -> str:
    """Return the name of what an optimizer computes; implementations of one algorithm share it."""
    name = type(optimizer).__name__
    if name not in _ADAM_CLASSES:
        return _ALGORITHM_BY_CLASS.get(name, name)
    if _is_torch(optimizer):
        is_decoupled = optimizer.param_groups[0].get("decoupled_weight_decay", name == "AdamW")
    else:
        is_decoupled = getattr(optimizer, "adam_w_mode", False)
    return "AdamW" if is_decoupled else "Adam"


def hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a parameter group that a file can hold."""
    found: dict[str, Any] = {}
    for key, value in group.items():
        if isinstance(value, Tensor) and value.numel() == 1:
            value = value.item()
        if isinstance(value, (list, tuple)):
            value = list(value)
        is_plain = all(
            isinstance(one, (bool, int, float, str)) for one in (value if isinstance(value, list) else [value])
        )
        if key not in _NO_HYPERPARAMETERS and is_plain:
            found[key] = value
    return found


def apply_hyperparameters(group: dict[str, Any], saved: Mapping[str, Any]) -> None:
    """Give a parameter group the settings of a checkpoint, as ``Optimizer.load_state_dict`` does."""
    for key, value in saved.items():
        if key in _NO_HYPERPARAMETERS or (key not in group and key != "initial_lr"):
            continue
        current = group.get(key)
        if isinstance(current, Tensor):
            current.fill_(value)
        else:
            group[key] = tuple(value) if isinstance(value, list) and isinstance(current, tuple) else value


def read_part(located: Located, slot: Slot, where: str) -> WeightState:
    """Return this process's part of the state of a weight; tensors are flat if the optimizer's are.

    Raises:
        CheckpointError: The optimizer keeps something that can't be told apart by weight.
    """
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, int | float] = {}
    for key, value in located.optimizer.state.get(slot.owner, {}).items():
        if isinstance(value, Tensor) and value.ndim == 0:
            value = value.item()
        if value is None:
            continue
        if isinstance(value, (int, float)):
            numbers[key] = int(value) if float(value).is_integer() else value
        elif isinstance(value, Tensor) and not slot.is_flat:
            tensors[key] = value
        elif isinstance(value, Tensor) and value.numel() == slot.owner.numel():
            tensors[key] = slot.part_of(value)
        else:
            raise CheckpointError(
                f"{where}: optimizer {type(located.optimizer).__name__} keeps {key!r}, which isn't one value for each "
                "weight; such state can't be moved between plans, use another optimizer"
            )
    master = slot.part_of(slot.owner.detach()) if slot.is_flat else None
    return WeightState(tensors=tensors, numbers=numbers, master=master)


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What a checkpoint holds for a weight of this process.

    Attributes:
        settings: Hyperparameters of its group; ``None`` if it wasn't optimized.
    """

    name: str
    slot: Slot
    numbers: Mapping[str, int | float]
    settings: Mapping[str, Any] | None


class Restoration:
    """Puts the state of a checkpoint into an optimizer, weight by weight, and then finishes each owner.

    What can't be done is found by ``check``, before anything is changed.
    """

    def __init__(self, located: Located) -> None:
        self._located = located
        self._numbers: dict[int, dict[str, Any]] = {}
        self._tensors: dict[int, dict[str, Tensor]] = {}
        self._owners: dict[int, Tensor] = {}

    def check(self, entries: Iterable[Expected]) -> None:
        """Check that weights which share an owner or a group can share what the checkpoint holds for them.

        Raises:
            CheckpointError: They can't.
        """
        by_owner: dict[int, Expected] = {}
        by_group: dict[int, Expected] = {}
        for entry in entries:
            first = by_owner.setdefault(id(entry.slot.owner), entry)
            if first.numbers != entry.numbers:
                raise CheckpointError(
                    f"weights {first.name!r} and {entry.name!r} were stepped differently ({first.numbers} and "
                    f"{entry.numbers}), but the optimizer here steps them as one; load with the ZeRO stage and "
                    "precision that they were trained with"
                )
            if entry.settings is None:
                continue
            first = by_group.setdefault(id(entry.slot.group), entry)
            assert first.settings is not None
            if first.settings != entry.settings:
                settings = {**first.settings, **entry.settings}
                key = next(key for key in settings if first.settings.get(key) != entry.settings.get(key))
                raise CheckpointError(
                    f"weights {first.name!r} and {entry.name!r} are in one parameter group here, but were trained with "
                    f"{key} {first.settings.get(key)} and {entry.settings.get(key)}; build the same parameter groups"
                )
            if entry.settings.get("amsgrad") and not _is_torch(self._located.optimizer):
                raise CheckpointError(
                    f"the checkpoint was trained with amsgrad, which {type(self._located.optimizer).__name__} doesn't "
                    "have; use torch's own optimizer"
                )

    def put(self, slot: Slot, value: Tensor, state: WeightState | None, settings: Mapping[str, Any] | None) -> None:
        """Set this process's part of a weight's fp32 copy, and of its state.

        Args:
            value: The whole weight, in the best precision there is.
            state: ``None`` leaves the optimizer's state as it is.
            settings: Hyperparameters of the weight's group; ``None`` leaves them as they are.
        """
        if slot.is_flat:
            slot.part_of(slot.owner.data).copy_(self._part(slot, value))
        if settings is not None:
            apply_hyperparameters(slot.group, settings)
        if state is None:
            return
        owner = id(slot.owner)
        self._owners[owner] = slot.owner
        self._numbers.setdefault(owner, {}).update({key: self._number(value) for key, value in state.numbers.items()})
        tensors = self._tensors.setdefault(owner, {})
        for key, tensor in state.tensors.items():
            if slot.is_flat:
                if key not in tensors:
                    tensors[key] = torch.zeros(slot.owner.shape, dtype=tensor.dtype, device=slot.owner.device)
                slot.part_of(tensors[key]).copy_(self._part(slot, tensor))
            elif tensor.shape == slot.owner.shape:
                tensors[key] = torch.empty_like(slot.owner, dtype=tensor.dtype, requires_grad=False).copy_(tensor)
            else:
                tensors[key] = tensor.to(slot.owner.device, copy=True)

    def finish(self) -> None:
        """Replace the state of every owner that was put; one without state starts afresh."""
        for key, owner in self._owners.items():
            state = {**self._numbers[key], **self._tensors[key]}
            if state:
                self._located.optimizer.state[owner] = state
            else:
                self._located.optimizer.state.pop(owner, None)

    @staticmethod
    def _part(slot: Slot, whole: Tensor) -> Tensor:
        return whole.reshape(-1).narrow(0, slot.weight_start, slot.num_elements)

    def _number(self, value: int | float) -> Any:
        """Return a number the way the optimizer keeps it: torch's as a tensor, DeepSpeed's plain."""
        return torch.tensor(float(value)) if _is_torch(self._located.optimizer) else value


def distinct(groups: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the different ones in order of first occurrence."""
    found: list[Mapping[str, Any]] = []
    for group in groups:
        if group not in found:
            found.append(group)
    return found


def _is_torch(optimizer: torch.optim.Optimizer) -> bool:
    return type(optimizer).__module__.startswith("torch.optim")
