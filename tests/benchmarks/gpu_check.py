"""What only a GPU can show, in under 5 minutes on one: ``python tests/benchmarks/gpu_check.py``.

Measures one layer of each kind of Nemotron-H-8B and of Jamba (with 4 of its 16 experts) in bf16, and checks

- that the times are steady, and what I + W take against B
- that the gradients of I and W are those of B, also on CUDA
- what the estimate for this GPU says of the same layers
- that one rank trains in bf16 and fp16: every loss is finite, and the last is below the first

``--device cpu --tiny`` runs the same steps on small models, to try this script where there is no GPU.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from pipeplan.cluster import equal_ranks
from pipeplan.deferral import WeightGradientStore, defer_weight_gradients
from pipeplan.emit.ds_config import build_ds_config
from pipeplan.model.source import open_model
from pipeplan.model.types import LayerSource, ModelLayers
from pipeplan.plan.folder import write_plan_folder
from pipeplan.plan.layout import Partition, Placement
from pipeplan.plan.orders import one_f_one_b
from pipeplan.plan.types import Plan
from pipeplan.profile.estimate.efficiency import read_efficiency
from pipeplan.profile.estimate.gpus import Gpu, read_gpus
from pipeplan.profile.estimate.model import estimate_profile
from pipeplan.profile.file import profile_digest
from pipeplan.profile.held import tensors_in
from pipeplan.profile.kept import MeasuredLayer
from pipeplan.profile.measure import DTYPES, measure_profile
from pipeplan.profile.passes import gradient_of
from pipeplan.profile.sampling import DEFAULT_BUDGET
from pipeplan.profile.types import Profile
from pipeplan.program.file import write_program
from pipeplan.program.verify import verify_plan
from pipeplan.resources import template_path

# One layer of each kind, and few experts: weights are drawn on the CPU, which takes most of the time.
MODELS: dict[str, dict[str, Any]] = {
    "nemotron-h-8b": {"hybrid_override_pattern": "M-*"},
    "jamba-v0.1": {"num_hidden_layers": 5, "num_experts": 4},
}
TINY_MODELS: dict[str, dict[str, Any]] = {"tiny-nemotron-h": {}, "tiny-jamba": {}}
# Words in the name of a device, the more special first.
GPU_BY_WORD = {
    "h200": "h200-sxm", "h100 pcie": "h100-pcie", "h100": "h100-sxm", "h800": "h800-sxm", "b200": "b200-hgx",
    "a100-sxm4-40gb": "a100-40gb", "a100-pcie-40gb": "a100-40gb", "a100": "a100-80gb", "l40s": "l40s",
    "4090": "rtx-4090", "a6000": "rtx-a6000",
}  # fmt: skip
GRADIENT_TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2, "fp16": 5e-3}  # of the norm of a gradient
NUM_TRAINING_STEPS = 6

console = Console(width=150)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What was found of one model."""

    model: ModelLayers
    profile: Profile
    estimate: Profile | None
    gradient_error_by_layer: dict[str, float]
    seconds: float


def shortened(name: str, changes: dict[str, Any], folder: Path) -> ModelLayers:
    """Return a template's model with some settings of its config changed."""
    config = json.loads(template_path(f"models/{name}.json").read_text()) | changes
    path = folder / f"{name}.json"
    path.write_text(json.dumps(config))
    return open_model(str(path))


def check_model(model: ModelLayers, gpu: Gpu | None, arguments: argparse.Namespace) -> Checked:
    """Measure, estimate and compare gradients."""
    start = time.monotonic()
    measured: dict[str, MeasuredLayer] = {}
    shape = {"micro_batch_size": 1, "sequence_length": arguments.sequence_length, "dtype": arguments.dtype}
    profile = measure_profile(
        model,
        device=arguments.device,
        measured=measured,
        budget=DEFAULT_BUDGET.shared(arguments.seconds, len({layer.identity for layer in model.layers})),
        **shape,
    )
    errors = gradient_errors(model, profile, measured, arguments)
    estimate = None
    if gpu is not None:
        estimate = estimate_profile(model, [gpu], read_efficiency(), has_kernels=False, **shape)
    return Checked(
        model=model,
        profile=profile,
        estimate=estimate,
        gradient_error_by_layer=errors,
        seconds=time.monotonic() - start,
    )


