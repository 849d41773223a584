"""The function mode that sends weight gradients to a store."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

from pipeplan.deferral.ops import RECOGNISERS, Call
from pipeplan.deferral.store import Stashed, WeightGradientStore


class defer_weight_gradients(TorchFunctionMode):  # noqa: N801  used as a context manager, like torch.no_grad
    """Inside this context, weight gradients of ``key`` go to ``store`` instead of the parameters.

    Wrap the forward, and the backward as well: recomputation runs the forward again inside it. In no-grad code
    nothing changes.

    Args:
        whole: Parameters whose gradients are computed in I, for layers that are not to be split; the same for the
            forward and the backward of a key.
    """

    def __init__(self, store: WeightGradientStore, key: Hashable, whole: Collection[Tensor] = ()) -> None:
        super().__init__()
        self._store = store
        self._key = key
        self._whole = frozenset(whole)  # tensors hash by identity

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.backward:
            kwargs = {"grad_tensors" if name == "gradient" else name: value for name, value in kwargs.items()}
            func = torch.autograd.backward
        if func is torch.autograd.backward:
            # A mode is off inside its own handler, and so would be for recomputation during this backward.
            with self:
                return _backward(*args, **kwargs)
        recognise = RECOGNISERS.get(func)
        if recognise is not None and torch.is_grad_enabled():
            try:
                call = recognise(*args, **kwargs)
            except TypeError:  # a form of the call that we don't know, such as out=
                call = None
            if call is not None and call.can_defer(self._whole):
                data = _autocast(call.data) if call.op.casts_under_autocast else call.data
                return _Deferred.apply(
                    _anchor(data), data, call.weight.detach(), _detached(call.bias), call, self._store, self._key
                )
        return func(*args, **kwargs)


def _backward(
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    """Run a backward under the active mode.

    Gradient edges instead of tensors keep torch from handing the call back to the mode, which would switch it off.
    """
    outputs = _as_tuple(tensors)
    gradients = (None,) * len(outputs) if grad_tensors is None else _as_tuple(grad_tensors)
    torch.autograd.backward(
        [_edge(output) for output in outputs],
        [
            torch.ones_like(output)
            if gradient is None and isinstance(output, Tensor) and output.numel() == 1
            else gradient
            for output, gradient in zip(outputs, gradients, strict=True)
        ],
        retain_graph,
        create_graph,
        inputs=None if inputs is None else [_edge(value) for value in _as_tuple(inputs)],
    )


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (list, tuple)) and not isinstance(value, GradientEdge) else (value,)


def _edge(value: Any) -> Any:
    return get_gradient_edge(value) if isinstance(value, Tensor) else value


class _Deferred(torch.autograd.Function):
    """The op itself in the forward; its data gradient in the backward, the rest stashed.

    The weight enters detached, or autograd would visit its accumulation node in I and fire hooks there. The anchor
    is an empty tensor that requires grad: with it the output requires grad even where the data does not.
    """

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        data: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        call: Call,
        store: WeightGradientStore,
        key: Hashable,
    ) -> Tensor:
        ctx.save_for_backward(data, weight)
        ctx.set_materialize_grads(False)
        ctx.op, ctx.weight, ctx.bias = call.op, call.weight, call.bias  # not ``call``: it holds the uncast data
        ctx.store, ctx.key = store, key
        output = call.op.output(data, weight, bias)
        if output._is_view():  # in-place ops on a view made inside a Function are refused
            output = torch.ops.aten._unsafe_view(output, output.shape)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        if gradient is None:
            return (None,) * 7
        data, weight = ctx.saved_tensors
        data_gradient = None
        if ctx.needs_input_grad[1]:
            data_gradient = ctx.op.data_gradient(gradient, data, weight.to(gradient.dtype))
        ctx.store.add(
            ctx.key,
            Stashed(ctx.op, data.detach(), gradient.detach(), ctx.weight, ctx.bias, data._version),
        )
        return None, data_gradient, None, None, None, None, None


def _autocast(data: Tensor) -> Tensor:
    """Return ``data`` in the dtype that autocast would run the op in, so that the cast copy is what is saved."""
    kind = data.device.type
    if not torch.is_autocast_enabled(kind) or not data.is_floating_point():
        return data
    return data.to(torch.get_autocast_dtype(kind))


def _detached(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach()


def _anchor(data: Tensor) -> Tensor:
    """Return an empty tensor that requires grad, on the device of ``data`` so that I stays on its stream."""
    return torch.empty(0, device=data.device, requires_grad=True)
