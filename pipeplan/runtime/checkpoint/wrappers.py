"""Where DeepSpeed's optimizers keep the state of each weight.

They step flat fp32 copies of many weights: ``BF16_Optimizer`` and ZeRO-1 a partition of them on every
data-parallel replica, ``FP16_Optimizer`` all; ``FP16_UnfusedOptimizer`` an fp32 copy of each weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from pipeplan.errors import CheckpointError
from pipeplan.runtime.checkpoint.optimizer import Located, Slot, locate_plain

_FIELDS_OF_LOSS_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def locate(optimizer: Any) -> Located:
    """Locate the state of a DeepSpeed engine's optimizer.

    Raises:
        CheckpointError: It is of a kind whose state can't be told apart by weight.
    """
    if hasattr(optimizer, "bf16_groups"):
        return _partitioned(optimizer, optimizer.bf16_groups, optimizer.fp32_groups_flat_partition)
    if hasattr(optimizer, "single_partition_of_fp32_groups"):
        return _partitioned(optimizer, optimizer.bit16_groups, optimizer.single_partition_of_fp32_groups)
    if hasattr(optimizer, "fp32_groups_flat"):
        return _flattened(optimizer, optimizer.fp16_groups, optimizer.fp32_groups_flat)
    if hasattr(optimizer, "fp32_groups"):
        return _copied(optimizer, optimizer.fp16_groups, optimizer.fp32_groups)
    if hasattr(optimizer, "optimizer"):
        raise CheckpointError(
            f"the state of {type(optimizer).__name__} can't be moved between plans; use bf16 or fp32 with ZeRO stage "
            "0 or 1"
        )
    return locate_plain(optimizer)


def forget_links(optimizer: Any) -> None:
    """Let DeepSpeed link its weights to their optimizer state again; the tensors are new."""
    if hasattr(optimizer, "_hp_optimizer_states_linked"):
        optimizer._hp_optimizer_states_linked = False


def loss_scale_of(optimizer: Any) -> dict[str, int | float]:
    """Return the state of fp16's loss scale; empty without one."""
    scaler = getattr(optimizer, "loss_scale_config", None) or getattr(optimizer, "loss_scaler", None)
    values = {field: getattr(scaler, field, None) for field in _FIELDS_OF_LOSS_SCALE}
    return {field: value for field, value in values.items() if isinstance(value, (int, float))}


def restore_loss_scale(optimizer: Any, saved: dict[str, int | float]) -> None:
    """Continue with the loss scale of a checkpoint, where there is one here and there."""
    scaler = getattr(optimizer, "loss_scale_config", None) or getattr(optimizer, "loss_scaler", None)
    if scaler is None or not getattr(scaler, "dynamic", getattr(scaler, "dynamic_loss_scale", False)):
        return
    for field, value in saved.items():
        if hasattr(scaler, field):
            setattr(scaler, field, value)


def _partitioned(
    optimizer: Any, weights_by_group: Sequence[Sequence[nn.Parameter]], flats: Sequence[Tensor]
) -> Located:
    slots: dict[int, Slot] = {}
    for group, weights, flat in zip(optimizer.optimizer.param_groups, weights_by_group, flats, strict=True):
        for weight in weights:
            mapping = weight._hp_mapping  # type: ignore[attr-defined]
            slots[id(weight)] = Slot(
                owner=flat,
                group=group,
                start=mapping.hp_fragment_address.start if mapping else 0,
                weight_start=mapping.lp_fragment_address.start if mapping else 0,
                num_elements=mapping.hp_fragment_address.numel if mapping else 0,
                is_flat=True,
            )
    return Located(optimizer.optimizer, slots)


def _flattened(optimizer: Any, weights_by_group: Sequence[Sequence[nn.Parameter]], flats: Sequence[Tensor]) -> Located:
    slots: dict[int, Slot] = {}
    for group, weights, flat in zip(optimizer.optimizer.param_groups, weights_by_group, flats, strict=True):
        start = 0
        for weight in weights:
            slots[id(weight)] = Slot(
                owner=flat, group=group, start=start, weight_start=0, num_elements=weight.numel(), is_flat=True
            )
            start += weight.numel()
    return Located(optimizer.optimizer, slots)


def _copied(
    optimizer: Any, weights_by_group: Sequence[Sequence[nn.Parameter]], copies: Sequence[Sequence[Tensor]]
) -> Located:
    slots: dict[int, Slot] = {}
    for group, weights, masters in zip(optimizer.optimizer.param_groups, weights_by_group, copies, strict=True):
        for weight, master in zip(weights, masters, strict=True):
            slots[id(weight)] = Slot(
                owner=master, group=group, start=0, weight_start=0, num_elements=weight.numel(), is_flat=True
            )
    return Located(optimizer.optimizer, slots)
