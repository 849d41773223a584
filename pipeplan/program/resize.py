"""A plan's order for another number of micro-batches, without a search.

Fewer: the plan's own order, with the ops of the others left out. Every dependency stays inside a micro-batch, so what
is left still finishes, in no more memory.

More: the plan again and again, in rounds of its own number of micro-batches, the last round cut off. Rounds one after
the other always work, in the plan's memory. Mostly it is faster to let a round begin before the one before it has
ended: a list scheduler runs the ops by due times, the plan's own plus one length of the busiest rank a round, while no
stage keeps more micro-batches than it does in the plan, and no rank more bytes where that doesn't stall. The fastest
order that fits is taken.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from pipeplan.cluster import Cluster
from pipeplan.errors import PlanError
from pipeplan.plan.ops import Op, OpKind, Order
from pipeplan.plan.types import Plan
from pipeplan.profile.types import Profile
from pipeplan.program.lower import Times, time_ops
from pipeplan.simulate.costs import CostTable, StageCosts
from pipeplan.simulate.dependencies import Result, needs, result_of
from pipeplan.simulate.encoding import decode_order
from pipeplan.simulate.timeline import Timeline, simulate


def resize_plan(plan: Plan, num_micro_batches: int, profile: Profile, cluster: Cluster) -> Plan:
    """Return the plan with its order carried over to ``num_micro_batches``, and with the prediction for it.

    Raises:
        PlanError: There would be no micro-batch, or the plan does not fit the profile or the cluster.
        RefusedError: The plan's order deadlocks.
    """
    if num_micro_batches < 1:
        raise PlanError(f"a batch needs at least one micro-batch, got {num_micro_batches}")
    if num_micro_batches == plan.num_micro_batches:
        return plan
    orders = [repeat_order(plan.order, plan.num_micro_batches, num_micro_batches)]
    if num_micro_batches > plan.num_micro_batches:
        times = time_ops(plan, profile, cluster, plan.queue_model)
        costs = CostTable(profile, cluster).stage_costs(plan.partition, plan.placement, plan.recomputed_stages)
        for limits_ranks in (True, False):
            overlapped = overlap_rounds(plan, times, costs, num_micro_batches, limits_ranks=limits_ranks)
            if overlapped is not None:
                orders.append(overlapped)
    candidates = [replace(plan, num_micro_batches=num_micro_batches, order=order, prediction=None) for order in orders]
    timelines = [simulate(candidate, profile, cluster) for candidate in candidates]
    planned = simulate(plan, profile, cluster)
    fitting = [number for number, timeline in enumerate(timelines) if number == 0 or _fits(timeline, planned, cluster)]
    best = min(fitting, key=lambda number: timelines[number].makespan_ns)
    return replace(candidates[best], prediction=timelines[best].prediction)


def repeat_order(order: Order, num_planned: int, num_micro_batches: int) -> Order:
    """Return rounds of ``order``, one after the other on every rank, up to ``num_micro_batches``."""
    return Order.of(
        [
            replace(op, micro_batch=op.micro_batch + first)
            for first in range(0, num_micro_batches, num_planned)
            for op in line
            if op.micro_batch + first < num_micro_batches
        ]
        for line in order
    )


def overlap_rounds(
    plan: Plan, times: Times, costs: StageCosts, num_micro_batches: int, *, limits_ranks: bool
) -> Order | None:
    """Return rounds of the plan that begin one length of the busiest rank apart, run by a list scheduler.

    The limits of stages can't stall it: the deepest micro-batch between F and backward meets none, since a limit is
    reached by deeper ones only, and a W that has piled up is always ready. Those of ranks can.

    Args:
        limits_ranks: Also keep every rank to the bytes of activations and of what is held for W that it has in the
            plan.

    Returns:
        ``None`` if it stalled.
    """
    flat = [op for line in decode_order(times.order) for op in line]
    start_ns = dict(zip(flat, times.start_ns.tolist(), strict=True))
    duration_ns = costs.duration_ns.tolist()
    round_ns = max(sum(duration_ns[op.stage][op.kind] for op in line) for line in plan.order)
    due_ns = {
        replace(op, micro_batch=micro_batch): start + micro_batch // plan.num_micro_batches * round_ns
        for op, start in start_ns.items()
        for micro_batch in range(op.micro_batch, num_micro_batches, plan.num_micro_batches)
    }
    schedule = _ListSchedule(due_ns, costs, plan.order, limits_ranks=limits_ranks)
    free_ns = [0] * plan.num_ranks
    now_ns = 0
    while schedule.num_left:
        next_ns = []  # when something may change: a rank is free again, or an input arrives
        for rank in range(plan.num_ranks):
            if free_ns[rank] <= now_ns:
                ready_ns, op = schedule.most_urgent(rank, now_ns)
                if op is None:
                    continue
                if ready_ns > now_ns:
                    next_ns.append(ready_ns)
                    continue
                free_ns[rank] = schedule.run(op, now_ns)
            next_ns.append(free_ns[rank])
        if not next_ns:
            return None
        now_ns = min(next_ns)
    return Order.of(schedule.ops_by_rank)


class _ListSchedule:
    """The ops that have run, those whose inputs are made, and what every stage keeps."""

    def __init__(self, due_ns: dict[Op, int], costs: StageCosts, planned: Order, *, limits_ranks: bool) -> None:
        self._due_ns = due_ns
        self._most = most_kept_by_stage(planned)
        self._bytes = {OpKind.F: costs.activation_bytes.tolist(), OpKind.W: costs.held_bytes.tolist()}
        self._most_bytes = [self._most_bytes_of(line) for line in planned] if limits_ranks else None
        self._kept_bytes = [0] * costs.num_ranks
        self._rank_by_stage = costs.rank_by_stage.tolist()
        self._duration_ns = costs.duration_ns.tolist()
        self._travel_ns = (costs.forward_transfer_ns.tolist(), costs.backward_transfer_ns.tolist())
        self._made_ns: dict[Result, int] = {}
        self._kept: Counter[tuple[int, OpKind]] = Counter()
        self._users: dict[Result, list[Op]] = defaultdict(list)
        self._needs: dict[Op, tuple[Result, ...]] = {}
        self._open: list[dict[tuple[int, OpKind], list[tuple[int, Op, int]]]] = [{} for _ in range(costs.num_ranks)]
        self.ops_by_rank: list[list[Op]] = [[] for _ in range(costs.num_ranks)]
        self.num_left = len(due_ns)
        for op in due_ns:
            self._needs[op] = tuple(needs(op, costs.num_stages))
            for result in self._needs[op]:
                self._users[result].append(op)
        for op in due_ns:
            if not self._needs[op]:
                self._open_up(op)

    def most_urgent(self, rank: int, now_ns: int) -> tuple[int, Op | None]:
        """Return when which op of ``rank`` can start: of those that can now the one due first, else the soonest."""
        best: tuple[int, int, Op] | None = None
        for (stage, kind), items in self._open[rank].items():
            if any(self._kept[stage, what] >= self._most[stage, what] for what in _FILLS[kind]):
                continue
            added = self._added_bytes(stage, kind)
            if self._most_bytes is not None and added > 0 and self._kept_bytes[rank] + added > self._most_bytes[rank]:
                continue
            for due_ns, op, ready_ns in items:
                candidate = (max(ready_ns, now_ns), due_ns, op)
                best = candidate if best is None else min(best, candidate)
                if ready_ns <= now_ns:
                    break  # the others of its stage and kind are due later
        return (0, None) if best is None else (best[0], best[2])

    def run(self, op: Op, now_ns: int) -> int:
        """Run ``op``; return when it ends."""
        rank = self._rank_by_stage[op.stage]
        items = self._open[rank][op.stage, op.kind]
        items.remove(next(item for item in items if item[1] == op))
        self.ops_by_rank[rank].append(op)
        self.num_left -= 1
        _keep(self._kept, op)
        self._kept_bytes[rank] += self._added_bytes(op.stage, op.kind)
        end_ns: int = now_ns + max(1, self._duration_ns[op.stage][op.kind])
        result = result_of(op)
        if result is not None:
            self._made_ns[result] = end_ns
            for user in self._users[result]:
                if all(needed in self._made_ns for needed in self._needs[user]):
                    self._open_up(user)
        return end_ns

    def _added_bytes(self, stage: int, kind: OpKind) -> int:
        """Return what a rank keeps more once the op is over."""
        filled = sum(self._bytes[what][stage] for what in _FILLS[kind])
        return int(filled - sum(self._bytes[what][stage] for what in _EMPTIES[kind]))

    def _most_bytes_of(self, line: Sequence[Op]) -> int:
        return max(accumulate((self._added_bytes(op.stage, op.kind) for op in line), initial=0))

    def _open_up(self, op: Op) -> None:
        travel_ns = self._travel_ns[op.kind is not OpKind.F]
        ready_ns = max(
            (
                self._made_ns[result] + (travel_ns[result.stage] if result.stage != op.stage else 0)
                for result in self._needs[op]
            ),
            default=0,
        )
        group = self._open[self._rank_by_stage[op.stage]].setdefault((op.stage, op.kind), [])
        insort(group, (self._due_ns[op], op, ready_ns))


def most_kept_by_stage(order: Order) -> Counter[tuple[int, OpKind]]:
    """Return the most micro-batches that each stage keeps at once, keyed by (stage, F: activations, W: held for W)."""
    most: Counter[tuple[int, OpKind]] = Counter()
    kept: Counter[tuple[int, OpKind]] = Counter()
    for line in order:
        for op in line:
            _keep(kept, op)
            for what in _FILLS[op.kind]:
                most[op.stage, what] = max(most[op.stage, what], kept[op.stage, what])
    return most


def _keep(kept: Counter[tuple[int, OpKind]], op: Op) -> None:
    for what in _FILLS[op.kind]:
        kept[op.stage, what] += 1
    for what in _EMPTIES[op.kind]:
        kept[op.stage, what] -= 1


_FILLS: dict[OpKind, tuple[OpKind, ...]] = {OpKind.F: (OpKind.F,), OpKind.B: (), OpKind.I: (OpKind.W,), OpKind.W: ()}
_EMPTIES: dict[OpKind, tuple[OpKind, ...]] = {
    OpKind.F: (),
    OpKind.B: (OpKind.F,),
    OpKind.I: (OpKind.F,),
    OpKind.W: (OpKind.W,),
}


def _fits(timeline: Timeline, planned: Timeline, cluster: Cluster) -> bool:
    """Whether every rank stays within its cap; without caps, within what the plan itself takes."""
    for rank, (peak, before) in enumerate(zip(timeline.memory_by_rank, planned.memory_by_rank, strict=True)):
        usable = cluster.usable_bytes(rank)
        if peak.total > (before.total if usable is None else usable):
            return False
    return True
