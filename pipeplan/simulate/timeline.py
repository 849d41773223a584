"""The timeline of a plan: when every op and transfer happens, where the bubbles are, what memory peaks at."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from pipeplan.cluster import Cluster
from pipeplan.errors import PlanError
from pipeplan.plan.ops import Op
from pipeplan.plan.types import Plan, Prediction
from pipeplan.profile.types import Profile
from pipeplan.simulate.clock import Clocked, run_clock
from pipeplan.simulate.costs import CostTable, StageCosts
from pipeplan.simulate.dependencies import ResultKind
from pipeplan.simulate.encoding import EncodedOrder, encode_order
from pipeplan.simulate.memory import MemoryPeak, peak_memory


@dataclass(frozen=True, slots=True)
class TimedOp:
    """An op with its start and end, in nanoseconds from the start of the batch."""

    op: Op
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class TimedTransfer:
    """A boundary on its way between two ranks."""

    kind: ResultKind
    source_stage: int
    micro_batch: int
    source_rank: int
    target_rank: int
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class Bubble:
    """Idle time of one rank inside the batch, in nanoseconds.

    Attributes:
        ramp_up_ns: Before its first op.
        inner_ns: Between its ops.
        ramp_down_ns: From its last op to the end of the batch.
    """

    ramp_up_ns: int
    inner_ns: int
    ramp_down_ns: int

    @property
    def total_ns(self) -> int:
        """All idle time."""
        return self.ramp_up_ns + self.inner_ns + self.ramp_down_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """What happens when, on every rank.

    Attributes:
        makespan_ns: From the start of the batch to the end of the last rank's step.
        last_op_ns: End of the last op; the rest of the makespan is reductions and the step.
    """

    ops_by_rank: tuple[tuple[TimedOp, ...], ...]
    transfers: tuple[TimedTransfer, ...]
    memory_by_rank: tuple[MemoryPeak, ...]
    last_op_ns: int
    makespan_ns: int

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return len(self.ops_by_rank)

    @property
    def busy_ns_by_rank(self) -> tuple[int, ...]:
        """Time that each rank computes."""
        return tuple(sum(timed.end_ns - timed.start_ns for timed in ops) for ops in self.ops_by_rank)

    @property
    def bubble_by_rank(self) -> tuple[Bubble, ...]:
        """Idle time of each rank up to the last op of the batch."""
        bubbles = []
        for ops, busy_ns in zip(self.ops_by_rank, self.busy_ns_by_rank, strict=True):
            first_ns = ops[0].start_ns if ops else self.last_op_ns
            last_ns = ops[-1].end_ns if ops else self.last_op_ns
            bubbles.append(Bubble(first_ns, last_ns - first_ns - busy_ns, self.last_op_ns - last_ns))
        return tuple(bubbles)

    @property
    def bubble_fraction(self) -> float:
        """Share of all ranks' time up to the last op that is idle."""
        whole = self.last_op_ns * self.num_ranks
        return 0.0 if whole == 0 else 1.0 - sum(self.busy_ns_by_rank) / whole

    @property
    def prediction(self) -> Prediction:
        """The summary that a plan file records."""
        return Prediction(
            makespan_ns=self.makespan_ns,
            peak_memory_bytes_by_rank=tuple(peak.total for peak in self.memory_by_rank),
            bubble_fraction=self.bubble_fraction,
        )


def simulate(plan: Plan, profile: Profile, cluster: Cluster) -> Timeline:
    """Return the predicted timeline of one batch.

    Raises:
        PlanError: The layout does not fit the profile or the cluster, or the order deadlocks (``verify`` shows how).
        ProfileError: The profile lacks times for a device type or recomputation figures for a stage.
    """
    plan.partition.check(profile.layers)
    plan.placement.check(plan.num_stages, cluster.num_ranks)
    if plan.order.num_ranks != cluster.num_ranks:
        raise PlanError(f"the order has {plan.order.num_ranks} ranks; the cluster has {cluster.num_ranks}")
    table = CostTable(profile, cluster)
    costs = table.stage_costs(plan.partition, plan.placement, plan.recomputed_stages)
    order = encode_order(plan.order)
    _check_range(plan)
    clocked = run_clock(costs, order, plan.num_micro_batches, plan.queue_model)
    if clocked.num_done < order.num_ops:
        raise PlanError(
            f"the order deadlocks: {order.num_ops - clocked.num_done} of {order.num_ops} ops never start; "
            f"first stuck: {_first_stuck(plan, order, clocked)}; run 'pipeplan verify' for the cycle"
        )
    ends = np.array([clocked.end_ns[last - 1] if last > first else 0 for first, last in _spans(order)], dtype=np.int64)
    return Timeline(
        ops_by_rank=_timed_ops(plan, order, clocked),
        transfers=tuple(_transfers(plan, costs, clocked)),
        memory_by_rank=peak_memory(costs, order, clocked, count_boundaries=profile.count_boundary_buffers),
        last_op_ns=clocked.makespan_ns,
        makespan_ns=table.tail_ns(plan.partition.bounds, plan.placement.rank_by_stage, ends),
    )


def _spans(order: EncodedOrder) -> Iterator[tuple[int, int]]:
    bounds = order.offsets.tolist()
    yield from itertools.pairwise(bounds)


def _check_range(plan: Plan) -> None:
    for rank, ops in enumerate(plan.order):
        for position, op in enumerate(ops):
            if op.stage >= plan.num_stages or op.micro_batch >= plan.num_micro_batches:
                raise PlanError(
                    f"rank {rank}, position {position}: {op} is outside the plan, which has {plan.num_stages} stages "
                    f"and {plan.num_micro_batches} micro-batches"
                )
            if plan.placement.rank_by_stage[op.stage] != rank:
                raise PlanError(
                    f"rank {rank}, position {position}: {op} runs stage {op.stage}, which is placed on rank "
                    f"{plan.placement.rank_by_stage[op.stage]}"
                )


def _first_stuck(plan: Plan, order: EncodedOrder, clocked: Clocked) -> str:
    stuck = []
    for rank, (first, last) in enumerate(_spans(order)):
        for index in range(first, last):
            if clocked.start_ns[index] < 0:
                stuck.append(f"{plan.order[rank][index - first]} on rank {rank}")
                break
    return ", ".join(stuck[:4])


def _timed_ops(plan: Plan, order: EncodedOrder, clocked: Clocked) -> tuple[tuple[TimedOp, ...], ...]:
    starts, ends = clocked.start_ns.tolist(), clocked.end_ns.tolist()
    return tuple(
        tuple(TimedOp(op, start, end) for op, start, end in zip(ops, starts[first:last], ends[first:last], strict=True))
        for ops, (first, last) in zip(plan.order, _spans(order), strict=True)
    )


def _transfers(plan: Plan, costs: StageCosts, clocked: Clocked) -> Iterator[TimedTransfer]:
    ranks = plan.placement.rank_by_stage
    for kind in ResultKind:
        for source in range(costs.num_stages):
            target = source + 1 if kind is ResultKind.FORWARD else source - 1
            if not 0 <= target < costs.num_stages or ranks[source] == ranks[target]:
                continue
            for micro_batch in range(plan.num_micro_batches):
                yield TimedTransfer(
                    kind,
                    source,
                    micro_batch,
                    ranks[source],
                    ranks[target],
                    int(clocked.message_start_ns[kind, source, micro_batch]),
                    int(clocked.message_end_ns[kind, source, micro_batch]),
                )
