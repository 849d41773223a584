"""Floating-point operations of matrix products, exact, by aten op; two to a multiplication and addition."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from pipeplan.profile.estimate.kernels import Category

Work = tuple[Category, int]


def matrix_work(name: str, args: Sequence[Any], output: Any) -> Work | None:
    """Return category and FLOPs of an op that multiplies matrices, ``None`` for any other op.

    Args:
        name: The op's overload packet, such as ``aten.mm``.
    """
    formula = _FORMULAS.get(name)
    return None if formula is None else formula(args, output)


def attended_pairs(num_queries: int, num_keys: int, *, is_causal: bool, window: int | None) -> float:
    """Return how many query-key pairs attention computes: the area of the mask.

    A causal mask halves the square; a window of w keys leaves a band below the diagonal.
    """
    if not is_causal:
        return float(num_queries * num_keys)
    width = num_keys if window is None else min(window, num_keys)
    return num_queries * width - min(num_queries, width) * width / 2 if width else 0.0


def attention_flops(
    query: Tensor, value: Tensor, num_keys: int, *, is_causal: bool, window: int | None, is_backward: bool
) -> int:
    """Return the FLOPs of attention, the scores computed once more in the backward, as fused kernels do.

    Args:
        query: Shape (batch, heads, queries, width of a key).
        value: Shape (batch, heads or fewer, keys, width of a value).
    """
    batch, num_heads, num_queries, key_width = query.shape
    pairs = batch * num_heads * attended_pairs(num_queries, num_keys, is_causal=is_causal, window=window)
    if is_backward:  # scores, gradients of queries and keys; gradients of values and of scores
        return round(2 * pairs * (3 * key_width + 2 * value.shape[-1]))
    return round(2 * pairs * (key_width + value.shape[-1]))


def _product(left: Tensor, right: Tensor) -> Work:
    return Category.GEMM, 2 * left.numel() * right.shape[-1]


def _grouped(args: Sequence[Any], output: Any) -> Work:
    left, right = args[0], args[1]
    if left.dim() == 3 and right.dim() == 2:  # each group takes its columns of the right operand
        return Category.GROUPED_GEMM, 2 * left.shape[1] * right.numel()
    # rows of the left operand, or of both, fall to one group each: every element meets one matrix
    return Category.GROUPED_GEMM, 2 * left.numel() * right.shape[-1]


def _grouped_backward(args: Sequence[Any], output: Any) -> Work:
    category, flops = _grouped(args, output)
    return category, 2 * flops  # the gradients of both operands


def _convolution_work(data: Tensor, weight: Tensor, gradient_or_output: Tensor, groups: int, *, times: int) -> Work:
    flops = 2 * gradient_or_output.numel() * math.prod(weight.shape[1:]) * times
    is_depthwise = groups == data.shape[1]
    return (Category.MEMORY if is_depthwise else Category.GEMM), flops


def _convolution(args: Sequence[Any], output: Any) -> Work:
    return _convolution_work(args[0], args[1], output, args[8], times=1)


def _convolution_backward(args: Sequence[Any], output: Any) -> Work:
    gradient, data, weight, groups, mask = args[0], args[1], args[2], args[9], args[10]
    return _convolution_work(data, weight, gradient, groups, times=int(mask[0]) + int(mask[1]))


def _flash_for_cpu(args: Sequence[Any], output: Any) -> Work:
    query, key, value = args[0], args[1], args[2]
    is_causal = bool(args[4]) if len(args) > 4 else False
    flops = attention_flops(query, value, key.shape[2], is_causal=is_causal, window=None, is_backward=False)
    return Category.ATTENTION_FORWARD, flops


def _flash_for_cpu_backward(args: Sequence[Any], output: Any) -> Work:
    query, key, value, is_causal = args[1], args[2], args[3], bool(args[7])
    flops = attention_flops(query, value, key.shape[2], is_causal=is_causal, window=None, is_backward=True)
    return Category.ATTENTION_BACKWARD, flops


def _attention(args: Sequence[Any], output: Any) -> Work:
    query, key, value, is_causal, window = args
    flops = attention_flops(query, value, key.shape[2], is_causal=is_causal, window=window or None, is_backward=False)
    return Category.ATTENTION_FORWARD, flops


def _attention_backward(args: Sequence[Any], output: Any) -> Work:
    _, query, key, value, _, _, is_causal, window = args
    flops = attention_flops(query, value, key.shape[2], is_causal=is_causal, window=window or None, is_backward=True)
    return Category.ATTENTION_BACKWARD, flops


_FORMULAS: dict[str, Callable[[Sequence[Any], Any], Work]] = {
    "aten.mm": lambda args, output: _product(args[0], args[1]),
    "aten.bmm": lambda args, output: _product(args[0], args[1]),
    "aten.addmm": lambda args, output: _product(args[1], args[2]),
    "aten.baddbmm": lambda args, output: _product(args[1], args[2]),
    "aten._grouped_mm": _grouped,
    "transformers.grouped_mm_fallback": _grouped,
    "transformers.grouped_mm_fallback_backward": _grouped_backward,
    "aten.convolution": _convolution,
    "aten.convolution_backward": _convolution_backward,
    "pipeplan.attention": _attention,
    "pipeplan.attention_backward": _attention_backward,
    "aten._scaled_dot_product_flash_attention_for_cpu": _flash_for_cpu,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": _flash_for_cpu_backward,
}
