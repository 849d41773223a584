"""Recomputation of one layer, for boundaries that are any pytree of tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from pipeplan.runtime import boundary
from pipeplan.runtime.boundary import BoundarySpec


def recompute(layer: Callable[[Any], Any], inputs: Any, *, is_reentrant: bool) -> Any:
    """Run ``layer`` on ``inputs``; what it computes on the way is computed again in the backward.

    Args:
        is_reentrant: Use torch's older way, which runs a backward inside the backward. It sees plain tensors only, so
            the boundary is taken apart for it; and it forgets the layer's weights unless an input takes a gradient
            (token ids don't), so it is given one that does.
    """
    if not is_reentrant:
        return checkpoint(layer, inputs, use_reentrant=False)
    spec, tensors = boundary.split(inputs)
    made: list[BoundarySpec] = []

    def run(_: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        made_spec, outputs = boundary.split(layer(spec.join(tensors)))
        made.append(made_spec)
        return tuple(outputs)

    anchor = torch.zeros(0, requires_grad=True)
    outputs = checkpoint(run, anchor, *tensors, use_reentrant=True)
    return made[0].join(outputs)
