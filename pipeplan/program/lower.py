"""Lowering: from a plan to the instructions of every rank, in small passes over plain values.

Every message gets one number, its place in the order in which a simulated run produces the messages. That number
strictly grows along everything that depends on each other, and both ends of every queue post in its order; so no circle
of waits can close (see ``post_receives`` and ``wait_for_sends`` for the two placements that this leaves open).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pipeplan.cluster import Cluster
from pipeplan.plan.check import check_plan
from pipeplan.plan.types import Plan, QueueModel
from pipeplan.profile.types import Profile
from pipeplan.program.boundaries import Boundaries, messages_between_ranks
from pipeplan.program.deadlock import refuse_deadlocked_order
from pipeplan.program.types import (
    Compute,
    Instruction,
    Message,
    OptimizerStep,
    Payload,
    Program,
    Receive,
    ReduceReplicas,
    ReduceTied,
    Send,
    WaitReceive,
    WaitSend,
)
from pipeplan.simulate.clock import run_clock
from pipeplan.simulate.costs import CostTable
from pipeplan.simulate.dependencies import ResultKind
from pipeplan.simulate.encoding import encode_order

RECEIVE_AHEAD = 2
"""Ops between the posting of a receive and its use: early enough to overlap, late enough to keep few buffers."""

TAIL: tuple[Instruction, ...] = (ReduceTied(), ReduceReplicas(), OptimizerStep())
"""What every rank ends with."""


@dataclass(frozen=True, slots=True)
class Times:
    """When the ops of a plan run in a simulation, rank after rank in one list.

    Attributes:
        offsets: The ops of rank r are [offsets[r], offsets[r + 1]).
        start_ns, end_ns: By op; every op takes at least 1 ns, so that ends strictly grow along dependencies.
        arrival_ns: By message, when its transfer is over.
    """

    offsets: Sequence[int]
    start_ns: Sequence[int]
    end_ns: Sequence[int]
    arrival_ns: dict[Message, int]


@dataclass(frozen=True, slots=True)
class Transfer:
    """A message between two ranks; ops are indices into ``Times``."""

    message: Message
    source_rank: int
    target_rank: int
    producer: int
    consumer: int


def lower(
    plan: Plan,
    profile: Profile,
    cluster: Cluster,
    queue_model: QueueModel | None = None,
    *,
    receive_ahead: int = RECEIVE_AHEAD,
) -> Program:
    """Return the instructions of every rank.

    Args:
        queue_model: What shares the order of messages at run time; the plan's own if not given.
        receive_ahead: How many ops before its use a receive is posted, where its queue allows.

    Raises:
        PlanError: The plan is faulty or does not fit the profile or the cluster.
        RefusedError: The order is faulty or deadlocks; shows the cycle.
        ProfileError: The profile lacks times that the cluster's devices need.
    """
    model = plan.queue_model if queue_model is None else queue_model
    check_plan(plan, profile)
    times = time_ops(plan, profile, cluster, model)
    transfers = order_transfers(plan, times)
    receive_gaps = post_receives(transfers, times, model, receive_ahead)
    wait_gaps = wait_for_sends(transfers, times, receive_gaps)
    return Program(
        plan_digest=plan.digest,
        num_micro_batches=plan.num_micro_batches,
        rank_by_stage=plan.placement.rank_by_stage,
        queue_model=model,
        instructions_by_rank=write_instructions(plan, transfers, times, receive_gaps, wait_gaps),
    )


def time_ops(plan: Plan, profile: Profile, cluster: Cluster, queue_model: QueueModel) -> Times:
    """Return when the ops run in a simulation; raises ``RefusedError`` for an order that deadlocks."""
    costs = CostTable(profile, cluster).stage_costs(plan.partition, plan.placement, plan.recomputed_stages)
    costs = replace(costs, duration_ns=np.maximum(costs.duration_ns, 1))
    encoded = encode_order(plan.order)
    clocked = run_clock(costs, encoded, plan.num_micro_batches, queue_model)
    if clocked.num_done < encoded.num_ops:
        refuse_deadlocked_order(plan.order, plan.num_stages)
    ends_by_payload = {
        Payload.ACTIVATION: clocked.message_end_ns[ResultKind.FORWARD].tolist(),
        Payload.GRADIENT: clocked.message_end_ns[ResultKind.INPUT_GRADIENT].tolist(),
    }
    arrival_ns = {
        message: ends_by_payload[message.payload][message.source_stage][message.micro_batch]
        for message in messages_between_ranks(plan.placement.rank_by_stage, plan.num_micro_batches)
    }
    return Times(encoded.offsets.tolist(), clocked.start_ns.tolist(), clocked.end_ns.tolist(), arrival_ns)


def order_transfers(plan: Plan, times: Times) -> list[Transfer]:
    """Return the messages between ranks by their producer's end, ties by stage, micro-batch and payload."""
    rank_by_stage = plan.placement.rank_by_stage
    producer: dict[Message, int] = {}
    consumer: dict[Message, int] = {}
    boundaries = Boundaries(plan.num_stages)
    for index, op in enumerate(op for ops in plan.order for op in ops):
        made, used = boundaries.made(op), boundaries.used(op)
        if made is not None:
            producer[made] = index
        if used is not None:
            consumer[used] = index

    def place(message: Message) -> tuple[int, int, int, str]:
        return times.end_ns[producer[message]], message.source_stage, message.micro_batch, message.payload.value

    return [
        Transfer(
            message,
            rank_by_stage[message.source_stage],
            rank_by_stage[message.target_stage],
            producer[message],
            consumer[message],
        )
        for message in sorted(times.arrival_ns, key=place)
    ]


