"""Estimating the profile of a whole model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree

from pipeplan.errors import PipeplanError, ProfileError, nearest
from pipeplan.model.splitting import splittable_layers
from pipeplan.model.types import LayerSource, ModelLayers
from pipeplan.profile.estimate.efficiency import Efficiency
from pipeplan.profile.estimate.fakes import fake_tensors
from pipeplan.profile.estimate.gpus import Gpu
from pipeplan.profile.estimate.kernels import LayerCost
from pipeplan.profile.estimate.layer import LayerOnFakes, run_on_fakes
from pipeplan.profile.estimate.opaque import FusedFunctions
from pipeplan.profile.estimate.parallel import ParallelSizes, share_of
from pipeplan.profile.measure import DTYPES, software_versions
from pipeplan.profile.passes import signature
from pipeplan.profile.states import state_bytes
from pipeplan.profile.types import LayerProfile, Profile, Recomputation

Callback = Callable[[int, str], None]
"""``callback(index, name)``: called before each layer."""


def layer_costs(
    model: ModelLayers,
    *,
    micro_batch_size: int,
    sequence_length: int,
    dtype: str,
    has_kernels: bool = True,
    on_layer: Callback | None = None,
) -> list[LayerCost]:
    """Return what each layer of a model runs and keeps, on any GPU; takes no memory for weights or activations.

    Layers of the same identity are looked at once. The last layer includes the loss.

    Args:
        has_kernels: Whether kernel packages are assumed to be installed where training will run; decides the bytes
            kept by layers that have such kernels (Mamba's scans and convolutions).

    Raises:
        ProfileError: A layer can't run on fake tensors; names it and what to do instead.
    """
    if dtype not in DTYPES:
        raise ProfileError(f"unknown dtype {dtype!r}{nearest(dtype, DTYPES)}; use one of {', '.join(DTYPES)}")
    inputs, labels = model.sample_batch(micro_batch_size, sequence_length, 0)
    functions = FusedFunctions()
    found: dict[str, LayerOnFakes] = {}
    costs = []
    with fake_tensors() as mode:
        value = _fake(inputs, mode, DTYPES[dtype])
        labels = _fake(labels, mode, None)
        for index, (source, is_splittable) in enumerate(
            zip(model.layers, splittable_layers(model.layers), strict=True)
        ):
            if on_layer is not None:
                on_layer(index, source.name)
            is_last = index == len(model.layers) - 1
            key = f"{source.identity}/{signature(value)}/{'loss' if is_last else ''}/{is_splittable}"
            if key not in found:
                with _naming(source):
                    found[key] = run_on_fakes(
                        source,
                        value,
                        (lambda outputs: model.loss_function(outputs, labels)) if is_last else None,
                        DTYPES[dtype],
                        functions=functions,
                        has_kernels=has_kernels,
                        is_splittable=is_splittable,
                    )
            value = found[key].outputs
            costs.append(found[key].cost)
    return costs


def estimate_profile(
    model: ModelLayers,
    gpus: Sequence[Gpu],
    efficiency: Efficiency,
    *,
    micro_batch_size: int,
    sequence_length: int,
    dtype: str = "bf16",
    sizes: ParallelSizes = ParallelSizes(),  # noqa: B008  frozen
    has_kernels: bool = True,
    device_name: str | None = None,
    state_bytes_per_parameter: float | None = None,
    on_layer: Callback | None = None,
) -> Profile:
    """Estimate F, B, I and W, the same with recomputation, and the bytes of every layer on GPUs that are not here.

    Args:
        sizes: Tensor- and expert-parallel sizes. A profile of shares can't be trained by pipeplan, which runs neither,
            so it doesn't say how to build the model.
        device_name: Device type in the profile instead of the GPU's own name; for one GPU.

    Raises:
        ProfileError: A layer can't run on fake tensors or can't be divided; names it.
    """
    costs = layer_costs(
        model,
        micro_batch_size=micro_batch_size,
        sequence_length=sequence_length,
        dtype=dtype,
        has_kernels=has_kernels,
        on_layer=on_layer,
    )
    gpu_by_device = {device_name or gpu.name: gpu for gpu in gpus}
    layers = []
    notes: dict[str, dict[str, Any]] = {}
    for source, whole in zip(model.layers, costs, strict=True):
        cost = share_of(whole, sizes, source.name)
        layers.append(_layer_profile(source, cost, gpu_by_device, efficiency, dtype))
        notes[source.name] = {
            "output_tensors": list(cost.output_tensors),
            "fused_activation_bytes": cost.fused_activation_bytes,
        }
    return Profile(
        model=model.name,
        source="estimated",
        micro_batch_size=micro_batch_size,
        sequence_length=sequence_length,
        dtype=dtype,
        state_bytes_per_parameter=(
            state_bytes(dtype).per_parameter if state_bytes_per_parameter is None else state_bytes_per_parameter
        ),
        layers=tuple(layers),
        model_source=None if sizes.is_parallel else model.source,
        extra={
            "software": software_versions(),
            "notes": estimate_notes(gpus, efficiency, dtype, sizes, has_kernels=has_kernels),
            "layers": notes,
        },
    )


def estimate_notes(
    gpus: Sequence[Gpu], efficiency: Efficiency, dtype: str, sizes: ParallelSizes, *, has_kernels: bool
) -> list[str]:
    """Return what whoever uses an estimate must know: what it rests on, how well that did, what is left out."""
    notes = [f"estimated, not measured, from {gpu.summary}" for gpu in gpus]
    notes.append(efficiency.record)
    if dtype == "fp32":
        notes.append("fp32 matrix products are taken to run in TF32, at half the rate of bf16")
    if has_kernels:
        notes.append("kept bytes assume the kernel packages of scans and convolutions (mamba-ssm, causal-conv1d, fla)")
    else:
        notes.append("kept bytes are those of transformers' plain torch code, times those of real kernels")
    if sizes.is_parallel:
        notes.append(
            f"one rank's share under tensor parallelism of {sizes.tensor} and expert parallelism of {sizes.expert}, "
            "without the communication that these need"
        )
    return notes


def _layer_profile(
    source: LayerSource, cost: LayerCost, gpu_by_device: dict[str, Gpu], efficiency: Efficiency, dtype: str
) -> LayerProfile:
    return LayerProfile(
        name=source.name,
        kind=source.kind,
        num_parameters=cost.num_parameters,
        output_bytes=cost.output_bytes,
        activation_bytes=cost.activation_bytes,
        held_for_w_bytes=cost.held_for_w_bytes,
        workspace_bytes=cost.workspace_bytes,
        untrained_bytes=cost.untrained_bytes,
        is_splittable=cost.is_splittable,
        tied=source.tied,
        keep_with_previous=source.keep_with_previous,
        times_by_device={device: efficiency.times(cost, gpu, dtype) for device, gpu in gpu_by_device.items()},
        recomputation=Recomputation(
            {device: efficiency.times(cost, gpu, dtype, recompute=True) for device, gpu in gpu_by_device.items()},
            cost.recompute_activation_bytes,
        ),
    )


def _fake(value: Any, mode: FakeTensorMode, dtype: torch.dtype | None) -> Any:
    def fake(tensor: Tensor) -> Tensor:
        cast = tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
        return cast if isinstance(cast, FakeTensor) else mode.from_tensor(cast)

    return pytree.tree_map_only(Tensor, fake, value)


@contextmanager
def _naming(source: LayerSource) -> Iterator[None]:
    """Turn what goes wrong inside into a ``ProfileError`` that names the layer."""
    try:
        yield
    except PipeplanError:
        raise
    except Exception as error:  # foreign code, run on tensors that it wasn't written for
        reason = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
        raise ProfileError(
            f"layer {source.name!r} ({source.kind}) can't be estimated: its code doesn't run on tensors without "
            f"values ({reason[:200]}); measure it where the GPU is, with --device cuda"
        ) from error