def gradient_errors(
    model: ModelLayers, profile: Profile, measured: dict[str, MeasuredLayer], arguments: argparse.Namespace
) -> dict[str, float]:
    """Return, for each layer measured, the largest difference between B and I + W, as a share of a gradient's norm."""
    device, dtype = torch.device(arguments.device), DTYPES[arguments.dtype]
    value, labels = model.sample_batch(1, arguments.sequence_length, 0)
    value, labels = value.to(device), labels.to(device)
    keys = {layer.name: profile.extra["layers"][layer.name]["measured_as"] for layer in profile.layers}
    errors: dict[str, float] = {}
    seen: set[str] = set()
    for source in model.layers:
        key = keys[source.name]
        if key not in seen:
            seen.add(key)
            is_last = source is model.layers[-1]
            finish = (lambda outputs: model.loss_function(outputs, labels)) if is_last else None
            errors[source.name] = gradient_error(source, value, finish, device, dtype)
        value = measured[key].outputs
    return errors


def gradient_error(
    source: LayerSource, value: Any, finish: Callable[[Any], Tensor] | None, device: torch.device, dtype: torch.dtype
) -> float:
    """Return the largest relative difference of one layer's gradients."""
    built = source.build()
    layer = built.to(device, dtype).train() if isinstance(built, nn.Module) else built
    parameters = list(layer.parameters()) if isinstance(layer, nn.Module) else []
    inputs = [tensor for tensor in tensors_in(value) if tensor.requires_grad]
    output_gradients: list[Tensor] = []

    def gradients(*, is_split: bool) -> list[Tensor | None]:
        for tensor in [*parameters, *inputs]:
            tensor.grad = None
        store = WeightGradientStore()

        def run() -> None:
            outputs = layer(value) if finish is None else finish(layer(value))
            roots = [tensor for tensor in tensors_in(outputs) if tensor.requires_grad]
            if not output_gradients:
                output_gradients.extend(gradient_of(root) for root in roots)
            if roots:
                torch.autograd.backward(roots, output_gradients)

        if is_split:
            with defer_weight_gradients(store, 0):
                run()
            if 0 in store:
                store.run(0)
        else:
            run()
        return [tensor.grad for tensor in [*parameters, *inputs]]

    whole, halves = gradients(is_split=False), gradients(is_split=True)
    worst = 0.0
    for one, other in zip(whole, halves, strict=True):
        if (one is None) != (other is None):
            return math.inf
        if one is not None and other is not None:
            norm = float(one.float().norm())
            worst = max(worst, float((one.float() - other.float()).norm()) / max(norm, 1e-12))
    return worst


def train(model: ModelLayers, profile: Profile, folder: Path) -> list[float]:
    """Train a few steps on one rank with the DeepSpeed config that pipeplan writes; return the losses."""
    import pipeplan.runtime

    plan = Plan(
        model=profile.model,
        num_micro_batches=2,
        partition=Partition((profile.num_layers,)),
        placement=Placement((0,)),
        order=one_f_one_b(1, 2),
        profile_digest=profile_digest(profile),
    )
    cluster = equal_ranks(1, profile.devices[0])
    write_plan_folder(plan, profile, cluster, folder)
    write_program(verify_plan(plan, profile, cluster), folder / "program.yaml")
    module = pipeplan.runtime.PlannedPipelineModule(model.layers, loss_fn=model.loss_function, plan=folder)
    config = build_ds_config(plan, profile, cluster) | {"steps_per_print": 10**9}
    engine, *_ = pipeplan.runtime.initialize(
        model=module,
        model_parameters=[parameter for parameter in module.parameters() if parameter.requires_grad],
        config=copy.deepcopy(config),
    )
    batch = model.sample_batch(profile.micro_batch_size, profile.sequence_length, 0)
    data: Iterator[Any] = iter(lambda: batch, None)
    return [float(engine.train_batch(data_iter=data)) for _ in range(NUM_TRAINING_STEPS)]


def training_losses(arguments: argparse.Namespace, folder: Path) -> dict[str, list[float]]:
    """Return the losses of a tiny model by dtype; fp16 needs a GPU."""
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(listener.getsockname()[1])}
    import deepspeed

    deepspeed.init_distributed(dist_backend="nccl" if arguments.device == "cuda" else "gloo")
    losses = {}
    for dtype in ("bf16", "fp16") if arguments.device == "cuda" else ("bf16",):
        model = open_model("tiny-llama")
        budget = DEFAULT_BUDGET.shared(2.0, len(model.layers))
        profile = measure_profile(
            model, device=arguments.device, micro_batch_size=1, sequence_length=32, dtype=dtype, budget=budget
        )
        losses[dtype] = train(model, profile, folder / dtype)
    return losses


def find_gpu(arguments: argparse.Namespace) -> Gpu | None:
    """Return the table's entry of this GPU, or the one that the user names."""
    gpus = read_gpus()
    if arguments.gpu is not None:
        return gpus[arguments.gpu]
    if arguments.device == "cpu":
        return None
    name = torch.cuda.get_device_name().lower()
    return next((gpus[known] for word, known in GPU_BY_WORD.items() if word in name), None)


