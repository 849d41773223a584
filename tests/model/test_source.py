from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from pipeplan.errors import FileFormatError, ModelError, PipeplanError
from pipeplan.files import dump_yaml
from pipeplan.model.source import model_from_source, open_model, template_names
from tests.model.families import config_of
from tests.model.running import batch, build_all, run

BILLION_PARAMETERS = {"jamba-v0.1": 51.57, "nemotron-h-8b": 8.1, "nemotron-nano-9b-v2": 8.89}
"""As the figures in the models' public configs add up."""

LAYOUTS = {
    "jamba-v0.1": 32,
    "nemotron-h-8b": 52,
    "nemotron-nano-9b-v2": 56,
}


@pytest.mark.parametrize("name", sorted(BILLION_PARAMETERS))
def test_published_models_have_their_published_size(name: str) -> None:
    """The templates of published models list all layers, with the right number of parameters within 1 %."""
    model = open_model(name)
    assert model.name == name
    assert len(model.layers) == LAYOUTS[name] + 3
    assert model.num_parameters == pytest.approx(BILLION_PARAMETERS[name] * 1e9, rel=0.01)
    assert len({layer.identity for layer in model.layers}) == 6


def test_a_large_model_is_listed_without_its_weights() -> None:
    """Listing the 52 B Jamba takes little memory: the weights alone would be 206 GB."""
    open_model("tiny-jamba")  # imports the libraries
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    open_model("jamba-v0.1")
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown_kib < 200 * 1024


def test_tiny_templates_suit_eight_stages_and_bytes() -> None:
    """Each tiny template has byte tokens, its family's kinds of layers, and enough layers for 4 x 2 stages."""
    kinds = {
        "tiny-jamba": {"mamba+mlp", "mamba+moe", "attention+mlp"},
        "tiny-nemotron-h": {"mamba", "mlp", "attention"},
        "tiny-llama": {"attention+mlp"},
    }
    for name, expected in kinds.items():
        model = open_model(name)
        assert model.vocab_size == 256
        assert len(model.layers) >= 8
        assert {layer.kind for layer in model.layers} == expected | {"embedding", "norm", "head"}


