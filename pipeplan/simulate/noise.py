"""A plan under noise: what a batch takes when no op and no message takes exactly its planned time.

The ranks keep their orders and the queues theirs, as at run time; only times vary. So the clock runs once, and its
sequence of ops is walked again with the times of all samples side by side.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from pipeplan.cluster import Cluster
from pipeplan.errors import PipeplanError
from pipeplan.plan.check import check_plan
from pipeplan.plan.ops import Op
from pipeplan.plan.types import Plan, QueueModel
from pipeplan.profile.types import Profile
from pipeplan.simulate.costs import CostTable
from pipeplan.simulate.dependencies import Result, ResultKind, needs, result_of
from pipeplan.simulate.encoding import IntArray
from pipeplan.simulate.timeline import Timeline, simulate

NUM_SAMPLES = 1000


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NoisyMakespans:
    """How long a batch takes in each sample of the noise, in nanoseconds.

    Attributes:
        planned_ns: Without noise.
        makespan_ns: [num_samples].
        spread: Standard deviation of the factors, whose mean is 1.
    """

    planned_ns: int
    makespan_ns: IntArray
    spread: float
    seed: int

    @property
    def num_samples(self) -> int:
        """Number of samples."""
        return len(self.makespan_ns)

    @property
    def mean_ns(self) -> float:
        """Mean of the samples."""
        return float(self.makespan_ns.mean())

    @property
    def standard_error_ns(self) -> float:
        """Standard error of the mean."""
        return float(self.makespan_ns.std(ddof=1)) / math.sqrt(self.num_samples)

    @property
    def waiting_ns(self) -> float:
        """Mean time that noise adds to the batch: idle time, since on average ops take what they take in the plan."""
        return self.mean_ns - self.planned_ns

    @property
    def worst_ns(self) -> int:
        """The slowest sample."""
        return int(self.makespan_ns.max())

    def quantile_ns(self, share: float) -> float:
        """Return the time that ``share`` of the samples do not exceed."""
        return float(np.quantile(self.makespan_ns, share))


def noisy_makespans(
    plan: Plan, profile: Profile, cluster: Cluster, *, spread: float, num_samples: int = NUM_SAMPLES, seed: int = 0
) -> NoisyMakespans:
    """Return what a batch takes when every op and every message varies on its own, anew in every sample.

    The time of an op (its host overhead included) and of a message between ranks is multiplied by a log-normal factor
    of mean 1 and standard deviation ``spread``. The host overheads of messages and what follows a rank's last op
    (reductions, step) stay as they are. Messages keep the order in which the simulation without noise queues them,
    which every rank's program fixes before it runs. A batch is then the longest path of a fixed graph, so that noise
    can't make it shorter on average (Jensen's inequality).

    Raises:
        PipeplanError: ``spread`` is outside [0, 1], or there are fewer than 2 samples.
        PlanError: The plan is faulty, does not fit the profile or the cluster, or deadlocks.
        ProfileError: The profile lacks times for a device type.
    """
    if not 0 <= spread <= 1:
        raise PipeplanError(f"noise must be a share from 0 to 1, such as 0.1 for 10 %; got {spread}")
    if num_samples < 2:
        raise PipeplanError(f"noise needs at least 2 samples, got {num_samples}")
    check_plan(plan, profile)
    timeline = simulate(plan, profile, cluster)
    table = CostTable(profile, cluster)
    costs = table.stage_costs(plan.partition, plan.placement, plan.recomputed_stages)
    transfer_ns_by_kind = {
        ResultKind.FORWARD: costs.forward_transfer_ns,
        ResultKind.INPUT_GRADIENT: costs.backward_transfer_ns,
    }
    ranks = plan.placement.rank_by_stage
    random = np.random.default_rng(seed)
    log_variance = math.log1p(spread**2)

    def varied(duration_ns: int) -> IntArray:
        factors = random.lognormal(-log_variance / 2, math.sqrt(log_variance), num_samples)
        return np.rint(duration_ns * factors).astype(np.int64)

    end_ns = np.zeros((plan.num_ranks, num_samples), dtype=np.int64)  # of the last op so far
    free_ns = np.zeros_like(end_ns)
    queue_free_ns: dict[tuple[int, int], IntArray] = {}
    arrival_ns: dict[Result, IntArray] = {}
    for op in _completion_order(plan, timeline):
        rank = ranks[op.stage]
        start = free_ns[rank]
        for result in needs(op, plan.num_stages):
            if result.stage != op.stage:
                start = np.maximum(start, arrival_ns.pop(result))
                if ranks[result.stage] != rank:
                    start += costs.wait_ns
        end = start + varied(int(costs.duration_ns[op.stage, op.kind]))
        end_ns[rank] = free_ns[rank] = end
        made = result_of(op)
        target_stage = _target_stage(made, plan.num_stages)
        if made is None or target_stage is None:
            continue
        target = ranks[target_stage]
        if target == rank:
            arrival_ns[made] = end
            continue
        free_ns[rank] += costs.send_ns
        queue = _queue(rank, target, plan.queue_model)
        begin = np.maximum(end, queue_free_ns[queue]) if queue in queue_free_ns else end
        arrival_ns[made] = queue_free_ns[queue] = begin + varied(int(transfer_ns_by_kind[made.kind][op.stage]))
    makespans = [table.tail_ns(plan.partition.bounds, ranks, sample) for sample in end_ns.T]
    return NoisyMakespans(
        planned_ns=timeline.makespan_ns,
        makespan_ns=np.array(makespans, dtype=np.int64),
        spread=spread,
        seed=seed,
    )


def _completion_order(plan: Plan, timeline: Timeline) -> Iterator[Op]:
    """Yield the ops in the order in which the clock completes them: by end, then rank, none before what it needs."""
    position = [0] * plan.num_ranks
    done: set[Result] = set()
    running: list[tuple[int, int]] = []  # heap of end and rank

    def start_next(rank: int) -> None:
        if position[rank] < len(plan.order[rank]):
            timed = timeline.ops_by_rank[rank][position[rank]]
            if all(result in done for result in needs(timed.op, plan.num_stages)):
                heapq.heappush(running, (timed.end_ns, rank))

    for rank in range(plan.num_ranks):
        start_next(rank)
    while running:
        _, rank = heapq.heappop(running)
        op = plan.order[rank][position[rank]]
        yield op
        position[rank] += 1
        made = result_of(op)
        if made is not None:
            done.add(made)
        start_next(rank)
        target_stage = _target_stage(made, plan.num_stages)
        if made is None or target_stage is None:
            continue
        target = plan.placement.rank_by_stage[target_stage]
        waiting = plan.order[target][position[target] : position[target] + 1]
        if target != rank and any(made in needs(head, plan.num_stages) for head in waiting):
            start_next(target)


def _target_stage(result: Result | None, num_stages: int) -> int | None:
    """Return the neighbouring stage that a result goes to, or ``None`` where it goes to none."""
    if result is None:
        return None
    stage = result.stage + (1 if result.kind is ResultKind.FORWARD else -1)
    return stage if 0 <= stage < num_stages else None


def _queue(source: int, target: int, queue_model: QueueModel) -> tuple[int, int]:
    """Return the queue that a message enters, by its lower and higher rank where both directions share it."""
    match queue_model:
        case QueueModel.ORDERED_PAIR:
            return source, target
        case QueueModel.PAIR:
            return min(source, target), max(source, target)
        case QueueModel.SINGLE:
            return 0, 0
