"""Lowering: from a plan to the instructions of every rank, in small passes over plain values.

Every message gets one number, its place in the order in which a simulated run produces the messages. That number
strictly grows along everything that depends on each other, and both ends of every queue post in its order; so no circle
of waits can close (see ``post_receives`` and ``wait_for_sends`` for the two placements that this leaves open).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from pipeplan.cluster import Cluster
from pipeplan.plan.check import check_plan
from pipeplan.plan.types import Plan, QueueModel
from pipeplan.profile.types import Profile
from pipeplan.program.boundaries import PAYLOAD_BY_RESULT, Boundaries
from pipeplan.program.deadlock import refuse_deadlocked_order
from pipeplan.program.types import (
    Compute,
    Instruction,
    Message,
    OptimizerStep,
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
from pipeplan.simulate.encoding import EncodedOrder, IntArray, encode_order

RECEIVE_AHEAD = 2
"""Ops between the posting of a receive and its use: early enough to overlap, late enough to keep few buffers."""

TAIL: tuple[Instruction, ...] = (ReduceTied(), ReduceReplicas(), OptimizerStep())
"""What every rank ends with."""


@dataclass(frozen=True, slots=True, eq=False)
class Times:
    """When the ops of a plan run in a simulation.

    Attributes:
        order: The ops as arrays, rank after rank; elsewhere, an op is its index there.
        start_ns, end_ns: By op; every op takes at least 1 ns, so that ends strictly grow along dependencies.
        arrival_ns: [2, num_stages, num_micro_batches], by result kind, source stage and micro-batch.
    """

    order: EncodedOrder
    start_ns: IntArray
    end_ns: IntArray
    arrival_ns: IntArray


class Transfer(NamedTuple):
    """A message between two ranks; producer and consumer are ops by their index, ``arrival_ns`` is simulated."""

    message: Message
    source_rank: int
    target_rank: int
    producer: int
    consumer: int
    arrival_ns: int


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
    return Times(encoded, clocked.start_ns, clocked.end_ns, clocked.message_end_ns)


def order_transfers(plan: Plan, times: Times) -> list[Transfer]:
    """Return the messages between ranks by their producer's end, ties by stage, micro-batch and payload."""
    num_stages, num_micro_batches = plan.num_stages, plan.num_micro_batches
    order, boundaries = times.order, Boundaries(num_stages)
    made = boundaries.made_codes[order.stage, order.kind]
    used = boundaries.used_codes[order.stage, order.kind]
    producer, consumer = np.full((2, 2 * num_stages * num_micro_batches), -1, dtype=np.int64)
    for by_message, codes in ((producer, made), (consumer, used)):
        ops = np.flatnonzero(codes >= 0)
        by_message[codes[ops] * num_micro_batches + order.micro_batch[ops]] = ops
    rank_by_op = np.repeat(np.arange(order.num_ranks), np.diff(order.offsets))
    sent = np.flatnonzero((producer >= 0) & (rank_by_op[producer] != rank_by_op[consumer]))
    payload, source, micro_batch = np.unravel_index(sent, times.arrival_ns.shape)
    sent = sent[np.lexsort((payload, micro_batch, source, times.end_ns[producer[sent]]))]
    payload, source, micro_batch = np.unravel_index(sent, times.arrival_ns.shape)
    payloads = [PAYLOAD_BY_RESULT[kind] for kind in ResultKind]
    messages = (
        Message(stage, payloads[number], index)
        for stage, number, index in zip(source.tolist(), payload.tolist(), micro_batch.tolist(), strict=True)
    )
    return list(
        map(
            Transfer,
            messages,
            rank_by_op[producer[sent]].tolist(),
            rank_by_op[consumer[sent]].tolist(),
            producer[sent].tolist(),
            consumer[sent].tolist(),
            times.arrival_ns.ravel()[sent].tolist(),
        )
    )


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
    offsets = times.order.offsets.tolist()
    shares_queue_with_sends = queue_model is not QueueModel.ORDERED_PAIR
    posts_by_queue: dict[Hashable, list[int]] = defaultdict(list)  # ~number for a send, number for a receive
    for number, transfer in enumerate(transfers):
        source, target = transfer.source_rank, transfer.target_rank
        posts_by_queue[queue_at(queue_model, source, source, target)].append(~number)
        posts_by_queue[queue_at(queue_model, target, source, target)].append(number)
    end_ns = times.end_ns.tolist() if shares_queue_with_sends else []
    for posts in posts_by_queue.values():
        latest = times.order.num_ops
        for post in reversed(posts):
            if post < 0:
                latest = transfers[~post].producer
                continue
            transfer = transfers[post]
            first = offsets[transfer.target_rank]
            wanted = max(first, transfer.consumer - receive_ahead)
            if shares_queue_with_sends:
                wanted = min(wanted, bisect_right(end_ns, end_ns[transfer.producer], first, transfer.consumer))
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
    offsets, start_ns, end_ns = times.order.offsets.tolist(), times.start_ns.tolist(), times.end_ns.tolist()
    gaps = []
    for transfer, receive_gap in zip(transfers, receive_gaps, strict=True):
        over_ns = transfer.arrival_ns
        if receive_gap > offsets[transfer.target_rank]:
            moving_ns = over_ns - end_ns[transfer.producer]
            over_ns = max(over_ns, end_ns[receive_gap - 1] + moving_ns)
        gaps.append(bisect_left(start_ns, over_ns, transfer.producer + 1, offsets[transfer.source_rank + 1]))
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
    offsets = times.order.offsets.tolist()
    for rank, ops in enumerate(plan.order):
        steps: list[Instruction] = []
        for index, op in enumerate(ops, start=offsets[rank]):
            steps.extend(receives.get(index, ()))
            steps.extend(waits.get((rank, index), ()))
            if index in wait_by_op:
                steps.append(wait_by_op[index])
            steps.append(Compute(op))
            if index in send_by_op:
                steps.append(send_by_op[index])
        steps.extend(waits.get((rank, offsets[rank + 1]), ()))
        steps.extend(TAIL)
        instructions_by_rank.append(tuple(steps))
    return tuple(instructions_by_rank)
