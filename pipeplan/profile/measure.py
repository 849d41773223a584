"""Measuring what each layer costs on this machine, the way the runtime runs it."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import pipeplan
from pipeplan.errors import ProfileError, nearest
from pipeplan.host_memory import keep_freed_memory
from pipeplan.model.splitting import splittable_layers
from pipeplan.model.types import LayerSource, ModelLayers
from pipeplan.profile.chain import Chain, Layer, Place, Workshop, detach
from pipeplan.profile.held import activation_bytes, tensors_in, untrained_bytes
from pipeplan.profile.kept import MeasuredLayer, OpTime, layer_key
from pipeplan.profile.passes import (
    Pass,
    call_overhead_ns,
    describe,
    gradient_of,
    measure_bytes,
    timed_round,
    without_collection,
)
from pipeplan.profile.routing import routed, routes_tokens
from pipeplan.profile.sampling import DEFAULT_BUDGET, Clock, SamplingBudget, clock_for, sample
from pipeplan.profile.sharing import SharedLayers
from pipeplan.profile.states import state_bytes
from pipeplan.profile.types import LayerProfile, Profile

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

OnLayer = Callable[[int, str], None]
"""``on_layer(index, name)``: called before each layer."""
OnMeasured = Callable[[Profile], None]
"""``on_measured(profile)``: called after each layer that was measured, with the layers up to it."""


def measure_profile(
    model: ModelLayers,
    *,
    device: str = "cpu",
    micro_batch_size: int,
    sequence_length: int,
    dtype: str = "fp32",
    seed: int = 0,
    device_name: str | None = None,
    state_bytes_per_parameter: float | None = None,
    budget: SamplingBudget = DEFAULT_BUDGET,
    measured: MutableMapping[str, MeasuredLayer] | None = None,
    sharing: SharedLayers | None = None,
    on_layer: OnLayer | None = None,
    on_measured: OnMeasured | None = None,
) -> Profile:
    """Measure F, B, I and W, the same with recomputation, and the bytes of every layer.

    Layers are built, measured and dropped one at a time, each on what the layer before it returned; layers of equal
    identity are measured once. The last layer includes the loss. Layers with experts are measured with tokens routed
    evenly; what they take with uneven routing stands in the notes. Layers that are not to be split, by default the
    head, have no I and W.

    Args:
        device: "cpu" or "cuda".
        dtype: "fp32", "bf16" or "fp16"; weights, activations and gradients.
        device_name: Device type in the profile; by default "cpu", or the GPU's name.
        state_bytes_per_parameter: Weights, gradients, master weights and moments; by default AdamW's on one replica.
        measured: Results by key, as ``kept.kept_layers`` reads them from a profile; found ones are used, new ones are
            put in, and stay there if a later layer fails.
        sharing: Deals out what is to be measured among this and other ranks, which all call this; each returns the
            whole profile.

    Raises:
        ProfileError: A layer can't run on this device or in this dtype, or memory ran out; names the layer.
    """
    if dtype not in DTYPES:
        raise ProfileError(f"unknown dtype {dtype!r}{nearest(dtype, DTYPES)}; use one of {', '.join(DTYPES)}")
    target = _usable_device(device)
    name = recorded_name(device, device_name)
    measured = {} if measured is None else measured
    if target.type == "cpu":
        keep_freed_memory()  # as the runtime does
    clock = clock_for(target)
    setting = _Setting(target, clock, budget, call_overhead_ns(clock, target))
    place = Place(device=target, device_type=name, dtype=DTYPES[dtype], dtype_name=dtype)
    inputs, labels = model.sample_batch(micro_batch_size, sequence_length, seed)
    labels = _cast(labels, target, None)
    chain = Chain(_cast(inputs, target, place.dtype), place)
    visited: list[tuple[LayerSource, str]] = []

    def profile() -> Profile:
        known = [(source, key, measured[key]) for source, key in visited if key in measured]
        return Profile(
            model=model.name,
            source="measured",
            micro_batch_size=micro_batch_size,
            sequence_length=sequence_length,
            dtype=dtype,
            state_bytes_per_parameter=(
                state_bytes(dtype).per_parameter if state_bytes_per_parameter is None else state_bytes_per_parameter
            ),
            layers=tuple(_layer_profile(source, one, name) for source, _, one in known),
            model_source=model.source,
            extra={
                "software": measuring_software(device),
                "layers": {source.name: one.notes(key, name) for source, key, one in known},
            },
        )

    elsewhere: set[str] = set()  # keys that another rank measures
    workshop = Workshop(place)
    for index, (source, is_splittable) in enumerate(zip(model.layers, splittable_layers(model.layers), strict=True)):
        if on_layer is not None:
            on_layer(index, source.name)
        is_last = index == len(model.layers) - 1
        key = layer_key(source.identity, chain.signature, has_loss=is_last, is_splittable=is_splittable)
        visited.append((source, key))
        if sharing is not None and key not in measured and (key in elsewhere or not sharing.takes(index, key)):
            elsewhere.add(key)
            if is_last:
                break
            own = sharing.next_own(index)
            if own is not None:
                workshop.prepare(model.layers[own])
            chain.advance(source, key, sharing.output_tensors(key), fetch=partial(sharing.outputs, key))
            continue
        is_new = key not in measured
        if is_new:
            value = chain.value()
            built = workshop.take(source)
            finish = (lambda outputs: model.loss_function(outputs, labels)) if is_last else None
            on_outputs = None if sharing is None or is_last else partial(sharing.post_outputs, key)
            with place.naming(source):
                measured[key] = _measure_layer(
                    source, built, value, finish, setting, on_outputs, is_splittable=is_splittable
                )
            del built, value
            if sharing is not None:
                sharing.post_result(key, measured[key])
        chain.advance(source, key, measured[key].output_tensors, measured[key].outputs)
        if is_new and on_measured is not None:
            on_measured(profile())
    for key in elsewhere:
        assert sharing is not None
        measured[key] = sharing.result(key)
    return profile()


def software_versions() -> dict[str, str]:
    """Return the versions that measured times depend on."""
    versions = {"pipeplan": pipeplan.__version__, "torch": str(torch.__version__)}
    with suppress(importlib.metadata.PackageNotFoundError):
        versions["transformers"] = importlib.metadata.version("transformers")
    return versions


def measuring_software(device: str) -> dict[str, str]:
    """Return the versions, and on CPUs the number of threads."""
    return software_versions() | ({"cpu_threads": str(torch.get_num_threads())} if device == "cpu" else {})


@dataclass(frozen=True, slots=True)
class _Setting:
    device: torch.device
    clock: Clock
    budget: SamplingBudget
    overhead_ns_by_op: Mapping[str, int]


_RECOMPUTED, _SKEWED = "recomputed ", "skewed "  # before an op's name, while all ways are sampled together


def _measure_layer(
    source: LayerSource,
    built: Layer,
    value: Any,
    finish: Callable[[Any], Tensor] | None,
    setting: _Setting,
    on_outputs: Callable[[Any, tuple[str, ...]], None] | None,
    *,
    is_splittable: bool,
) -> MeasuredLayer:
    has_experts = routes_tokens(source.kind)
    layer = routed(built, is_skewed=False) if has_experts else built

    def finished(layer: Layer) -> Layer:
        return layer if finish is None else lambda inputs: finish(layer(inputs))

    def recomputing(inputs: Any) -> Any:
        return checkpoint(layer, inputs, use_reentrant=False)

    def make_inputs() -> Any:
        return pytree.tree_map_only(
            Tensor, lambda tensor: tensor.detach().clone().requires_grad_(tensor.requires_grad), value
        )

    run, run_recomputing = finished(layer), finished(recomputing)
    outputs = run(make_inputs())
    described = tensors_in(outputs)
    output_tensors = tuple(describe(tensor) for tensor in described)
    output_bytes = sum(tensor.numel() * tensor.element_size() for tensor in described)
    detached = detach(outputs)
    if on_outputs is not None:
        on_outputs(detached, output_tensors)
    roots = [tensor for tensor in described if tensor.requires_grad]
    gradients = [gradient_of(root) for root in roots]
    if roots:
        torch.autograd.backward(roots, gradients)  # .grad exists from here on, as for all micro-batches but the first
    del outputs, described, roots  # and with them the graph

    def rounds(runner: Layer, prefix: str) -> Callable[[], dict[str, int]]:
        run_round = timed_round(
            lambda: Pass(runner, make_inputs(), gradients),
            setting.clock,
            setting.overhead_ns_by_op,
            is_splittable=is_splittable,
        )
        return lambda: {prefix + op: duration_ns for op, duration_ns in run_round().items()}

    ways = {"": run, _RECOMPUTED: run_recomputing}
    if has_experts:
        ways[_SKEWED] = finished(routed(built, is_skewed=True))
    all_rounds = [rounds(runner, prefix) for prefix, runner in ways.items()]
    held_bytes, workspace_bytes = measure_bytes(
        Pass(run, make_inputs(), gradients), setting.device, is_splittable=is_splittable
    )
    with without_collection():
        samples_by_op = sample(
            lambda: {op: duration_ns for run_round in all_rounds for op, duration_ns in run_round().items()},
            setting.budget,
        )

    def time_by_op(prefix: str) -> dict[str, OpTime]:
        return {
            op: OpTime(samples.median_ns, samples.relative_spread, len(samples.durations_ns))
            for op in "FBIW"
            if (samples := samples_by_op.get(prefix + op)) is not None
        }

    module_parameters = list(built.parameters()) if isinstance(built, nn.Module) else []
    return MeasuredLayer(
        num_parameters=sum(parameter.numel() for parameter in module_parameters if parameter.requires_grad),
        untrained_bytes=untrained_bytes(built) if isinstance(built, nn.Module) else 0,
        output_bytes=output_bytes,
        output_tensors=output_tensors,
        activation_bytes=activation_bytes(run, make_inputs, keeps_inputs=False),
        recompute_activation_bytes=activation_bytes(run_recomputing, make_inputs, keeps_inputs=True),
        held_for_w_bytes=held_bytes,
        workspace_bytes=workspace_bytes,
        time_by_op=time_by_op(""),
        recompute_ns_by_op={op: time.median_ns for op, time in time_by_op(_RECOMPUTED).items()},
        skewed_ns_by_op={op: time.median_ns for op, time in time_by_op(_SKEWED).items()},
        outputs=detached,
    )


def _cast(value: Any, device: torch.device, dtype: torch.dtype | None) -> Any:
    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(device, dtype if tensor.is_floating_point() else None)

    return pytree.tree_map_only(Tensor, cast, value)


def _usable_device(device: str) -> torch.device:
    if device == "cpu":
        return torch.device("cpu")
    if device == "cuda":
        if not torch.cuda.is_available():
            raise ProfileError(
                "device 'cuda' asked for, but torch finds no usable GPU on this machine; use --device cpu, or profile "
                "where the GPU is"
            )
        return torch.device("cuda", torch.cuda.current_device())
    raise ProfileError(f"layers can be measured on cpu or cuda, not on {device!r}")


def recorded_name(device: str, device_name: str | None) -> str:
    """Return the device type under which times measured on ``device`` are recorded; raises as ``measure_profile``."""
    return device_name or device_name_of(_usable_device(device))


def device_name_of(device: torch.device) -> str:
    """Return what profiles and clusters call the type of a device, unless a user names it."""
    if device.type == "cpu":
        return "cpu"
    return torch.cuda.get_device_name(device).lower().replace(" ", "-")


def _layer_profile(source: LayerSource, measured: MeasuredLayer, device: str) -> LayerProfile:
    return LayerProfile(
        name=source.name,
        kind=source.kind,
        num_parameters=measured.num_parameters,
        output_bytes=measured.output_bytes,
        activation_bytes=measured.activation_bytes,
        held_for_w_bytes=measured.held_for_w_bytes,
        workspace_bytes=measured.workspace_bytes,
        untrained_bytes=measured.untrained_bytes,
        is_splittable=measured.is_splittable,
        tied=source.tied,
        keep_with_previous=source.keep_with_previous,
        times_by_device={device: measured.times()},
        recomputation=measured.recomputation(device),
    )
