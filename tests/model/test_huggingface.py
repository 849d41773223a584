from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pipeplan.errors import ModelError
from pipeplan.model.huggingface import build_reference, layers_from_config
from pipeplan.model.source import open_model
from tests.model.families import FAMILIES, config_of
from tests.model.running import LENGTH, batch, build_all, gradients_by_name, logits_of, run

TEMPLATES = ("tiny-jamba", "tiny-nemotron-h", "tiny-llama")
TOLERANCE: dict[str, Any] = {"rtol": 1e-5, "atol": 1e-6}


def check_equal(config: dict[str, Any], *, padded: bool) -> None:
    """Compare logits, loss and every gradient with the Hugging Face model of the same weights."""
    model = layers_from_config(config, name="model", seed=11)
    modules = build_all(model)
    reference = build_reference(config, seed=11).eval()
    inputs, labels = batch(config["vocab_size"], padded=padded)
    expected = reference(**inputs, labels=labels, use_cache=False)
    torch.autograd.backward(expected.loss)

    outputs = run(modules, inputs if padded else inputs["input_ids"])
    loss = model.loss_function(outputs, labels)
    torch.autograd.backward(loss)

    torch.testing.assert_close(logits_of(outputs), expected.logits, **TOLERANCE)
    torch.testing.assert_close(loss, expected.loss, **TOLERANCE)
    gradients = gradients_by_name(model, modules, reference)
    for name, parameter in reference.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(gradients.pop(name), parameter.grad, **TOLERANCE)
    assert not any(gradient.any() for gradient in gradients.values())


@pytest.mark.parametrize("padded", [False, True], ids=["plain", "padded"])
@pytest.mark.parametrize("template", TEMPLATES)
def test_templates_equal_the_hugging_face_model(template: str, padded: bool) -> None:
    """The layers of each tiny template in a row give logits, loss and gradients of the Hugging Face model."""
    check_equal(dict(open_model(template).source["huggingface"]), padded=padded)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_families_equal_the_hugging_face_model(family: str) -> None:
    """Every promised family works through the one general path, padding and its own extras included."""
    check_equal(config_of(family), padded=True)


def test_a_base_model_under_another_name_than_its_class_says() -> None:
    """Llama-4's class names "language_model", and holds "model"."""
    config = {
        "model_type": "llama4_text", "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 4, "head_dim": 8,
        "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48, "intermediate_size_mlp": 64,
        "num_local_experts": 4, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2, "attention_chunk_size": 8,
        "pad_token_id": 0,
    }  # fmt: skip
    check_equal(config, padded=True)


@pytest.mark.parametrize("family", ["jamba", "llama"])
def test_tied_embeddings_equal_the_hugging_face_model(family: str) -> None:
    """A tied head starts as the embedding and both gradients belong to the one weight."""
    config = config_of(family, tie_word_embeddings=True)
    model = layers_from_config(config, name="tied", seed=11)
    tied = {layer.name: layer.tied_weight_attr for layer in model.layers if layer.tied is not None}
    assert tied == {"embedding": ("embed_tokens.weight",), "head": ("lm_head.weight",)}
    assert len({layer.tied for layer in model.layers if layer.tied}) == 1
    assert model.num_parameters == sum(p.numel() for p in build_reference(config).parameters())
    check_equal(config, padded=False)


def test_router_loss_reaches_the_routers() -> None:
    """With output_router_logits, the auxiliary loss is part of the loss, and its gradient reaches the routers."""
    config = config_of("jamba", output_router_logits=True, router_aux_loss_coef=0.5)
    plain = layers_from_config(config_of("jamba"), name="plain", seed=11)
    model = layers_from_config(config, name="router", seed=11)
    inputs, labels = batch(96, padded=False)
    with torch.no_grad():
        loss = model.loss_function(run(build_all(model), inputs), labels)
        without = plain.loss_function(run(build_all(plain), inputs), labels)
    assert loss - without > 0.1
    check_equal(config, padded=False)
    check_equal(config, padded=True)


def test_boundaries_are_as_small_as_they_can_be() -> None:
    """Hidden states alone pass between layers, a mask only while a later layer needs it."""
    model = layers_from_config(config_of("jamba"), name="model")
    modules = build_all(model)
    inputs, _ = batch(96, padded=True)
    value: Any = inputs["input_ids"]
    for module in modules:
        value = module(value)
        assert isinstance(value, Tensor)
    value, kinds = inputs, []
    for module in modules:
        value = module(value)
        kinds.append("hidden" if isinstance(value, Tensor) else "+".join(sorted(value)))
    assert kinds == ["attention_mask+hidden_states"] * 4 + ["hidden"] * 3


