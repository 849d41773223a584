"""How much each micro-batch's loss counts in the loss of the batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from deepspeed import comm as dist
from torch.utils import _pytree as pytree

from pipeplan.errors import LaunchError

IGNORED_LABEL = -100  # torch's own default: cross-entropy leaves these out

MICRO_BATCHES = "micro-batches"
TOKENS = "tokens"

CountLabels = Callable[[Any], Any]
LossReduction = str | CountLabels


def count_labels(labels: Any) -> int:
    """Return how many labels count: those other than -100."""
    return sum(
        int((leaf != IGNORED_LABEL).sum()) for leaf in pytree.tree_leaves(labels) if isinstance(leaf, torch.Tensor)
    )


def counter_of(reduction: LossReduction) -> CountLabels | None:
    """Return what counts a micro-batch's labels; ``None`` where every micro-batch counts the same.

    Raises:
        LaunchError: It is no reduction.
    """
    if callable(reduction):
        return reduction
    if reduction == MICRO_BATCHES:
        return None
    if reduction == TOKENS:
        return count_labels
    raise LaunchError(
        f"loss_reduction is {reduction!r}; use {MICRO_BATCHES!r} (the mean of micro-batch means, as DeepSpeed does), "
        f"{TOKENS!r} (weighted by labels other than {IGNORED_LABEL}), or a function from labels to their count"
    )


def micro_batch_weights(counts: Sequence[float], group: Any, num_replicas: int, device: torch.device) -> list[float]:
    """Return each micro-batch's weight, 1 on average over all micro-batches of all replicas; collective over ``group``.

    With it, the mean over micro-batches and replicas of weight times micro-batch mean is the mean over all labels. A
    batch without any label that counts weighs nothing.

    Args:
        counts: Labels that count, by micro-batch of this replica.
        group: The ranks of other replicas that compute the same stages.
    """
    total = torch.tensor(float(sum(counts)), dtype=torch.float64, device=device)
    if num_replicas > 1:
        dist.all_reduce(total, group=group)
    if total.item() == 0:
        return [0.0] * len(counts)
    return [count * len(counts) * num_replicas / total.item() for count in counts]
