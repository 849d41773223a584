"""What is asked: profile, cluster, micro-batches and what the user fixed; and the exact evaluation of any answer."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeplan.cluster import Cluster
from pipeplan.errors import PlanError
from pipeplan.plan.layout import Partition, Placement
from pipeplan.plan.types import Plan, Prediction
from pipeplan.profile.file import profile_digest
from pipeplan.profile.types import Profile
from pipeplan.search.partition import atom_bounds
from pipeplan.simulate import CostTable, EncodedOrder, decode_order, peak_bytes_by_rank, run_clock

IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraints:
    """What the user fixed.

    Attributes:
        colocate_tied: Whether layers that share a weight must sit on one rank.
    """

    partition: Partition | None = None
    placement: Placement | None = None
    colocate_tied: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Candidate:
    """A complete answer in the form that searches work on."""

    partition: Partition
    placement: Placement
    order: EncodedOrder
    recomputed_stages: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Evaluation:
    """What the one clock and the one memory formula say of a candidate.

    Attributes:
        excess_bytes: Sum over the ranks of what is above the cap; 0 means that it fits.
    """

    makespan_ns: int
    peak_bytes_by_rank: IntArray
    excess_bytes: int
    busy_ns_by_rank: IntArray
    last_op_ns: int

    @property
    def fits(self) -> bool:
        """Whether every rank stays within its cap."""
        return self.excess_bytes == 0

    @property
    def bubble_fraction(self) -> float:
        """Share of all ranks' time up to the last op that is idle."""
        whole = self.last_op_ns * len(self.busy_ns_by_rank)
        return 0.0 if whole == 0 else 1.0 - float(self.busy_ns_by_rank.sum()) / whole


