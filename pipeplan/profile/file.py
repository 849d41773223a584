"""The profile file: YAML in milliseconds outside, ``Profile`` in nanoseconds inside."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from pipeplan.errors import ProfileError
from pipeplan.files import Document, Flow, check_format, digest, dump_yaml, parse_document, read_yaml, write_text
from pipeplan.profile.types import LayerProfile, LayerTimes, Profile, Recomputation
from pipeplan.units import ms_from_ns, ns_from_ms

FORMAT = "pipeplan-profile/1"


class _TimesEntry(Document):
    F: float = Field(ge=0)
    B: float = Field(ge=0)
    I: float | None = Field(default=None, ge=0)  # noqa: E741  the file's own key
    W: float | None = Field(default=None, ge=0)


class _RecomputeEntry(Document):
    times_ms: dict[str, _TimesEntry] = Field(min_length=1)
    activation_bytes: int = Field(ge=0)


class _SpreadEntry(Document):
    """How far to trust one measured time; written by the measuring profiler, read by people."""

    relative_spread: float
    num_samples: int


class _LayerEntry(Document):
    name: str = Field(min_length=1)
    kind: str
    parameters: int = Field(ge=0)
    output_bytes: int = Field(ge=0)
    activation_bytes: int = Field(ge=0)
    held_for_w_bytes: int = Field(default=0, ge=0)
    workspace_bytes: int = Field(default=0, ge=0)
    splittable: bool = True
    tied: str | None = None
    keep_with_previous: bool = False
    times_ms: dict[str, _TimesEntry] = Field(min_length=1)
    recompute: _RecomputeEntry | None = None
    output_tensors: list[str] | None = None
    spread: dict[str, dict[str, _SpreadEntry]] | None = None
    skewed_routing_ms: dict[str, _TimesEntry] | None = None
    measured_as: str | None = None
    fused_activation_bytes: int | None = Field(default=None, ge=0)
    untrained_bytes: int = Field(default=0, ge=0)


class _StatesEntry(Document):
    """What ``state_bytes_per_parameter`` was computed for."""

    optimizer: str
    zero_stage: int
    data_parallel: int = Field(ge=1)


class _ProfileDocument(Document):
    format: Literal["pipeplan-profile/1"]
    model: str
    source: Literal["measured", "estimated"]
    micro_batch_size: int = Field(ge=1)
    sequence_length: int = Field(ge=1)
    dtype: str
    state_bytes_per_parameter: float = Field(ge=0)
    count_boundary_buffers: bool = True
    model_source: dict[str, Any] | None = None
    software: dict[str, str] | None = None
    states: _StatesEntry | None = None
    notes: list[str] | None = None
    layers: list[_LayerEntry] = Field(min_length=1)


def read_profile(path: Path) -> Profile:
    """Read a profile file.

    Raises:
        FileFormatError: The file is missing, malformed, truncated or of another format.
        ProfileError: It contradicts itself; names the layer.
    """
    content = read_yaml(path, "profile")
    check_format(content, FORMAT, path)
    return profile_from_document(content, path)


def profile_from_document(content: Mapping[str, Any], path: Path | str) -> Profile:
    """Check the content of a profile file and return the profile; raises as ``read_profile`` does."""
    document = parse_document(content, _ProfileDocument, path)
    layers: list[LayerProfile] = []
    seen: set[str] = set()
    for entry in document.layers:
        if entry.name in seen:
            raise ProfileError(f"{path}: two layers are named {entry.name!r}; names must differ")
        seen.add(entry.name)
        where = f"{path}: layer {entry.name!r}"
        times = {device: _times(item, f"{where}, times_ms.{device}") for device, item in entry.times_ms.items()}
        can_split = all(item.input_gradient_ns is not None for item in times.values())
        recomputation = None
        if entry.recompute is not None:
            recomputation = Recomputation(
                {
                    device: _times(item, f"{where}, recompute.times_ms.{device}")
                    for device, item in entry.recompute.times_ms.items()
                },
                entry.recompute.activation_bytes,
            )
        layers.append(
            LayerProfile(
                name=entry.name,
                kind=entry.kind,
                num_parameters=entry.parameters,
                output_bytes=entry.output_bytes,
                activation_bytes=entry.activation_bytes,
                held_for_w_bytes=entry.held_for_w_bytes,
                workspace_bytes=entry.workspace_bytes,
                untrained_bytes=entry.untrained_bytes,
                is_splittable=entry.splittable and can_split,
                tied=entry.tied,
                keep_with_previous=entry.keep_with_previous,
                times_by_device=times,
                recomputation=recomputation,
            )
        )
    if document.layers[0].keep_with_previous:
        raise ProfileError(f"{path}: the first layer, {layers[0].name!r}, has no layer before it to keep with")
    extra: dict[str, Any] = {}
    if document.software is not None:
        extra["software"] = document.software
    if document.states is not None:
        extra["states"] = document.states.model_dump()
    if document.notes is not None:
        extra["notes"] = document.notes
    notes = {entry.name: note for entry in document.layers if (note := _notes(entry))}
    if notes:
        extra["layers"] = notes
    profile = Profile(
        model=document.model,
        source=document.source,
        micro_batch_size=document.micro_batch_size,
        sequence_length=document.sequence_length,
        dtype=document.dtype,
        state_bytes_per_parameter=document.state_bytes_per_parameter,
        count_boundary_buffers=document.count_boundary_buffers,
        model_source=document.model_source,
        layers=tuple(layers),
        extra=extra,
    )
    if not profile.devices:
        raise ProfileError(f"{path}: no device type has times for every layer; profile the missing layers")
    return profile


def _notes(entry: _LayerEntry) -> dict[str, Any]:
    """Return what the file records about a layer beyond its costs, in the file's own form."""
    notes: dict[str, Any] = {}
    if entry.output_tensors is not None:
        notes["output_tensors"] = entry.output_tensors
    if entry.spread is not None:
        notes["spread"] = {
            device: {op: item.model_dump() for op, item in by_op.items()} for device, by_op in entry.spread.items()
        }
    if entry.skewed_routing_ms is not None:
        notes["skewed_routing_ms"] = {
            device: item.model_dump(exclude_none=True) for device, item in entry.skewed_routing_ms.items()
        }
    if entry.measured_as is not None:
        notes["measured_as"] = entry.measured_as
    if entry.fused_activation_bytes is not None:
        notes["fused_activation_bytes"] = entry.fused_activation_bytes
    return notes


