"""``pipeplan profile``: what each layer of a model costs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from pipeplan.cli.options import Json, Quiet

if TYPE_CHECKING:
    from pipeplan.emit.tables import Table
    from pipeplan.profile import Profile

_NUM_NAMED = 3  # of the uncertain times
_SHAPE = "Shape"
_MEASURING = "Measuring"
_ESTIMATING = "Estimating (GPUs that are not here)"
_STATES = "What the optimizer keeps"
_LINKS = "Links (started by the deepspeed launcher)"


def profile(
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="File to write.")],
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="A Hugging Face config.json or its folder, package.module:factory, or a template.",
            show_default=False,
        ),
    ] = None,
    device: Annotated[
        str,
        typer.Option("--device", help="cpu or cuda: measure here. Names of GPUs, as in h100-sxm,a100-80gb: estimate."),
    ] = "cpu",
    micro_batch_size: Annotated[
        int, typer.Option("--micro-batch-size", min=1, help="Samples of a micro-batch.", rich_help_panel=_SHAPE)
    ] = 1,
    sequence_length: Annotated[
        int, typer.Option("--sequence-length", min=2, help="Tokens of a sample.", rich_help_panel=_SHAPE)
    ] = 128,
    dtype: Annotated[
        Literal["fp32", "bf16", "fp16"] | None,
        typer.Option(
            "--dtype",
            help="Weights, activations and gradients; fp32 if measured, bf16 if estimated.",
            rich_help_panel=_SHAPE,
            show_default=False,
        ),
    ] = None,
    granularity: Annotated[
        Literal["layer", "sublayer"],
        typer.Option("--granularity", help="Cut at decoder layers, or inside them.", rich_help_panel=_SHAPE),
    ] = "layer",
    seed: Annotated[
        int, typer.Option("--seed", min=0, help="Seed of weights and data.", rich_help_panel=_MEASURING)
    ] = 0,
    time_limit: Annotated[
        float | None,
        typer.Option("--time-limit", min=0, help="Seconds to measure, shared by layers.", rich_help_panel=_MEASURING),
    ] = None,
    threads: Annotated[
        int,
        typer.Option("--threads", min=1, help="CPU threads, as each rank will have.", rich_help_panel=_MEASURING),
    ] = 1,
    device_name: Annotated[
        str | None,
        typer.Option("--device-name", help="Device type to record, such as h100-sxm.", rich_help_panel=_MEASURING),
    ] = None,
    update: Annotated[
        bool,
        typer.Option("--update", help="Measure again what changed since FILE was written.", rich_help_panel=_MEASURING),
    ] = False,
    optimizer: Annotated[
        str,
        typer.Option(
            "--optimizer",
            help="adam, adamw, lamb, adagrad, lion, sgd or sgd-momentum.",
            rich_help_panel=_STATES,
        ),
    ] = "adamw",
    zero_stage: Annotated[
        int | None,
        typer.Option(
            "--zero-stage",
            help="0 or 1; by default 1 for bf16, else 0.",
            rich_help_panel=_STATES,
            show_default=False,
        ),
    ] = None,
    data_parallel: Annotated[
        int,
        typer.Option("--data-parallel", min=1, help="Replicas that share states.", rich_help_panel=_STATES),
    ] = 1,
    efficiency: Annotated[
        Path | None,
        typer.Option("--efficiency", help="Efficiency file; see fit-efficiency.", rich_help_panel=_ESTIMATING),
    ] = None,
    tensor_parallel: Annotated[
        int,
        typer.Option(
            "--tensor-parallel",
            min=1,
            help="Ranks that share each layer; their communication is left out.",
            rich_help_panel=_ESTIMATING,
        ),
    ] = 1,
    expert_parallel: Annotated[
        int,
        typer.Option(
            "--expert-parallel",
            min=1,
            help="Ranks that share the experts; their communication is left out.",
            rich_help_panel=_ESTIMATING,
        ),
    ] = 1,
    kernel_packages: Annotated[
        bool,
        typer.Option(
            "--kernel-packages/--no-kernel-packages",
            help="Whether mamba-ssm and the like will be installed; decides what their layers keep.",
            rich_help_panel=_ESTIMATING,
        ),
    ] = True,
    links: Annotated[
        bool,
        typer.Option("--links", help="Measure the links between ranks, not a model.", rich_help_panel=_LINKS),
    ] = False,
    cluster: Annotated[
        Path | None,
        typer.Option("--cluster", help="Cluster file whose links to measure.", rich_help_panel=_LINKS),
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Find the time and memory of every layer of a model, forward and backward: measured here, or estimated.

    Example: pipeplan profile tiny-nemotron-h --sequence-length 128 -o profile.yaml

    With the name of a GPU it estimates, from the ops of the model and the GPU's figures:

    pipeplan profile jamba-v0.1 --device h100-sxm --sequence-length 4096 -o profile.yaml

    With --links, started by the launcher, it measures the links between the processes into a cluster file:

    deepspeed --no_local_rank --num_gpus 4 --module pipeplan profile --links -o cluster.yaml
    """
    from pipeplan.cli.estimate import MEASURED_DEVICES, chosen_gpus, estimated_profile

    if links:
        from pipeplan.cli.links import profile_links

        if model is not None:
            raise typer.BadParameter("--links measures no model; leave MODEL out")
        profile_links(cluster, output, json=json, quiet=quiet)
        return
    if model is None:
        raise typer.BadParameter("name a model to profile, or give --links")
    is_measured = device in MEASURED_DEVICES
    if is_measured and (efficiency is not None or tensor_parallel > 1 or expert_parallel > 1):
        raise typer.BadParameter("--efficiency and the parallel sizes are for estimates; name a GPU with --device")
    gpus = [] if is_measured else chosen_gpus(device)

    import torch

    from pipeplan.cli.console import print_json, print_message, print_result, progress
    from pipeplan.cli.render import rich_table
    from pipeplan.model.source import open_model
    from pipeplan.profile.estimate.parallel import ParallelSizes
    from pipeplan.profile.file import profile_document, write_profile
    from pipeplan.profile.resume import forget_partial, measure_resumably
    from pipeplan.profile.sampling import DEFAULT_BUDGET
    from pipeplan.profile.states import state_bytes, with_states

    chosen_dtype = dtype or ("fp32" if is_measured else "bf16")
    state_bytes(chosen_dtype, optimizer=optimizer, zero_stage=zero_stage, num_replicas=data_parallel)  # or refuse now
    torch.set_num_threads(threads)
    with progress(f"reading {model}", quiet=quiet) as describe, _keeping(output, quiet=quiet):
        layers = open_model(model, granularity=granularity, seed=seed)
        if quiet or device != "cuda":
            _silence_transformers()
        num_layers = len(layers.layers)
        num_distinct = len({layer.identity for layer in layers.layers})
        if is_measured:
            found = measure_resumably(
                output,
                layers,
                is_update=update,
                on_message=(lambda text: None) if quiet else print_message,
                device=device,
                micro_batch_size=micro_batch_size,
                sequence_length=sequence_length,
                dtype=chosen_dtype,
                seed=seed,
                device_name=device_name,
                budget=DEFAULT_BUDGET if time_limit is None else DEFAULT_BUDGET.shared(time_limit, num_distinct),
                on_layer=lambda index, name: describe(f"measuring {name} ({index + 1} of {num_layers})"),
            )
        else:
            found = estimated_profile(
                layers,
                gpus,
                efficiency_file=efficiency,
                micro_batch_size=micro_batch_size,
                sequence_length=sequence_length,
                dtype=chosen_dtype,
                sizes=ParallelSizes(tensor=tensor_parallel, expert=expert_parallel),
                has_kernels=kernel_packages,
                device_name=device_name,
                on_layer=lambda index, name: describe(f"estimating {name} ({index + 1} of {num_layers})"),
            )
    found = with_states(found, optimizer=optimizer, zero_stage=zero_stage, num_replicas=data_parallel)
    write_profile(found, output)
    forget_partial(output)
    if json:
        print_json(profile_document(found))
    else:
        print_result(*(rich_table(_table(found, name)) for name in found.devices))
    if not quiet:
        _warn_of_spread(found)
        print_message(f"wrote {output}")


