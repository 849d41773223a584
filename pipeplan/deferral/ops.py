"""The ops whose weight gradient can be deferred: their gradients, and how calls to them are recognised."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional


class Op(Protocol):
    """One kind of op ``output = op(data, weight) + bias``; gradients as autograd would compute them."""

    @property
    def casts_under_autocast(self) -> bool:
        """Whether autocast runs the op in its lower precision."""

    def output(self, data: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return what the op itself returns."""

    def data_gradient(self, gradient: Tensor, data: Tensor, weight: Tensor) -> Tensor:
        """Return the gradient of ``data``."""

    def weight_gradient(self, gradient: Tensor, data: Tensor, weight: Tensor) -> Tensor:
        """Return the gradient of ``weight``, of which only shape, dtype and layout are read."""

    def bias_gradient(self, gradient: Tensor) -> Tensor:
        """Return the gradient of the bias."""


@dataclass(frozen=True, slots=True)
class Call:
    """A recognised call, its operands sorted into data, weight and bias."""

    op: Op
    data: Tensor
    weight: Tensor
    bias: Tensor | None = None

    def can_defer(self, whole: Collection[Tensor] = ()) -> bool:
        """Whether the operands to be trained are parameters outside ``whole``, and all are ordinary tensors."""
        operands = (self.weight,) if self.bias is None else (self.weight, self.bias)
        trained = [operand for operand in operands if operand.requires_grad]
        return (
            bool(trained)
            and all(_is_plain(tensor) for tensor in (self.data, *operands))
            and all((parameter := _parameter_of(operand)) is not None and parameter not in whole for operand in trained)
        )


