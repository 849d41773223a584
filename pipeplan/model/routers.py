"""Router logits of mixture-of-experts layers, which a loss over all layers reads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

_MARK = "_pipeplan_router_index"


def mark_routers(layer: nn.Module, recorders: Any) -> None:
    """Mark the modules of a decoder layer whose output holds router logits.

    Args:
        recorders: What the model class says of them: the entry ``router_logits`` of ``_can_record_outputs``, a
            module class, or an object with ``target_class``, ``index`` and ``layer_name``, or a list of those.
    """
    for recorder in recorders if isinstance(recorders, list) else [recorders]:
        target = getattr(recorder, "target_class", recorder)
        index = getattr(recorder, "index", 1)  # transformers' own default for a plain class
        needed = getattr(recorder, "layer_name", None)
        if not isinstance(target, type):
            continue
        for name, module in layer.named_modules():
            if isinstance(module, target) and (needed is None or f".{needed.strip('.')}." in f".{name}."):
                module.__dict__[_MARK] = index


@contextmanager
def record_router_logits(layer: nn.Module) -> Iterator[list[Tensor]]:
    """Collect the router logits of one forward of ``layer``, in calling order."""
    logits: list[Tensor] = []

    def record(module: nn.Module, args: Any, output: Any) -> None:
        found = output[module.__dict__[_MARK]] if isinstance(output, tuple) else output
        if found is not None:
            logits.append(found)

    handles = [module.register_forward_hook(record) for module in layer.modules() if _MARK in module.__dict__]
    try:
        yield logits
    finally:
        for handle in handles:
            handle.remove()
