"""Routing tokens to experts by rule instead of by random weights, so that what an expert layer costs is defined."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_KIND = "moe"


def routes_tokens(kind: str) -> bool:
    """Return whether a layer of this kind has experts."""
    return _KIND in kind.split("+")


def chosen_experts(num_tokens: int, num_experts: int, num_chosen: int, *, is_skewed: bool) -> Tensor:
    """Return the experts of every token, [num_tokens, num_chosen].

    Balanced: every expert gets as many tokens as any other, give or take one. Skewed: every second token goes to the
    first experts, so that these get half of all tokens and their balanced share of the rest.
    """
    tokens = torch.arange(num_tokens).unsqueeze(1)
    experts = torch.arange(num_chosen).unsqueeze(0)
    balanced = (tokens * num_chosen + experts) % num_experts
    return torch.where(tokens % 2 == 0, experts, balanced) if is_skewed else balanced


def routed(layer: Callable[[Any], Any], *, is_skewed: bool) -> Callable[[Any], Any]:
    """Return ``layer`` with its tokens routed by rule, whatever its router says; also when it is recomputed."""

    def run(inputs: Any) -> Any:
        with _routing(is_skewed):
            return layer(inputs)

    return run


class _ChosenScores(torch.autograd.Function):
    """Scores at given indices; keeps the indices alone, as ``topk`` does, where ``gather`` keeps the scores too."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, indices: Tensor) -> Tensor:
        ctx.save_for_backward(indices)
        ctx.shape = scores.shape
        return scores.gather(-1, indices)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (indices,) = ctx.saved_tensors
        return gradient.new_zeros(ctx.shape).scatter(-1, indices, gradient), None


def _chosen_scores(scores: Tensor, indices: Tensor) -> Tensor:
    found: Tensor = _ChosenScores.apply(scores, indices)
    return found


@contextmanager
def _routing(is_skewed: bool) -> Iterator[None]:
    """Replace what ``topk`` chooses: it is how routers of every family pick experts.

    Patched and not intercepted by a mode, which would slow down every other call that is being timed.
    """
    original, original_method = torch.topk, Tensor.topk

    def topk(scores: Tensor, k: int, dim: int = -1, *others: Any, **options: Any) -> Any:
        if scores.dim() < 2 or dim not in (-1, scores.dim() - 1):
            return original(scores, k, dim, *others, **options)
        num_experts = scores.shape[-1]
        chosen = chosen_experts(scores.numel() // num_experts, num_experts, k, is_skewed=is_skewed)
        indices = chosen.reshape(*scores.shape[:-1], k).to(scores.device)
        return torch.return_types.topk((_chosen_scores(scores, indices), indices))

    torch.topk, Tensor.topk = topk, topk  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        torch.topk, Tensor.topk = original, original_method  # type: ignore[method-assign]
