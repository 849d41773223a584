"""Small models for the runtime tests, and their training in one process: a plain torch loop over the layers."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeplan.model.types import LayerSource

VOCABULARY = 31
WIDTH = 16
LENGTH = 12
LENGTHS = (16, 24, 16)
SAMPLES = 2
AUXILIARY_WEIGHT = 0.02
LEARNING_RATE = 0.05
MOMENTUM = 0.9
BASE_SEED = 77
FIRST_EVALUATED = 5000  # the first micro-batch of every evaluation


class Embedding(nn.Module):
    """Token ids to (hidden states, auxiliary loss so far)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.5 * torch.randn(VOCABULARY, WIDTH))

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return functional.embedding(tokens, self.weight), torch.zeros(())


class Attention(nn.Module):
    """Pre-norm causal attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, boundary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        hidden, auxiliary = boundary
        queries, keys, values = self.qkv(self.norm(hidden)).unflatten(-1, (3, 2, WIDTH // 2)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        return hidden + self.out(mixed.transpose(1, 2).flatten(2)), auxiliary


class Convolution(nn.Module):
    """Mamba-like: a gated depthwise causal convolution and a decaying sum over time."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.into = nn.Linear(WIDTH, 2 * WIDTH)
        self.convolution = nn.Conv1d(WIDTH, WIDTH, 3, groups=WIDTH, padding=2)
        self.decay = nn.Parameter(torch.rand(WIDTH))
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, boundary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        hidden, auxiliary = boundary
        signal, gate = self.into(self.norm(hidden)).chunk(2, dim=-1)
        signal = self.convolution(signal.transpose(1, 2))[..., : hidden.shape[1]].transpose(1, 2)
        state, states = torch.zeros_like(signal[:, 0]), []
        for position in range(hidden.shape[1]):
            state = torch.sigmoid(self.decay) * state + signal[:, position]
            states.append(state)
        return hidden + self.out(torch.stack(states, 1) * functional.silu(gate)), auxiliary


class Experts(nn.Module):
    """Two of four experts a token, with a load-balancing loss."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, 4, bias=False)
        self.up = nn.Parameter(0.3 * torch.randn(4, WIDTH, WIDTH))
        self.down = nn.Parameter(0.3 * torch.randn(4, WIDTH, WIDTH))

    def forward(self, boundary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        hidden, auxiliary = boundary
        normed = self.norm(hidden)
        probabilities = self.router(normed).softmax(-1)
        chosen, experts = probabilities.topk(2, dim=-1)
        weights = torch.zeros_like(probabilities).scatter(-1, experts, chosen)
        outputs = torch.einsum(
            "bsew,ewv->bsev", functional.gelu(torch.einsum("bsw,ewv->bsev", normed, self.up)), self.down
        )
        load = (weights > 0).float().mean((0, 1))
        auxiliary = auxiliary + 4 * (load * probabilities.mean((0, 1))).sum()
        return hidden + (weights.unsqueeze(-1) * outputs).sum(2), auxiliary


class Perceptron(nn.Module):
    """Pre-norm MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, boundary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        hidden, auxiliary = boundary
        return hidden + self.down(functional.gelu(self.up(self.norm(hidden)))), auxiliary


