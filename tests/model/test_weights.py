from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from pipeplan.errors import FileFormatError, ModelError
from pipeplan.model.huggingface import build_reference, layers_from_config
from pipeplan.model.weights import load_weights, save_weights
from tests.model.families import config_of
from tests.model.running import batch, build_all, logits_of, run

EXACT: dict[str, Any] = {"rtol": 0.0, "atol": 0.0}


def perturbed_reference(family: str, **changes: Any) -> tuple[dict[str, Any], nn.Module]:
    """Return a config and a Hugging Face model of it with weights that no seed of ours gives."""
    config = config_of(family, **changes)
    reference = build_reference(config, seed=1).eval()
    torch.manual_seed(99)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return config, reference


def save(reference: nn.Module, folder: Path, **options: Any) -> Path:
    """Write a checkpoint as transformers does."""
    reference.save_pretrained(folder, **options)  # type: ignore[operator]
    return folder


def test_a_layer_alone_has_the_weights_it_has_among_all() -> None:
    """One layer alone has the weights it has among all, by the seed only; torch's random state stays."""
    config = config_of("nemotron_h")
    model = layers_from_config(config, name="model", seed=4)
    every = [module.state_dict() for module in build_all(model)]
    torch.manual_seed(123)
    before = torch.random.get_rng_state()
    alone = layers_from_config(config, name="model", seed=4).layers[4].build()
    assert torch.equal(torch.random.get_rng_state(), before)
    assert isinstance(alone, nn.Module)
    torch.testing.assert_close(alone.state_dict(), every[4], **EXACT)
    other = layers_from_config(config, name="model", seed=5).layers[4].build()
    assert isinstance(other, nn.Module)
    assert any(not torch.equal(value, every[4][name]) for name, value in other.state_dict().items())


def test_initial_weights_are_those_of_transformers() -> None:
    """Each weight starts with the mean and spread that transformers' own initialisation gives it."""
    config = config_of("jamba", hidden_size=64)
    ours = dict(build_reference(config, seed=2).named_parameters())
    theirs = dict(fresh_reference(config).named_parameters())
    assert ours.keys() == theirs.keys()
    for name, parameter in ours.items():
        if parameter.std() == 0 or name.endswith("A_log"):
            torch.testing.assert_close(parameter, theirs[name])
        elif parameter.numel() > 1000:
            assert parameter.std().item() == pytest.approx(theirs[name].std().item(), rel=0.2), name


