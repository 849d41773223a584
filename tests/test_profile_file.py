"""The profile file: what it means, and one clear message for everything that can be wrong in it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeplan.errors import PipeplanError, ProfileError
from pipeplan.profile import (
    LayerProfile,
    LayerTimes,
    Profile,
    Recomputation,
    profile_digest,
    read_profile,
    write_profile,
)
from pipeplan.profile.file import profile_document, profile_from_document

TEXT = """\
format: pipeplan-profile/1
model: nemotron-h-8b
source: measured
micro_batch_size: 1
sequence_length: 8192
dtype: bf16
state_bytes_per_parameter: 18
layers:
- name: embedding
  kind: embedding
  parameters: 100
  output_bytes: 10
  activation_bytes: 10
  held_for_w_bytes: 0
  times_ms: {h100-sxm: {F: 0.5, B: 0.25}}
- name: layers.0
  kind: mamba
  parameters: 118000000
  output_bytes: 67108864
  activation_bytes: 201000000
  held_for_w_bytes: 120000000
  workspace_bytes: 5
  tied: embedding
  keep_with_previous: true
  times_ms: {h100-sxm: {F: 2.9, B: 5.9, I: 3.8, W: 2.1}, a100-80gb: {F: 6, B: 12, I: 8, W: 4.5}}
  recompute: {times_ms: {h100-sxm: {F: 2.9, B: 8.8}}, activation_bytes: 7}
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "profile.yaml"
    path.write_text(text)
    return path


