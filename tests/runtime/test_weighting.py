"""How much a micro-batch's loss counts."""

from __future__ import annotations

import pytest
import torch

from pipeplan.errors import LaunchError
from pipeplan.runtime.weighting import count_labels, counter_of, micro_batch_weights


def test_labels_that_count() -> None:
    """All but -100, over every tensor of the labels."""
    assert count_labels(torch.tensor([[1, -100], [-100, 0]])) == 2
    assert count_labels({"a": torch.tensor([1, -100]), "b": (torch.tensor([-100]), None)}) == 1


def test_weights_are_one_on_average() -> None:
    """They are proportional to the counts; without any label nothing counts."""
    weights = micro_batch_weights([3, 0, 1], group=None, num_replicas=1, device=torch.device("cpu"))
    assert weights == pytest.approx([9 / 4, 0, 3 / 4])
    assert micro_batch_weights([0, 0], group=None, num_replicas=1, device=torch.device("cpu")) == [0, 0]


def test_reductions() -> None:
    """The names, a function of one's own, and what is neither."""
    assert counter_of("micro-batches") is None
    assert counter_of("tokens") is count_labels
    assert counter_of(len) is len
    with pytest.raises(LaunchError, match="loss_reduction is 'token'; use 'micro-batches'"):
        counter_of("token")
