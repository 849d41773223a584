"""Routing by rule, on its own and in a real model with experts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from pipeplan.model.source import open_model
from pipeplan.profile.held import activation_bytes
from pipeplan.profile.measure import measure_profile
from pipeplan.profile.routing import chosen_experts, routed, routes_tokens
from tests.profile.test_measure import ONCE

torch.set_num_threads(1)


def test_balanced_and_skewed_loads() -> None:
    """Balanced: equal loads. Skewed: half of all tokens for the first experts, beside their share of the rest."""
    balanced = torch.bincount(chosen_experts(64, 8, 2, is_skewed=False).flatten(), minlength=8)
    assert balanced.tolist() == [16] * 8
    skewed = torch.bincount(chosen_experts(64, 8, 2, is_skewed=True).flatten(), minlength=8)
    assert skewed.sum() == 128
    assert skewed[0] >= 32 and skewed[1] >= 32
    for is_skewed in (False, True):
        assert all(len(set(row)) == 2 for row in chosen_experts(64, 8, 2, is_skewed=is_skewed).tolist())


def test_a_router_is_overruled_inside_the_layer_alone() -> None:
    """Values belong to the chosen experts and keep their gradient; outside, topk is torch's own."""
    scores = torch.rand(6, 4, requires_grad=True)
    values, indices = routed(lambda inputs: inputs.topk(2, dim=-1), is_skewed=False)(scores)
    assert torch.equal(indices, chosen_experts(6, 4, 2, is_skewed=False))
    assert torch.equal(values, scores.gather(1, indices))
    assert values.requires_grad
    assert torch.equal(scores.topk(2).values, torch.sort(scores, descending=True).values[:, :2])


def test_an_overruled_router_keeps_and_gives_back_what_its_own_would() -> None:
    """The bytes that torch's topk keeps for its backward, and a gradient for the chosen scores alone."""

    def layer(scores: torch.Tensor) -> torch.Tensor:
        values, indices = (2 * scores).topk(2, dim=-1)
        return values * indices

    def kept(run: Callable[[torch.Tensor], torch.Tensor]) -> int:
        return activation_bytes(run, lambda: torch.rand(6, 4, requires_grad=True), keeps_inputs=False)

    assert kept(routed(layer, is_skewed=False)) == kept(layer)
    scores = torch.rand(6, 4, requires_grad=True)
    values, indices = routed(lambda inputs: inputs.topk(2, dim=-1), is_skewed=True)(scores)
    (3 * values).sum().backward()
    assert torch.equal(scores.grad, torch.zeros(6, 4).scatter(1, indices, 3.0))


@pytest.mark.parametrize(("kind", "expected"), [("moe", True), ("attention+moe", True), ("mlp", False)])
def test_kinds_with_experts(kind: str, expected: bool) -> None:
    """The kind of a layer says whether it routes."""
    assert routes_tokens(kind) is expected


def test_expert_layers_note_uneven_routing() -> None:
    """In a profile of tiny-jamba exactly the layers with experts say what uneven routing costs, with every op."""
    profile = measure_profile(open_model("tiny-jamba"), micro_batch_size=1, sequence_length=16, budget=ONCE)
    for layer in profile.layers:
        notes = profile.extra["layers"][layer.name]
        assert ("skewed_routing_ms" in notes) == routes_tokens(layer.kind)
        if routes_tokens(layer.kind):
            assert notes["skewed_routing_ms"]["cpu"].keys() == {"F", "B", "I", "W"}
    assert any(routes_tokens(layer.kind) for layer in profile.layers)
