"""Weight-gradient deferral against plain torch."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from pipeplan.deferral import WeightGradientStore, defer_weight_gradients

torch.set_num_threads(1)


class Lambda(nn.Module):
    """A module of the given parameters and a function of it and its input."""

    def __init__(self, compute: Callable[[Any, Tensor], Tensor], **parameters: Tensor) -> None:
        super().__init__()
        self.compute = compute
        for name, value in parameters.items():
            setattr(self, name, nn.Parameter(value))

    def forward(self, value: Tensor) -> Tensor:
        return self.compute(self, value)


class SelfAttention(nn.Module):
    """Attention with separate projections, as decoder layers have it."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8, bias=index == 3) for index in range(4))

    def forward(self, value: Tensor) -> Tensor:
        q, k, v = (project(value).unflatten(-1, (2, 4)).transpose(1, 2) for project in (self.q, self.k, self.v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(mixed.transpose(1, 2).flatten(2))


class Experts(nn.Module):
    """Two experts in stacked parameters, called one by one as in eager mixture-of-experts code."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(2, 12, 8))
        self.down = nn.Parameter(torch.randn(2, 8, 12))
        self.router = nn.Linear(8, 2)

    def forward(self, value: Tensor) -> Tensor:
        shares = self.router(value).softmax(-1)
        outputs = [
            functional.linear(functional.silu(functional.linear(value, self.up[index])), self.down[index])
            for index in range(2)
        ]
        return sum(share * output for share, output in zip(shares.split(1, -1), outputs, strict=True))


class TiedHead(nn.Module):
    """An embedding whose weight is also the head's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8, padding_idx=3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens) @ self.embedding.weight.t()


@dataclass(frozen=True)
class Case:
    """A module, its input, and the parameters whose gradient must come from W alone."""

    build: Callable[[], nn.Module]
    deferred: set[str]
    inputs: Callable[[], Tensor] = lambda: torch.randn(2, 6, 8, dtype=torch.float64)


def _weight(*shape: int) -> Tensor:
    return torch.randn(*shape)


def _grouped(module: Any, value: Tensor) -> Tensor:
    rows = value.reshape(-1, 8)
    offsets = torch.tensor([3, 3, 12], dtype=torch.int32)
    return functional.grouped_mm(functional.grouped_mm(rows, module.up, offs=offsets), module.down.mT, offs=offsets)


CASES = {
    "linear": Case(lambda: nn.Linear(8, 5), {"weight", "bias"}),
    "linear without bias": Case(lambda: nn.Linear(8, 5, bias=False), {"weight"}),
    "linear on a vector": Case(
        lambda: nn.Linear(8, 5), {"weight", "bias"}, lambda: torch.randn(8, dtype=torch.float64)
    ),
    "linear on a transposed input": Case(
        lambda: Lambda(lambda m, x: functional.linear(x.mT.contiguous().mT, m.w), w=_weight(5, 8)), {"w"}
    ),
    "transposed parameter": Case(
        lambda: Lambda(lambda m, x: functional.linear(x, m.w.t(), m.b), w=_weight(8, 5), b=_weight(5)), {"w", "b"}
    ),
    "@": Case(lambda: Lambda(lambda m, x: x @ m.w, w=_weight(8, 5)), {"w"}),
    "@ transposed": Case(lambda: Lambda(lambda m, x: x @ m.w.t(), w=_weight(5, 8)), {"w"}),
    "matmul by a stack": Case(lambda: Lambda(lambda m, x: torch.matmul(x, m.w), w=_weight(3, 1, 8, 5)), {"w"}),
    "parameter on the left": Case(lambda: Lambda(lambda m, x: m.w @ x.mT, w=_weight(5, 8)), {"w"}),
    "mm": Case(lambda: Lambda(lambda m, x: torch.mm(x[0], m.w), w=_weight(8, 5)), {"w"}),
    "bmm": Case(lambda: Lambda(lambda m, x: x.bmm(m.w), w=_weight(2, 8, 5)), {"w"}),
    "addmm": Case(lambda: Lambda(lambda m, x: torch.addmm(m.b, x[0], m.w), w=_weight(8, 5), b=_weight(5)), {"w", "b"}),
    "addmm scaled": Case(
        lambda: Lambda(lambda m, x: torch.addmm(m.b, x[0], m.w, alpha=2), w=_weight(8, 5), b=_weight(5)), set()
    ),
    "slices and splits": Case(
        lambda: Lambda(
            lambda m, x: functional.linear(x, m.w[2:5]) + x @ m.v.chunk(2)[1].t(), w=_weight(6, 8), v=_weight(6, 8)
        ),
        {"w", "v"},
    ),
    "einsum stays whole": Case(
        lambda: Lambda(lambda m, x: torch.einsum("bsk,kn->bsn", x, m.w), w=_weight(8, 5)), set()
    ),
    "computed weight stays whole": Case(lambda: Lambda(lambda m, x: x @ (m.w * 2), w=_weight(8, 5)), set()),
    "depthwise causal conv1d": Case(
        lambda: Lambda(
            lambda m, x: functional.conv1d(x.mT, m.w, m.b, padding=3, groups=8)[..., :6],
            w=_weight(8, 1, 4),
            b=_weight(8),
        ),
        {"w", "b"},
    ),
    "strided conv1d": Case(lambda: nn.Conv1d(6, 4, 3, stride=2, dilation=2), {"weight", "bias"}),
    "conv1d with same padding stays whole": Case(lambda: nn.Conv1d(6, 4, 3, padding="same"), set()),
    "used twice": Case(lambda: Lambda(lambda m, x: (x @ m.w).relu_() @ m.w, w=_weight(8, 8)), {"w"}),
    "used both ways": Case(lambda: Lambda(lambda m, x: x @ m.w + m.w.sum(), w=_weight(8, 8)), set()),
    "in-place on the output": Case(
        lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True)), {"0.weight", "0.bias"}
    ),
    "norm stays whole": Case(lambda: nn.Sequential(nn.RMSNorm(8), nn.Linear(8, 8)), {"1.weight", "1.bias"}),
    "attention": Case(SelfAttention, {"q.weight", "k.weight", "v.weight", "o.weight", "o.bias"}),
    "experts": Case(Experts, {"up", "down", "router.weight", "router.bias"}),
    "tied head": Case(TiedHead, {"embedding.weight"}, lambda: torch.randint(10, (2, 6))),
    "grouped experts": Case(lambda: Lambda(_grouped, up=_weight(3, 8, 16), down=_weight(3, 8, 16)), {"up", "down"}),
}
CHECKPOINTING = {"plain": None, "recomputed": False, "recomputed, reentrant": True}


