"""Measuring into a file: what an interrupted run measured is kept beside it, and a finished one can be updated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeplan.errors import PipeplanError, ProfileError
from pipeplan.model.types import ModelLayers
from pipeplan.profile.file import read_profile, write_profile
from pipeplan.profile.kept import MeasuredLayer, difference, kept_layers
from pipeplan.profile.measure import OnLayer, measure_profile, measuring_software, recorded_name
from pipeplan.profile.merge import merge_profiles, without_device
from pipeplan.profile.sampling import DEFAULT_BUDGET, SamplingBudget
from pipeplan.profile.types import Profile


def partial_path(output: Path) -> Path:
    """Return where the results of an unfinished run into ``output`` are kept."""
    return output.with_name(f"{output.name}.partial")


def forget_partial(output: Path) -> None:
    """Remove what an unfinished run kept, once ``output`` is written."""
    partial_path(output).unlink(missing_ok=True)


def measure_resumably(
    output: Path,
    model: ModelLayers,
    *,
    device: str,
    micro_batch_size: int,
    sequence_length: int,
    dtype: str,
    seed: int = 0,
    device_name: str | None = None,
    budget: SamplingBudget = DEFAULT_BUDGET,
    is_update: bool = False,
    on_layer: OnLayer | None = None,
    on_message: Callable[[str], None] = lambda text: None,
) -> Profile:
    """Measure a model as ``measure_profile`` does, without measuring again what is known.

    After each layer the results so far go to ``partial_path(output)``, which a later run with the same settings goes
    on from; whoever writes ``output`` calls ``forget_partial`` then. Layers are known by their identity and inputs, so
    that a model which changed in places keeps the rest.

    Args:
        output: The profile file that the result will be written to.
        is_update: Start from the profile in ``output``; its times on other device types stay.
        on_message: Gets what a user should know: what was found, and why it is of no use.

    Raises:
        ProfileError: As ``measure_profile``; or there is nothing to update, or the device types of an update don't fit.
    """
    partial = partial_path(output)
    name = recorded_name(device, device_name)
    conditions = {
        "micro-batch size": micro_batch_size,
        "sequence length": sequence_length,
        "dtype": dtype,
        **measuring_software(device),
    }
    existing: Profile | None = None
    measured: dict[str, MeasuredLayer] = {}
    if is_update:
        if not output.exists():
            raise ProfileError(f"{output} does not exist, so there is nothing to update; run without --update first")
        existing = read_profile(output)
        measured |= _known(existing, name, conditions, str(output), on_message)
    if partial.exists():
        try:
            measured |= _known(read_profile(partial), name, conditions, str(partial), on_message)
        except PipeplanError as error:
            on_message(f"measuring from the start: {error}")
    found = measure_profile(
        model,
        device=device,
        micro_batch_size=micro_batch_size,
        sequence_length=sequence_length,
        dtype=dtype,
        seed=seed,
        device_name=device_name,
        budget=budget,
        measured=measured,
        on_layer=on_layer,
        on_measured=lambda profile: write_profile(profile, partial),
    )
    if existing is not None:
        others = [other for other in existing.devices if other != name]
        if others:
            # What the states are for is said anew with every run; the rest must fit.
            kept = replace(existing, state_bytes_per_parameter=found.state_bytes_per_parameter)
            found = merge_profiles([found, without_device(kept, name)], [str(output), f"its times on {others[0]}"])
    return found


def _known(
    profile: Profile, device: str, conditions: Mapping[str, Any], where: str, on_message: Callable[[str], None]
) -> dict[str, MeasuredLayer]:
    reason = difference(profile, conditions)
    if reason is not None:
        on_message(f"{where} was measured under other conditions ({reason}); measuring from the start")
        return {}
    kept = kept_layers(profile, device)
    if kept:
        plural = "s" if len(kept) > 1 else ""
        on_message(f"{where} holds {len(kept)} measured layer{plural} on {device}; what is equal isn't measured again")
    return kept
