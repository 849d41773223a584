"""Measuring what each layer costs on this machine, the way the runtime runs it."""

from __future__ import annotations

import gc
import importlib.metadata
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import pipeplan
from pipeplan.deferral import WeightGradientStore, defer_weight_gradients
from pipeplan.errors import PipeplanError, ProfileError, nearest
from pipeplan.model.types import LayerSource, ModelLayers
from pipeplan.profile.held import PeakMeter, activation_bytes, tensors_in
from pipeplan.profile.sampling import DEFAULT_BUDGET, Clock, Samples, SamplingBudget, clock_for, sample
from pipeplan.profile.types import LayerProfile, LayerTimes, Profile, Recomputation

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
STATE_BYTES_PER_PARAMETER = {
    "fp32": 16.0,  # weights 4, gradients 4, Adam's moments 8
    "bf16": 18.0,  # weights 2, gradients in fp32 4, master weights 4, Adam's moments 8
    "fp16": 18.0,
}

_NUM_OVERHEAD_ROUNDS = 30
_RECOMPUTE = "recompute "  # prefix of an op's name while both ways are sampled together

Callback = Callable[[int, str], None]
"""``callback(index, name)``: called before each layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredLayer:
    """What measuring one layer gave; layers of the same identity share it.

    Attributes:
        samples_by_op: F and B, and I and W where something could be deferred.
        recompute_samples_by_op: The same with recomputation in the backward.
    """

    num_parameters: int
    output_bytes: int
    output_tensors: tuple[str, ...]
    activation_bytes: int
    recompute_activation_bytes: int
    held_for_w_bytes: int
    workspace_bytes: int
    samples_by_op: dict[str, Samples]
    recompute_samples_by_op: dict[str, Samples]
    outputs: Any  # detached, the inputs of the layer after it

    @property
    def is_splittable(self) -> bool:
        """Whether any weight gradient could be deferred."""
        return "W" in self.samples_by_op


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
    on_layer: Callback | None = None,
) -> Profile:
    """Measure F, B, I and W, the same with recomputation, and the bytes of every layer.

    Layers are built, measured and dropped one at a time, each on what the layer before it returned; layers of equal
    identity are measured once. The last layer includes the loss.

    Args:
        device: "cpu" or "cuda".
        dtype: "fp32", "bf16" or "fp16"; weights, activations and gradients.
        device_name: Device type in the profile; by default "cpu", or the GPU's name.
        state_bytes_per_parameter: Weights, gradients, master weights and moments; by default Adam's without sharding.
        measured: Results by identity; found ones are used, new ones are put in, and stay there if a later layer fails.

    Raises:
        ProfileError: A layer can't run on this device or in this dtype, or memory ran out; names the layer.
    """
    if dtype not in DTYPES:
        raise ProfileError(f"unknown dtype {dtype!r}{nearest(dtype, DTYPES)}; use one of {', '.join(DTYPES)}")
    target = _usable_device(device)
    name = device_name or device_name_of(target)
    measured = {} if measured is None else measured
    clock = clock_for(target)
    setting = _Setting(target, DTYPES[dtype], clock, budget, _call_overhead_ns(clock, target))
    inputs, labels = model.sample_batch(micro_batch_size, sequence_length, seed)
    value = _cast(inputs, target, setting.dtype)
    labels = _cast(labels, target, None)
    layers: list[LayerProfile] = []
    notes: dict[str, dict[str, Any]] = {}
    for index, source in enumerate(model.layers):
        if on_layer is not None:
            on_layer(index, source.name)
        is_last = index == len(model.layers) - 1
        finish = (lambda outputs: model.loss_function(outputs, labels)) if is_last else None
        key = f"{source.identity}/{signature(value)}/{'loss' if is_last else ''}"
        with _naming(source, dtype, name):
            if key not in measured:
                measured[key] = _measure_layer(source, value, finish, setting)
        value = measured[key].outputs
        layers.append(_layer_profile(source, measured[key], name))
        notes[source.name] = _notes(measured[key], name)
    return Profile(
        model=model.name,
        source="measured",
        micro_batch_size=micro_batch_size,
        sequence_length=sequence_length,
        dtype=dtype,
        state_bytes_per_parameter=(
            STATE_BYTES_PER_PARAMETER[dtype] if state_bytes_per_parameter is None else state_bytes_per_parameter
        ),
        layers=tuple(layers),
        model_source=model.source,
        extra={"software": software_versions(), "layers": notes},
    )


def software_versions() -> dict[str, str]:
    """Return the versions that measured times depend on."""
    versions = {"pipeplan": pipeplan.__version__, "torch": str(torch.__version__)}
    with suppress(importlib.metadata.PackageNotFoundError):
        versions["transformers"] = importlib.metadata.version("transformers")
    return versions


def signature(value: Any) -> str:
    """Return what of a layer's inputs decides its cost: dtypes, shapes, and which of them take a gradient."""
    return ", ".join(describe(tensor) + ("'" if tensor.requires_grad else "") for tensor in tensors_in(value))


