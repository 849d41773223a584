"""Profiles of one model put together: device types side by side, or a micro-batch size between two measured ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pipeplan.errors import ProfileError
from pipeplan.profile.types import LayerProfile, LayerTimes, Profile, Recomputation

_ESTIMATED = "estimated"
_INTERPOLATED = "interpolated, not measured"


def merge_profiles(profiles: Sequence[Profile], names: Sequence[str]) -> Profile:
    """Return one profile with the times of all device types.

    Bytes may differ between device types, since their kernels keep other tensors: the larger ones count. The result is
    estimated if any of the profiles is.

    Args:
        names: What the profiles are called in messages.

    Raises:
        ProfileError: They are of different models, layers or shapes, or two have times of the same device type.
    """
    first = profiles[0]
    owner_by_device = dict.fromkeys(first.devices, names[0])
    for profile, name in zip(profiles[1:], names[1:], strict=True):
        _check_same_shape(first, profile, names[0], name, but=())
        for device in profile.devices:
            if device in owner_by_device:
                raise ProfileError(
                    f"{owner_by_device[device]} and {name} both have times on {device!r}; name the device types "
                    "differently when profiling (--device-name), or leave one out"
                )
            owner_by_device[device] = name
    layers = tuple(_merge_layers(same) for same in zip(*(profile.layers for profile in profiles), strict=True))
    is_estimated = any(profile.source == _ESTIMATED for profile in profiles)
    return replace(
        first,
        source=_ESTIMATED if is_estimated else first.source,
        layers=layers,
        extra=_merge_extra(profiles),
    )


def without_device(profile: Profile, device: str) -> Profile:
    """Return the profile without the times on ``device``; it must have others."""
    return replace(
        profile,
        layers=tuple(
            replace(
                layer,
                times_by_device={name: times for name, times in layer.times_by_device.items() if name != device},
                recomputation=None
                if layer.recomputation is None
                else replace(
                    layer.recomputation,
                    times_by_device={
                        name: times for name, times in layer.recomputation.times_by_device.items() if name != device
                    },
                ),
            )
            for layer in profile.layers
        ),
    )


def interpolate_micro_batch(smaller: Profile, larger: Profile, micro_batch_size: int, names: Sequence[str]) -> Profile:
    """Return the profile at a micro-batch size between two measured ones; times and bytes on a straight line.

    Raises:
        ProfileError: The size is not between the two, one of them is estimated or interpolated itself, or they differ
            in more than the size.
    """
    if smaller.micro_batch_size > larger.micro_batch_size:
        smaller, larger, names = larger, smaller, [names[1], names[0]]
    low, high = smaller.micro_batch_size, larger.micro_batch_size
    _check_same_shape(smaller, larger, names[0], names[1], but=("micro-batch size",))
    for profile, name in ((smaller, names[0]), (larger, names[1])):
        if profile.source == _ESTIMATED:
            raise ProfileError(f"{name} is estimated; estimate at micro-batch size {micro_batch_size} itself")
        if any(note.startswith(_INTERPOLATED) for note in profile.extra.get("notes", ())):
            raise ProfileError(f"{name} is interpolated itself; give the two measured profiles that it lies between")
    if smaller.devices != larger.devices:
        raise ProfileError(
            f"{names[0]} has times on {', '.join(smaller.devices)}, {names[1]} on {', '.join(larger.devices)}; "
            "interpolation needs both sizes on every device type"
        )
    if not low < micro_batch_size < high:
        raise ProfileError(
            f"micro-batch size {micro_batch_size} is not between the measured {low} and {high}; times outside of them "
            "are unknown, so measure there"
        )
    share = (micro_batch_size - low) / (high - low)
    note = f"{_INTERPOLATED}: micro-batch size {micro_batch_size} lies between the measured {low} and {high}"
    return replace(
        smaller,
        micro_batch_size=micro_batch_size,
        layers=tuple(_between(*pair, share) for pair in zip(smaller.layers, larger.layers, strict=True)),
        extra={key: value for key, value in smaller.extra.items() if key in ("software", "states")} | {"notes": [note]},
    )


def _check_same_shape(one: Profile, other: Profile, one_name: str, other_name: str, *, but: Sequence[str]) -> None:
    pairs: dict[str, tuple[Any, Any]] = {
        "model": (one.model, other.model),
        "micro-batch size": (one.micro_batch_size, other.micro_batch_size),
        "sequence length": (one.sequence_length, other.sequence_length),
        "dtype": (one.dtype, other.dtype),
        "number of layers": (one.num_layers, other.num_layers),
        "bytes of state a parameter": (one.state_bytes_per_parameter, other.state_bytes_per_parameter),
    }
    for what, (left, right) in pairs.items():
        if left != right and what not in but:
            raise ProfileError(f"{one_name} and {other_name} don't fit together: {what} {left} against {right}")
    for number, (left_layer, right_layer) in enumerate(zip(one.layers, other.layers, strict=True)):
        if _essence(left_layer) != _essence(right_layer):
            raise ProfileError(
                f"{one_name} and {other_name} don't fit together: layer {number} is {left_layer.name!r} "
                f"({left_layer.kind}, {left_layer.num_parameters:,} parameters) against {right_layer.name!r} "
                f"({right_layer.kind}, {right_layer.num_parameters:,} parameters)"
            )


def _essence(layer: LayerProfile) -> tuple[Any, ...]:
    return layer.name, layer.kind, layer.num_parameters, layer.tied, layer.keep_with_previous


def _merge_layers(layers: Sequence[LayerProfile]) -> LayerProfile:
    recomputations = [layer.recomputation for layer in layers]
    recomputation = None
    if all(one is not None for one in recomputations):
        known = [one for one in recomputations if one is not None]
        recomputation = Recomputation(
            {device: times for one in known for device, times in one.times_by_device.items()},
            max(one.activation_bytes for one in known),
        )
    return replace(
        layers[0],
        output_bytes=max(layer.output_bytes for layer in layers),
        activation_bytes=max(layer.activation_bytes for layer in layers),
        held_for_w_bytes=max(layer.held_for_w_bytes for layer in layers),
        workspace_bytes=max(layer.workspace_bytes for layer in layers),
        is_splittable=all(layer.is_splittable for layer in layers),
        times_by_device={device: times for layer in layers for device, times in layer.times_by_device.items()},
        recomputation=recomputation,
    )


def _merge_extra(profiles: Sequence[Profile]) -> dict[str, Any]:
    """Return the notes of all profiles; the figures of each device type stay with it."""
    extra = dict(profiles[0].extra)
    notes = list(dict.fromkeys(note for profile in profiles for note in profile.extra.get("notes", [])))
    if notes:
        extra["notes"] = notes
    by_layer: dict[str, dict[str, Any]] = {}
    for profile in profiles:
        for name, found in profile.extra.get("layers", {}).items():
            merged = by_layer.setdefault(name, {})
            for key, value in found.items():
                merged[key] = {**merged.get(key, {}), **value} if isinstance(value, dict) else merged.get(key, value)
    if by_layer:
        extra["layers"] = by_layer
    return extra


def _between(low: LayerProfile, high: LayerProfile, share: float) -> LayerProfile:
    def mix(one: int, other: int) -> int:
        return round(one + (other - one) * share)

    def mix_times(one: LayerTimes, other: LayerTimes) -> LayerTimes:
        halves = None
        if (
            one.input_gradient_ns is not None
            and one.weight_gradient_ns is not None
            and other.input_gradient_ns is not None
            and other.weight_gradient_ns is not None
        ):
            halves = (
                mix(one.input_gradient_ns, other.input_gradient_ns),
                mix(one.weight_gradient_ns, other.weight_gradient_ns),
            )
        return LayerTimes(
            forward_ns=mix(one.forward_ns, other.forward_ns),
            backward_ns=mix(one.backward_ns, other.backward_ns),
            input_gradient_ns=None if halves is None else halves[0],
            weight_gradient_ns=None if halves is None else halves[1],
        )

    recomputation = None
    if low.recomputation is not None and high.recomputation is not None:
        recomputation = Recomputation(
            {
                device: mix_times(times, high.recomputation.times_by_device[device])
                for device, times in low.recomputation.times_by_device.items()
                if device in high.recomputation.times_by_device
            },
            mix(low.recomputation.activation_bytes, high.recomputation.activation_bytes),
        )
    return replace(
        low,
        output_bytes=mix(low.output_bytes, high.output_bytes),
        activation_bytes=mix(low.activation_bytes, high.activation_bytes),
        held_for_w_bytes=mix(low.held_for_w_bytes, high.held_for_w_bytes),
        workspace_bytes=mix(low.workspace_bytes, high.workspace_bytes),
        is_splittable=low.is_splittable and high.is_splittable,
        times_by_device={
            device: mix_times(times, high.times_by_device[device])
            for device, times in low.times_by_device.items()
            if device in high.times_by_device
        },
        recomputation=recomputation,
    )