def _run(module: nn.Module, value: Tensor, reentrant: bool | None) -> Tensor:
    return module(value) if reentrant is None else checkpoint(module, value, use_reentrant=reentrant)


def _build(case: Case, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    module, value = case.build().to(dtype), case.inputs()
    return module, value.to(dtype).requires_grad_() if value.is_floating_point() else value


def _backward(output: Tensor) -> Tensor:
    return torch.linspace(-1, 1, output.numel(), dtype=output.dtype).reshape(output.shape)


@pytest.mark.parametrize("reentrant", CHECKPOINTING.values(), ids=CHECKPOINTING)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_gradients_equal_plain_torch(case: Case, reentrant: bool | None) -> None:
    """I and W together give the gradients of B, and I leaves the deferred ones to W."""
    if reentrant and not case.inputs().is_floating_point():
        pytest.skip("reentrant checkpointing loses gradients of integer inputs in plain torch too")
    dtype = torch.float32 if case is CASES["grouped experts"] else torch.float64
    expected, expected_value = _build(case, dtype)
    module, value = _build(case, dtype)
    output = _run(expected, expected_value, reentrant)
    output.backward(_backward(output))

    store = WeightGradientStore()
    with defer_weight_gradients(store, 0):
        found = _run(module, value, reentrant)
    torch.testing.assert_close(found, output)
    with defer_weight_gradients(store, 0):
        found.backward(_backward(found))
    assert {name for name, parameter in module.named_parameters() if parameter.grad is None} == case.deferred
    torch.testing.assert_close(value.grad, expected_value.grad)
    store.run(0)
    assert not store.pending_keys
    for (name, parameter), one in zip(module.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, one.grad, msg=lambda text, name=name: f"{name}: {text}")
        assert parameter.grad.stride() == one.grad.stride(), name


@pytest.mark.parametrize("reentrant", CHECKPOINTING.values(), ids=CHECKPOINTING)
@pytest.mark.parametrize("name", ["linear", "transposed parameter", "slices and splits", "attention"])
def test_whole_parameters_are_left_out(name: str, reentrant: bool | None) -> None:
    """I computes all gradients of the parameters named, views of them included, and holds nothing for W."""
    (expected, expected_value), (module, value) = _build(CASES[name]), _build(CASES[name])
    before = copy.deepcopy(nn.Linear(8, 8, dtype=torch.float64))  # another layer of the stage, which is split
    output = _run(expected, before(expected_value), reentrant)
    output.backward(_backward(output))
    wanted = {key: one.grad.clone() for key, one in before.named_parameters()}
    before.zero_grad()

    store = WeightGradientStore()
    whole = list(module.parameters())
    with defer_weight_gradients(store, 0, whole):
        found = _run(module, before(value), reentrant)
    with defer_weight_gradients(store, 0, whole):
        found.backward(_backward(found))
    for (key, parameter), one in zip(module.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, one.grad, msg=lambda text, key=key: f"{key}: {text}")
    assert before.weight.grad is None and store.held_bytes(0) == 2 * value.nbytes  # its input and output gradient
    store.run(0)
    torch.testing.assert_close({key: one.grad for key, one in before.named_parameters()}, wanted)


@pytest.mark.parametrize("case", [CASES["used twice"], CASES["attention"], CASES["experts"], CASES["tied head"]])
def test_hooks_fire_once_in_w(case: Case) -> None:
    """Hooks on parameters and on their accumulation nodes fire once a backward, in W, as DeepSpeed needs."""
    module, value = _build(case)
    fired: list[str] = []
    nodes = []
    for name, parameter in module.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: fired.append(f"{name} accumulated"))
        nodes.append(torch.autograd.graph.get_gradient_edge(parameter).node)
        nodes[-1].register_hook(lambda *_, name=name: fired.append(f"{name} node"))
    store = WeightGradientStore()
    with defer_weight_gradients(store, 0):
        output = module(value)
        torch.autograd.backward(output, _backward(output))
    assert fired == []
    store.run(0)
    assert sorted(fired) == sorted(f"{name} {what}" for name in case.deferred for what in ("accumulated", "node"))