class Dropping(Perceptron):
    """An MLP with dropout."""

    def forward(self, boundary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        hidden, auxiliary = super().forward(boundary)
        return functional.dropout(hidden, 0.3, training=self.training), auxiliary


class Head(nn.Module):
    """Hidden states to (logits, auxiliary loss)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.3 * torch.randn(VOCABULARY, WIDTH))

    def forward(self, boundary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        hidden, auxiliary = boundary
        return functional.linear(hidden, self.weight), auxiliary


def head_from_embedding(embedding: Embedding, boundary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return what ``Head`` does, with the weight of an embedding, as a ``TiedLayerSpec`` wants it."""
    hidden, auxiliary = boundary
    return functional.linear(hidden, embedding.weight), auxiliary


class Scale(nn.Module):
    """A layer without parameters."""

    def forward(self, boundary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        hidden, auxiliary = boundary
        return hidden * 1.1, auxiliary


class Echo(Head):
    """A third user of the vocabulary: adds a projection through it to the hidden states."""

    def forward(self, boundary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        hidden, auxiliary = boundary
        return hidden + 0.1 * functional.linear(hidden, self.weight) @ self.weight, auxiliary


class Packing(nn.Module):
    """The embedding of a model whose boundaries hold tensors of many kinds, and None."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCABULARY, WIDTH))

    def forward(self, tokens: Tensor) -> dict[str, Any]:
        hidden = functional.embedding(tokens, self.weight)
        return {
            "half": hidden.to(torch.bfloat16),
            "positions": torch.arange(tokens.shape[1]).expand_as(tokens),
            "mask": tokens % 5 != 0,
            "nothing": None,
            "scale": (tokens.float().mean(), "a constant"),
            "hidden": hidden,
        }


class Mixing(nn.Module):
    """A layer that uses everything in a mixed boundary and hands all of it on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, boundary: dict[str, Any]) -> dict[str, Any]:
        assert boundary["nothing"] is None
        assert boundary["mask"].dtype is torch.bool
        assert boundary["positions"].dtype is torch.int64
        assert boundary["half"].dtype is torch.bfloat16
        assert boundary["scale"][1] == "a constant"
        hidden = self.linear(boundary["hidden"]) + boundary["half"].float()
        hidden = torch.where(boundary["mask"].unsqueeze(-1), hidden, hidden * boundary["scale"][0] / VOCABULARY)
        hidden = hidden + torch.sin(boundary["positions"].float()).unsqueeze(-1)
        return {**boundary, "hidden": hidden, "half": hidden.to(torch.bfloat16)}


class Unpacking(nn.Module):
    """The head of the mixed model."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, boundary: dict[str, Any]) -> tuple[Tensor, Tensor]:
        return self.linear(boundary["hidden"]), torch.zeros(())


_BODY = (Attention, Convolution, Experts, Perceptron, Attention, Convolution, Perceptron, Experts)
CLASSES_BY_MODEL: dict[str, tuple[type[nn.Module], ...]] = {
    "hybrid": (Embedding, *_BODY, Head),
    "own-splits": (Embedding, *_BODY, Head),
    "tied": (Embedding, *_BODY, Head),
    "tied-thrice": (Embedding, *_BODY[:3], Echo, *_BODY[3:], Head),
    "scaled": (Embedding, Attention, Scale, Scale, Perceptron, Head),
    "dropout": (Embedding, Dropping, Attention, Dropping, Experts, Dropping, Head),
    "mixed": (Packing, Mixing, Mixing, Mixing, Mixing, Unpacking),
}

# What layers say of splitting their backward, against the default.
SPLITTABLE_BY_CLASS: dict[str, dict[type[nn.Module], bool]] = {"own-splits": {Head: True, Attention: False}}
WITHOUT_W = (Scale,)  # classes none of whose weight gradients can be deferred


def loss_function(outputs: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
    """Return the next-token cross-entropy plus the weighted auxiliary loss."""
    logits, auxiliary = outputs
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten()) + AUXILIARY_WEIGHT * auxiliary


def micro_batch(index: int, replica: int = 0, data: str = "plain") -> tuple[Tensor, Tensor]:
    """Return (inputs, labels) of a global micro-batch.

    Args:
        data: "plain"; "lengths", where sequences are 16, 24, 16, 16, 24, ... long; or "padded", where micro-batches
            differ in how many labels count, down to one.
    """
    generator = torch.Generator().manual_seed(1000 * replica + index)
    length = LENGTHS[index % len(LENGTHS)] if data == "lengths" else LENGTH
    tokens = torch.randint(VOCABULARY, (SAMPLES, length + 1), generator=generator)
    labels = tokens[:, 1:].contiguous()
    if data == "padded":
        num_padded = (5 * index + 3 * replica) % length + 1
        labels[:, length - num_padded :] = -100
        labels[0, 0] = 1  # a mean over nothing is no number
    return tokens[:, :-1], labels


def _build(kind: type[nn.Module], index: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(100 + index)
        return kind()


def layers_of(model: str) -> list[LayerSource]:
    """Return the layers of a model, each with weights of its own seed."""
    sources = []
    for index, kind in enumerate(CLASSES_BY_MODEL[model]):
        is_tied = model.startswith("tied") and kind in (Embedding, Echo, Head)
        sources.append(
            LayerSource(
                name=f"{index}.{kind.__name__.lower()}",
                kind=kind.__name__.lower(),
                build=lambda kind=kind, index=index: _build(kind, index),
                identity=kind.__name__,
                tied="vocabulary" if is_tied else None,
                tied_weight_attr=("weight",) if is_tied else (),
                is_splittable=SPLITTABLE_BY_CLASS.get(model, {}).get(kind),
            )
        )
    return sources


def build_all(model: str) -> list[nn.Module]:
    """Return the built layers with tied weights shared, the first one's winning."""
    layers: list[nn.Module] = []
    shared: nn.Parameter | None = None
    for source in layers_of(model):
        layer = source.build()
        assert isinstance(layer, nn.Module)
        if source.tied is not None:
            if shared is None:
                shared = layer.weight
            layer.weight = shared
        layers.append(layer)
    return layers


def run(layers: Sequence[Callable[[Any], Any]], inputs: Any, seed: int | None = None) -> Any:
    """Return what the last layer returns; with ``seed``, torch is seeded with it plus the index before each layer."""
    for index, layer in enumerate(layers):
        if seed is not None:
            torch.manual_seed(seed + index)
        inputs = layer(inputs)
    return inputs


def train_in_one_process(
    model: str,
    *,
    num_steps: int,
    num_micro_batches: int,
    num_replicas: int = 1,
    max_norm: float = 1e9,
    is_bf16: bool = False,
    is_seeded: bool = False,
    data: str = "plain",
    by_tokens: bool = False,
    counts_by_step: Mapping[int, int] | None = None,
    evaluations: Mapping[int, Sequence[int]] | None = None,
) -> dict[str, Any]:
    """Train the layers in a row with SGD and momentum.

    Args:
        is_bf16: Run the layers in bf16; keep the weights and sum the gradients in fp32, those of tied weights too.
        is_seeded: Seed before each layer by micro-batch and layer, the way DeepSpeed's ``seed_layers`` counts.
        data: As ``micro_batch`` takes it.
        by_tokens: Divide the sum over all labels that count by their number, instead of averaging means.
        counts_by_step: Numbers of micro-batches of steps that have another one.
        evaluations: Numbers of micro-batches to evaluate before a step.

    Returns:
        ``losses`` and ``norms`` by step, ``evaluations`` and the ``logits`` of each, ``gradients`` of the first step,
        and final ``weights`` by "LAYER.NAME".
    """
    layers = build_all(model)
    if is_bf16:  # DeepSpeed takes its fp32 weights from the model that it has already cast
        layers = [layer.to(torch.bfloat16).float() for layer in layers]
    masters = {f"{i}.{name}": p for i, layer in enumerate(layers) for name, p in layer.named_parameters()}
    running = [copy.deepcopy(layer).to(torch.bfloat16) for layer in layers] if is_bf16 else layers
    run_with = {f"{i}.{name}": p for i, layer in enumerate(running) for name, p in layer.named_parameters()}
    parameters = list({id(p): p for p in masters.values()}.values())
    optimizer = torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=MOMENTUM)
    result: dict[str, Any] = {"losses": [], "norms": [], "gradients": {}, "evaluations": [], "logits": []}
    first = 0
    for step in range(num_steps):
        for count in (evaluations or {}).get(step, ()):
            mean, logits = _evaluate(running, count)
            result["evaluations"].append(mean)
            result["logits"].append(logits)
        total = 0.0
        count = (counts_by_step or {}).get(step, num_micro_batches)
        numbered = list(itertools.product(range(num_replicas), range(first, first + count)))
        num_labels = sum(int((micro_batch(index, replica, data)[1] != -100).sum()) for replica, index in numbered)
        for replica, index in numbered:
            inputs, labels = micro_batch(index, replica, data)
            loss = loss_function(run(running, inputs, BASE_SEED * (index + 2) if is_seeded else None), labels)
            share = int((labels != -100).sum()) / num_labels if by_tokens else 1 / len(numbered)
            (loss * share * num_replicas).backward()  # divided below, where replicas are averaged
            total += loss.item() * share
            if is_bf16:
                _move_gradients(run_with, masters)
        first += count
        for parameter in parameters:
            parameter.grad /= num_replicas
        result["losses"].append(total)
        if step == 0:
            result["gradients"] = {name: p.grad.clone() for name, p in masters.items()}
        result["norms"].append(float(torch.nn.utils.clip_grad_norm_(parameters, max_norm)))
        optimizer.step()
        optimizer.zero_grad()
        if is_bf16:
            for name, master in masters.items():
                run_with[name].data.copy_(master.data)
    result["weights"] = {name: p.detach().clone() for name, p in run_with.items()}
    return result


def _move_gradients(run_with: Mapping[str, nn.Parameter], masters: Mapping[str, nn.Parameter]) -> None:
    """Add the bf16 gradients of one micro-batch to those of the fp32 weights."""
    for name, parameter in run_with.items():
        assert parameter.grad is not None
        gradient = parameter.grad.float()
        masters[name].grad = gradient if masters[name].grad is None else masters[name].grad + gradient
        parameter.grad = None


def _evaluate(layers: Sequence[nn.Module], num_micro_batches: int) -> tuple[float, list[Tensor]]:
    """Return the mean loss of the evaluated micro-batches, and their logits."""
    losses, logits = [], []
    with torch.no_grad():
        for number in range(num_micro_batches):
            inputs, labels = micro_batch(FIRST_EVALUATED + number)
            outputs = run(layers, inputs)
            losses.append(loss_function(outputs, labels).item())
            logits.append(outputs[0])
    return sum(losses) / len(losses), logits