def test_stages_built_apart_work_together() -> None:
    """Two processes that build half of the layers each run the same model as one that builds all."""
    config = config_of("gemma3_text")
    one = layers_from_config(config, name="one", seed=3)
    first, second = (layers_from_config(config, name="half", seed=3) for _ in range(2))
    inputs, _ = batch(96, padded=True)
    with torch.no_grad():
        expected = run(build_all(one), inputs)
        middle = run([layer.build() for layer in first.layers[:5]], inputs)  # type: ignore[misc]
        outputs = run([layer.build() for layer in second.layers[5:]], middle)  # type: ignore[misc]
    torch.testing.assert_close(outputs, expected, rtol=0, atol=0)


def test_arguments_follow_shape_mask_and_type() -> None:
    """What layers get besides hidden states is never that of an earlier batch: other lengths, masks, types."""
    config = config_of("llama")
    model = layers_from_config(config, name="model", seed=11)
    modules = build_all(model)
    reference = build_reference(config, seed=11).eval()
    inputs, _ = batch(96, padded=True)
    mask = inputs["attention_mask"]
    with torch.no_grad():
        for length in (LENGTH, 7, LENGTH):
            tokens = inputs["input_ids"][:, :length]
            expected = reference(tokens, use_cache=False).logits
            torch.testing.assert_close(run(modules, tokens), expected, **TOLERANCE)
        for padding in (5, 2, 5):  # written into the same tensor, as a receive buffer is
            mask.fill_(1)[1, :padding] = 0
            expected = reference(**inputs, use_cache=False).logits
            torch.testing.assert_close(run(modules, inputs), expected, **TOLERANCE)
        double = [module.double() for module in modules]
        expected = reference.double()(inputs["input_ids"], use_cache=False).logits
        assert expected.dtype == torch.float64
        torch.testing.assert_close(run(double, inputs["input_ids"]), expected, rtol=1e-5, atol=1e-6)
    modules = [module.float() for module in double]
    with torch.inference_mode():
        run(modules, inputs["input_ids"])
    run(modules, inputs["input_ids"]).sum().backward()  # nothing made in inference mode may be kept


def test_position_ids_reach_every_layer() -> None:
    """Position ids of a batch are honoured by attention in all layers."""
    config = config_of("llama")
    modules = build_all(layers_from_config(config, name="model", seed=11))
    reference = build_reference(config, seed=11).eval()
    inputs, _ = batch(96, padded=False)
    inputs["position_ids"] = torch.arange(LENGTH).expand(2, -1) * 3
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    with torch.no_grad():
        expected = reference(**inputs, use_cache=False).logits
        torch.testing.assert_close(run(modules, inputs), expected, **TOLERANCE)
        assert not torch.allclose(run(modules, inputs["input_ids"]), expected, atol=1e-4)


def test_alike_layers_share_their_identity() -> None:
    """Layers that cost the same are measured once, others apart: by parts and settings, not by name."""
    jamba = layers_from_config(config_of("jamba", num_hidden_layers=8), name="jamba").layers
    assert [layer.kind for layer in jamba] == [
        "embedding", "mamba+mlp", "mamba+moe", "attention+mlp", "mamba+moe", "mamba+mlp", "mamba+moe", "attention+mlp",
        "mamba+moe", "norm", "head",
    ]  # fmt: skip
    assert len({layer.identity for layer in jamba}) == 6
    assert jamba[1].identity == jamba[5].identity != jamba[2].identity
    gemma = layers_from_config(config_of("gemma2"), name="gemma").layers
    assert gemma[1].identity != gemma[2].identity  # the same weights, but one of them sees a window only


def test_an_unknown_key_in_a_batch_is_named() -> None:
    """A batch with a key that the model would ignore is an error."""
    embedding = layers_from_config(config_of("llama"), name="model").layers[0].build()
    tokens = torch.zeros(1, 4, dtype=torch.long)
    with pytest.raises(ModelError, match=r"'attention_masks' \(did you mean 'attention_mask'\?\)"):
        embedding({"input_ids": tokens, "attention_masks": tokens})


UNCUTTABLE: dict[str, tuple[dict[str, Any], str]] = {
    "gemma3n": (
        {
            "model_type": "gemma3n_text", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 10,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 96,
            "vocab_size_per_layer_input": 96, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0,
        },
        "Gemma3nForCausalLM can't be cut into layers",
    ),
    "rwkv": (
        {"model_type": "rwkv", "hidden_size": 32, "num_hidden_layers": 3, "vocab_size": 96},
        "RwkvForCausalLM can't be cut into layers: layer 1 reads more of the layers before it than the hidden states",
    ),
    "opt": (
        {"model_type": "opt", "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
        "OPTForCausalLM can't be cut into layers: OPTModel has no list of decoder layers",
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", sorted(UNCUTTABLE))
def test_a_family_that_cannot_be_cut_is_refused_by_name(family: str) -> None:
    """A model whose layers hand each other more than one boundary can hold is refused, with the reason."""
    config, message = UNCUTTABLE[family]
    with pytest.raises(ModelError, match=message):
        layers_from_config(config, name=family)
