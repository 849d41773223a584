"""``pipeplan profile``: what each layer of a model costs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from pipeplan.cli.options import Json, Quiet

if TYPE_CHECKING:
    from pipeplan.model.types import ModelLayers
    from pipeplan.profile import Profile
_SHAPE = "Shape"
_MEASURING = "Measuring"
_ESTIMATING = "Estimating (GPUs that are not here)"
_STATES = "What the optimizer keeps"
_LAUNCHED = "Started by the deepspeed launcher"


def profile(
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", dir_okay=False, help="File to write.")],
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
        typer.Option(
            "--device-name",
            help="Device type to record, such as h100-sxm; with --ranks also one for each rank: h100,h100,a100.",
            rich_help_panel=_MEASURING,
        ),
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
    ranks: Annotated[
        bool,
        typer.Option(
            "--ranks",
            help="Measure on all ranks of the launch: those of one device type share its layers.",
            rich_help_panel=_LAUNCHED,
        ),
    ] = False,
    links: Annotated[
        bool,
        typer.Option("--links", help="Measure the links between ranks, not a model.", rich_help_panel=_LAUNCHED),
    ] = False,
    cluster: Annotated[
        Path | None,
        typer.Option(
            "--cluster",
            help="Cluster file: whose links to measure, or which device type each rank is (by default what its "
            "GPU is called).",
            rich_help_panel=_LAUNCHED,
        ),
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Find the time and memory of every layer of a model, forward and backward: measured here, or estimated.

    Example: pipeplan profile tiny-nemotron-h --sequence-length 128 -o profile.yaml

    With the name of a GPU it estimates, from the ops of the model and the GPU's figures:

    pipeplan profile jamba-v0.1 --device h100-sxm --sequence-length 4096 -o profile.yaml

    With --ranks, started by the launcher, all processes measure, and all device types come into one profile:

    deepspeed --no_local_rank --num_gpus 4 --module pipeplan profile MODEL --ranks --device cuda -o profile.yaml

    With --links it measures the links between the processes into a cluster file:

    deepspeed --no_local_rank --num_gpus 4 --module pipeplan profile --links -o cluster.yaml
    """
    from pipeplan.cli.estimate import MEASURED_DEVICES, chosen_gpus, estimated_profile

    if links:
        from pipeplan.cli.links import profile_links

        if ranks:
            raise typer.BadParameter("--links and --ranks are two launches; give one of them")
        if model is not None:
            raise typer.BadParameter("--links measures no model; leave MODEL out")
        profile_links(cluster, output, json=json, quiet=quiet)
        return
    if model is None:
        raise typer.BadParameter("name a model to profile, or give --links")
    if cluster is not None and not ranks:
        raise typer.BadParameter("--cluster is for --links and --ranks; give one of them")
    is_measured = device in MEASURED_DEVICES
    if is_measured and (efficiency is not None or tensor_parallel > 1 or expert_parallel > 1):
        raise typer.BadParameter("--efficiency and the parallel sizes are for estimates; name a GPU with --device")
    if ranks:
        from pipeplan.cli.launched import check_launched

        if not is_measured:
            raise typer.BadParameter(f"--ranks measures, and {device} is estimated, for which one process will do")
        if cluster is not None and device_name is not None:
            raise typer.BadParameter("--cluster and --device-name both say what the ranks are; give one of them")
        check_launched("--ranks measures on", f"profile MODEL --ranks --device {device} -o profile.yaml")
    gpus = [] if is_measured else chosen_gpus(device)

    import torch

    from pipeplan.cli.console import print_message, progress
    from pipeplan.cli.costs import report_profile, silence_transformers
    from pipeplan.model.source import open_model
    from pipeplan.profile.estimate.parallel import ParallelSizes
    from pipeplan.profile.file import write_profile
    from pipeplan.profile.resume import Settings, forget_partial, measure_resumably
    from pipeplan.profile.states import state_bytes, with_states

    chosen_dtype = dtype or ("fp32" if is_measured else "bf16")
    state_bytes(chosen_dtype, optimizer=optimizer, zero_stage=zero_stage, num_replicas=data_parallel)  # or refuse now
    torch.set_num_threads(threads)
    settings = Settings(
        device=device, micro_batch_size=micro_batch_size, sequence_length=sequence_length, dtype=chosen_dtype, seed=seed
    )

    def opened() -> ModelLayers:
        layers = open_model(model, granularity=granularity, seed=seed)
        if quiet or device != "cuda":
            silence_transformers()
        return layers

    def finished(profile: Profile) -> Profile:
        return with_states(profile, optimizer=optimizer, zero_stage=zero_stage, num_replicas=data_parallel)

    if ranks:
        from pipeplan.cli.ranks import profile_ranks
        from pipeplan.runtime.profiling import Task

        names = () if device_name is None else tuple(name.strip() for name in device_name.split(","))
        task = Task(
            output=output,
            settings=settings,
            open_model=opened,
            finish=finished,
            device_names=names,
            cluster_file=cluster,
            time_limit_s=time_limit,
            is_update=update,
        )
        profile_ranks(task, json=json, quiet=quiet)
        return
    with (
        progress(f"reading {model}", quiet=quiet) as describe,
        _keeping(output, quiet=quiet),
        redirect_stdout(sys.stderr),
    ):
        layers = opened()
        num_layers = len(layers.layers)
        if is_measured:
            found = measure_resumably(
                output,
                layers,
                settings.within(time_limit, layers),
                device_name=device_name,
                is_update=update,
                on_layer=lambda index, name: describe(f"measuring {name} ({index + 1} of {num_layers})"),
                on_message=(lambda text: None) if quiet else print_message,
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
        found = finished(found)
        write_profile(found, output)
    forget_partial(output)
    report_profile(found, output, json=json, quiet=quiet)


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