@pytest.mark.parametrize("name", ["linear", "transposed parameter", "@", "@ transposed", "grouped experts"])
def test_the_new_gradient_becomes_the_parameters_own(name: str) -> None:
    """The engine keeps the computed tensor as .grad; a copy of every gradient once made W a quarter slower."""
    module, value = _build(CASES[name], torch.float32)
    seen: list[int] = []
    for parameter in module.parameters():
        parameter.register_hook(lambda gradient: seen.append(gradient.data_ptr()))
    store = WeightGradientStore()
    with defer_weight_gradients(store, 0):
        module(value).sum().backward()
    store.run(0)
    assert sorted(seen) == sorted(parameter.grad.data_ptr() for parameter in module.parameters())


@pytest.mark.parametrize(
    ("frozen", "trained"), [({"weight"}, {"bias"}), ({"bias"}, {"weight"}), ({"weight", "bias"}, set())]
)
def test_frozen_parameters_get_no_gradient(frozen: set[str], trained: set[str]) -> None:
    """Only parameters that require grad get one, and a layer with none of them stashes nothing."""
    module = nn.Linear(8, 5)
    for name in frozen:
        module.get_parameter(name).requires_grad_(False)
    value = torch.randn(3, 8, requires_grad=True)
    store = WeightGradientStore()
    with defer_weight_gradients(store, 0):
        module(value).sum().backward()
    assert (0 in store) == bool(trained)
    store.run(0)
    assert {name for name, parameter in module.named_parameters() if parameter.grad is not None} == trained
    torch.testing.assert_close(value.grad, module.weight.sum(0).expand(3, 8))