def describe(tensor: Tensor) -> str:
    """Return dtype and shape as text, such as ``bfloat16[1, 4096, 512]``."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


@dataclass(frozen=True, slots=True)
class _Setting:
    device: torch.device
    dtype: torch.dtype
    clock: Clock
    budget: SamplingBudget
    overhead_ns_by_op: Mapping[str, int]


@dataclass(slots=True)
class Pass:
    """Forward and backward of one layer on inputs of their own, as the runtime would run them."""

    run: Callable[[Any], Any]
    inputs: Any
    output_gradients: list[Tensor]
    outputs: Any = None

    def forward(self) -> None:
        """Run F and keep the graph."""
        self.outputs = self.run(self.inputs)

    def backward(self) -> None:
        """Run B, or I inside a deferral; nothing where no output has a gradient."""
        roots = [tensor for tensor in tensors_in(self.outputs) if tensor.requires_grad]
        self.outputs = None
        if roots:
            torch.autograd.backward(roots, self.output_gradients)


def _measure_layer(
    source: LayerSource, value: Any, finish: Callable[[Any], Tensor] | None, setting: _Setting
) -> MeasuredLayer:
    built = source.build()
    if isinstance(built, nn.Module):
        built = built.to(setting.device, setting.dtype).train()
    layer: Callable[[Any], Any] = built

    def run(inputs: Any) -> Any:
        outputs = layer(inputs)
        return outputs if finish is None else finish(outputs)

    def run_recomputing(inputs: Any) -> Any:
        outputs = checkpoint(layer, inputs, use_reentrant=False)
        return outputs if finish is None else finish(outputs)

    def make_inputs() -> Any:
        return pytree.tree_map_only(
            Tensor, lambda tensor: tensor.detach().clone().requires_grad_(tensor.requires_grad), value
        )

    outputs = run(make_inputs())
    described = tensors_in(outputs)
    roots = [tensor for tensor in described if tensor.requires_grad]
    gradients = [gradient_of(root) for root in roots]
    if roots:
        torch.autograd.backward(roots, gradients)  # .grad exists from here on, as for all micro-batches but the first
    outputs = pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad), outputs)

    def start(runner: Callable[[Any], Any]) -> Pass:
        return Pass(runner, make_inputs(), gradients)

    store = WeightGradientStore()
    held_bytes, workspace_bytes = measure_bytes(start(run), store, setting.device)
    time_plain = _round(lambda: start(run), store, setting.clock, setting.overhead_ns_by_op)
    time_recomputing = _round(lambda: start(run_recomputing), store, setting.clock, setting.overhead_ns_by_op)
    with _without_collection():
        samples_by_op = sample(
            lambda: time_plain() | {_RECOMPUTE + op: ns for op, ns in time_recomputing().items()}, setting.budget
        )
    module_parameters = list(built.parameters()) if isinstance(built, nn.Module) else []
    return MeasuredLayer(
        num_parameters=sum(parameter.numel() for parameter in module_parameters if parameter.requires_grad),
        output_bytes=sum(tensor.numel() * tensor.element_size() for tensor in described),
        output_tensors=tuple(describe(tensor) for tensor in described),
        activation_bytes=activation_bytes(run, make_inputs, keeps_inputs=False),
        recompute_activation_bytes=activation_bytes(run_recomputing, make_inputs, keeps_inputs=True),
        held_for_w_bytes=held_bytes,
        workspace_bytes=workspace_bytes,
        samples_by_op={op: one for op, one in samples_by_op.items() if not op.startswith(_RECOMPUTE)},
        recompute_samples_by_op={
            op.removeprefix(_RECOMPUTE): one for op, one in samples_by_op.items() if op.startswith(_RECOMPUTE)
        },
        outputs=outputs,
    )


def measure_bytes(one: Pass, store: WeightGradientStore, device: torch.device) -> tuple[int, int]:
    """Return the bytes held from I to W, and the workspace."""
    meter = PeakMeter(device)
    with meter.recording():
        with meter.watch(), defer_weight_gradients(store, 0):
            one.forward()
        with meter.watch(), defer_weight_gradients(store, 0):
            one.backward()
        held_bytes = store.held_bytes(0)
        with meter.watch():
            store.run(0)
    return held_bytes, meter.workspace_bytes


def _round(
    start: Callable[[], Pass], store: WeightGradientStore, clock: Clock, overhead_ns_by_op: Mapping[str, int]
) -> Callable[[], dict[str, int]]:
    """Return a function that times F and B, then F, I and W, once, less the overhead of the calls."""
    can_split = True

    def run_round() -> dict[str, int]:
        nonlocal can_split
        durations: dict[str, int] = {}

        def time(op: str, work: Callable[[], Any]) -> None:
            _, duration_ns = clock.time(work)
            durations[op] = max(0, duration_ns - overhead_ns_by_op.get(op, 0))

        def input_half() -> None:
            with defer_weight_gradients(store, 0):
                one.backward()

        one = start()
        time("F", one.forward)
        time("B", one.backward)
        if can_split:
            one = start()
            with defer_weight_gradients(store, 0):
                one.forward()
            time("I", input_half)
            can_split = 0 in store
            if can_split:
                time("W", lambda: store.run(0))
            else:
                del durations["I"]
        return durations

    return run_round


def _call_overhead_ns(clock: Clock, device: torch.device) -> dict[str, int]:
    """Return what F, B, I and W cost where there is nothing to do.

    A stage pays it once an op, whatever its number of layers, so it belongs to the cluster's host overheads and not to
    any layer; left in, it would make the layers of a small model add up to more than the model.
    """
    value = torch.zeros(1, device=device, requires_grad=True)
    gradient = torch.zeros(1, device=device)
    store = WeightGradientStore()

    def input_half() -> None:
        with defer_weight_gradients(store, 0):
            one.backward()

    durations: dict[str, list[int]] = {"F": [], "B": [], "I": []}
    for _ in range(_NUM_OVERHEAD_ROUNDS):
        for op in ("B", "I"):
            one = Pass(lambda value: value.view_as(value), value, [gradient])
            durations["F"].append(clock.time(one.forward)[1])
            durations[op].append(clock.time(one.backward if op == "B" else input_half)[1])
    overhead = {op: Samples(tuple(found)).median_ns for op, found in durations.items()}
    return {**overhead, "W": overhead["B"]}  # W is one call of the engine too


@contextmanager
def _without_collection() -> Iterator[None]:
    """Keep Python's garbage collector out of what is timed."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def gradient_of(output: Tensor) -> Tensor:
    """Return a gradient to start a backward from; small, since parameters accumulate it round after round."""
    return torch.ones_like(output) if output.dim() == 0 else torch.randn_like(output) * 1e-3


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


