"""What one rank keeps while a batch runs, keyed by stage and micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from pipeplan.runtime.boundary import BoundarySpec

Key = tuple[int, int]  # (stage, micro-batch)


@dataclass(slots=True)
class Outgoing:
    """The boundary that a forward made for the next stage, until it is sent."""

    tensors: Sequence[torch.Tensor]
    header: BoundarySpec | None


@dataclass(slots=True)
class BatchState:
    """Everything that lives from one op to a later one, and no longer.

    Attributes:
        inputs: Boundaries that have arrived and wait for their forward.
        input_leaves: Leaves of a forward's graph that a gradient is due for, in boundary order.
        roots: Where a backward starts: the edges of the outputs that take a gradient, or of the loss.
        output_gradients: Gradients that have arrived for the roots; ``None`` where no gradient came.
        outgoing: Boundaries waiting to be sent.
        outgoing_gradients: Input gradients waiting to be sent.
        losses: Detached loss of each micro-batch.
    """

    inputs: dict[Key, Any] = field(default_factory=dict)
    input_leaves: dict[Key, list[torch.Tensor]] = field(default_factory=dict)
    roots: dict[Key, list[GradientEdge]] = field(default_factory=dict)
    output_gradients: dict[Key, Sequence[torch.Tensor | None]] = field(default_factory=dict)
    outgoing: dict[Key, Outgoing] = field(default_factory=dict)
    outgoing_gradients: dict[Key, list[torch.Tensor]] = field(default_factory=dict)
    losses: dict[int, torch.Tensor] = field(default_factory=dict)
    logits: dict[int, Any] = field(default_factory=dict)


class MicroBatches:
    """The micro-batches of one batch, fetched from the user's iterator in order and handed out by index.

    The order of ops may ask for them in any order and, on a rank with the first and the last stage, twice.
    """

    def __init__(self, fetch: Callable[[], Any], num_uses: int) -> None:
        self._fetch = fetch
        self._num_uses = num_uses
        self._num_fetched = 0
        self._kept: dict[int, Any] = {}
        self._uses_left: dict[int, int] = {}

    @property
    def num_kept(self) -> int:
        """Micro-batches that were fetched and are still needed."""
        return len(self._kept)

    def labels(self, num_micro_batches: int) -> list[Any]:
        """Return the labels of all micro-batches ahead of their use."""
        self._fetch_up_to(num_micro_batches - 1)
        return [self._kept[micro_batch][1] for micro_batch in range(num_micro_batches)]

    def _fetch_up_to(self, micro_batch: int) -> None:
        while self._num_fetched <= micro_batch:
            self._kept[self._num_fetched] = self._fetch()
            self._uses_left[self._num_fetched] = self._num_uses
            self._num_fetched += 1

    def __getitem__(self, micro_batch: int) -> Any:
        """Return (inputs, labels) of a micro-batch."""
        self._fetch_up_to(micro_batch)
        content = self._kept[micro_batch]
        self._uses_left[micro_batch] -= 1
        if self._uses_left[micro_batch] == 0:
            del self._kept[micro_batch], self._uses_left[micro_batch]
        return content