@dataclass(frozen=True, slots=True)
class _Linear:
    """``data @ weight.T + bias``, weight [out, in]."""

    casts_under_autocast = True

    def output(self, data: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return functional.linear(data, weight, bias)

    def data_gradient(self, gradient: Tensor, data: Tensor, weight: Tensor) -> Tensor:
        return gradient @ weight

    def weight_gradient(self, gradient: Tensor, data: Tensor, weight: Tensor) -> Tensor:
        return _product_of_rows(gradient, data, weight)

    def bias_gradient(self, gradient: Tensor) -> Tensor:
        return _rows(gradient).sum(0)


@dataclass(frozen=True, slots=True)
class _Matmul:
    """``data @ weight + bias``, weight [in, out]."""

    casts_under_autocast = True

    def output(self, data: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return data @ weight if bias is None else torch.addmm(bias, data, weight)

    def data_gradient(self, gradient: Tensor, data: Tensor, weight: Tensor) -> Tensor:
        return gradient @ weight.mT

    def weight_gradient(self, gradient: Tensor, data: Tensor, weight: Tensor) -> Tensor:
        return _product_of_rows(data, gradient, weight)

    def bias_gradient(self, gradient: Tensor) -> Tensor:
        return _rows(gradient).sum(0)


@dataclass(frozen=True, slots=True)
class _BatchedMatmul:
    """``data @ weight`` or ``weight @ data`` with batch dimensions that broadcast."""

    weight_is_left: bool

    casts_under_autocast = True

    def output(self, data: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return weight @ data if self.weight_is_left else data @ weight

    def data_gradient(self, gradient: Tensor, data: Tensor, weight: Tensor) -> Tensor:
        full = weight.mT @ gradient if self.weight_is_left else gradient @ weight.mT
        return full.sum_to_size(data.shape)

    def weight_gradient(self, gradient: Tensor, data: Tensor, weight: Tensor) -> Tensor:
        full = gradient @ data.mT if self.weight_is_left else data.mT @ gradient
        return full.sum_to_size(weight.shape)

    def bias_gradient(self, gradient: Tensor) -> Tensor:
        raise NotImplementedError("batched products have no bias")


@dataclass(frozen=True, slots=True)
class _GroupedMatmul:
    """Rows ``data[offsets[e-1]:offsets[e]] @ weight[e]`` for every expert e, weight [experts, in, out]."""

    offsets: Tensor

    casts_under_autocast = False

    def output(self, data: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return functional.grouped_mm(data, weight, offs=self.offsets)

    def data_gradient(self, gradient: Tensor, data: Tensor, weight: Tensor) -> Tensor:
        return functional.grouped_mm(gradient.contiguous(), weight.mT, offs=self.offsets)

    def weight_gradient(self, gradient: Tensor, data: Tensor, weight: Tensor) -> Tensor:
        gradient, data = gradient.contiguous(), data.contiguous()
        if weight.mT.is_contiguous():
            return functional.grouped_mm(gradient.mT, data, offs=self.offsets).mT
        return functional.grouped_mm(data.mT, gradient, offs=self.offsets)

    def bias_gradient(self, gradient: Tensor) -> Tensor:
        raise NotImplementedError("grouped products have no bias")


@dataclass(frozen=True, slots=True)
class _Convolution:
    """A convolution over one to three dimensions, weight [out, in / groups, ...]."""

    stride: list[int]
    padding: list[int]
    dilation: list[int]
    groups: int

    casts_under_autocast = True

    def output(self, data: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        no_output_padding = [0] * len(self.stride)
        return torch.convolution(
            data, weight, bias, self.stride, self.padding, self.dilation, False, no_output_padding, self.groups
        )

    def data_gradient(self, gradient: Tensor, data: Tensor, weight: Tensor) -> Tensor:
        return self._gradients(gradient, data, weight, 0)

    def weight_gradient(self, gradient: Tensor, data: Tensor, weight: Tensor) -> Tensor:
        return self._gradients(gradient, data, weight.to(gradient.dtype), 1)

    def bias_gradient(self, gradient: Tensor) -> Tensor:
        return gradient.sum([0, *range(2, gradient.dim())])

    def _gradients(self, gradient: Tensor, data: Tensor, weight: Tensor, wanted: int) -> Tensor:
        mask = [index == wanted for index in range(3)]
        gradients = torch.ops.aten.convolution_backward(
            gradient,
            data,
            weight,
            None,
            self.stride,
            self.padding,
            self.dilation,
            False,
            [0] * len(self.stride),
            self.groups,
            mask,
        )
        result: Tensor = gradients[wanted]
        return result


@dataclass(frozen=True, slots=True)
class _Embedding:
    """Rows of ``weight`` picked by integer ``data``."""

    padding_index: int
    scales_by_frequency: bool

    casts_under_autocast = False

    def output(self, data: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return torch.embedding(weight, data, self.padding_index, self.scales_by_frequency, False)

    def data_gradient(self, gradient: Tensor, data: Tensor, weight: Tensor) -> Tensor:
        raise NotImplementedError("indices have no gradient")

    def weight_gradient(self, gradient: Tensor, data: Tensor, weight: Tensor) -> Tensor:
        result: Tensor = torch.ops.aten.embedding_dense_backward(
            gradient, data, weight.shape[0], self.padding_index, self.scales_by_frequency
        )
        return result

    def bias_gradient(self, gradient: Tensor) -> Tensor:
        raise NotImplementedError("an embedding has no bias")


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def _product_of_rows(left: Tensor, right: Tensor, like: Tensor) -> Tensor:
    """Return ``left.T @ right`` over all rows, in the memory layout of ``like``.

    A transposed parameter view gets a transposed gradient, so that the parameter's own is contiguous and is not copied.
    """
    left, right = _rows(left), _rows(right)
    if like.mT.is_contiguous() and not like.is_contiguous():
        return torch.mm(right.t(), left).t()
    return torch.mm(left.t(), right)


def _recognise_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Call | None:  # noqa: A002
    return Call(_Linear(), input, weight, bias) if weight.dim() == 2 else None


def _recognise_product(input: Tensor, other: Tensor) -> Call | None:  # noqa: A002
    if _parameter_of(other) is not None:
        if other.dim() == 2 and input.dim() >= 1:
            return Call(_Matmul(), input, other)
        if other.dim() > 2 and input.dim() >= 2:
            return Call(_BatchedMatmul(weight_is_left=False), input, other)
    elif _parameter_of(input) is not None and input.dim() >= 2 and other.dim() >= 2:
        return Call(_BatchedMatmul(weight_is_left=True), other, input)
    return None


def _recognise_mm(input: Tensor, mat2: Tensor) -> Call | None:  # noqa: A002
    return _recognise_product(input, mat2)


def _recognise_reversed(input: Tensor, other: Tensor) -> Call | None:  # noqa: A002
    return _recognise_product(other, input)


def _recognise_addmm(
    input: Tensor,  # noqa: A002
    mat1: Tensor,
    mat2: Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> Call | None:
    if beta != 1 or alpha != 1 or input.shape != mat2.shape[1:]:
        return None
    return Call(_Matmul(), mat1, mat2, input)


def _recognise_grouped(
    mat_a: Tensor,
    mat_b: Tensor,
    *,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Call | None:
    if offs is None or bias is not None or out_dtype is not None or mat_a.dim() != 2 or mat_b.dim() != 3:
        return None
    return Call(_GroupedMatmul(offs), mat_a, mat_b)


def _recognise_convolution(
    input: Tensor,  # noqa: A002
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Iterable[int] = 1,
    padding: int | Iterable[int] | str = 0,
    dilation: int | Iterable[int] = 1,
    groups: int = 1,
) -> Call | None:
    num_dimensions = weight.dim() - 2
    if isinstance(padding, str) or input.dim() != weight.dim():
        return None

    def each(value: int | Iterable[int]) -> list[int]:
        values = [value] if isinstance(value, int) else list(value)
        return values * num_dimensions if len(values) == 1 else values

    return Call(_Convolution(each(stride), each(padding), each(dilation), groups), input, weight, bias)


def _recognise_embedding(
    input: Tensor,  # noqa: A002
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Call | None:
    if max_norm is not None or sparse:
        return None
    index = -1 if padding_idx is None else padding_idx % weight.shape[0]
    return Call(_Embedding(index, scale_grad_by_freq), input, weight)


RECOGNISERS: dict[Any, Callable[..., Call | None]] = {
    functional.linear: _recognise_linear,
    torch.matmul: _recognise_product,
    torch.Tensor.matmul: _recognise_product,
    torch.Tensor.__matmul__: _recognise_product,
    torch.Tensor.__rmatmul__: _recognise_reversed,
    torch.mm: _recognise_mm,
    torch.Tensor.mm: _recognise_mm,
    torch.bmm: _recognise_mm,
    torch.Tensor.bmm: _recognise_mm,
    torch.addmm: _recognise_addmm,
    torch.Tensor.addmm: _recognise_addmm,
    functional.conv1d: _recognise_convolution,
    functional.conv2d: _recognise_convolution,
    functional.conv3d: _recognise_convolution,
    functional.embedding: _recognise_embedding,
    functional.grouped_mm: _recognise_grouped,
    torch._grouped_mm: _recognise_grouped,
}

# Nodes that lie between a parameter and a view or a cast of it. They save no tensors, so that the path may be walked
# once by I (for another use of the view) and again by W.
_VIEW_NODES = frozenset(
    {
        "AliasBackward0",
        "ExpandBackward0",
        "PermuteBackward0",
        "ReshapeAliasBackward0",
        "SelectBackward0",
        "SliceBackward0",
        "SplitBackward0",
        "SplitWithSizesBackward0",
        "SqueezeBackward0",
        "SqueezeBackward1",
        "SqueezeBackward2",
        "TBackward0",
        "ToCopyBackward0",
        "TransposeBackward0",
        "UnbindBackward0",
        "UnsafeViewBackward0",
        "UnsqueezeBackward0",
        "ViewBackward0",
    }
)


def _parameter_of(tensor: Tensor) -> torch.nn.Parameter | None:
    """Return the trained parameter that ``tensor`` is, or is a view or cast of and of nothing else."""
    if not tensor.requires_grad:
        return None
    if tensor.is_leaf:
        return tensor if isinstance(tensor, torch.nn.Parameter) else None
    node = tensor.grad_fn
    while node is not None:
        if hasattr(node, "variable"):
            return node.variable if isinstance(node.variable, torch.nn.Parameter) else None
        if node.name() not in _VIEW_NODES:
            return None
        ((node, _),) = node.next_functions
    return None


def _is_plain(tensor: Tensor) -> bool:
    """Whether ``tensor`` is an ordinary or a fake tensor: no other subclass, nothing that vmap or grad wrapped."""
    is_known = type(tensor) in (Tensor, torch.nn.Parameter, FakeTensor)
    return is_known and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
