"""``pipeplan convert``: weights survive the way to a checkpoint and back to transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pipeplan.model.huggingface import build_reference, layers_from_config
from pipeplan.model.types import ModelLayers
from pipeplan.runtime.checkpoint import capture_checkpoint, read_checkpoint, write_checkpoint
from tests.cli.conftest import Run
from tests.model.families import config_of
from tests.model.running import build_all


def reference_of(family: str, **changes: Any) -> tuple[dict[str, Any], Any]:
    """Return a config and a Hugging Face model of it with weights that no seed of ours gives."""
    config = config_of(family, architectures=None, **changes)
    reference = build_reference(config, seed=1).eval()
    torch.manual_seed(99)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return config, reference


def load(folder: Path) -> nn.Module:
    """Return what transformers makes of a folder, everything by its defaults."""
    from transformers import AutoModelForCausalLM

    loader: Any = AutoModelForCausalLM.from_pretrained
    model, info = loader(folder, output_loading_info=True)
    assert not any(info.values())
    assert isinstance(model, nn.Module)
    return model


def assert_same_weights(found: nn.Module, expected: nn.Module) -> None:
    """Check every weight bit by bit, and its precision."""
    wanted = expected.state_dict()
    weights = found.state_dict()
    assert weights.keys() == wanted.keys()
    for name, value in wanted.items():
        assert weights[name].dtype == value.dtype, name
        assert torch.equal(weights[name], value), name


def trained(model: ModelLayers, folder: Path, dtype: torch.dtype = torch.float32) -> list[nn.Module]:
    """Write a checkpoint of a model, as training leaves one; return its layers."""
    modules = [module.to(dtype) for module in build_all(model)]
    weights = [weight for module in modules for weight in module.parameters()]
    names = [layer.name for layer in model.layers]
    write_checkpoint(capture_checkpoint(modules, torch.optim.SGD(weights), layer_names=names), folder)
    return modules


@pytest.mark.parametrize(
    ("family", "changes"),
    [("jamba", {}), ("nemotron_h", {}), ("zamba2", {}), ("llama", {"tie_word_embeddings": True})],
)
def test_there_and_back(run: Run, family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """A folder of transformers becomes a checkpoint and a folder of transformers again, equal bit by bit."""
    _, reference = reference_of(family, **changes)
    reference.save_pretrained(tmp_path / "original")
    outcome = run("convert", tmp_path / "original", "-o", tmp_path / "checkpoints")
    assert (outcome.status, outcome.out) == (0, ""), outcome.err
    assert "global_step0" in outcome.err
    outcome = run("convert", tmp_path / "checkpoints", "-o", tmp_path / "back", "--model", tmp_path / "original", "-q")
    assert (outcome.status, outcome.out, outcome.err) == (0, "", "")
    assert_same_weights(load(tmp_path / "back"), load(tmp_path / "original"))
    assert not list(tmp_path.glob(".*"))


def test_a_checkpoint_in_bf16_stays_in_bf16(run: Run, tmp_path: Path) -> None:
    """The precision that the model was trained in is what transformers loads, whatever the config said before."""
    config = config_of("llama", dtype="float32")
    model = layers_from_config(config, name="model", seed=8)
    modules = trained(model, tmp_path / "checkpoints", torch.bfloat16)
    (tmp_path / "config.json").write_text(json.dumps(config))
    outcome = run("convert", tmp_path / "checkpoints", "-o", tmp_path / "out", "--model", tmp_path / "config.json")
    assert outcome.status == 0, outcome.err
    weights = load(tmp_path / "out").state_dict()
    for layer, module in zip(model.layers, modules, strict=True):
        for local, name in layer.weight_names.items():
            assert weights[name].dtype is torch.bfloat16
            assert torch.equal(weights[name], module.state_dict()[local]), name


def test_layers_keep_their_names_and_hold_no_optimizer(run: Run, tmp_path: Path) -> None:
    """A converted checkpoint holds each layer's weights under the names that the profile gives the layers."""
    config, reference = reference_of("llama")
    reference.save_pretrained(tmp_path / "original")
    assert run("convert", tmp_path / "original", "-o", tmp_path / "out", "-q").status == 0
    checkpoint = read_checkpoint(tmp_path / "out")
    model = layers_from_config(config, name="original")
    assert [layer.name for layer in checkpoint.outline.layers] == [layer.name for layer in model.layers]
    assert checkpoint.outline.optimizer is None
    for layer, state in zip(model.layers, checkpoint.layers, strict=True):
        for local, name in layer.weight_names.items():
            assert torch.equal(state.weights[local], reference.state_dict()[name])


def test_what_cannot_be_converted_is_said(run: Run, tmp_path: Path) -> None:
    """No such folder, a checkpoint of unknown or of another model, and a folder that is in use are each one message."""
    model = layers_from_config(config_of("llama"), name="model")
    trained(model, tmp_path / "checkpoints")
    (tmp_path / "llama.json").write_text(json.dumps(config_of("llama")))
    (tmp_path / "jamba.json").write_text(json.dumps(config_of("jamba")))
    checkpoints, out = tmp_path / "checkpoints", tmp_path / "out"
    llama, jamba = tmp_path / "llama.json", tmp_path / "jamba.json"
    for arguments, says in (
        ((tmp_path / "nowhere", "-o", out), "nowhere is no folder"),
        ((checkpoints, "-o", out), "which model is"),
        ((checkpoints, "-o", out, "--model", jamba), "is a checkpoint of another model"),
        ((checkpoints, "-o", out, "--model", llama, "--tag", "best"), "no checkpoint 'best'"),
        ((tmp_path, "-o", out, "--model", llama), "holds no checkpoint"),
        ((checkpoints, "-o", checkpoints, "--model", llama), "is there already; name a new folder"),
    ):
        outcome = run("convert", *arguments)
        assert (outcome.status, outcome.out) == (1, "")
        assert says in outcome.err
        assert len(outcome.err.splitlines()) == 1
    assert not out.exists()
    assert not list(tmp_path.glob(".*"))
