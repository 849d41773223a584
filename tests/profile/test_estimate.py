"""Estimated profiles: parameters, FLOPs and bytes are exact; times, errors and shares are what they claim."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipeplan.errors import FileFormatError, ProfileError
from pipeplan.model.context import ForwardContext
from pipeplan.model.source import model_from_source, open_model
from pipeplan.model.types import LayerSource, ModelLayers
from pipeplan.profile import Profile, profile_digest, read_profile, write_profile
from pipeplan.profile.estimate.efficiency import Efficiency, read_efficiency
from pipeplan.profile.estimate.gpus import find_gpu, read_gpus
from pipeplan.profile.estimate.kernels import Category, LayerCost
from pipeplan.profile.estimate.model import estimate_profile, layer_costs
from pipeplan.profile.estimate.parallel import ParallelSizes, share_of
from pipeplan.profile.held import activation_bytes, tensors_in
from pipeplan.profile.measure import measure_profile
from tests.model.families import config_of
from tests.profile.published import DEVICE, NANO_9B
from tests.profile.test_measure import ONCE

torch.set_num_threads(1)

BATCH, LENGTH = 2, 24
GPUS = read_gpus()
H100 = GPUS["h100-sxm"]
MATRIX_PRODUCTS = (Category.GEMM, Category.GROUPED_GEMM, Category.ATTENTION_FORWARD, Category.ATTENTION_BACKWARD)


def costs_by_kind(
    name: str, *, batch: int = BATCH, length: int = LENGTH, dtype: str = "bf16", **others: Any
) -> dict[str, LayerCost]:
    """The cost of the last layer of each kind of a template."""
    model = open_model(name)
    costs = layer_costs(model, micro_batch_size=batch, sequence_length=length, dtype=dtype, **others)
    return {layer.kind: cost for layer, cost in zip(model.layers, costs, strict=True)}


@cache
def nano_9b() -> tuple[ModelLayers, list[LayerCost]]:
    """Nemotron-Nano-9B-v2 as its times were published."""
    model = open_model("nemotron-nano-9b-v2")
    return model, layer_costs(model, micro_batch_size=1, sequence_length=4096, dtype="bf16")


def factory_model(*builds: Callable[[], Any], inputs: Callable[[], Any]) -> ModelLayers:
    """A model of the given layers; its loss is the mean of what the last one returns."""
    return ModelLayers(
        name="test",
        layers=tuple(
            LayerSource(name=f"layer{index}", kind="test", build=build, identity=str(index))
            for index, build in enumerate(builds)
        ),
        loss_function=lambda outputs, labels: outputs.float().mean(),
        sample_batch=lambda micro_batch_size, sequence_length, seed: (inputs(), torch.zeros(1)),
        source={"factory": "test:factory", "root": "."},
    )


def cost_of(build: Callable[[], Any], inputs: Callable[[], Any], dtype: str = "bf16") -> LayerCost:
    """The cost of one layer between a layer that gives its input a gradient, and one that takes the loss."""
    model = factory_model(lambda: nn.Identity(), build, lambda: nn.Identity(), inputs=inputs)
    return layer_costs(model, micro_batch_size=1, sequence_length=1, dtype=dtype)[1]


def flops(cost: LayerCost, direction: str, *categories: Category) -> int:
    """FLOPs of a direction."""
    return sum(kernel.flops for kernel in getattr(cost, direction) if kernel.category in categories)


# --- exact: bytes ---------------------------------------------------------------------------------------------------


def real_bytes(layer: LayerSource, value: Any, finish: Any, dtype: torch.dtype) -> tuple[int, Any]:
    """What a real run on this CPU keeps, and the detached outputs."""
    module = layer.build()
    assert isinstance(module, nn.Module)
    module = module.to(dtype).train()

    def run(inputs: Any) -> Any:
        outputs = module(inputs)
        return outputs if finish is None else finish(outputs)

    def make_inputs() -> Any:
        return pytree.tree_map_only(Tensor, lambda one: one.detach().clone().requires_grad_(one.requires_grad), value)

    outputs = module(make_inputs())
    detached = pytree.tree_map_only(Tensor, lambda one: one.detach().requires_grad_(one.requires_grad), outputs)
    return activation_bytes(run, make_inputs, keeps_inputs=False), detached


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["tiny-llama", "tiny-jamba", "tiny-nemotron-h"])
def test_activation_bytes_equal_a_real_run(name: str, dtype: str) -> None:
    """Byte for byte: as plain torch keeps them, and, where no kernel package steps in, as the default counts them."""
    model = open_model(name)
    settings = {"micro_batch_size": BATCH, "sequence_length": LENGTH, "dtype": dtype}
    plain = layer_costs(model, has_kernels=False, **settings)  # type: ignore[arg-type]
    with_kernels = layer_costs(model, **settings)  # type: ignore[arg-type]
    value, labels = model.sample_batch(BATCH, LENGTH, 0)
    seen = set()
    for index, (layer, cost, fused) in enumerate(zip(model.layers, plain, with_kernels, strict=True)):
        is_last = index == len(model.layers) - 1
        finish = (lambda outputs: model.loss_function(outputs, labels)) if is_last else None
        if layer.identity in seen:
            continue
        seen.add(layer.identity)
        expected, value = real_bytes(layer, value, finish, torch.float32 if dtype == "fp32" else torch.bfloat16)
        assert cost.activation_bytes == expected, layer.name
        if "mamba" in layer.kind:
            assert fused.activation_bytes < expected
        else:
            assert fused.activation_bytes == expected, layer.name
        assert fused.fused_activation_bytes <= fused.activation_bytes
        assert cost.num_parameters == layer.num_parameters


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_next", "zamba2"])
def test_activation_bytes_equal_a_measured_profile(family: str) -> None:
    """Where routing is by rule, router logits travel with the hidden states, or every layer reads the embeddings."""
    model = model_from_source({"huggingface": config_of(family)})
    measured = measure_profile(model, micro_batch_size=3, sequence_length=13, dtype="fp32", budget=ONCE)
    costs = layer_costs(model, micro_batch_size=3, sequence_length=13, dtype="fp32", has_kernels=False)
    assert {layer.name: cost.activation_bytes for layer, cost in zip(model.layers, costs, strict=True)} == {
        layer.name: layer.activation_bytes for layer in measured.layers
    }


def test_other_bytes_of_a_linear_layer_equal_a_hand_count() -> None:
    """Boundary, held for W and recomputation."""
    cost = cost_of(lambda: nn.Linear(16, 48), lambda: torch.randn(10, 16, requires_grad=True))
    assert (cost.output_bytes, cost.output_tensors) == (10 * 48 * 2, ("bfloat16[10, 48]",))
    assert cost.activation_bytes == cost.recompute_activation_bytes == 10 * 16 * 2
    assert cost.held_for_w_bytes == 10 * (16 + 48) * 2


# --- exact: FLOPs ---------------------------------------------------------------------------------------------------


def test_flops_of_linear_layers() -> None:
    """Two to a weight and token in each of F, I and W, and twice that in B."""
    cost = cost_of(lambda: nn.Linear(16, 48), lambda: torch.randn(10, 16, requires_grad=True))
    once = 2 * 10 * 16 * 48
    assert [flops(cost, one, Category.GEMM) for one in ("forward", "input_gradient", "weight_gradient")] == [once] * 3
    assert flops(cost, "backward", Category.GEMM) == 2 * once


TOKENS = BATCH * LENGTH
WIDTH, FFN, VOCAB = 128, 256, 256  # of the tiny templates


def attention_products(heads: int, kv_heads: int, head: int) -> tuple[int, int]:
    """FLOPs of the projections and of causal attention, forward."""
    projections = 2 * TOKENS * (2 * WIDTH * heads * head + 2 * WIDTH * kv_heads * head)
    return projections, BATCH * heads * 2 * 2 * LENGTH * LENGTH * head // 2


def test_flops_of_attention_and_a_gated_mlp() -> None:
    """A Llama layer: projections with fewer key heads, attention over half the square, three products of the MLP."""
    cost = costs_by_kind("tiny-llama")["attention+mlp"]
    module = open_model("tiny-llama").layers[1].build()
    assert isinstance(module, nn.Module)
    ffn = module.get_parameter("layer.mlp.gate_proj.weight").shape[0]
    projections, attention = attention_products(4, 2, 32)
    assert flops(cost, "forward", Category.GEMM) == projections + 3 * 2 * TOKENS * WIDTH * ffn
    assert flops(cost, "forward", Category.ATTENTION_FORWARD) == attention
    assert flops(cost, "backward", Category.ATTENTION_BACKWARD) == attention * 5 // 2
    assert flops(cost, "backward", Category.GEMM) == 2 * flops(cost, "forward", Category.GEMM)
    assert flops(cost, "weight_gradient", *MATRIX_PRODUCTS) == flops(cost, "forward", Category.GEMM)


def test_flops_of_mamba_1_and_experts() -> None:
    """Jamba: the four projections of Mamba-1, and two of four experts for each token besides the router."""
    cost = costs_by_kind("tiny-jamba")["mamba+moe"]
    inner, state, rank, experts, chosen = 2 * WIDTH, 16, 8, 4, 2
    projections = WIDTH * 2 * inner + inner * (rank + 2 * state) + rank * inner + inner * WIDTH
    assert flops(cost, "forward", Category.GEMM) == 2 * TOKENS * (projections + WIDTH * experts)
    assert flops(cost, "forward", Category.GROUPED_GEMM) == 2 * TOKENS * chosen * 3 * WIDTH * FFN
    assert flops(cost, "backward", Category.GROUPED_GEMM) == 2 * flops(cost, "forward", Category.GROUPED_GEMM)
    assert flops(cost, "weight_gradient", Category.GROUPED_GEMM) == flops(cost, "forward", Category.GROUPED_GEMM)
    assert [kernel.flops for kernel in cost.forward if kernel.category is Category.SCAN_FORWARD] == [0]


def test_flops_of_a_real_hybrid() -> None:
    """Nemotron-Nano-9B-v2 at full size: every kind against its published config, taking no memory."""
    model, costs = nano_9b()
    by_kind = {layer.kind: cost for layer, cost in zip(model.layers, costs, strict=True)}
    hidden, length, inner, groups, state, heads = 4480, 4096, 128 * 80, 8, 128, 128
    mamba = hidden * (2 * inner + 2 * groups * state + heads) + inner * hidden
    attention = hidden * (40 + 2 * 8) * 128 + 40 * 128 * hidden
    for kind, weights in (("mamba", mamba), ("mlp", 2 * hidden * 15680), ("attention", attention)):
        assert flops(by_kind[kind], "forward", Category.GEMM) == 2 * length * weights
    assert flops(by_kind["head"], "forward", *MATRIX_PRODUCTS) == 2 * length * hidden * 131072
    assert flops(by_kind["attention"], "forward", Category.ATTENTION_FORWARD) == 2 * 2 * 40 * 128 * length * length // 2
    assert sum(cost.num_parameters for cost in costs) == pytest.approx(8.89e9, rel=0.01)


class Windowed(nn.Module):
    """Attention through transformers' interface with a window."""

    def __init__(self, window: int | None) -> None:
        super().__init__()
        self.window = window

    def forward(self, value: Tensor) -> Tensor:
        from pipeplan.profile.estimate.attention import attention

        return attention(value, value, value, True, self.window or 0)[0]


