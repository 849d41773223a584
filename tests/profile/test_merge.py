"""Profiles of one model put together."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipeplan.errors import ProfileError
from pipeplan.profile import LayerProfile, LayerTimes, Profile, Recomputation
from pipeplan.profile.merge import interpolate_micro_batch, merge_profiles, without_device

NAMES = ["a.yaml", "b.yaml"]


def times(unit_ns: int) -> LayerTimes:
    return LayerTimes(
        forward_ns=unit_ns, backward_ns=2 * unit_ns, input_gradient_ns=unit_ns, weight_gradient_ns=unit_ns + 2
    )


def profile(device: str = "fast", unit_ns: int = 100, num_bytes: int = 40, **changes: object) -> Profile:
    """A profile of two layers on one device type."""
    layers = tuple(
        LayerProfile(
            name=name,
            kind="mlp",
            num_parameters=7,
            output_bytes=num_bytes,
            activation_bytes=2 * num_bytes,
            held_for_w_bytes=3 * num_bytes,
            workspace_bytes=num_bytes,
            times_by_device={device: times(unit_ns)},
            recomputation=Recomputation({device: times(2 * unit_ns)}, num_bytes),
        )
        for name in ("one", "two")
    )
    notes = {"one": {"spread": {device: {"F": {"relative_spread": 0.1, "num_samples": 5}}}}}
    return replace(
        Profile(
            model="m",
            source="measured",
            micro_batch_size=1,
            sequence_length=8,
            dtype="fp32",
            state_bytes_per_parameter=16.0,
            layers=layers,
            extra={"layers": notes},
        ),
        **changes,  # type: ignore[arg-type]
    )


def test_device_types_stand_side_by_side() -> None:
    """Each device type keeps its times and notes; the larger bytes count."""
    merged = merge_profiles([profile(), profile("slow", unit_ns=300, num_bytes=50)], NAMES)
    assert merged.devices == ("fast", "slow")
    for layer in merged.layers:
        assert layer.times("fast") == times(100)
        assert layer.times("slow") == times(300)
        assert layer.times("slow", recompute=True) == times(600)
        assert (layer.activation_bytes, layer.workspace_bytes) == (100, 50)
    assert merged.extra["layers"]["one"]["spread"].keys() == {"fast", "slow"}
    assert merged.source == "measured"


def test_an_estimate_stays_one() -> None:
    """A merged profile with one estimated device type says that it is estimated, and keeps the notes."""
    estimate = profile("gpu", source="estimated", extra={"notes": ["estimated, not measured"]})
    merged = merge_profiles([profile(), estimate], NAMES)
    assert merged.source == "estimated"
    assert merged.extra["notes"] == ["estimated, not measured"]


def test_splitting_undoes_merging() -> None:
    """Without the second device type the first profile is back."""
    merged = merge_profiles([profile(), profile("slow")], NAMES)
    assert without_device(merged, "slow").layers == profile().layers


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (profile("slow", model="n"), "model m against n"),
        (profile("slow", sequence_length=9), "sequence length 8 against 9"),
        (profile("slow", micro_batch_size=2), "micro-batch size 1 against 2"),
        (profile("slow", dtype="bf16"), "dtype fp32 against bf16"),
        (profile("slow", state_bytes_per_parameter=18.0), "bytes of state a parameter 16.0 against 18.0"),
        (profile("slow", layers=profile("slow").layers[:1]), "number of layers 2 against 1"),
        (
            profile("slow", layers=(profile("slow").layers[0], replace(profile("slow").layers[1], num_parameters=8))),
            "layer 1 is 'two' \\(mlp, 7 parameters\\) against 'two' \\(mlp, 8 parameters\\)",
        ),
        (profile(), "a.yaml and b.yaml both have times on 'fast'"),
    ],
)
def test_what_does_not_fit_is_refused(other: Profile, message: str) -> None:
    """Other models, shapes, layers and equal device types are named."""
    with pytest.raises(ProfileError, match=message):
        merge_profiles([profile(), other], NAMES)


def test_between_two_measured_sizes() -> None:
    """Times and bytes lie on the line between the sizes, in either order of the files, and the profile says so."""
    small, large = profile(micro_batch_size=1), profile(unit_ns=400, num_bytes=160, micro_batch_size=4)
    found = interpolate_micro_batch(large, small, 2, NAMES)
    assert found == interpolate_micro_batch(small, large, 2, NAMES)
    assert found.micro_batch_size == 2
    for layer in found.layers:
        assert layer.times("fast") == times(200)
        assert layer.times("fast", recompute=True) == times(400)
        assert (layer.output_bytes, layer.activation_bytes, layer.held_for_w_bytes) == (80, 160, 240)
    assert found.extra["notes"] == ["interpolated, not measured: micro-batch size 2 lies between the measured 1 and 4"]


@pytest.mark.parametrize(
    ("other", "size", "message"),
    [
        (profile(micro_batch_size=4), 8, "not between the measured 1 and 4"),
        (profile(micro_batch_size=4), 1, "not between the measured 1 and 4"),
        (profile(micro_batch_size=4, source="estimated"), 2, "b.yaml is estimated; estimate at micro-batch size 2"),
        (
            interpolate_micro_batch(profile(micro_batch_size=2), profile(micro_batch_size=8), 4, NAMES),
            2,
            "b.yaml is interpolated itself; give the two measured profiles",
        ),
        (profile("slow", micro_batch_size=4), 2, "has times on fast, b.yaml on slow"),
        (profile(micro_batch_size=4, sequence_length=9), 2, "sequence length"),
    ],
)
def test_no_size_is_made_up(other: Profile, size: int, message: str) -> None:
    """Outside of what was measured, from estimates or across shapes there is no interpolation."""
    with pytest.raises(ProfileError, match=message):
        interpolate_micro_batch(profile(), other, size, NAMES)