def _times(entry: _TimesEntry, where: str) -> LayerTimes:
    if (entry.I is None) != (entry.W is None):
        raise ProfileError(f"{where}: I and W come together; give both, or neither for a layer that can't split")
    return LayerTimes(
        forward_ns=ns_from_ms(entry.F),
        backward_ns=ns_from_ms(entry.B),
        input_gradient_ns=None if entry.I is None else ns_from_ms(entry.I),
        weight_gradient_ns=None if entry.W is None else ns_from_ms(entry.W),
    )


def _times_entry(times: LayerTimes) -> Flow:
    entry = Flow(F=ms_from_ns(times.forward_ns), B=ms_from_ns(times.backward_ns))
    if times.input_gradient_ns is not None and times.weight_gradient_ns is not None:
        entry["I"] = ms_from_ns(times.input_gradient_ns)
        entry["W"] = ms_from_ns(times.weight_gradient_ns)
    return entry


def profile_document(profile: Profile) -> dict[str, Any]:
    """Return what the profile file holds; ``profile_from_document`` gives the same profile back."""
    content: dict[str, Any] = {
        "format": FORMAT,
        "model": profile.model,
        "source": profile.source,
        "micro_batch_size": profile.micro_batch_size,
        "sequence_length": profile.sequence_length,
        "dtype": profile.dtype,
        "state_bytes_per_parameter": profile.state_bytes_per_parameter,
        "count_boundary_buffers": profile.count_boundary_buffers,
    }
    if profile.model_source is not None:
        content["model_source"] = dict(profile.model_source)
    if "software" in profile.extra:
        content["software"] = dict(profile.extra["software"])
    if "states" in profile.extra:
        content["states"] = Flow(profile.extra["states"])
    if "notes" in profile.extra:
        content["notes"] = list(profile.extra["notes"])
    notes = profile.extra.get("layers", {})
    content["layers"] = [_layer_entry(layer, notes.get(layer.name, {})) for layer in profile.layers]
    return content


def _layer_entry(layer: LayerProfile, notes: Mapping[str, Any]) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "name": layer.name,
        "kind": layer.kind,
        "parameters": layer.num_parameters,
        "output_bytes": layer.output_bytes,
        "activation_bytes": layer.activation_bytes,
        "held_for_w_bytes": layer.held_for_w_bytes,
    }
    if layer.workspace_bytes:
        entry["workspace_bytes"] = layer.workspace_bytes
    if layer.untrained_bytes:
        entry["untrained_bytes"] = layer.untrained_bytes
    if not layer.is_splittable:
        entry["splittable"] = False
    if layer.tied is not None:
        entry["tied"] = layer.tied
    if layer.keep_with_previous:
        entry["keep_with_previous"] = True
    entry["times_ms"] = Flow({device: _times_entry(times) for device, times in layer.times_by_device.items()})
    if layer.recomputation is not None:
        entry["recompute"] = {
            "times_ms": Flow(
                {device: _times_entry(times) for device, times in layer.recomputation.times_by_device.items()}
            ),
            "activation_bytes": layer.recomputation.activation_bytes,
        }
    if "output_tensors" in notes:
        entry["output_tensors"] = list(notes["output_tensors"])
    if "spread" in notes:
        entry["spread"] = Flow(notes["spread"])
    if "skewed_routing_ms" in notes:
        entry["skewed_routing_ms"] = Flow(notes["skewed_routing_ms"])
    if "measured_as" in notes:
        entry["measured_as"] = notes["measured_as"]
    if "fused_activation_bytes" in notes:
        entry["fused_activation_bytes"] = notes["fused_activation_bytes"]
    return entry


def write_profile(profile: Profile, path: Path) -> None:
    """Write the profile file whole or not at all."""
    write_text(path, dump_yaml(profile_document(profile)))


def profile_digest(profile: Profile) -> str:
    """Return the digest that a plan records: of the content, not of the formatting or the notes on measuring."""
    content = profile_document(profile)
    for key in ("software", "states", "notes"):
        content.pop(key, None)
    for entry in content["layers"]:
        for key in ("spread", "skewed_routing_ms", "measured_as", "fused_activation_bytes"):
            entry.pop(key, None)
    return digest(content)