def device_name_of(device: torch.device) -> str:
    """Return what profiles and clusters call the type of a device, unless a user names it."""
    if device.type == "cpu":
        return "cpu"
    return torch.cuda.get_device_name(device).lower().replace(" ", "-")


@contextmanager
def _naming(source: LayerSource, dtype: str, device: str) -> Iterator[None]:
    """Turn what goes wrong inside into a ``ProfileError`` that names the layer."""
    where = f"layer {source.name!r} ({source.kind})"
    try:
        yield
    except PipeplanError:
        raise
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise ProfileError(
            f"{where} does not fit in the memory of {device}; use a smaller --micro-batch-size or --sequence-length"
        ) from error
    except Exception as error:
        reason = str(error).strip().splitlines()
        raise ProfileError(
            f"{where} can't run in {dtype} on {device}: {reason[0] if reason else type(error).__name__}"
        ) from error


def _layer_profile(source: LayerSource, measured: MeasuredLayer, device: str) -> LayerProfile:
    return LayerProfile(
        name=source.name,
        kind=source.kind,
        num_parameters=measured.num_parameters,
        output_bytes=measured.output_bytes,
        activation_bytes=measured.activation_bytes,
        held_for_w_bytes=measured.held_for_w_bytes,
        workspace_bytes=measured.workspace_bytes,
        is_splittable=measured.is_splittable,
        tied=source.tied,
        keep_with_previous=source.keep_with_previous,
        times_by_device={device: _times(measured.samples_by_op)},
        recomputation=Recomputation(
            {device: _times(measured.recompute_samples_by_op)}, measured.recompute_activation_bytes
        ),
    )


def _times(samples_by_op: dict[str, Samples]) -> LayerTimes:
    ns = {op: samples.median_ns for op, samples in samples_by_op.items()}
    return LayerTimes(
        forward_ns=ns["F"],
        backward_ns=ns["B"],
        input_gradient_ns=ns.get("I"),
        weight_gradient_ns=ns.get("W"),
    )


def _notes(measured: MeasuredLayer, device: str) -> dict[str, Any]:
    spread = {
        op: {"relative_spread": round(samples.relative_spread, 4), "num_samples": len(samples.durations_ns)}
        for op, samples in measured.samples_by_op.items()
    }
    return {"output_tensors": list(measured.output_tensors), "spread": {device: spread}}
