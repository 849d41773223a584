"""``pipeplan fit-efficiency``: teach estimated profiles by measured ones."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipeplan.cli.options import Json, Quiet

if TYPE_CHECKING:
    from pipeplan.emit.tables import Table
    from pipeplan.profile.estimate.efficiency import Efficiency
    from pipeplan.profile.estimate.fit import KnownProfile


def fit_efficiency(
    profiles: Annotated[
        list[Path], typer.Argument(metavar="PROFILE...", help="Measured profiles of models on GPUs of the table.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Efficiency file to write.")],
    start: Annotated[
        Path | None, typer.Option("--efficiency", help="File to start from; what comes with pipeplan if not given.")
    ] = None,
    device: Annotated[
        str | None, typer.Option("--device", help="Device type to read from profiles that cover several.")
    ] = None,
    forward_only: Annotated[
        bool, typer.Option("--forward-only", help="Fit F alone and compare the backward only.")
    ] = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Fit the share of a GPU's peak that each category of op reaches to measured profiles.

    Example: pipeplan fit-efficiency measured.yaml -o efficiency.yaml
    """
    from pipeplan.cli.console import print_json, print_message, print_result, progress
    from pipeplan.cli.render import rich_table
    from pipeplan.profile.estimate.efficiency import efficiency_document, read_efficiency, write_efficiency
    from pipeplan.profile.estimate.fit import fit_efficiency as fit

    efficiency = read_efficiency(start)
    with progress("reading profiles", quiet=quiet) as describe:
        known = []
        for path in profiles:
            describe(f"reading {path}")
            known.append(_known_profile(path, device))
        result = fit(known, efficiency, forward_only=forward_only)
    write_efficiency(result.efficiency, output)
    if json:
        print_json({**efficiency_document(result.efficiency), "left_out": list(result.left_out)})
    else:
        print_result(rich_table(_shares(efficiency, result.efficiency)), rich_table(_residuals(result.efficiency)))
    if not quiet:
        for reason in result.left_out:
            print_message(f"left out {reason}")
        print_message(f"wrote {output}")


def _known_profile(path: Path, device: str | None) -> KnownProfile:
    """Read a profile and run its model's layers on fake tensors."""
    from pipeplan.cli.costs import silence_transformers
    from pipeplan.errors import ProfileError
    from pipeplan.model.source import model_from_source
    from pipeplan.profile import read_profile
    from pipeplan.profile.estimate.fit import KnownProfile
    from pipeplan.profile.estimate.gpus import find_gpu, read_gpus
    from pipeplan.profile.estimate.model import layer_costs

    profile = read_profile(path)
    if profile.source != "measured":
        raise ProfileError(f"{path} is {profile.source}; a table fitted on it would learn what it already says")
    if profile.model_source is None:
        raise ProfileError(f"{path} doesn't say how to build its model ('model_source'); measure it with pipeplan")
    if device is None and len(profile.devices) > 1:
        raise ProfileError(f"{path} covers {', '.join(profile.devices)}; say which with --device")
    name = device or profile.devices[0]
    gpu = find_gpu(name, read_gpus())
    model = model_from_source(profile.model_source, name=profile.model)
    silence_transformers()
    costs = layer_costs(
        model,
        micro_batch_size=profile.micro_batch_size,
        sequence_length=profile.sequence_length,
        dtype=profile.dtype,
    )
    return KnownProfile(profile, costs, gpu, name)


def _shares(before: Efficiency, after: Efficiency) -> Table:
    from pipeplan.emit.tables import Table
    from pipeplan.profile.estimate.fit import LAUNCH
    from pipeplan.units import NS_PER_US

    rows = [
        (
            category.value,
            f"{before.share_by_category[category]:.1%}",
            f"{after.share_by_category[category]:.1%}",
            "fitted" if category.value in after.fitted else "",
        )
        for category in after.share_by_category
    ]
    launches = [f"{one.launch_ns / NS_PER_US:.2f} us" for one in (before, after)]
    rows.append((LAUNCH, launches[0], launches[1], "fitted" if LAUNCH in after.fitted else ""))
    return Table(heading="Share of the GPU's peak", columns=("category", "before", "after", ""), rows=tuple(rows))


def _residuals(efficiency: Efficiency) -> Table:
    from pipeplan.emit.tables import Table

    return Table(
        heading="How well the table does",
        columns=("profile", "kind", "op", "measured (ms)", "estimated (ms)", "error"),
        rows=tuple(
            (
                one.profile,
                one.kind,
                one.op,
                f"{one.expected_ms:.4g}",
                f"{one.estimated_ms:.4g}",
                f"{one.relative_error:+.0%}",
            )
            for one in efficiency.residuals
        ),
    )
