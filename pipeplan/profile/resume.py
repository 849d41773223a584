"""Measuring into a file: what an interrupted run measured is kept beside it, and a finished one can be updated."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeplan.errors import PipeplanError, ProfileError
from pipeplan.model.types import ModelLayers
from pipeplan.profile.file import read_profile, write_profile
from pipeplan.profile.kept import MeasuredLayer, difference, kept_layers
from pipeplan.profile.measure import OnLayer, measure_profile, measuring_software, recorded_name
from pipeplan.profile.merge import merge_profiles, without_device
from pipeplan.profile.sampling import DEFAULT_BUDGET, SamplingBudget
from pipeplan.profile.sharing import SharedLayers, first_layers
from pipeplan.profile.types import LayerProfile, Profile

OnMessage = Callable[[str], None]
_SUFFIX = ".partial"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How layers are measured; see ``measure_profile``."""

    device: str
    micro_batch_size: int
    sequence_length: int
    dtype: str
    seed: int = 0
    budget: SamplingBudget = DEFAULT_BUDGET

    def conditions(self) -> dict[str, Any]:
        """Return what measured times depend on, versions of software included."""
        return {
            "micro-batch size": self.micro_batch_size,
            "sequence length": self.sequence_length,
            "dtype": self.dtype,
            **measuring_software(self.device),
        }

    def within(self, time_limit_s: float | None, model: ModelLayers, num_ranks: int = 1) -> Settings:
        """Return the settings that measure ``model`` on ``num_ranks`` at once within a limit, if there is one."""
        if time_limit_s is None:
            return self
        num_distinct = len(first_layers(model))
        seconds = time_limit_s * min(num_ranks, num_distinct)
        return replace(self, budget=self.budget.shared(seconds, num_distinct))


@dataclass(frozen=True, slots=True)
class KeptProfile:
    """A profile of an earlier run, and where it was found."""

    where: str
    profile: Profile


def partial_path(output: Path, part: str | None = None) -> Path:
    """Return where the results of an unfinished run into ``output`` are kept; each rank of a launch has a part."""
    return output.with_name(f"{output.name}{_SUFFIX}" if part is None else f"{output.name}.{part}{_SUFFIX}")


def partial_paths(output: Path) -> list[Path]:
    """Return the files that unfinished runs into ``output`` left, of all ranks."""
    if not output.parent.is_dir():
        return []
    return sorted(
        path
        for path in output.parent.iterdir()
        if path.name.startswith(f"{output.name}.") and path.name.endswith(_SUFFIX)
    )


def forget_partial(output: Path) -> None:
    """Remove what unfinished runs kept, once ``output`` is written."""
    for path in partial_paths(output):
        path.unlink(missing_ok=True)


def read_partials(output: Path, on_message: OnMessage) -> list[KeptProfile]:
    """Return what unfinished runs into ``output`` kept; a message says which file can't be read."""
    found = []
    for path in partial_paths(output):
        try:
            found.append(KeptProfile(str(path), read_profile(path)))
        except PipeplanError as error:
            on_message(f"measuring from the start: {error}")
    return found


def read_to_update(output: Path) -> KeptProfile:
    """Return the profile that is to be updated.

    Raises:
        ProfileError: There is none.
    """
    if not output.exists():
        raise ProfileError(f"{output} does not exist, so there is nothing to update; run without --update first")
    return KeptProfile(str(output), read_profile(output))


def check_updatable(
    existing: KeptProfile, model: ModelLayers, settings: Settings, device_names: Collection[str]
) -> None:
    """Check, before anything is measured, that times on other device types can stay beside those to come.

    Args:
        device_names: Device types to be measured.

    Raises:
        ProfileError: They are of another model or under other conditions.
    """
    others = [device for device in existing.profile.devices if device not in device_names]
    if not others:
        return
    profile = existing.profile
    pairs: dict[str, tuple[Any, Any]] = {
        "micro-batch size": (profile.micro_batch_size, settings.micro_batch_size),
        "sequence length": (profile.sequence_length, settings.sequence_length),
        "dtype": (profile.dtype, settings.dtype),
        "model": (profile.model, model.name),
        "layers": ([layer.name for layer in profile.layers], [layer.name for layer in model.layers]),
    }
    for what, (kept, now) in pairs.items():
        if kept != now:
            change = "other layers" if what == "layers" else f"{what} {kept}, now {now}"
            raise ProfileError(
                f"{existing.where} has times on {', '.join(others)} too, which can't stay: {change}; write to another "
                "file with -o, or leave --update out to replace it"
            )


