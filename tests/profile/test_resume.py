"""Measuring that goes on where it stopped, and measures again only what changed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pipeplan.errors import ProfileError
from pipeplan.model.types import LayerSource
from pipeplan.profile import Profile, read_profile, write_profile
from pipeplan.profile.resume import Settings, forget_partial, measure_resumably, partial_path
from tests.profile.test_measure import BATCH, HIDDEN, ONCE, WIDTH, Failing, model, source

torch.set_num_threads(1)


class Counted:
    """A layer that counts how often it is built."""

    def __init__(self, name: str, num_inputs: int = WIDTH, num_outputs: int = WIDTH) -> None:
        self.num_built = 0
        self.shape = (num_inputs, num_outputs)
        self.source = source(name, self.build, identity=f"{name} {self.shape}")

    def build(self) -> nn.Module:
        self.num_built += 1
        return nn.Linear(*self.shape)


def run(output: Path, *layers: LayerSource, **settings: Any) -> tuple[Profile, list[str]]:
    """Measure; returns the profile and the messages."""
    messages: list[str] = []
    chosen = Settings(
        device="cpu", micro_batch_size=BATCH, sequence_length=1, dtype=settings.pop("dtype", "fp32"), budget=ONCE
    )
    found = measure_resumably(output, model(*layers), chosen, on_message=messages.append, **settings)
    return found, messages


def test_what_was_measured_before_a_failure_is_used(tmp_path: Path) -> None:
    """After a layer ran out of memory the layers before it are on disk, and only the others are measured."""
    output = tmp_path / "profile.yaml"
    first, second = Counted("first"), Counted("second")
    bad = source("bad", lambda: Failing(torch.OutOfMemoryError("CUDA out of memory")))
    with pytest.raises(ProfileError, match="layer 'bad'"):
        run(output, first.source, second.source, bad)
    partial = read_profile(partial_path(output))
    assert [layer.name for layer in partial.layers] == ["first", "second"]
    assert not output.exists()

    third = Counted("third")
    found, messages = run(output, first.source, second.source, third.source)
    assert found.layers[:2] == partial.layers, "times and all, to the nanosecond"
    assert (first.num_built, second.num_built, third.num_built) == (2, 2, 1), "once more each, to feed the third"
    assert "holds 2 measured layers on cpu" in messages[0]
    forget_partial(output)
    assert not partial_path(output).exists()


def test_another_failure_loses_nothing(tmp_path: Path) -> None:
    """A second run that measures one layer and fails before it comes to the kept ones leaves those in the file."""
    output = tmp_path / "profile.yaml"
    second, third = Counted("second").source, Counted("third").source
    bad = source("bad", lambda: Failing(torch.OutOfMemoryError("CUDA out of memory")))
    with pytest.raises(ProfileError, match="layer 'bad'"):
        run(output, Counted("first").source, second, replace(third, keep_with_previous=True), bad)
    before = read_profile(partial_path(output))
    changed = source("first", Counted("first").build, identity="changed")
    with pytest.raises(ProfileError, match="layer 'bad'"):
        run(output, changed, bad, second, third)
    after, _ = run(output, changed, second, replace(third, keep_with_previous=True), source("end", lambda: lambda v: v))
    assert after.layers[0].times("cpu") != before.layers[0].times("cpu")
    assert after.layers[1:3] == before.layers[1:3]


def test_update_measures_what_changed(tmp_path: Path) -> None:
    """A changed layer is measured, also one whose inputs changed shape; equal ones keep their figures unbuilt."""
    output = tmp_path / "profile.yaml"
    first, second, third = Counted("first"), Counted("second"), Counted("third")
    before, _ = run(output, first.source, second.source, third.source)
    write_profile(before, output)
    same, _ = run(output, first.source, second.source, third.source, is_update=True)
    assert same == before
    assert (first.num_built, second.num_built, third.num_built) == (1, 1, 1)
    wide, wider = Counted("second", WIDTH, HIDDEN), Counted("third", HIDDEN, WIDTH)
    after, _ = run(output, first.source, wide.source, wider.source, is_update=True)
    assert after.layers[0] == before.layers[0]
    assert [layer.output_bytes for layer in after.layers[:2]] == [BATCH * WIDTH * 4, BATCH * HIDDEN * 4]


def test_other_conditions_start_again(tmp_path: Path) -> None:
    """Results of another dtype or other software are left alone, and the message says which."""
    output = tmp_path / "profile.yaml"
    first = Counted("first")
    before, _ = run(output, first.source, source("end", lambda: lambda value: value))
    write_profile(before, output)
    arguments = (output, first.source, source("end", lambda: lambda value: value))
    _, messages = run(*arguments, is_update=True, dtype="bf16")
    assert "dtype fp32, now bf16" in messages[0]
    old = replace(before, extra={**before.extra, "software": {**before.extra["software"], "torch": "1.0"}})
    write_profile(old, output)
    _, messages = run(*arguments, is_update=True)
    assert "torch 1.0, now" in messages[0]
    assert first.num_built == 3


def test_an_update_keeps_other_device_types(tmp_path: Path) -> None:
    """Measured here under another name, the file's own device type stays in it."""
    output = tmp_path / "profile.yaml"
    layer, end = Counted("first"), source("end", lambda: lambda value: value)
    here, _ = run(output, layer.source, end, device_name="here")
    write_profile(here, output)
    both, _ = run(output, layer.source, end, device_name="there", is_update=True)
    assert both.devices == ("here", "there")
    assert both.layers[0].times("here") == here.layers[0].times("here")
    assert layer.num_built == 2


def test_an_update_that_other_device_types_forbid_measures_nothing(tmp_path: Path) -> None:
    """Their times are of other conditions or layers: said before the first layer is built, and the file stays."""
    output = tmp_path / "profile.yaml"
    layer, end = Counted("first"), source("end", lambda: lambda value: value)
    here, _ = run(output, layer.source, end, device_name="here")
    write_profile(here, output)
    content = output.read_bytes()
    with pytest.raises(ProfileError, match=r"has times on here too, .*: dtype fp32, now bf16; write to another file"):
        run(output, layer.source, end, device_name="there", is_update=True, dtype="bf16")
    with pytest.raises(ProfileError, match="other layers"):
        run(output, layer.source, Counted("more").source, end, device_name="there", is_update=True)
    assert layer.num_built == 1
    assert output.read_bytes() == content


def test_nothing_to_update(tmp_path: Path) -> None:
    """--update without a profile says so."""
    with pytest.raises(ProfileError, match="nothing to update"):
        run(tmp_path / "profile.yaml", Counted("first").source, is_update=True)
