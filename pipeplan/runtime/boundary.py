"""What one stage hands to the next: any pytree of tensors, taken apart into messages and put together again."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from pipeplan.errors import LaunchError


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype of one tensor of a boundary, and whether a gradient comes back for it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        return f"{name}{list(self.shape)}{'' if self.requires_grad else ' without gradient'}"


@dataclass(frozen=True, slots=True)
class BoundarySpec:
    """The structure of a boundary, exchanged once and checked afterwards.

    Attributes:
        tree: Structure of the pytree, leaves in its order.
        tensors: One entry a tensor leaf.
        constants: Leaves that are no tensors, keyed by their position among all leaves.
    """

    tree: pytree.TreeSpec
    tensors: tuple[TensorSpec, ...]
    constants: tuple[tuple[int, Any], ...]

    @property
    def gradient_tensors(self) -> tuple[TensorSpec, ...]:
        """The tensors that a gradient comes back for."""
        return tuple(tensor for tensor in self.tensors if tensor.requires_grad)

    def encode(self) -> bytes:
        """Return bytes that ``decode`` reads on another rank of the same job."""
        return pickle.dumps(self)

    @staticmethod
    def decode(content: bytes) -> BoundarySpec:
        """Return the spec that ``encode`` wrote."""
        spec = pickle.loads(content)
        assert isinstance(spec, BoundarySpec)
        return spec

    def join(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return the boundary of the given tensors."""
        if not self.constants and len(tensors) == 1 and self.tree.is_leaf():
            return tensors[0]
        leaves: list[Any] = list(tensors)
        for position, value in self.constants:
            leaves.insert(position, value)
        return pytree.tree_unflatten(leaves, self.tree)

    def check(self, found: BoundarySpec, where: str) -> None:
        """Check that a later boundary has the structure of the first.

        Raises:
            LaunchError: Names the first tensor that differs.
        """
        if found == self:
            return
        if len(found.tensors) == len(self.tensors):
            for index, (one, other) in enumerate(zip(self.tensors, found.tensors, strict=True)):
                if one != other:
                    raise LaunchError(
                        f"{where}: tensor {index} of the boundary is {other}, but it was {one} in the first batch; "
                        "pad the micro-batches to one length, or build the module with dynamic_shapes=True"
                    )
        raise LaunchError(
            f"{where}: the boundary has another structure than in the first batch; return the same structure with "
            "the same values that aren't tensors for every micro-batch"
        )


def split(boundary: Any) -> tuple[BoundarySpec, list[torch.Tensor]]:
    """Return the structure of a boundary and its tensors."""
    if isinstance(boundary, torch.Tensor):  # the common case, without the walk
        return BoundarySpec(_LEAF, (_tensor_spec(boundary),), ()), [boundary]
    leaves, tree = pytree.tree_flatten(boundary)
    tensors: list[torch.Tensor] = []
    constants: list[tuple[int, Any]] = []
    for position, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            tensors.append(leaf)
        else:
            constants.append((position, leaf))
    return BoundarySpec(tree, tuple(_tensor_spec(tensor) for tensor in tensors), tuple(constants)), tensors


def detach_inputs(spec: BoundarySpec, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors cut from the graph that made them; those that take a gradient are new leaves."""
    return [
        tensor.detach().requires_grad_(wanted.requires_grad)
        for wanted, tensor in zip(spec.tensors, tensors, strict=True)
    ]


_LEAF = pytree.tree_structure(0)


def _tensor_spec(tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
