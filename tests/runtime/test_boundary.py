"""Boundaries come apart and together again, and a changed structure is named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from pipeplan.errors import LaunchError
from pipeplan.runtime import boundary
from pipeplan.runtime.boundary import BoundarySpec

BOUNDARIES: dict[str, Any] = {
    "tensor": torch.zeros(2, 3, requires_grad=True),
    "tuple": (torch.zeros(2), torch.ones(1, dtype=torch.int64)),
    "nested": {"a": [None, torch.zeros(1)], "b": (torch.ones(2, dtype=torch.bool), "text", 3)},
    "constants first": (1, None, torch.zeros(2), "x", torch.ones(1)),
    "nothing": (None,),
}


@pytest.mark.parametrize("name", BOUNDARIES)
def test_split_and_join_give_the_boundary_back(name: str) -> None:
    """What a stage receives has the structure, the values and the constants that were sent, after encoding too."""
    spec, tensors = boundary.split(BOUNDARIES[name])
    spec = BoundarySpec.decode(spec.encode())
    found, found_tree = pytree.tree_flatten(spec.join(tensors))
    expected, expected_tree = pytree.tree_flatten(BOUNDARIES[name])
    assert found_tree == expected_tree
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other) if isinstance(other, torch.Tensor) else one == other


def test_only_tensors_with_gradient_become_leaves() -> None:
    """Inputs are cut from the sender's graph and take a gradient exactly where the sender's tensors do."""
    weight = torch.ones(2, requires_grad=True)
    spec, tensors = boundary.split((weight * 2, torch.ones(1, dtype=torch.int64), torch.ones(1)))
    leaves = boundary.detach_inputs(spec, tensors)
    assert [leaf.requires_grad for leaf in leaves] == [True, False, False]
    assert all(leaf.is_leaf for leaf in leaves)
    assert [one.shape for one in spec.gradient_tensors] == [(2,)]


@pytest.mark.parametrize(
    ("later", "says"),
    [
        (torch.zeros(2, 4, requires_grad=True), r"tensor 0 .* float32\[2, 4\], but it was float32\[2, 3\]"),
        (torch.zeros(2, 3), "float32\\[2, 3\\] without gradient, but it was float32\\[2, 3\\] in"),
        ((torch.zeros(2, 3), torch.zeros(1)), "another structure"),
    ],
)
def test_a_changed_boundary_is_named(later: Any, says: str) -> None:
    """The first micro-batch of another shape is refused, with stage, micro-batch, expected and found."""
    spec, _ = boundary.split(BOUNDARIES["tensor"])
    with pytest.raises(LaunchError, match=f"stage 1, micro-batch 2: .*{says}"):
        spec.check(boundary.split(later)[0], "stage 1, micro-batch 2")
