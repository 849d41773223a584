"""How far to trust a measured profile: spreads, weighted by the share of time they stand for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeplan.profile.types import LayerTimes, Profile

WIDE_SPREAD = 0.10  # relative; a median of five is then known to about 5 %
_SMALL_SHARE = 0.01  # of the time of all layers, below which nobody need care


@dataclass(frozen=True, slots=True, kw_only=True)
class UncertainOp:
    """A measured op whose times spread widely.

    Attributes:
        time_share: Of the time of all ops of all layers on the device.
    """

    layer: str
    device: str
    op: str
    relative_spread: float
    time_share: float


def uncertain_ops(profile: Profile) -> Sequence[UncertainOp]:
    """Return the ops that spread widely and take a share of the time worth the name, the weightiest first."""
    found: list[UncertainOp] = []
    for device in profile.devices:
        total_ns = sum(sum(_ns_by_op(layer.times(device)).values()) for layer in profile.layers)
        for layer in profile.layers:
            spread = profile.extra.get("layers", {}).get(layer.name, {}).get("spread", {}).get(device, {})
            for op, duration_ns in _ns_by_op(layer.times(device)).items():
                share = duration_ns / total_ns if total_ns else 0.0
                if op in spread and spread[op]["relative_spread"] > WIDE_SPREAD and share >= _SMALL_SHARE:
                    found.append(
                        UncertainOp(
                            layer=layer.name,
                            device=device,
                            op=op,
                            relative_spread=spread[op]["relative_spread"],
                            time_share=share,
                        )
                    )
    return sorted(found, key=lambda one: -one.relative_spread * one.time_share)


def _ns_by_op(times: LayerTimes) -> dict[str, int]:
    by_op = {
        "F": times.forward_ns,
        "B": times.backward_ns,
        "I": times.input_gradient_ns,
        "W": times.weight_gradient_ns,
    }
    return {op: duration_ns for op, duration_ns in by_op.items() if duration_ns is not None}