@contextmanager
def _keeping(output: Path, *, quiet: bool) -> Iterator[None]:
    """Say, when something ends the run inside, where its results are."""
    from pipeplan.cli.console import print_message
    from pipeplan.profile.resume import partial_path

    try:
        yield
    except BaseException:
        if not quiet and partial_path(output).exists():
            print_message(f"what was measured is kept in {partial_path(output)}; the same command goes on from there")
        raise


def _silence_transformers() -> None:
    """Keep transformers from recommending GPU kernels; a factory's model may not use transformers at all."""
    if "transformers" in sys.modules:
        from transformers.utils import logging

        logging.set_verbosity_error()  # type: ignore[no-untyped-call]


def _table(profile: Profile, device: str) -> Table:
    """Return one row for each run of layers that cost the same, in model order of the first."""
    from pipeplan.emit.tables import Table, format_gb, format_ms

    names_by_row: dict[tuple[str, ...], list[str]] = {}
    for layer in profile.layers:
        times = layer.times(device)
        halves = (times.input_gradient_ns, times.weight_gradient_ns)
        row = (
            layer.kind,
            f"{layer.num_parameters:,}",
            format_ms(times.forward_ns),
            format_ms(times.backward_ns),
            *("-" if half is None else format_ms(half) for half in halves),
            format_gb(layer.activation_bytes),
            format_gb(layer.held_for_w_bytes) if layer.is_splittable else "-",
            format_gb(layer.output_bytes),
        )
        names_by_row.setdefault(row, []).append(layer.name)
    return Table(
        heading=f"{profile.model} on {device}: {profile.source}, micro-batch {profile.micro_batch_size} x "
        f"{profile.sequence_length}, {profile.dtype}",
        columns=(
            "layers",
            "kind",
            "parameters",
            "F",
            "B",
            "I",
            "W",
            "kept to B",
            "kept to W",
            "output",
        ),
        rows=tuple(
            (names[0] if len(names) == 1 else f"{names[0]} + {len(names) - 1} alike", *row)
            for row, names in names_by_row.items()
        ),
        footnote="\n".join(
            [
                "Milliseconds and bytes of one micro-batch; I and W are the halves of a split backward.",
                *profile.extra.get("notes", []),
            ]
        ),
    )


def _warn_of_spread(profile: Profile) -> None:
    """Say which times are uncertain, and how much of all time that is."""
    from pipeplan.cli.console import print_message
    from pipeplan.profile.confidence import uncertain_ops

    wide = uncertain_ops(profile)
    if wide:
        named = ", ".join(f"{one.layer} {one.op} ±{one.relative_spread:.0%}" for one in wide[:_NUM_NAMED])
        more = f" and {len(wide) - _NUM_NAMED} more" if len(wide) > _NUM_NAMED else ""
        share = sum(one.time_share for one in wide) / len(profile.devices)
        print_message(
            f"warning: {share:.0%} of the time was measured with a wide spread ({named}{more}); "
            "is the machine busy? measure again, or give --time-limit more seconds"
        )
