"""``pipeplan merge``: profiles of one model put together."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pipeplan.cli.options import Json, Quiet

_NUM_ENDS = 2


def merge(
    profiles: Annotated[
        list[Path], typer.Argument(metavar="PROFILE...", help="Profiles of the same model in the same shape.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Profile file to write.")],
    micro_batch_size: Annotated[
        int | None,
        typer.Option(
            "--micro-batch-size",
            min=1,
            help="Interpolate: a size between those of two measured profiles.",
            show_default=False,
        ),
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Put device types that were profiled apart into one profile, for clusters that mix them.

    Example: pipeplan merge h100.yaml a100.yaml -o profile.yaml

    Or find the costs of a micro-batch size between two measured ones; the profile says that it is interpolated:

    pipeplan merge size-1.yaml size-4.yaml --micro-batch-size 2 -o size-2.yaml
    """
    from pipeplan.cli.console import print_json, print_message
    from pipeplan.profile.file import profile_document, read_profile, write_profile
    from pipeplan.profile.merge import interpolate_micro_batch, merge_profiles

    needs = "two" if micro_batch_size is not None else "two or more"
    if len(profiles) < _NUM_ENDS or (micro_batch_size is not None and len(profiles) != _NUM_ENDS):
        raise typer.BadParameter(f"name {needs} profiles")
    read = [read_profile(path) for path in profiles]
    names = [str(path) for path in profiles]
    if micro_batch_size is None:
        found = merge_profiles(read, names)
    else:
        found = interpolate_micro_batch(read[0], read[1], micro_batch_size, names)
    write_profile(found, output)
    if json:
        print_json(profile_document(found))
    if not quiet:
        for note in found.extra.get("notes", []):
            print_message(f"note: {note}")
        print_message(f"wrote {output}: {found.model} on {', '.join(found.devices)}")