class Problem:
    """A question to a search: it knows the costs and judges answers.

    Raises:
        PlanError: What was fixed does not fit the profile, the cluster or each other.
        ProfileError: The cluster has a device type that a layer has no times for.
    """

    def __init__(
        self, profile: Profile, cluster: Cluster, num_micro_batches: int, constraints: Constraints | None = None
    ) -> None:
        """Check the question."""
        self.profile = profile
        self.cluster = cluster
        self.num_micro_batches = num_micro_batches
        self.constraints = constraints or Constraints()
        self.table = CostTable(profile, cluster)
        self.num_ranks = cluster.num_ranks
        self.usable_bytes: list[int | None] = [cluster.usable_bytes(rank) for rank in range(cluster.num_ranks)]
        self._digest: str | None = None
        if num_micro_batches < 1:
            raise PlanError(f"a batch needs at least 1 micro-batch, got {num_micro_batches}")
        self._check_constraints()

    def _check_constraints(self) -> None:
        partition, placement = self.constraints.partition, self.constraints.placement
        if partition is not None:
            partition.check(self.profile.layers)
            if partition.num_stages < self.num_ranks:
                raise PlanError(
                    f"partition {partition} has {partition.num_stages} stages for {self.num_ranks} ranks; "
                    "every rank needs at least one"
                )
        if placement is not None:
            num_stages = placement.num_stages if partition is None else partition.num_stages
            placement.check(num_stages, self.num_ranks)
            most = len(atom_bounds(self.profile.layers)) - 1
            if num_stages > most:
                raise PlanError(
                    f"placement {placement} names {num_stages} stages; the {self.profile.num_layers} layers fill at "
                    f"most {most}"
                )

    @property
    def are_ranks_alike(self) -> bool:
        """Whether no rank and no link differs from another, so that ranks may be exchanged."""
        cluster = self.cluster
        pairs = itertools.permutations(range(cluster.num_ranks), 2)
        return (
            len({(rank.device, rank.memory_bytes, rank.slowdown) for rank in cluster.ranks}) == 1
            and len({cluster.link(here, there) for here, there in pairs}) <= 1
        )

    @property
    def layer_ns(self) -> list[int]:
        """F plus the whole backward of each layer on the device type of rank 0, in nanoseconds."""
        sums = self.table.device_sums(self.cluster.ranks[0].device)
        return [int(value) for value in np.diff(sums[:, 0] + sums[:, 1])]

    def evaluate(self, candidate: Candidate) -> Evaluation | None:
        """Return what the simulator says, or ``None`` if the order deadlocks."""
        costs = self.table.stage_costs(candidate.partition, candidate.placement, candidate.recomputed_stages)
        order = candidate.order
        clocked = run_clock(costs, order, self.num_micro_batches)
        if clocked.num_done < order.num_ops:
            return None
        bounds = order.offsets
        ends = np.array([clocked.end_ns[bounds[r + 1] - 1] for r in range(order.num_ranks)], dtype=np.int64)
        busy = np.add.reduceat(clocked.end_ns - clocked.start_ns, bounds[:-1])
        peaks = peak_bytes_by_rank(costs, order, clocked, count_boundaries=self.profile.count_boundary_buffers)
        return Evaluation(
            makespan_ns=self.table.tail_ns(candidate.partition.bounds, candidate.placement.rank_by_stage, ends),
            peak_bytes_by_rank=peaks,
            excess_bytes=sum(
                max(0, int(peak) - usable)
                for peak, usable in zip(peaks, self.usable_bytes, strict=True)
                if usable is not None
            ),
            busy_ns_by_rank=busy,
            last_op_ns=clocked.makespan_ns,
        )

    def fuse_unsplittable(
        self, order: EncodedOrder, partition: Partition, recomputed_stages: Collection[int] = ()
    ) -> EncodedOrder:
        """Return ``order`` with B instead of I and W on stages none of whose layers can split."""
        bounds = partition.bounds
        fused = np.array([not self.table.can_split(first, last) for first, last in itertools.pairwise(bounds)])
        return fuse_backward(order, fused[order.stage]) if fused.any() else order

    def respects_ties(self, partition: Partition, placement: Placement) -> bool:
        """Return whether layers that share a weight sit on one rank, if they must."""
        if not self.constraints.colocate_tied:
            return True
        stage_by_layer = np.repeat(np.arange(partition.num_stages), partition.num_layers_by_stage)
        return all(
            len({placement.rank_by_stage[stage_by_layer[layer]] for layer in layers}) == 1
            for _, layers in self.table.tied_layers.values()
        )

    def plan(self, candidate: Candidate, evaluation: Evaluation) -> Plan:
        """Return the plan of a candidate, with its prediction."""
        if self._digest is None:
            self._digest = profile_digest(self.profile)
        return Plan(
            model=self.profile.model,
            num_micro_batches=self.num_micro_batches,
            partition=candidate.partition,
            placement=candidate.placement,
            order=decode_order(candidate.order),
            recomputed_stages=candidate.recomputed_stages,
            profile_digest=self._digest,
            prediction=Prediction(
                makespan_ns=evaluation.makespan_ns,
                peak_memory_bytes_by_rank=tuple(int(peak) for peak in evaluation.peak_bytes_by_rank),
                bubble_fraction=evaluation.bubble_fraction,
            ),
        )


def fuse_backward(order: EncodedOrder, is_fused: NDArray[np.bool_]) -> EncodedOrder:
    """Return ``order`` with I turned into B and W dropped where ``is_fused``, [num_ops]."""
    kind = order.kind.copy()
    kind[is_fused & (kind == 2)] = 1
    kept = ~(is_fused & (kind == 3))
    offsets = np.zeros_like(order.offsets)
    offsets[1:] = np.cumsum(kept)[order.offsets[1:] - 1]
    return EncodedOrder(
        np.ascontiguousarray(order.stage[kept]),
        np.ascontiguousarray(kind[kept]),
        np.ascontiguousarray(order.micro_batch[kept]),
        offsets,
    )