def measure_resumably(
    output: Path,
    model: ModelLayers,
    settings: Settings,
    *,
    device_name: str | None = None,
    is_update: bool = False,
    on_layer: OnLayer | None = None,
    on_message: OnMessage = lambda text: None,
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
    name = recorded_name(settings.device, device_name)
    existing = read_to_update(output) if is_update else None
    if existing is not None:
        check_updatable(existing, model, settings, [name])
    kept = [*([] if existing is None else [existing]), *read_partials(output, on_message)]
    found = measure_what_is_new(
        model, settings, name, kept, partial_path(output), on_layer=on_layer, on_message=on_message
    )
    return found if existing is None else with_other_devices(found, existing)


def measure_what_is_new(
    model: ModelLayers,
    settings: Settings,
    device_name: str,
    kept: Sequence[KeptProfile],
    partial: Path,
    *,
    sharing: SharedLayers | None = None,
    on_layer: OnLayer | None = None,
    on_message: OnMessage = lambda text: None,
) -> Profile:
    """Measure what ``kept`` has no results of; later ones count more. Raises as ``measure_profile``.

    Args:
        partial: Gets, after each layer, the results so far together with those in ``kept``.
        sharing: As in ``measure_profile``; all ranks must be given equal results.
    """
    conditions = settings.conditions()
    measured: dict[str, MeasuredLayer] = {}
    usable: list[Profile] = []
    for one in kept:
        known = _known(one, device_name, conditions, on_message)
        if known:
            usable.append(one.profile)
            measured |= known
    return measure_profile(
        model,
        device=settings.device,
        micro_batch_size=settings.micro_batch_size,
        sequence_length=settings.sequence_length,
        dtype=settings.dtype,
        seed=settings.seed,
        device_name=device_name,
        budget=settings.budget,
        measured=measured,
        sharing=sharing,
        on_layer=on_layer,
        on_measured=lambda profile: write_profile(_with_kept(profile, usable, device_name), partial),
    )


def with_other_devices(found: Profile, existing: KeptProfile) -> Profile:
    """Return an updated profile: with the times of the existing one on device types that were not measured again.

    Raises:
        ProfileError: The profiles don't fit together.
    """
    others = [other for other in existing.profile.devices if other not in found.devices]
    if not others:
        return found
    # What the states are for is said anew with every run; the rest must fit.
    kept = replace(existing.profile, state_bytes_per_parameter=found.state_bytes_per_parameter)
    for device in set(existing.profile.devices) - set(others):
        kept = without_device(kept, device)
    return merge_profiles([found, kept], [existing.where, f"its times on {others[0]}"])


def _known(
    kept: KeptProfile, device: str, conditions: Mapping[str, Any], on_message: OnMessage
) -> dict[str, MeasuredLayer]:
    reason = difference(kept.profile, conditions)
    if reason is not None:
        on_message(f"{kept.where} was measured under other conditions ({reason}); measuring from the start")
        return {}
    known = kept_layers(kept.profile, device)
    if known:
        plural = "s" if len(known) > 1 else ""
        on_message(
            f"{kept.where} holds {len(known)} measured layer{plural} on {device}; what is equal isn't measured again"
        )
    return known


def _with_kept(found: Profile, kept: Iterable[Profile], device: str) -> Profile:
    """Return the layers so far, and behind them those of earlier runs that haven't been come to yet."""
    layer_by_name = {layer.name: layer for layer in found.layers}
    notes = dict(found.extra["layers"])
    for earlier in kept:
        for layer in earlier.layers:
            if layer.name not in layer_by_name and device in layer.times_by_device:
                layer_by_name[layer.name] = layer
                notes[layer.name] = earlier.extra.get("layers", {}).get(layer.name, {})
    first, *others = layer_by_name.values()
    # The layer that the first one must stay with may be another rank's.
    layers: tuple[LayerProfile, ...] = (replace(first, keep_with_previous=False), *others)
    return replace(found, layers=layers, extra={**found.extra, "layers": notes})
