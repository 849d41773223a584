"""Where input halves leave what weight halves need, and the weight half itself."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from pipeplan.deferral.ops import Op


@dataclass(slots=True)
class Stashed:
    """What the weight gradients of one call are computed from."""

    op: Op
    data: Tensor
    gradient: Tensor
    weight: Tensor
    bias: Tensor | None
    data_version: int

    def contributions(self) -> list[tuple[Tensor, Callable[[], Tensor]]]:
        """Return the tensors that want a gradient, each with the function that computes it."""
        found: list[tuple[Tensor, Callable[[], Tensor]]] = []
        if self.weight.requires_grad:
            found.append((self.weight, self.weight_gradient))
        if self.bias is not None and self.bias.requires_grad:
            found.append((self.bias, self.bias_gradient))
        return found

    def weight_gradient(self) -> Tensor:
        """Compute the gradient of the weight.

        Raises:
            RuntimeError: The data was modified in place since the input half.
        """
        if self.data._version != self.data_version:
            raise RuntimeError(
                "an input that a deferred weight gradient needs was modified in place between I and W; "
                "don't reuse receive buffers before W"
            )
        return self.op.weight_gradient(self.gradient, self.data, self.weight.detach())

    def bias_gradient(self) -> Tensor:
        """Compute the gradient of the bias."""
        return self.op.bias_gradient(self.gradient)


class WeightGradientStore:
    """Holds what the weight gradients of finished input halves are computed from, by key (stage, micro-batch)."""

    def __init__(self) -> None:
        self._stashed_by_key: dict[Hashable, list[Stashed]] = {}

    @property
    def pending_keys(self) -> tuple[Hashable, ...]:
        """Keys whose W has not run, oldest first; none at the end of a batch, or gradients were lost."""
        return tuple(self._stashed_by_key)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._stashed_by_key

    def run(self, key: Hashable) -> None:
        """Compute the weight gradients of ``key``, accumulate them into the parameters and free what they held.

        Does nothing when the backward of ``key`` deferred nothing.
        """
        contributions_by_target = self._take(key)
        if not contributions_by_target:
            return
        # The gradients are computed inside backward nodes, one a parameter: the engine then holds the only
        # reference and AccumulateGrad keeps the new tensor as .grad. Passing ready gradients to backward() makes
        # it copy every one of them, and all of them would be alive at once.
        with torch.enable_grad():
            roots = [_WeightGradient.apply(target, parts) for target, parts in contributions_by_target.values()]
        contributions_by_target.clear()
        torch.autograd.backward(roots, [root.detach() for root in roots])

    def gradients(self, key: Hashable) -> list[Tensor]:
        """Compute the weight gradients of ``key`` as ``run`` does, but return them instead of accumulating them."""
        with torch.no_grad():
            return [_total(parts) for _, parts in self._take(key).values()]

    def _take(self, key: Hashable) -> dict[int, tuple[Tensor, list[Callable[[], Tensor]]]]:
        """Forget what ``key`` holds but for what computes its gradients: by tensor, the parts of its gradient."""
        contributions_by_target: dict[int, tuple[Tensor, list[Callable[[], Tensor]]]] = {}
        stashed = self._stashed_by_key.pop(key, [])
        for entry in stashed:
            for target, gradient in entry.contributions():
                contributions_by_target.setdefault(id(target), (target, []))[1].append(gradient)
        stashed.clear()
        return contributions_by_target

    def discard(self, key: Hashable) -> None:
        """Forget what ``key`` holds without computing its gradients."""
        self._stashed_by_key.pop(key, None)

    def held_bytes(self, key: Hashable) -> int:
        """Return the bytes that ``key`` holds from I to W: distinct storages of stashed data and gradients."""
        return storage_bytes(self.held_tensors(key))

    def held_tensors(self, key: Hashable) -> list[Tensor]:
        """Return the stashed data and gradients of ``key``; several may share a storage."""
        stashed = self._stashed_by_key.get(key, [])
        return [tensor for entry in stashed for tensor in (entry.data, entry.gradient)]

    def add(self, key: Hashable, entry: Stashed) -> None:
        """Keep what one op of the backward of ``key`` leaves for W."""
        self._stashed_by_key.setdefault(key, []).append(entry)


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the distinct storages behind living ``tensors``; a view or an expanded one adds nothing."""
    bytes_by_storage = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        bytes_by_storage[storage._cdata] = storage.nbytes()  # fake tensors have no address
    return sum(bytes_by_storage.values())


class _WeightGradient(torch.autograd.Function):
    """A root of W: its backward computes the gradient of one weight and hands it to the engine."""

    @staticmethod
    def forward(ctx: Any, target: Tensor, contributions: list[Callable[[], Tensor]]) -> Tensor:
        ctx.contributions = contributions
        return target.new_empty(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return _total(ctx.contributions), None


def _total(contributions: list[Callable[[], Tensor]]) -> Tensor:
    """Add up the parts of one gradient, each forgotten as soon as it is computed."""
    total = contributions.pop(0)()
    while contributions:
        total.add_(contributions.pop(0)())
    return total