@pytest.mark.parametrize(("window", "pairs"), [(None, 32 * 32 / 2), (8, 32 * 8 - 8 * 8 / 2), (64, 32 * 32 / 2)])
def test_a_window_limits_attention(window: int | None, pairs: float) -> None:
    """A causal mask leaves half the square, a window a band below the diagonal."""
    cost = cost_of(lambda: Windowed(window), lambda: torch.randn(1, 2, 32, 16, requires_grad=True))
    assert flops(cost, "forward", Category.ATTENTION_FORWARD) == 2 * pairs * 2 * (16 + 16)


def test_sliding_layers_of_a_model_are_seen() -> None:
    """Gemma-3's local layers do less attention than its global ones."""
    from pipeplan.model.huggingface import layers_from_config
    from tests.model.families import config_of

    model = layers_from_config(config_of("gemma3_text"), name="gemma")
    costs = layer_costs(model, micro_batch_size=1, sequence_length=16, dtype="bf16")
    found = [flops(cost, "forward", Category.ATTENTION_FORWARD) for cost in costs[1:8]]
    assert found[5] == 4 * 2 * 2 * 16 * 16 * 8 // 2  # the sixth layer is global
    assert found[0] == 4 * 2 * 2 * (16 * 4 - 4 * 4 // 2) * 8


# --- fusion ---------------------------------------------------------------------------------------------------------


def test_a_chain_of_pointwise_ops_is_one_kernel() -> None:
    """It reads its input once and writes its output once; the backward reads that input and the gradient."""

    class Chain(nn.Module):
        def forward(self, value: Tensor) -> Tensor:
            return torch.tanh(torch.relu(value) * 2) * 3

    cost = cost_of(Chain, lambda: torch.randn(100, 16, requires_grad=True))
    size = 100 * 16 * 2
    assert [(kernel.category, kernel.num_bytes) for kernel in cost.forward] == [(Category.MEMORY, 2 * size)]
    assert [(kernel.category, kernel.num_bytes) for kernel in cost.backward] == [(Category.MEMORY, 3 * size)]
    assert cost.fused_activation_bytes == size < cost.activation_bytes


def test_a_matrix_product_ends_a_chain() -> None:
    """What a product reads is written first; views cost nothing."""

    class Between(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16, bias=False)

        def forward(self, value: Tensor) -> Tensor:
            return torch.relu(self.linear(torch.tanh(value).view(10, 10, 16))).transpose(0, 1)

    cost = cost_of(Between, lambda: torch.randn(100, 16, requires_grad=True))
    assert [kernel.category for kernel in cost.forward] == [Category.MEMORY, Category.GEMM, Category.MEMORY]
    size = 100 * 16 * 2
    assert [kernel.num_bytes for kernel in cost.forward] == [2 * size, 2 * size + 16 * 16 * 2, 2 * size]


def test_gradients_of_weights_are_added_up() -> None:
    """Matrix products add while they write; an embedding's gradient is written, then read and added in fp32."""
    builds = (lambda: nn.Embedding(100, 16), lambda: nn.Linear(16, 8, bias=False), lambda: nn.Identity())
    model = factory_model(*builds, inputs=lambda: torch.arange(10))
    embedding, linear, _ = layer_costs(model, micro_batch_size=1, sequence_length=1, dtype="bf16")
    size = 100 * 16 * 2
    scatter = size + 10 * 8 + 10 * 16 * 2  # the gradient, token ids, and the output's gradient
    assert [kernel.num_bytes for kernel in embedding.weight_gradient] == [scatter, size + 2 * 100 * 16 * 4]
    assert [kernel.category for kernel in linear.weight_gradient] == [Category.GEMM]


def test_the_head_is_not_split_unless_it_says_so() -> None:
    """Whole, its B is what it is when split, it has no W and holds nothing; any layer may choose."""
    model = open_model("tiny-llama")
    settings: dict[str, Any] = {"micro_batch_size": BATCH, "sequence_length": LENGTH, "dtype": "bf16"}

    def chosen(index: int, *, is_splittable: bool) -> list[LayerCost]:
        layers = list(model.layers)
        layers[index] = replace(layers[index], is_splittable=is_splittable)
        return layer_costs(replace(model, layers=tuple(layers)), **settings)

    whole, split = layer_costs(model, **settings), chosen(-1, is_splittable=True)
    assert [cost.is_splittable for cost in whole] == [*(True for _ in whole[:-2]), False, False]  # norm, head
    assert whole[-1] == replace(
        split[-1],
        input_gradient=split[-1].backward,
        weight_gradient=(),
        held_for_w_bytes=0,
        workspace_bytes=whole[-1].workspace_bytes,  # of B, no longer of I and W
    )
    assert split[-1].held_for_w_bytes >= TOKENS * (WIDTH + VOCAB) * 2
    assert flops(split[-1], "weight_gradient", Category.GEMM) == 2 * TOKENS * WIDTH * VOCAB
    other = chosen(1, is_splittable=False)
    assert not other[1].is_splittable and other[1].backward == whole[1].backward
    assert other[2:] == whole[2:]


# --- times ----------------------------------------------------------------------------------------------------------


def test_the_shipped_table_on_the_profile_it_was_fitted_to() -> None:
    """Backward within 25 %, totals within 15 %, the head within 25 %, and the order of the kinds by total."""
    model, costs = nano_9b()
    efficiency = read_efficiency()
    totals = {}
    for kind in ("mamba", "mlp", "attention", "head"):
        cost = next(cost for layer, cost in zip(model.layers, costs, strict=True) if layer.kind == kind)
        times = efficiency.times(cost, GPUS[DEVICE], "bf16")
        if kind == "head":
            assert times.input_gradient_ns is None and times.weight_gradient_ns is None
            backward_ms = times.backward_ns / 1e6
        else:
            assert times.input_gradient_ns is not None and times.weight_gradient_ns is not None
            backward_ms = (times.input_gradient_ns + times.weight_gradient_ns) / 1e6
        totals[kind] = times.forward_ns / 1e6 + backward_ms
        published = NANO_9B[kind]
        assert times.forward_ns / 1e6 == pytest.approx(published.forward, rel=0.01)
        assert backward_ms == pytest.approx(published.backward, rel=0.25)
        assert totals[kind] == pytest.approx(published.total, rel=0.25 if kind == "head" else 0.15)
    assert sorted(totals, key=totals.__getitem__) == ["attention", "mlp", "mamba", "head"]


def test_times_follow_the_gpu_and_the_table() -> None:
    """Compute-bound time scales with the peak, traffic with the bandwidth, both with the shares; launches add."""
    cost = cost_of(lambda: nn.Linear(512, 512, bias=False), lambda: torch.randn(4096, 512, requires_grad=True))
    shares = dict.fromkeys(Category, 0.5)
    efficiency = Efficiency(share_by_category=shares, launch_ns=1000)
    peak_s = max(2 * 4096 * 512 * 512 / 989e12, (2 * 4096 * 512 + 512 * 512) * 2 / 3350e9)
    assert efficiency.times(cost, H100, "bf16").forward_ns == round(peak_s * 1e9 / 0.5 + 1000)
    recomputed = efficiency.times(cost, H100, "bf16", recompute=True)
    plain = efficiency.times(cost, H100, "bf16")
    assert recomputed.backward_ns == pytest.approx(plain.backward_ns + plain.forward_ns, abs=1)
    assert recomputed.weight_gradient_ns == plain.weight_gradient_ns


# --- the profile ----------------------------------------------------------------------------------------------------


def estimated(name: str = "tiny-jamba", **others: Any) -> Profile:
    """An estimate of a tiny model."""
    settings = {"micro_batch_size": 1, "sequence_length": 16, **others}
    return estimate_profile(open_model(name), [H100, GPUS["a100-80gb"]], read_efficiency(), **settings)


def test_the_profile_says_what_it_rests_on_and_survives_the_file(tmp_path: Path) -> None:
    """Estimated, both GPUs, the table's record; the model can be built again; the digest ignores the notes."""
    profile = estimated()
    write_profile(profile, tmp_path / "profile.yaml")
    found = read_profile(tmp_path / "profile.yaml")
    assert found == replace(profile, extra=found.extra)
    assert (found.source, found.devices, found.dtype) == ("estimated", ("a100-80gb", "h100-sxm"), "bf16")
    assert found.model_source == open_model("tiny-jamba").source
    notes = " ".join(found.extra["notes"])
    assert "estimated, not measured" in notes and "figures confirmed" in notes and "layer totals are off by" in notes
    assert profile_digest(found) == profile_digest(replace(found, extra={**found.extra, "notes": []}))
    assert found.extra["layers"]["layers.0"]["fused_activation_bytes"] > 0
    for layer in found.layers:
        assert layer.times("h100-sxm").forward_ns <= layer.times("a100-80gb").forward_ns


def test_shares_of_tensor_and_expert_parallel_ranks() -> None:
    """Work and weights are divided and nothing is added; a profile of shares doesn't claim to be trainable."""
    cost = costs_by_kind("tiny-jamba")["mamba+moe"]
    half = share_of(cost, ParallelSizes(tensor=2), "x")
    assert flops(half, "forward", *MATRIX_PRODUCTS) * 2 == flops(cost, "forward", *MATRIX_PRODUCTS)
    assert len(half.forward) == len(cost.forward)
    assert cost.num_parameters - half.num_parameters == cost.num_split_parameters // 2
    assert cost.activation_bytes / 2 < half.activation_bytes < cost.activation_bytes
    assert half.output_bytes == cost.output_bytes
    by_expert = share_of(cost, ParallelSizes(expert=4), "x")
    assert cost.num_parameters - by_expert.num_parameters == 3 * 4 * WIDTH * FFN * 3 // 4
    assert by_expert.forward == cost.forward
    with pytest.raises(ProfileError, match="its 4 experts can't be divided evenly by 3"):  # their weights can
        share_of(cost, ParallelSizes(expert=3), "x")
    shared = estimated(sizes=ParallelSizes(tensor=2, expert=2))
    assert shared.model_source is None
    assert any("tensor parallelism of 2" in note for note in shared.extra["notes"])
    with pytest.raises(ProfileError, match=r"layer 'embedding': its 32,768 weights can't be divided evenly by 3"):
        estimated(sizes=ParallelSizes(tensor=3))


def test_estimating_leaves_the_model_as_it_was() -> None:
    """The same model can be built for real afterwards, with its own attention, and runs."""
    model = open_model("tiny-jamba")
    layer_costs(model, micro_batch_size=1, sequence_length=8, dtype="bf16")
    value, _ = model.sample_batch(1, 8, 0)
    for layer in model.layers:
        module = layer.build()
        assert isinstance(module, nn.Module)
        value = module(value)
    (logits,) = tensors_in(value)
    assert type(logits) is Tensor and torch.isfinite(logits).all()


# --- errors ---------------------------------------------------------------------------------------------------------


def test_a_layer_that_looks_at_values_is_named() -> None:
    """Code that branches on what is computed can't run without values: the layer, the reason and the way out."""

    class Branching(nn.Module):
        def forward(self, value: Tensor) -> Tensor:
            return value * 2 if value.sum() > 0 else value

    with pytest.raises(ProfileError, match=r"layer 'layer1' \(test\) can't be estimated: .*--device cuda"):
        cost_of(Branching, lambda: torch.randn(4, 4, requires_grad=True))


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_experts_count_the_same_in_every_dtype(dtype: str) -> None:
    """Groups of fp32 and fp16 are multiplied by torch on a CPU, but not on fake tensors."""
    expected, found = costs_by_kind("tiny-jamba")["mamba+moe"], costs_by_kind("tiny-jamba", dtype=dtype)["mamba+moe"]
    for direction in ("forward", "backward", "weight_gradient"):
        assert flops(found, direction, *MATRIX_PRODUCTS) == flops(expected, direction, *MATRIX_PRODUCTS)


def test_rotary_tables_that_look_at_values() -> None:
    """Phi-3.5-MoE's choose their frequencies by the largest position, which fake tensors don't have."""
    scaling = {
        "type": "longrope", "long_factor": [1.5] * 4, "short_factor": [1.0] * 4, "long_mscale": 1.2,
        "short_mscale": 1.3, "original_max_position_embeddings": 8,
    }  # fmt: skip
    config = {
        "model_type": "phimoe", "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 48, "num_local_experts": 4, "max_position_embeddings": 64,
        "original_max_position_embeddings": 8, "rope_scaling": scaling,
    }  # fmt: skip
    costs = layer_costs(
        model_from_source({"huggingface": config}), micro_batch_size=1, sequence_length=16, dtype="bf16"
    )
    assert flops(costs[1], "forward", Category.GROUPED_GEMM) == 16 * 2 * 2 * 3 * 32 * 48


def test_arguments_of_layers_that_read_embeddings_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are real tensors: of 131,072 tokens, a gigabyte for each run of each of Zamba2's layers."""
    num_real = []
    run = ForwardContext._run

    def counted(self: ForwardContext, hidden: Tensor, *others: Any) -> Any:
        num_real.append(type(hidden) is Tensor)
        return run(self, hidden, *others)

    monkeypatch.setattr(ForwardContext, "_run", counted)
    model = model_from_source({"huggingface": config_of("zamba2")})
    layer_costs(model, micro_batch_size=1, sequence_length=16, dtype="bf16")
    assert len(num_real) > 5 * sum(num_real) > 0


def test_a_loop_over_the_sequence_is_refused() -> None:
    """Taken op by op it would last minutes, and move bytes that grow with the square of the length."""
    config = {
        "model_type": "recurrent_gemma", "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 3, "lru_width": 32,
        "head_dim": 8, "attention_window_size": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 48,
    }  # fmt: skip
    model = model_from_source({"huggingface": config})
    assert layer_costs(model, micro_batch_size=1, sequence_length=4, dtype="bf16")
    with pytest.raises(ProfileError, match=r"layer 'layers\.0' \(recurrent\+mlp\) .* more than 5,000 ops, as a loop"):
        layer_costs(model, micro_batch_size=1, sequence_length=1024, dtype="bf16")


def test_unknown_gpus_dtypes_and_files(tmp_path: Path) -> None:
    """The nearest name is offered, and a faulty efficiency file is named with its key."""
    with pytest.raises(ProfileError, match=r"no GPU 'h100-smx' in the table \(did you mean 'h100-sxm'\?\)"):
        find_gpu("h100-smx", GPUS)
    with pytest.raises(ProfileError, match="unknown dtype 'bf61'"):
        estimated(dtype="bf61")
    faulty = tmp_path / "efficiency.yaml"
    faulty.write_text("format: pipeplan-efficiency/1\nshare_of_peak: {gem: 0.5}\nlaunch_us: 5\n")
    with pytest.raises(FileFormatError, match=r"unknown key 'share_of_peak.gem' \(did you mean 'gemm'\?\)"):
        read_efficiency(faulty)