def test_reads_every_key(tmp_path: Path) -> None:
    """Every key of the file reaches the profile, in nanoseconds and bytes."""
    profile = read_profile(write(tmp_path, TEXT))
    embedding, mamba = profile.layers
    assert not embedding.is_splittable, "without I and W, W can't be split off"
    assert mamba.is_splittable
    assert mamba.times("a100-80gb") == LayerTimes(
        forward_ns=6_000_000, backward_ns=12_000_000, input_gradient_ns=8_000_000, weight_gradient_ns=4_500_000
    )
    assert mamba.times("h100-sxm", recompute=True).backward_ns == 8_800_000
    assert (mamba.tied, mamba.keep_with_previous, mamba.workspace_bytes) == ("embedding", True, 5)
    assert profile.count_boundary_buffers
    assert profile.devices == ("h100-sxm",)
    with pytest.raises(ProfileError, match="'h100' \\(did you mean 'h100-sxm'\\?\\)"):
        mamba.times("h100")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            ("held_for_w_bytes: 0", "held_for_w: 0"),
            "unknown key 'layers[0].held_for_w' (did you mean 'held_for_w_bytes'?)",
        ),
        (("{F: 2.9, B: 5.9, I: 3.8,", "{F: 2.9, B: 5.9, J: 3.8,"), "unknown key 'layers[1].times_ms.h100-sxm.J'"),
        (("dtype: bf16", "dtyp: bf16"), "unknown key 'dtyp' (did you mean 'dtype'?)"),
        (("parameters: 100", "parameters: many"), "layers[0].parameters"),
        (("  activation_bytes: 201000000\n", ""), "key 'layers[1].activation_bytes' is missing"),
        (("I: 3.8, ", ""), "I and W come together"),
        (("F: 0.5", "F: -0.5"), "layers[0].times_ms.h100-sxm.F"),
        (("name: layers.0", "name: embedding"), "two layers are named 'embedding'"),
        (("profile/1", "profile/9"), "newer than this pipeplan reads"),
        (("source: measured", "source: guessed"), "source"),
        (("{h100-sxm: {F: 0.5, B: 0.25}}", "{cpu: {F: 0.5, B: 0.25}}"), "no device type has times for every layer"),
        (("  tied: embedding", "  tied: [embedding"), "is it truncated?"),
    ],
)
def test_faults_are_named(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    """Every fault gives one message that names the file and the key or layer."""
    assert change[0] in TEXT
    path = write(tmp_path, TEXT.replace(*change, 1))
    with pytest.raises(PipeplanError) as caught:
        read_profile(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_truncated_file_is_refused(tmp_path: Path, share: float) -> None:
    """A file cut anywhere in its middle is an error, never a shorter model."""
    cut = TEXT[: int(len(TEXT) * share)]
    with pytest.raises(PipeplanError, match="profile\\.yaml"):
        read_profile(write(tmp_path, cut))


times = st.builds(
    lambda f, b, split: LayerTimes(forward_ns=f, backward_ns=b, **(split or {})),
    st.integers(0, 10**10),
    st.integers(0, 10**10),
    st.none()
    | st.fixed_dictionaries(
        {"input_gradient_ns": st.integers(0, 10**10), "weight_gradient_ns": st.integers(0, 10**10)}
    ),
)


NOTES = {
    "software": {"torch": "2.14.1"},
    "states": {"optimizer": "adamw", "zero_stage": 1, "data_parallel": 4},
    "notes": ["interpolated"],
    "layers": {
        "layer 0: é": {
            "output_tensors": ["float32[1, 2]"],
            "spread": {"gpu": {"F": {"relative_spread": 0.01, "num_samples": 5}}},
            "skewed_routing_ms": {"gpu": {"F": 1.5, "B": 3.0}},
            "measured_as": "0123456789abcdef",
        }
    },
}  # everything that a profile may hold beside costs


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    count = draw(st.integers(1, 4))
    layers = []
    for index in range(count):
        by_device = {"gpu": draw(times), **({"cpu": draw(times)} if draw(st.booleans()) else {})}
        layers.append(
            LayerProfile(
                name=f"layer {index}: é",
                kind=draw(st.sampled_from(["mamba", "moe"])),
                num_parameters=draw(st.integers(0, 10**12)),
                output_bytes=draw(st.integers(0, 10**12)),
                activation_bytes=draw(st.integers(0, 10**12)),
                held_for_w_bytes=draw(st.integers(0, 10**12)),
                workspace_bytes=draw(st.integers(0, 3)),
                is_splittable=draw(st.booleans())
                and all(item.input_gradient_ns is not None for item in by_device.values()),
                tied=draw(st.none() | st.just("e")),
                keep_with_previous=index > 0 and draw(st.booleans()),
                times_by_device=by_device,
                recomputation=draw(st.none() | st.builds(Recomputation, st.just(by_device), st.integers(0, 9))),
            )
        )
    return Profile(
        model="m",
        source="measured",
        micro_batch_size=1,
        sequence_length=2,
        dtype="fp32",
        state_bytes_per_parameter=draw(st.sampled_from([0.0, 7.5, 18.0])),
        count_boundary_buffers=draw(st.booleans()),
        layers=tuple(layers),
        model_source={"factory": "a.b:c", "root": "somewhere"},
        extra=draw(st.just({}) | st.just(NOTES)),
    )


@given(profiles())
def test_document_gives_the_profile_back(profile: Profile) -> None:
    """Writing and reading loses nothing, to the nanosecond."""
    assert profile_from_document(profile_document(profile), "profile.yaml") == profile


def test_file_and_digest(tmp_path: Path) -> None:
    """The digest survives a round trip through the file, and changes with any cost."""
    profile = read_profile(write(tmp_path, TEXT))
    write_profile(profile, tmp_path / "again.yaml")
    again = read_profile(tmp_path / "again.yaml")
    assert again == profile
    assert profile_digest(again) == profile_digest(profile)
    notes = {**NOTES, "layers": {"layers.0": {"measured_as": "0123456789abcdef"}}}
    assert profile_digest(replace(profile, extra=notes)) == profile_digest(profile)
    changed = replace(profile, layers=(profile.layers[0], replace(profile.layers[1], activation_bytes=1)))
    assert profile_digest(changed) != profile_digest(profile)