def print_models(found: Sequence[Checked], arguments: argparse.Namespace) -> None:
    """Print one row for each layer that was measured."""
    where = torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu"
    table = Table(
        "layer", "kind", "F", "B", "I", "W", "(I + W) / B", "spread", "gradient error", "estimate", "est. / measured",
        title=f"{where}, {arguments.dtype}, {arguments.sequence_length} tokens, ms",
    )  # fmt: skip
    for checked in found:
        [device] = checked.profile.devices
        table.add_section()
        for index, layer in enumerate(checked.profile.layers):
            error = checked.gradient_error_by_layer.get(layer.name)
            if error is None:
                continue
            times = layer.times(device)
            halves = (times.input_gradient_ns, times.weight_gradient_ns)
            total_ns = times.forward_ns + times.backward_ns
            ratio = sum(half or 0 for half in halves) / times.backward_ns if None not in halves else None
            spread = checked.profile.extra["layers"][layer.name]["spread"][device]
            estimated_ns = None
            if checked.estimate is not None:
                other = checked.estimate.layers[index].times(checked.estimate.devices[0])
                estimated_ns = other.forward_ns + other.backward_ns
            table.add_row(
                f"{checked.model.name} {layer.name}",
                layer.kind,
                *("-" if ns is None else f"{ns / 1e6:.3f}" for ns in (times.forward_ns, times.backward_ns, *halves)),
                "-" if ratio is None else f"{ratio:.2f}",
                f"{max(one['relative_spread'] for one in spread.values()):.0%}",
                f"{error:.1e}",
                "-" if estimated_ns is None else f"{estimated_ns / 1e6:.3f}",
                "-" if estimated_ns is None else f"{estimated_ns / max(total_ns, 1):.2f}",
            )
    console.print(table)
    console.print("Estimate: F + B. Gradient error: B against I + W, relative to a gradient's norm.")


def faults(found: Sequence[Checked], losses: dict[str, list[float]], arguments: argparse.Namespace) -> list[str]:
    """Return what is wrong, one line each."""
    lines = []
    tolerance = GRADIENT_TOLERANCE[arguments.dtype]
    for checked in found:
        for name, error in checked.gradient_error_by_layer.items():
            if not error <= tolerance:
                lines.append(f"{checked.model.name} {name}: I + W differ from B by {error:.1e}, allowed {tolerance:g}")
    for dtype, values in losses.items():
        if not all(math.isfinite(value) for value in values) or not values[-1] < values[0]:
            lines.append(f"training in {dtype}: the losses are {', '.join(f'{value:.4f}' for value in values)}")
    return lines


def main() -> int:
    """Run everything; the exit status says whether gradients and losses are right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small models, few tokens")
    parser.add_argument("--gpu", help="this GPU's name in pipeplan's table, if it isn't recognised")
    parser.add_argument("--dtype", choices=[*DTYPES], default="bf16")
    parser.add_argument("--sequence-length", type=int, help="default: 2048, or 16 with --tiny")
    parser.add_argument("--seconds", type=float, help="to measure each model; default: 30, or 1 with --tiny")
    arguments = parser.parse_args()
    arguments.sequence_length = arguments.sequence_length or (16 if arguments.tiny else 2048)
    arguments.seconds = arguments.seconds or (1.0 if arguments.tiny else 30.0)
    if arguments.gpu is not None and arguments.gpu not in read_gpus():
        sys.exit(f"error: no GPU {arguments.gpu!r} in the table; known: {', '.join(read_gpus())}")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        sys.exit("error: torch finds no usable GPU here; run this where one is, or try it with --device cpu --tiny")
    if arguments.device == "cpu":
        torch.set_num_threads(1)
        os.environ["DS_ACCELERATOR"] = "cpu"
    gpu = find_gpu(arguments)
    found: list[Checked] = []
    with tempfile.TemporaryDirectory() as folder:
        for name, changes in (TINY_MODELS if arguments.tiny else MODELS).items():
            found.append(check_model(shortened(name, changes, Path(folder)), gpu, arguments))
            console.print(f"{name}: {found[-1].seconds:.0f} s")
        losses = training_losses(arguments, Path(folder))
    print_models(found, arguments)
    for dtype, values in losses.items():
        console.print(f"tiny-llama in {dtype}, one rank: loss {values[0]:.4f} to {values[-1]:.4f}")
    wrong = faults(found, losses, arguments)
    for line in wrong:
        console.print(f"[red]wrong[/red]: {line}")
    console.print("all checks passed" if not wrong else f"{len(wrong)} checks failed")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
