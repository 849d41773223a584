"""The plan: partition, placement, order and what else decides how a batch runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from pipeplan.files import digest
from pipeplan.plan.layout import Partition, Placement
from pipeplan.plan.ops import Order


class QueueModel(StrEnum):
    """What shares the order of messages at run time.

    ORDERED_PAIR: one process group for every ordered pair of ranks that talks (the runtime's own choice).
    PAIR: one queue for every unordered pair (NCCL, lazy communicators).
    SINGLE: one queue for all ranks and both directions (NCCL, eager communicator of one group).
    """

    ORDERED_PAIR = "ordered-pair"
    PAIR = "pair"
    SINGLE = "single"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What the simulator said of a plan."""

    makespan_ns: int
    peak_memory_bytes_by_rank: tuple[int, ...]
    bubble_fraction: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How one batch runs.

    Attributes:
        recomputed_stages: Stages that recompute their activations in the backward, ascending.
        profile_digest: Digest of the profile it was made for, if known.
        prediction: What the simulator said, if known; not part of the digest.
    """

    model: str
    num_micro_batches: int
    partition: Partition
    placement: Placement
    order: Order
    recomputed_stages: tuple[int, ...] = ()
    queue_model: QueueModel = QueueModel.ORDERED_PAIR
    profile_digest: str | None = None
    prediction: Prediction | None = None
    extra: Mapping[str, Any] | None = None

    @property
    def num_ranks(self) -> int:
        """Number of pipeline ranks."""
        return self.order.num_ranks

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return self.partition.num_stages

    @property
    def digest(self) -> str:
        """Digest of what the plan does, independent of its name and prediction."""
        return digest(
            {
                "num_micro_batches": self.num_micro_batches,
                "partition": list(self.partition.num_layers_by_stage),
                "placement": list(self.placement.rank_by_stage),
                "order": self.order.lines(),
                "recompute": list(self.recomputed_stages),
                "queue_model": self.queue_model.value,
            }
        )
