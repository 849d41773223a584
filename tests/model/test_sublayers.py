from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pipeplan.model.huggingface import build_reference, layers_from_config
from pipeplan.model.source import model_from_source, open_model
from pipeplan.model.weights import load_weights, save_weights
from tests.model.families import FAMILIES, config_of
from tests.model.running import batch, build_all, gradients_by_name, logits_of, run

HALVES = {
    "jamba": ["mamba", "mlp", "mamba", "moe", "attention", "mlp", "mamba", "moe"],
    "bamba": ["mamba", "mlp", "attention", "mlp", "mamba", "mlp"],
    "granitemoehybrid": ["mamba", "moe", "attention", "moe", "mamba", "moe"],
    "falcon_h1": ["mamba+attention", "mlp"] * 2,
    "deepseek_v3": ["attention", "mlp", "attention", "moe", "attention", "moe"],
    "gemma2": ["attention", "mlp"] * 2,
    "gpt_oss": ["attention", "moe"] * 2,
    "qwen3_next": ["gated_delta_net", "moe"] * 3 + ["attention", "moe"],
}
WHOLE = {
    "nemotron_h": ["mamba", "mlp", "mamba", "moe", "attention", "mlp"],
    "zamba2": ["mamba+attention", "mamba", "mamba+attention", "mamba+attention", "mamba"],
    "mamba2": ["mamba", "mamba"],
}


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_halves_in_a_row_equal_the_hugging_face_model(family: str) -> None:
    """Sublayers give logits, loss and gradients of the Hugging Face model, with the weights of whole layers."""
    config = config_of(family)
    model = layers_from_config(config, name="halves", granularity="sublayer", seed=11)
    modules = build_all(model)
    reference = build_reference(config, seed=11).eval()
    inputs, labels = batch(config["vocab_size"], padded=True)
    expected = reference(**inputs, labels=labels, use_cache=False)
    torch.autograd.backward(expected.loss)
    outputs = run(modules, inputs)
    loss = model.loss_function(outputs, labels)
    torch.autograd.backward(loss)
    torch.testing.assert_close(logits_of(outputs), expected.logits, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(loss, expected.loss, rtol=1e-5, atol=1e-6)
    gradients = gradients_by_name(model, modules, reference)
    for name, parameter in reference.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", sorted(HALVES | WHOLE))
def test_layers_with_two_residual_halves_are_cut(family: str) -> None:
    """A layer is cut where its class has two residual halves, and left whole where it has one or mixes them."""
    model = layers_from_config(config_of(family), name="halves", granularity="sublayer")
    whole = layers_from_config(config_of(family), name="whole")
    decoder = [layer for layer in model.layers if layer.name.startswith("layers.")]
    assert [layer.kind for layer in decoder] == (HALVES | WHOLE)[family]
    assert model.num_parameters == whole.num_parameters
    names = [full for layer in model.layers for full in layer.weight_names.values()]
    assert sorted(names) == sorted(full for layer in whole.layers for full in layer.weight_names.values())


def test_halves_that_run_in_parallel_stay_together() -> None:
    """Attention and feed-forward that read the same input can't follow each other, so the layer stays whole."""
    config = {
        "model_type": "gpt_neox", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "vocab_size": 96, "use_parallel_residual": True,
    }  # fmt: skip
    parallel = layers_from_config(config, name="parallel", granularity="sublayer")
    assert [layer.name for layer in parallel.layers] == ["embedding", "layers.0", "layers.1", "norm", "head"]
    sequential = layers_from_config(
        {**config, "use_parallel_residual": False}, name="sequential", granularity="sublayer"
    )
    assert len(sequential.layers) == 7


def test_halves_load_and_save_checkpoints(tmp_path: Path) -> None:
    """Weights go from whole layers through a checkpoint into halves and back."""
    config: dict[str, Any] = config_of("jamba")
    whole = layers_from_config(config, name="whole", seed=1)
    halves = layers_from_config(config, name="halves", granularity="sublayer", seed=2)
    inputs, _ = batch(96, padded=False)
    with torch.no_grad():
        first = build_all(whole)
        save_weights(whole, dict(enumerate(first)), tmp_path / "first")
        second = build_all(halves)
        load_weights(halves, dict(enumerate(second)), tmp_path / "first")
        torch.testing.assert_close(run(second, inputs), run(first, inputs), rtol=1e-6, atol=1e-7)
        save_weights(halves, dict(enumerate(second)), tmp_path / "second")
        third = build_all(layers_from_config(config, name="whole", seed=3))
        load_weights(whole, dict(enumerate(third)), tmp_path / "second")
        for one, other in zip(first, third, strict=True):
            torch.testing.assert_close(one.state_dict(), other.state_dict(), rtol=0, atol=0)


def test_the_granularity_is_part_of_the_source() -> None:
    """A profile of sublayers builds sublayers again; published Jamba has 64 of them."""
    model = open_model("jamba-v0.1", granularity="sublayer")
    again = model_from_source(model.source)
    assert [layer.name for layer in again.layers] == [layer.name for layer in model.layers]
    assert len(again.layers) == 2 * 32 + 3
    assert model.num_parameters == pytest.approx(51.57e9, rel=0.01)
    # embedding, mamba, attention, mlp, moe, norm, head: a half costs the same whatever the other half is
    assert len({layer.identity for layer in model.layers}) == 7
