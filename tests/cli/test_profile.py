"""``pipeplan profile`` on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeplan.profile import read_profile
from tests.cli.conftest import Run

SHAPE = ("--sequence-length", "8", "--micro-batch-size", "2", "--time-limit", "0")


def test_profile_writes_what_it_prints(run: Run, tmp_path: Path) -> None:
    """The file holds every layer with all its times; --json prints the same document, messages go to stderr."""
    path = tmp_path / "profile.yaml"
    outcome = run("profile", "tiny-llama", "-o", path, *SHAPE, "--json")
    assert outcome.status == 0, outcome.err
    profile = read_profile(path)
    assert [layer["name"] for layer in json.loads(outcome.out)["layers"]] == [layer.name for layer in profile.layers]
    assert (profile.source, profile.micro_batch_size, profile.sequence_length) == ("measured", 2, 8)
    assert profile.model_source is not None and "huggingface" in profile.model_source
    for layer in profile.layers:
        times = layer.times("cpu")
        assert times.forward_ns > 0 and times.backward_ns > 0
        assert (times.weight_gradient_ns is not None) == layer.is_splittable
    assert f"wrote {path}" in outcome.err


def test_the_table_folds_equal_layers(run: Run, tmp_path: Path) -> None:
    """Equal decoder layers take one row, and --quiet leaves stderr empty."""
    outcome = run("profile", "tiny-llama", "-o", tmp_path / "profile.yaml", *SHAPE, "--quiet", "--device-name", "slow")
    assert outcome.status == 0
    assert outcome.err == ""
    assert "tiny-llama on slow: measured, micro-batch 2 x 8, fp32" in outcome.out
    assert "layers.0 + " in outcome.out
    assert read_profile(tmp_path / "profile.yaml").devices == ("slow",)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("tiny-lama",), "no model 'tiny-lama' (did you mean 'tiny-llama'?)"),
        (("missing/config.json",), "missing/config.json does not exist"),
        (("tiny-llama", "--device", "h100-sxm"), "device 'h100-sxm'"),
    ],
)
def test_bad_input_is_one_clear_message(run: Run, tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    """A model or device that does not exist: exit 1, one line, no file."""
    path = tmp_path / "profile.yaml"
    outcome = run("profile", *arguments, "-o", path, *SHAPE)
    assert outcome.status == 1
    assert message in outcome.err
    assert outcome.err.count("\n") == 1
    assert not path.exists()


def test_without_the_launcher(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Started alone, the command says how it is started; nothing is written."""
    monkeypatch.delenv("RANK", raising=False)
    outcome = run("profile", "--links", "-o", tmp_path / "cluster.yaml")
    assert outcome.status == 1
    assert "deepspeed --no_local_rank --num_gpus N --module pipeplan profile --links" in outcome.err
    assert not (tmp_path / "cluster.yaml").exists()


def test_links_measure_no_model(run: Run, tmp_path: Path) -> None:
    """A model and --links together are wrong usage, and so is neither."""
    assert run("profile", "tiny-llama", "--links", "-o", tmp_path / "x").status == 2
    assert run("profile", "-o", tmp_path / "x").status == 2
