"""Attention as one op that real GPUs have a kernel for, whatever the model's own code would run on a CPU.

transformers lets its models' attention be exchanged by name. The one registered here knows shapes, causality and
window, which a mask would hide, and keeps for the backward what flash kernels keep.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

NAME = "pipeplan_estimate"


@torch.library.custom_op("pipeplan::attention", mutates_args=())
def attention(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, window: int) -> tuple[Tensor, Tensor]:
    """Return the attended values and the log-sum of each query's weights; shapes only, on fake tensors.

    Args:
        query: Shape (batch, heads, queries, width of a key); ``key`` and ``value`` may have fewer heads.
        window: Number of keys that a query sees; 0 for all.
    """
    raise NotImplementedError("runs on fake tensors only")


@attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, window: int) -> tuple[Tensor, Tensor]:
    batch, num_heads, num_queries, _ = query.shape
    if value.shape[-1] == query.shape[-1]:
        output = torch.empty_like(query)  # in its layout, as flash kernels do
    else:
        output = query.new_empty(batch, num_queries, num_heads, value.shape[-1]).transpose(1, 2)
    return output, query.new_empty(batch, num_heads, num_queries, dtype=torch.float32)


@torch.library.custom_op("pipeplan::attention_backward", mutates_args=())
def attention_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    log_sum: Tensor,
    is_causal: bool,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value; shapes only, on fake tensors."""
    raise NotImplementedError("runs on fake tensors only")


@attention_backward.register_fake
def _(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    log_sum: Tensor,
    is_causal: bool,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    query, key, value, ctx.is_causal, ctx.window = inputs
    ctx.save_for_backward(query, key, value, *output)


def _backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    gradients = attention_backward(gradient, *ctx.saved_tensors, ctx.is_causal, ctx.window)
    return *gradients, None, None


attention.register_autograd(_backward, setup_context=_setup_context)


def _forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Answer a model's call of its attention function; the mask is none of the model's own making."""
    is_causal = options.get("is_causal")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    window = options.get("sliding_window") or 0
    output, _ = attention(query, key, value, bool(is_causal), int(window))
    return output.transpose(1, 2).contiguous(), None


def register() -> None:
    """Make the op known to transformers under ``NAME``."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _forward)
    AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)
