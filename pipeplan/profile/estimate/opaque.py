"""Functions that real GPUs have one kernel for: counted by what they read and write, whatever runs on a CPU.

transformers marks them by a decorator that takes the kernel where its package is installed, and falls back to plain
torch where it isn't. The fallback would be counted op by op; Mamba-1's is a loop over the sequence, whose backward
moves bytes that grow with the square of its length.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from pipeplan.profile.estimate.kernels import Category
from pipeplan.profile.estimate.recorder import OpRecorder
from pipeplan.profile.held import tensors_in

_DECORATOR = "use_kernel_func_from_hub_with_fallback."


class FusedFunctions:
    """Exchanges the marked functions of a model; remembers what they return for operands of the same sizes."""

    def __init__(self) -> None:
        self._results: dict[tuple[Any, ...], Any] = {}

    @contextmanager
    def exchanged(self, module: nn.Module, recorder: OpRecorder | None = None) -> Iterator[None]:
        """Let the classes of ``module`` call opaque ops instead of their marked functions, inside this context."""
        replaced: list[tuple[dict[str, Any], str, Any]] = []
        homes = {type(part).__module__ for part in module.modules()}
        for home in sorted(homes):
            names = vars(sys.modules[home])
            for name, value in list(names.items()):
                if inspect.isfunction(value) and _is_marked(value):
                    replaced.append((names, name, value))
                    names[name] = self._opaque(value, recorder)
        try:
            yield
        finally:
            for names, name, value in replaced:
                names[name] = value

    def _opaque(self, function: Callable[..., Any], recorder: OpRecorder | None) -> Callable[..., Any]:
        is_scan = "conv" not in function.__name__

        def run(*args: Any, **kwargs: Any) -> Any:
            described = self._described(function, args, kwargs)
            if described is None:
                return None  # a kernel for more than this function; the model goes on to the single ones
            operands = tensors_in((args, kwargs))
            shapes, structure = pytree.tree_flatten(described)
            outputs = _Opaque.apply(function.__name__, is_scan, recorder, shapes, *operands)
            return pytree.tree_unflatten(outputs, structure)

        return run

    def _described(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Return what ``function`` returns, as tensors on the meta device; floats in the type of its first operand.

        The fallbacks return some results in fp32, the kernels none.
        """
        leaves, structure = pytree.tree_flatten((args, kwargs))
        key = (
            function,
            str(structure),
            *((leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves),
        )
        if key not in self._results:
            with _disable_current_modes(), torch.no_grad():
                on_meta = [
                    torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
                    if isinstance(leaf, Tensor)
                    else leaf
                    for leaf in leaves
                ]
                first = next(leaf for leaf in on_meta if isinstance(leaf, Tensor))
                meta_args, meta_kwargs = pytree.tree_unflatten(on_meta, structure)
                self._results[key] = pytree.tree_map_only(
                    Tensor,
                    lambda tensor: tensor.to(first.dtype) if tensor.is_floating_point() else tensor,
                    function(*meta_args, **meta_kwargs),
                )
        return self._results[key]


def _is_marked(function: Callable[..., Any]) -> bool:
    current: Any = function
    while inspect.isfunction(current):
        if current.__code__.co_qualname.startswith(_DECORATOR):
            return True
        current = getattr(current, "__wrapped__", None)
    return False


class _Opaque(torch.autograd.Function):
    """One op of given results; its backward reads operands, results and their gradients, and writes gradients."""

    @staticmethod
    def forward(
        ctx: Any, name: str, is_scan: bool, recorder: OpRecorder | None, shapes: list[Any], *operands: Tensor
    ) -> tuple[Any, ...]:
        outputs = tuple(
            operands[0].new_empty(shape.shape, dtype=shape.dtype) if isinstance(shape, Tensor) else shape
            for shape in shapes
        )
        results = [value for value in outputs if isinstance(value, Tensor)]
        # a scan's backward starts from its results, a convolution's computes them again
        ctx.save_for_backward(*operands, *(results if is_scan else ()))
        ctx.name, ctx.is_scan, ctx.recorder, ctx.num_operands = name, is_scan, recorder, len(operands)
        if recorder is not None:
            recorder.add(name, Category.SCAN_FORWARD if is_scan else Category.MEMORY, operands, results)
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        operands = saved[: ctx.num_operands]
        results = tuple(
            torch.empty_like(operand) if needed else None
            for operand, needed in zip(operands, ctx.needs_input_grad[4:], strict=True)
        )
        if ctx.recorder is not None:
            category = Category.SCAN_BACKWARD if ctx.is_scan else Category.MEMORY
            ctx.recorder.add(f"{ctx.name}_backward", category, (saved, gradients), results)
        return (None, None, None, None, *results)