def test_models_are_found_by_folder_file_and_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A config's folder, the config file, a template's name and a factory all name a model."""
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config_of("llama")))
    assert open_model(str(folder)).name == "mine"
    assert open_model(str(folder / "config.json")).name == "mine"
    assert open_model("tiny-llama").name == "tiny-llama"
    monkeypatch.chdir(folder)
    assert open_model(".").name == "mine"


@pytest.mark.parametrize("template", ["tiny-jamba", "tiny-nemotron-h", "tiny-llama"])
def test_a_model_source_survives_a_profile_file(template: str) -> None:
    """What a profile records builds the same model again, holds no path, and needs no other file."""
    model = open_model(template, seed=6)
    text = dump_yaml(dict(model.source))
    assert "/" not in text
    again = model_from_source(yaml.safe_load(text), name=model.name, seed=6)
    assert [layer.name for layer in again.layers] == [layer.name for layer in model.layers]
    assert [layer.identity for layer in again.layers] == [layer.identity for layer in model.layers]
    inputs, labels = batch(256, padded=False)
    with torch.no_grad():
        losses = [one.loss_function(run(build_all(one), inputs), labels) for one in (model, again)]
    assert losses[0] == losses[1]


def test_sample_batches_are_tokens_of_the_shape_asked_for() -> None:
    """A sample batch has the shape asked for, depends on the seed alone, and its labels are its inputs."""
    model = open_model("tiny-llama")
    inputs, labels = model.sample_batch(3, 17, 1)
    assert inputs.shape == (3, 17)
    assert inputs.max() < 256
    assert torch.equal(inputs, labels)
    assert torch.equal(inputs, model.sample_batch(3, 17, 1)[0])
    assert not torch.equal(inputs, model.sample_batch(3, 17, 2)[0])


def faulty_files(folder: Path) -> dict[str, tuple[str, type[PipeplanError], str]]:
    """Return faulty config files by name: content, expected error, and part of the message."""
    llama = config_of("llama")
    return {
        "truncated.json": (json.dumps(llama)[:40], FileFormatError, "is it truncated"),
        "list.json": ("[]", FileFormatError, "holds no keys"),
        "no-type.json": ("{}", ModelError, "no 'model_type'"),
        "typo.json": (json.dumps({**llama, "model_type": "lama"}), ModelError, r"'lama' \(did you mean 'llama'\?\)"),
        "no-depth.json": (
            json.dumps({key: value for key, value in llama.items() if key != "num_hidden_layers"}),
            ModelError,
            "key 'num_hidden_layers' is missing",
        ),
        "no-width.json": (
            json.dumps({key: value for key, value in llama.items() if key != "hidden_size"}),
            ModelError,
            "key 'hidden_size' is missing",
        ),
        "no-words.json": (
            json.dumps({key: value for key, value in llama.items() if key != "vocab_size"} | {"vocabsize": 96}),
            ModelError,
            r"key 'vocab_size' is missing \(did you mean 'vocabsize'\?\)",
        ),
        "no-vocabulary.json": (
            json.dumps({key: value for key, value in llama.items() if key != "vocab_size"}),
            ModelError,
            "key 'vocab_size' is missing$",
        ),
        "no-heads.json": (
            json.dumps({key: value for key, value in llama.items() if key != "num_attention_heads"}),
            ModelError,
            "key 'num_attention_heads' is missing$",
        ),
        "no-experts.json": (
            json.dumps(
                {key: value for key, value in config_of("qwen3_next").items() if key != "moe_intermediate_size"}
            ),
            ModelError,
            "key 'moe_intermediate_size' is missing",
        ),
        "music.json": (json.dumps({"model_type": "musicgen"}), ModelError, "several language models"),
        "text.json": (json.dumps({**llama, "vocab_size": "many"}), ModelError, "vocab_size"),
        "heads.json": (json.dumps({**llama, "num_attention_heads": 7}), ModelError, "heads"),
        "encoder.json": (json.dumps({"model_type": "t5", "d_model": 8}), ModelError, "no causal language model"),
        "pattern.json": (
            json.dumps({**config_of("nemotron_h"), "hybrid_override_pattern": "MX"}),
            ModelError,
            "refuses this nemotron_h config",
        ),
    }


@pytest.mark.parametrize("name", sorted(faulty_files(Path())))
def test_faulty_configs_are_refused_by_name(name: str, tmp_path: Path) -> None:
    """A malformed, truncated or incomplete config, or an unknown model type, gives one message that names the file."""
    content, error, message = faulty_files(tmp_path)[name]
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(error, match=message) as caught:
        open_model(str(path))
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_language_model_inside_a_larger_one_may_leave_sizes_out() -> None:
    """As published Gemma-3 configs do: transformers saves of a nested config only what differs from its defaults."""
    left_out = ("vocab_size", "num_attention_heads", "intermediate_size")
    text = {key: value for key, value in config_of("gemma3_text").items() if key not in left_out}
    model = model_from_source({"huggingface": {"model_type": "gemma3", "text_config": text}})
    assert model.vocab_size == 262208


def test_sizes_may_have_their_older_names() -> None:
    """As in published configs of LFM2, whose ``block_ff_dim`` says how wide the feed-forward is."""
    config = {
        "model_type": "lfm2", "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "full_attn_idxs": [1], "block_auto_adjust_ff_dim": False,
    }  # fmt: skip
    with pytest.raises(ModelError, match="key 'intermediate_size' is missing"):
        model_from_source({"huggingface": config})
    narrow, wide = (model_from_source({"huggingface": {**config, "block_ff_dim": width}}) for width in (48, 12288))
    assert narrow.num_parameters is not None and wide.num_parameters is not None
    assert wide.num_parameters - narrow.num_parameters == 2 * 3 * 32 * (12288 - 48)  # 12288 is the family's own


def test_unknown_models_are_refused_with_what_exists(tmp_path: Path) -> None:
    """A missing file and an unknown template are told apart; the nearest template is named."""
    with pytest.raises(FileFormatError, match=r"nowhere/config\.json does not exist"):
        open_model("nowhere/config.json")
    with pytest.raises(FileFormatError, match=r"config\.json does not exist"):
        open_model(str(tmp_path))
    with pytest.raises(ModelError, match=r"'tiny-jambe' \(did you mean 'tiny-jamba'\?\)"):
        open_model("tiny-jambe")
    assert {"tiny-jamba", "tiny-llama", "tiny-nemotron-h", *BILLION_PARAMETERS} <= set(template_names())


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({}, "either 'huggingface' or 'factory'"),
        ({"huggingfac": {}}, r"unknown key 'huggingfac' \(did you mean 'huggingface'\?\)"),
        ({"huggingface": "tiny-llama"}, "whole config"),
        ({"huggingface": config_of("llama"), "granularity": "layr"}, r"'layr' is unknown \(did you mean 'layer'\?\)"),
        ({"factory": "package.module:factory"}, "no 'root'"),
        ({"factory": "package module", "root": "."}, "does not have the form"),
        ({"factory": "package.module:factory", "root": "/nowhere"}, "/nowhere does not exist"),
    ],
)
def test_faulty_model_sources_are_refused(source: dict[str, Any], message: str) -> None:
    """A profile whose model_source can't be used says what is wrong with it."""
    with pytest.raises(ModelError, match=message):
        model_from_source(source)
