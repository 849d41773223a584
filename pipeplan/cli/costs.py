"""What a profile looks like on the terminal."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeplan.emit.tables import Table
    from pipeplan.profile import Profile

_NUM_NAMED = 3  # of the uncertain times


def report_profile(profile: Profile, output: Path, *, json: bool, quiet: bool) -> None:
    """Print the profile that was written to ``output``, and how far to trust it."""
    from pipeplan.cli.console import print_json, print_message, print_result
    from pipeplan.cli.render import rich_table
    from pipeplan.profile.file import profile_document

    if json:
        print_json(profile_document(profile))
    else:
        print_result(*(rich_table(_table(profile, name)) for name in profile.devices))
    if not quiet:
        _warn_of_spread(profile)
        print_message(f"wrote {output}")


def silence_transformers() -> None:
    """Keep transformers from recommending GPU kernels; a factory's model may not use transformers at all."""
    if "transformers" in sys.modules:
        from transformers.utils import logging

        logging.set_verbosity_error()  # type: ignore[no-untyped-call]


def _table(profile: Profile, device: str) -> Table:
    """Return one row for each run of layers that cost the same, in model order of the first."""
    from pipeplan.emit.tables import Table, format_ms
    from pipeplan.units import format_gb

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