def test_an_input_without_gradient_loses_nothing() -> None:
    """The first stage's input takes no gradient; its weights still get theirs."""
    module, value = nn.Linear(8, 5), torch.randn(3, 8)
    store = WeightGradientStore()
    with defer_weight_gradients(store, 0):
        module(value).sum().backward()
    store.run(0)
    torch.testing.assert_close(module.weight.grad, value.sum(0).expand(5, 8))


def test_products_of_activations_are_left_alone() -> None:
    """A leaf that is no parameter, such as a received boundary, gets its gradient in I."""
    left, right = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    store = WeightGradientStore()
    with defer_weight_gradients(store, 0):
        (left @ right.t()).sum().backward()
    assert 0 not in store
    torch.testing.assert_close(right.grad, left.detach().sum(0).expand(4, 4))


def test_nothing_changes_without_gradients() -> None:
    """Evaluation inside the context gives plain outputs."""
    module, value = nn.Linear(8, 5), torch.randn(3, 8)
    with defer_weight_gradients(WeightGradientStore(), 0), torch.no_grad():
        assert not module(value).requires_grad


def test_autocast_gives_the_same_numbers() -> None:
    """Under autocast the op runs and saves in bf16, and the parameters get fp32 gradients."""
    module, value = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(3, 8)
    twin = copy.deepcopy(module)
    with torch.autocast("cpu", torch.bfloat16):
        twin(value).sum().backward()
    store = WeightGradientStore()
    with defer_weight_gradients(store, 0):
        with torch.autocast("cpu", torch.bfloat16):
            output = module(value)
        assert output.dtype is torch.bfloat16
        output.sum().backward()
    assert store.held_bytes(0) == 2 * (2 * 3 * 8) + 2 * (3 * 8) + 2  # two inputs, a gradient, and an expanded one
    store.run(0)
    for parameter, expected in zip(module.parameters(), twin.parameters(), strict=True):
        assert parameter.grad.dtype is torch.float32
        torch.testing.assert_close(parameter.grad, expected.grad)


def test_bf16_weights() -> None:
    """bf16 models get bf16 gradients equal to plain torch's."""
    module = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16)).bfloat16()
    twin, value = copy.deepcopy(module), torch.randn(3, 16, dtype=torch.bfloat16)
    twin(value).sum().backward()
    store = WeightGradientStore()
    with defer_weight_gradients(store, 0):
        module(value).sum().backward()
    store.run(0)
    for parameter, expected in zip(module.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad)


