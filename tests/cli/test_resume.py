"""The emitted script saves and resumes, and what it trained goes back to transformers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeplan.model.source import open_model
from pipeplan.profile.file import write_profile
from pipeplan.profile.types import LayerProfile, LayerTimes, Profile
from pipeplan.quickstart.machine import cpu_environment, find_script, free_port
from pipeplan.runtime.checkpoint import read_checkpoint
from tests.cli.conftest import Run

COUNT_THREADS = """
    import os

    names = [Path(f"/proc/self/task/{each}/comm").read_text() for each in os.listdir("/proc/self/task")]
    Path(__file__).with_name(f"threads-{os.environ['RANK']}").write_text(str(sum("gloo" in name for name in names)))
"""
THREADS_OF_A_GROUP = 3


def train(plan: Path, *arguments: object) -> None:
    """Run an emitted ``train.py`` on 2 ranks."""
    launch = [find_script("deepspeed"), "--num_gpus", 2, "--master_port", free_port()]
    script = [plan / "train.py", "--deepspeed_config", plan / "ds_config.json"]
    done = subprocess.run(
        [str(word) for word in (*launch, *script, *arguments)],
        env=cpu_environment() | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]


def profile_of(template: str) -> Profile:
    """Return a made-up profile that builds a template's model; nothing here depends on its times."""
    model = open_model(template)
    times = LayerTimes(forward_ns=10**6, backward_ns=2 * 10**6)
    return Profile(
        model=model.name,
        source="measured",
        micro_batch_size=1,
        sequence_length=16,
        dtype="fp32",
        state_bytes_per_parameter=16.0,
        model_source=model.source,
        layers=tuple(
            LayerProfile(
                name=layer.name,
                kind=layer.kind,
                num_parameters=layer.num_parameters or 0,
                output_bytes=1000,
                activation_bytes=1000,
                held_for_w_bytes=0,
                tied=layer.tied,
                times_by_device={"cpu": times},
            )
            for layer in model.layers
        ),
    )


@pytest.mark.launcher
def test_saved_under_one_plan_and_resumed_under_another(run: Run, tmp_path: Path) -> None:
    """Two steps, saved, and two more under another plan are four steps: data, losses, weights and moments.

    The trained model then becomes a folder whose weights transformers loads bit by bit.
    """
    from transformers import AutoModelForCausalLM

    profile = tmp_path / "profile.yaml"
    write_profile(profile_of("tiny-llama"), profile)
    cluster = ("--ranks", 2, "--micro-batches", 4, "--work-limit", 100_000, "-q")
    for name, placement in ("first", "0,1"), ("second", "1,0,0,1"):
        outcome = run("optimize", profile, "-o", tmp_path / name, "--placement", placement, *cluster)
        assert outcome.status == 0, outcome.err

    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    options = ("--save-every", 2, "--losses", tmp_path / "whole.json")
    train(tmp_path / "first", "--steps", 4, "--save", whole, *options)
    options = ("--resume", whole / "global_step2", "--losses", tmp_path / "resumed.json")
    with (tmp_path / "second" / "train.py").open("a") as script:
        script.write(COUNT_THREADS)
    train(tmp_path / "second", "--steps", 2, "--save", resumed, *options)
    for rank in range(2):  # groups whose threads outlive the interpreter may abort it
        assert int((tmp_path / "second" / f"threads-{rank}").read_text()) <= THREADS_OF_A_GROUP

    losses = json.loads((tmp_path / "whole.json").read_text())["losses"]
    assert json.loads((tmp_path / "resumed.json").read_text())["losses"] == pytest.approx(losses[2:], rel=1e-5)
    found, expected = read_checkpoint(resumed), read_checkpoint(whole)
    assert found.outline.progress == expected.outline.progress
    assert found.outline.plan_digest != expected.outline.plan_digest
    for layer, wanted in zip(found.layers, expected.layers, strict=True):
        assert layer.optimizer.keys() == wanted.optimizer.keys()
        for name, state in wanted.optimizer.items():
            torch.testing.assert_close(layer.weights[name], wanted.weights[name], rtol=1e-4, atol=1e-6)
            for key, value in state.tensors.items():
                torch.testing.assert_close(layer.optimizer[name].tensors[key], value, rtol=1e-4, atol=1e-7)

    outcome = run("convert", resumed, "-o", tmp_path / "out", "--model", tmp_path / "second")
    assert outcome.status == 0, outcome.err
    load: Any = AutoModelForCausalLM.from_pretrained
    weights = load(tmp_path / "out").state_dict()
    stored = {f"model.{name}": value for layer in found.layers[:1] for name, value in layer.weights.items()}
    assert stored
    for name, value in stored.items():
        assert torch.equal(weights[name], value), name
