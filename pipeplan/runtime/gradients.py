"""Gradients where DeepSpeed accumulates them, and their norm over all parameters of all ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from deepspeed import comm as dist
from torch import nn

from pipeplan.errors import LaunchError


def global_gradient_norm(parameters: Iterable[nn.Parameter], group: Any, device: torch.device) -> torch.Tensor:
    """Return the 2-norm over the gradients of all ranks of ``group``, in fp32; collective.

    Copies of tied weights (``ds_pipe_replicated``) count on one rank only, so that the norm is the one of the model
    whatever the placement.
    """
    norms = [
        torch.linalg.vector_norm(parameter.grad, dtype=torch.float32)
        for parameter in parameters
        if parameter.grad is not None and not getattr(parameter, "ds_pipe_replicated", False)
    ]
    square = torch.stack(norms).square().sum() if norms else torch.zeros((), device=device)
    dist.all_reduce(square, group=group)
    return square.sqrt()


def scale_gradients(parameters: Iterable[nn.Parameter], norm: torch.Tensor, max_norm: float) -> None:
    """Scale the gradients so that their global norm is at most ``max_norm``, as ``clip_grad_norm_`` does."""
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if gradients:
        torch._foreach_mul_(gradients, factor)


def accumulated_gradient(weight: nn.Parameter, *, optimizer: Any, is_bf16: bool) -> torch.Tensor:
    """Return the tensor that the gradient of ``weight`` is accumulated in, zeros where it got none.

    Args:
        is_bf16: Whether the optimizer is DeepSpeed's for bf16 with fp32 accumulation.

    Raises:
        LaunchError: That optimizer has none for it.
    """
    attribute = "grad"
    if is_bf16:
        attribute = "_hp_grad"
    elif getattr(optimizer, "use_grad_accum_attribute", False):
        attribute = "grad_accum"
    gradient = getattr(weight, attribute, None)
    if gradient is None:
        if is_bf16:
            raise LaunchError("a tied weight got no gradient on this rank; use it in the loss, or freeze it")
        gradient = torch.zeros_like(weight)
        setattr(weight, attribute, gradient)
    return gradient