@given(order=st.permutations([0, 1, 2] * 3))
@settings(max_examples=25, deadline=None)
def test_any_interleaving_of_micro_batches_accumulates_the_sum(order: list[int]) -> None:
    """W of several micro-batches may wait at once and run in any order; gradients add up."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    twin = copy.deepcopy(module)
    values = [torch.randn(3, 4, dtype=torch.float64) for _ in range(3)]
    sum(twin(value).pow(2).sum() for value in values).backward()
    store, outputs, next_kinds = WeightGradientStore(), {}, {number: iter("FIW") for number in range(3)}
    for number in order:
        kind = next(next_kinds[number])
        if kind == "W":
            store.run(number)
            continue
        with defer_weight_gradients(store, number):
            if kind == "F":
                outputs[number] = module(values[number]).pow(2).sum()
            else:
                outputs.pop(number).backward()
    assert not store.pending_keys
    for parameter, expected in zip(module.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad)


@given(
    batch=st.lists(st.integers(1, 3), max_size=3),
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    has_bias=st.booleans(),
    is_transposed=st.booleans(),
    is_strided=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_linear_of_any_shape(
    batch: list[int], sizes: tuple[int, int], has_bias: bool, is_transposed: bool, is_strided: bool
) -> None:
    """Any number of batch dimensions, strided inputs and transposed weights give plain torch's gradients."""
    width, num_outputs = sizes
    generator = torch.Generator().manual_seed(0)

    def tensor(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    weight = tensor(width, num_outputs) if is_transposed else tensor(num_outputs, width)
    bias = tensor(num_outputs) if has_bias else None
    value = tensor(*batch, width * 2)[..., ::2] if is_strided else tensor(*batch, width)
    results = []
    for store in (None, WeightGradientStore()):
        leaf = value.clone().requires_grad_()
        own = [nn.Parameter(one.clone()) for one in (weight, bias) if one is not None]
        operands = [own[0].t() if is_transposed else own[0], *own[1:]]
        if store is None:
            functional.linear(leaf, *operands).pow(2).sum().backward()
        else:
            with defer_weight_gradients(store, 0):
                functional.linear(leaf, *operands).pow(2).sum().backward()
            assert all(parameter.grad is None for parameter in own)
            store.run(0)
        results.append([leaf.grad, *(parameter.grad for parameter in own)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected)


def test_memory_is_flat_in_the_number_of_micro_batches() -> None:
    """W frees all it held, and later micro-batches add to the gradient in place."""
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    store, addresses, alive = WeightGradientStore(), set(), []
    for number in range(8):
        value = torch.randn(4, 8)
        with defer_weight_gradients(store, number):
            output = module(value)
            output.sum().backward()
        alive += [weakref.ref(value.untyped_storage()), weakref.ref(output.untyped_storage())]
        del value, output
        store.run(number)
        assert all(reference() is None for reference in alive)
        addresses.add(tuple(parameter.grad.data_ptr() for parameter in module.parameters()))
    assert len(addresses) == 1


def test_held_bytes_are_those_of_distinct_storages() -> None:
    """Two projections of one input hold it once, and one gradient each."""
    value = torch.randn(4, 8)
    module = Lambda(lambda m, x: torch.cat([x @ m.a, x @ m.b], -1), a=_weight(8, 3), b=_weight(8, 5))
    store = WeightGradientStore()
    with defer_weight_gradients(store, 0):
        output = module(value)
        assert store.held_bytes(0) == 0
        output.backward(torch.randn(4, 8))
    # the backward of cat hands out two views of one gradient
    assert store.held_bytes(0) == value.nbytes + 4 * 8 * 4
    store.discard(0)
    assert store.held_bytes(0) == 0


def test_overwriting_a_held_input_is_an_error() -> None:
    """A receive buffer that is used again before W ran can't train silently wrong."""
    module, value = nn.Linear(8, 5), torch.randn(3, 8)
    store = WeightGradientStore()
    with defer_weight_gradients(store, 0):
        module(value).sum().backward()
    value.zero_()
    with pytest.raises(RuntimeError, match="before W"):
        store.run(0)


def test_function_transforms_are_left_alone() -> None:
    """A vmap inside a stage works; what it wraps is not deferred."""
    weight = nn.Parameter(torch.randn(8, 5))
    store = WeightGradientStore()
    with defer_weight_gradients(store, 0):
        output = torch.vmap(lambda row: row @ weight)(torch.randn(3, 8))
        output.sum().backward()
    assert weight.grad is not None


JAMBA = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attn_layer_period": 4,
    "attn_layer_offset": 2,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "mamba_d_state": 4,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_dt_rank": 4,
    "use_mamba_kernels": False,
}
NEMOTRON_H = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "hybrid_override_pattern": "M-*-",
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "ssm_state_size": 8,
    "n_groups": 2,
    "chunk_size": 8,
    "conv_kernel": 4,
}


@pytest.mark.parametrize(("family", "settings_"), [("jamba", JAMBA), ("nemotron_h", NEMOTRON_H)])
def test_hugging_face_hybrids(family: str, settings_: dict[str, Any]) -> None:
    """Whole hybrid models (Mamba, attention, experts, MLP, head, loss) get plain torch's gradients."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **settings_)
    model = transformers.AutoModelForCausalLM.from_config(config)
    twin = copy.deepcopy(model)
    tokens = torch.randint(64, (2, 16))
    twin(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    store = WeightGradientStore()
    with defer_weight_gradients(store, 0):
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    in_w = {name for name, parameter in model.named_parameters() if parameter.grad is None}
    store.run(0)
    products = {name for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Conv1d)}
    assert {f"{name}.weight" for name in products} <= in_w
    for (name, parameter), expected in zip(model.named_parameters(), twin.parameters(), strict=True):
        if expected.grad is not None:
            torch.testing.assert_close(parameter.grad, expected.grad, msg=lambda text, name=name: f"{name}: {text}")