def queue_at(queue_model: QueueModel, rank: int, source_rank: int, target_rank: int) -> Hashable:
    """Return the name of the queue in which ``rank`` posts its end of a message from source to target."""
    match queue_model:
        case QueueModel.ORDERED_PAIR:
            return rank, source_rank, target_rank
        case QueueModel.PAIR:
            return rank, min(source_rank, target_rank), max(source_rank, target_rank)
        case QueueModel.SINGLE:
            return rank


def post_receives(
    transfers: Sequence[Transfer], times: Times, queue_model: QueueModel, receive_ahead: int
) -> list[int]:
    """Return, by transfer, the op of the target rank that its receive is posted before.

    Every queue posts in the order of ``transfers``. Sends are posted right after their producer; a receive goes
    between the posts before and after it in its queue, at most ``receive_ahead`` ops ahead of its use where they
    allow. In a queue that sends share, a late receive would hold them up, so there it is also posted no later than
    its message is made.
    """
    gaps = [0] * len(transfers)
    posts_by_queue: dict[Hashable, list[int]] = defaultdict(list)  # ~number for a send, number for a receive
    for number, transfer in enumerate(transfers):
        ends = transfer.source_rank, transfer.target_rank
        posts_by_queue[queue_at(queue_model, transfer.source_rank, *ends)].append(~number)
        posts_by_queue[queue_at(queue_model, transfer.target_rank, *ends)].append(number)
    for posts in posts_by_queue.values():
        latest = len(times.end_ns)
        for post in reversed(posts):
            if post < 0:
                latest = transfers[~post].producer
                continue
            transfer = transfers[post]
            first, last = times.offsets[transfer.target_rank], times.offsets[transfer.target_rank + 1]
            wanted = max(first, transfer.consumer - receive_ahead)
            if queue_model is not QueueModel.ORDERED_PAIR:
                wanted = min(wanted, bisect_left(times.end_ns, times.end_ns[transfer.producer] + 1, first, last))
            latest = gaps[post] = min(wanted, latest)
        earliest = 0
        for post in posts:
            if post < 0:
                earliest = transfers[~post].producer + 1
            else:
                earliest = gaps[post] = max(gaps[post], earliest)
    return gaps


def wait_for_sends(transfers: Sequence[Transfer], times: Times, receive_gaps: Sequence[int]) -> list[int]:
    """Return, by transfer, the op of the source rank that the wait for its send is placed before.

    That is the first op which starts, in the simulation, after the receive has been posted and the transfer is over:
    then the wait costs nothing, closes no circle, and the tensors are let go as soon as they can be.
    """
    gaps = []
    for transfer, receive_gap in zip(transfers, receive_gaps, strict=True):
        over_ns = times.arrival_ns[transfer.message]
        if receive_gap > times.offsets[transfer.target_rank]:
            posted_ns = times.end_ns[receive_gap - 1]
            moving_ns = over_ns - times.end_ns[transfer.producer]
            over_ns = max(over_ns, posted_ns + moving_ns)
        last = times.offsets[transfer.source_rank + 1]
        gaps.append(bisect_left(times.start_ns, over_ns, transfer.producer + 1, last))
    return gaps


def write_instructions(
    plan: Plan,
    transfers: Sequence[Transfer],
    times: Times,
    receive_gaps: Sequence[int],
    wait_gaps: Sequence[int],
) -> tuple[tuple[Instruction, ...], ...]:
    """Return the instructions of every rank: before each op its receives to post, sends to wait for, and own wait."""
    receives: dict[int, list[Instruction]] = defaultdict(list)
    waits: dict[tuple[int, int], list[Instruction]] = defaultdict(
        list
    )  # (rank, gap): a rank's last gap is the next one's first
    send_by_op: dict[int, Instruction] = {}
    wait_by_op: dict[int, Instruction] = {}
    for transfer, receive_gap, wait_gap in zip(transfers, receive_gaps, wait_gaps, strict=True):
        receives[receive_gap].append(Receive(transfer.message))
        waits[transfer.source_rank, wait_gap].append(WaitSend(transfer.message))
        send_by_op[transfer.producer] = Send(transfer.message)
        wait_by_op[transfer.consumer] = WaitReceive(transfer.message)
    instructions_by_rank: list[tuple[Instruction, ...]] = []
    for rank, ops in enumerate(plan.order):
        steps: list[Instruction] = []
        index = times.offsets[rank]
        for index, op in enumerate(ops, start=times.offsets[rank]):
            steps.extend(receives.get(index, ()))
            steps.extend(waits.get((rank, index), ()))
            if index in wait_by_op:
                steps.append(wait_by_op[index])
            steps.append(Compute(op))
            if index in send_by_op:
                steps.append(send_by_op[index])
        steps.extend(waits.get((rank, times.offsets[rank + 1]), ()))
        steps.extend(TAIL)
        instructions_by_rank.append(tuple(steps))
    return tuple(instructions_by_rank)
