"""What measuring a layer gave, as a profile keeps it: so that it need not be measured again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from pipeplan.files import digest
from pipeplan.profile.types import LayerProfile, LayerTimes, Profile, Recomputation
from pipeplan.units import ms_from_ns, ns_from_ms

_KEY_LENGTH = 16
UNKNOWN: Final = object()
"""Outputs of a layer that was not run in this process."""


@dataclass(frozen=True, slots=True)
class OpTime:
    """Median duration of an op, and how far to trust it."""

    median_ns: int
    relative_spread: float
    num_samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredLayer:
    """What measuring one layer gave; layers of the same key share it.

    Attributes:
        untrained_bytes: Of weights that get no gradient, and buffers.
        output_tensors: Dtypes and shapes of what it hands on, as ``passes.describe`` writes them.
        time_by_op: F and B, and I and W where something could and may be deferred.
        recompute_ns_by_op: The same with recomputation in the backward.
        skewed_ns_by_op: The same with tokens routed unevenly to experts; empty for layers that route nothing.
        outputs: Inputs of the layer after it, detached; ``UNKNOWN`` where they come from a file.
    """

    num_parameters: int
    untrained_bytes: int
    output_bytes: int
    output_tensors: tuple[str, ...]
    activation_bytes: int
    recompute_activation_bytes: int
    held_for_w_bytes: int
    workspace_bytes: int
    time_by_op: Mapping[str, OpTime]
    recompute_ns_by_op: Mapping[str, int]
    skewed_ns_by_op: Mapping[str, int]
    outputs: Any = UNKNOWN

    @property
    def is_splittable(self) -> bool:
        """Whether any weight gradient could and may be deferred."""
        return "W" in self.time_by_op

    def recomputation(self, device: str) -> Recomputation:
        """Return what a profile says of recomputing the layer."""
        return Recomputation({device: _layer_times(self.recompute_ns_by_op)}, self.recompute_activation_bytes)

    def times(self) -> LayerTimes:
        """Return the medians."""
        return _layer_times({op: time.median_ns for op, time in self.time_by_op.items()})

    def notes(self, key: str, device: str) -> dict[str, Any]:
        """Return what the profile notes beside the costs; with them ``kept_layers`` gives the layer back."""
        notes: dict[str, Any] = {
            "output_tensors": list(self.output_tensors),
            "spread": {
                device: {
                    op: {"relative_spread": round(time.relative_spread, 4), "num_samples": time.num_samples}
                    for op, time in self.time_by_op.items()
                }
            },
        }
        if self.skewed_ns_by_op:
            notes["skewed_routing_ms"] = {device: {op: ms_from_ns(ns) for op, ns in self.skewed_ns_by_op.items()}}
        return notes | {"measured_as": key}


def layer_key(identity: str, inputs: str, *, has_loss: bool, is_splittable: bool) -> str:
    """Return what tells a layer apart from others that cost differently on the same device in the same shape.

    Args:
        identity: Of the layer's source.
        inputs: Dtypes and shapes that it runs on.
        has_loss: Whether the loss is part of it.
        is_splittable: Whether I and W are measured.
    """
    told = [identity, inputs, has_loss] if is_splittable else [identity, inputs, has_loss, "whole"]
    return digest(told).removeprefix("sha256:")[:_KEY_LENGTH]


def kept_layers(profile: Profile, device: str) -> dict[str, MeasuredLayer]:
    """Return the layers of a measured profile by key, as far as it has times on ``device`` and says how it got them."""
    kept: dict[str, MeasuredLayer] = {}
    for layer in profile.layers:
        notes = profile.extra.get("layers", {}).get(layer.name, {})
        spread = notes.get("spread", {}).get(device)
        recomputation = layer.recomputation
        if spread is None or "measured_as" not in notes or device not in layer.times_by_device:
            continue
        if recomputation is None or device not in recomputation.times_by_device:
            continue
        kept[notes["measured_as"]] = _measured_layer(layer, recomputation, notes, spread, device)
    return kept


def _measured_layer(
    layer: LayerProfile, recomputation: Recomputation, notes: Mapping[str, Any], spread: Mapping[str, Any], device: str
) -> MeasuredLayer:
    skewed = notes.get("skewed_routing_ms", {}).get(device, {})
    return MeasuredLayer(
        num_parameters=layer.num_parameters,
        untrained_bytes=layer.untrained_bytes,
        output_bytes=layer.output_bytes,
        output_tensors=tuple(notes["output_tensors"]),
        activation_bytes=layer.activation_bytes,
        recompute_activation_bytes=recomputation.activation_bytes,
        held_for_w_bytes=layer.held_for_w_bytes,
        workspace_bytes=layer.workspace_bytes,
        time_by_op={
            op: OpTime(ns, spread[op]["relative_spread"], spread[op]["num_samples"])
            for op, ns in _ns_by_op(layer.times_by_device[device]).items()
        },
        recompute_ns_by_op=_ns_by_op(recomputation.times_by_device[device]),
        skewed_ns_by_op={op: ns_from_ms(ms) for op, ms in skewed.items()},
    )


def difference(profile: Profile, conditions: Mapping[str, Any]) -> str | None:
    """Return why the profile's times say nothing about ``conditions``, or ``None`` if they do.

    Args:
        conditions: Micro-batch size, sequence length and dtype, and the versions of what measures.
    """
    known = {
        "micro-batch size": profile.micro_batch_size,
        "sequence length": profile.sequence_length,
        "dtype": profile.dtype,
        **profile.extra.get("software", {}),
    }
    for name in dict.fromkeys([*known, *conditions]):
        before, now = known.get(name), conditions.get(name)
        if before != now:
            return f"{name} {before}, now {now}"
    return None


def _layer_times(ns_by_op: Mapping[str, int]) -> LayerTimes:
    return LayerTimes(
        forward_ns=ns_by_op["F"],
        backward_ns=ns_by_op["B"],
        input_gradient_ns=ns_by_op.get("I"),
        weight_gradient_ns=ns_by_op.get("W"),
    )


def _ns_by_op(times: LayerTimes) -> dict[str, int]:
    by_op = {"F": times.forward_ns, "B": times.backward_ns}
    if times.input_gradient_ns is not None and times.weight_gradient_ns is not None:
        by_op |= {"I": times.input_gradient_ns, "W": times.weight_gradient_ns}
    return by_op
