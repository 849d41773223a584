"""Partition (layers of each stage) and placement (rank of each stage)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from pipeplan.errors import PlanError
from pipeplan.profile.types import LayerProfile


@dataclass(frozen=True, slots=True)
class Partition:
    """Number of layers of each stage, in model order. Text form: ``4,5,5,3``."""

    num_layers_by_stage: tuple[int, ...]

    def __post_init__(self) -> None:
        for stage, count in enumerate(self.num_layers_by_stage):
            if count < 1:
                raise PlanError(f"stage {stage} of partition {self} has {count} layers; every stage needs at least one")
        if not self.num_layers_by_stage:
            raise PlanError("a partition needs at least one stage")

    def __str__(self) -> str:
        return ",".join(str(count) for count in self.num_layers_by_stage)

    @classmethod
    def parse(cls, text: str) -> Partition:
        """Return the partition that ``4,5,5,3`` names.

        Raises:
            PlanError: A part is not a positive whole number.
        """
        return cls(_parse_numbers(text, "partition"))

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.num_layers_by_stage)

    @property
    def num_layers(self) -> int:
        """Number of layers of all stages."""
        return sum(self.num_layers_by_stage)

    @property
    def bounds(self) -> tuple[int, ...]:
        """First layer of each stage, then the number of layers."""
        return (0, *accumulate(self.num_layers_by_stage))

    def layers(self, stage: int) -> range:
        """Return the indices of the layers of ``stage``."""
        bounds = self.bounds
        return range(bounds[stage], bounds[stage + 1])

    def check(self, layers: Sequence[LayerProfile]) -> None:
        """Check that the partition covers ``layers`` and separates none that must stay together.

        Raises:
            PlanError: It covers another number of layers, or starts a stage at a layer that keeps with the one before.
        """
        if self.num_layers != len(layers):
            raise PlanError(f"partition {self} covers {self.num_layers} layers; the profile has {len(layers)}")
        for stage, first in enumerate(self.bounds[1:-1], start=1):
            if layers[first].keep_with_previous:
                raise PlanError(
                    f"stage {stage} starts at layer {layers[first].name!r}, which must share a stage with the layer "
                    f"before it, {layers[first - 1].name!r}"
                )


@dataclass(frozen=True, slots=True)
class Placement:
    """Rank of each stage. Text form: ``0,1,1,0``."""

    rank_by_stage: tuple[int, ...]

    def __str__(self) -> str:
        return ",".join(str(rank) for rank in self.rank_by_stage)

    @classmethod
    def parse(cls, text: str) -> Placement:
        """Return the placement that ``0,1,1,0`` names.

        Raises:
            PlanError: A part is not a whole number.
        """
        return cls(_parse_numbers(text, "placement"))

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.rank_by_stage)

    @property
    def num_ranks(self) -> int:
        """One more than the highest rank that holds a stage."""
        return max(self.rank_by_stage) + 1

    def stages(self, rank: int) -> tuple[int, ...]:
        """Return the stages that ``rank`` holds, in model order."""
        return tuple(stage for stage, holder in enumerate(self.rank_by_stage) if holder == rank)

    def check(self, num_stages: int, num_ranks: int) -> None:
        """Check that every stage has a rank that exists and every rank a stage.

        Raises:
            PlanError: Names the stage or the rank.
        """
        if self.num_stages != num_stages:
            raise PlanError(f"placement {self} names {self.num_stages} stages; the partition has {num_stages}")
        for stage, rank in enumerate(self.rank_by_stage):
            if not 0 <= rank < num_ranks:
                raise PlanError(f"stage {stage} is placed on rank {rank}; the cluster has ranks 0 to {num_ranks - 1}")
        for rank in range(num_ranks):
            if rank not in self.rank_by_stage:
                raise PlanError(f"rank {rank} holds no stage in placement {self}; every rank needs one")


def _parse_numbers(text: str, what: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.strip().strip("[]").split(","))
    except ValueError:
        raise PlanError(f"{what} {text!r} is not a list of whole numbers such as 4,5,5,3") from None