def fresh_reference(config: dict[str, Any]) -> nn.Module:
    """Return a Hugging Face model as transformers itself initialises it."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call, no-any-return]
        CONFIG_MAPPING[str(config["model_type"])].from_dict(dict(config)), dtype=torch.float32
    )


@pytest.mark.parametrize("shard_size", ["1GB", "20KB"], ids=["one-file", "sharded"])
@pytest.mark.parametrize("family", ["jamba", "nemotron_h", "llama", "zamba2"])
def test_checkpoints_of_transformers_load(family: str, shard_size: str, tmp_path: Path) -> None:
    """Weights that transformers saved give, loaded layer by layer, the logits of the model that was saved."""
    config, reference = perturbed_reference(family)
    folder = save(reference, tmp_path / "checkpoint", max_shard_size=shard_size)
    assert (folder / "model.safetensors").is_file() == (shard_size == "1GB")
    model = layers_from_config(config, name="model")
    modules = build_all(model)
    inputs, _ = batch(96, padded=False)
    with torch.no_grad():
        expected = reference(**inputs, use_cache=False).logits
        assert not torch.allclose(logits_of(run(modules, inputs)), expected, atol=1e-3)
        load_weights(model, dict(enumerate(modules)), folder)
        torch.testing.assert_close(logits_of(run(modules, inputs)), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", ["jamba", "nemotron_h", "zamba2"])
def test_saved_weights_load_in_transformers(family: str, tmp_path: Path) -> None:
    """What layers save, transformers loads without missing or unexpected tensors, and gives the same logits."""
    from transformers import AutoModelForCausalLM

    config = config_of(family, architectures=None)
    model = layers_from_config(config, name="model", seed=8)
    modules = build_all(model)
    save_weights(model, dict(enumerate(modules)), tmp_path)
    load: Any = AutoModelForCausalLM.from_pretrained
    loaded, info = load(tmp_path, dtype=torch.float32, output_loading_info=True)
    assert not any(info.values())
    inputs, _ = batch(96, padded=False)
    with torch.no_grad():
        expected = loaded.eval()(**inputs, use_cache=False).logits
        torch.testing.assert_close(logits_of(run(modules, inputs)), expected, rtol=1e-5, atol=1e-6)


def test_a_layer_reads_only_its_own_shards(tmp_path: Path) -> None:
    """Loading one layer works with the files of the others gone, and a missing file is named."""
    model = layers_from_config(config_of("llama"), name="model")
    save_weights(model, dict(enumerate(build_all(model))), tmp_path)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) == len(model.layers)
    for index, path in enumerate(files):
        if index != 2:
            path.unlink()
    layer = model.layers[2].build()
    assert isinstance(layer, nn.Module)
    load_weights(model, {2: layer}, tmp_path)
    with pytest.raises(FileFormatError, match=r"model-00002-of-00005\.safetensors can't be read"):
        load_weights(model, {1: layer}, tmp_path)


def test_tied_weights_load_into_head_and_embedding(tmp_path: Path) -> None:
    """A checkpoint that stores a tied weight once fills every layer that shares it."""
    config, reference = perturbed_reference("llama", tie_word_embeddings=True)
    folder = save(reference, tmp_path)
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    model = layers_from_config(config, name="model")
    modules = build_all(model)
    load_weights(model, dict(enumerate(modules)), folder)
    first, last = modules[0].state_dict(), modules[-1].state_dict()
    torch.testing.assert_close(last["lm_head.weight"], first["embed_tokens.weight"], **EXACT)
    torch.testing.assert_close(first["embed_tokens.weight"], reference.state_dict()["lm_head.weight"], **EXACT)


def test_faulty_checkpoints_are_named(tmp_path: Path) -> None:
    """A missing, an unexpected and a misshapen tensor, a truncated file and an empty folder are each told apart."""
    config, reference = perturbed_reference("llama")
    file = save(reference, tmp_path) / "model.safetensors"
    whole = load_file(file)
    model = layers_from_config(config, name="model")
    layer = model.layers[1].build()
    assert isinstance(layer, nn.Module)
    name = "model.layers.0.mlp.up_proj.weight"

    def load_with(tensors: dict[str, torch.Tensor]) -> None:
        save_file(tensors, file, metadata={"format": "pt"})
        load_weights(model, {1: layer}, tmp_path)

    with pytest.raises(ModelError, match=f"no tensor for '{name}'"):
        load_with({key: value for key, value in whole.items() if key != name})
    with pytest.raises(ModelError, match=r"holds 'model\.layers\.0\.mlp\.extra', which this model does not have"):
        load_with({**whole, "model.layers.0.mlp.extra": torch.zeros(1)})
    with pytest.raises(ModelError, match=rf"'{name}' has shape \(3, 32\), the model \(48, 32\)"):
        load_with({**whole, name: torch.zeros(3, 32)})
    save_file(whole, file, metadata={"format": "pt"})
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(FileFormatError, match="is it truncated"):
        load_weights(model, {1: layer}, tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weights": {}}))
    with pytest.raises(FileFormatError, match=r"index\.json can't be read"):
        load_weights(model, {1: layer}, tmp_path)
    with pytest.raises(FileFormatError, match=r"holds neither model\.safetensors nor"):
        load_weights(model, {1: layer}, tmp_path.parent)
    with pytest.raises(FileFormatError, match="nowhere does not exist"):
        load_weights(model, {1: layer}, tmp_path / "nowhere")
