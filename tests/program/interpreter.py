"""A slow, literal interpreter of programs: the independent truth that the verifier is held against.

Ranks take turns; a transfer happens when a send and a receive stand at the heads of their queues, whatever they
carry, as on a channel without tags. Values are labels of who made them.
"""

from __future__ import annotations

from collections import defaultdict

from pipeplan.plan.ops import Op, OpKind
from pipeplan.plan.types import QueueModel
from pipeplan.program.types import Compute, Message, Payload, Program, Receive, Send, WaitReceive, WaitSend


class WrongError(Exception):
    """The program hangs or computes something wrong; the text says what."""


def interpret(program: Program, queue_model: QueueModel) -> list[Op]:
    """Run ``program`` to the end and return its ops in the order in which they ran.

    Raises:
        WrongError: It hangs, an op lacks an input or gets another one, or something is left over.
    """
    rows = program.instructions_by_rank
    positions = [0] * program.num_ranks
    queues: dict[object, list[tuple[str, Message]]] = defaultdict(list)
    have: list[dict[Message, str]] = [{} for _ in rows]
    sent: set[tuple[int, Message]] = set()
    arrived: dict[tuple[int, Message], str] = {}
    ran: list[Op] = []

    def queue_of(rank: int, peer: int, is_send: bool) -> object:
        if queue_model is QueueModel.SINGLE:
            return rank
        if queue_model is QueueModel.PAIR:
            return rank, peer
        return rank, peer, is_send

    def step_rank(rank: int) -> bool:
        if positions[rank] == len(rows[rank]):
            return False
        step = rows[rank][positions[rank]]
        if isinstance(step, Compute):
            _run(step.op, rank)
        elif isinstance(step, Send):
            if step.message not in have[rank]:
                raise WrongError(f"nothing to send for {step.message}")
            peer = program.target_rank(step.message)
            queues[queue_of(rank, peer, True)].append(("send", step.message))
        elif isinstance(step, Receive):
            peer = program.source_rank(step.message)
            queues[queue_of(rank, peer, False)].append(("receive", step.message))
        elif isinstance(step, WaitSend):
            if (rank, step.message) not in sent:
                return False
        elif isinstance(step, WaitReceive):
            if (rank, step.message) not in arrived:
                return False
            have[rank][step.message] = arrived[rank, step.message]  # before the wait it may still be under way
        positions[rank] += 1
        return True

    def _run(op: Op, rank: int) -> None:
        last = program.num_stages - 1
        needed: list[Message] = []
        if op.kind is OpKind.F and op.stage > 0:
            needed.append(Message(op.stage - 1, Payload.ACTIVATION, op.micro_batch))
        if op.kind in (OpKind.B, OpKind.I) and op.stage < last:
            needed.append(Message(op.stage + 1, Payload.GRADIENT, op.micro_batch))
        for message in needed:
            if have[rank].get(message) != str(message):
                raise WrongError(f"{op} finds {have[rank].get(message)} for {message}")
        if op.kind is OpKind.F:
            made = Message(op.stage, Payload.ACTIVATION, op.micro_batch)
            have[rank][made] = str(made)
        elif op.kind is not OpKind.W:
            made = Message(op.stage, Payload.GRADIENT, op.micro_batch)
            have[rank][made] = str(made)
        ran.append(op)

    def transfer() -> bool:
        for source in range(program.num_ranks):
            for target in range(program.num_ranks):
                if source == target:
                    continue
                outgoing = queues[queue_of(source, target, True)]
                incoming = queues[queue_of(target, source, False)]
                if not outgoing or not incoming:
                    continue
                (kind, message), (other, expected) = outgoing[0], incoming[0]
                if (kind, other) != ("send", "receive"):
                    continue
                if program.target_rank(message) != target or program.source_rank(expected) != source:
                    continue
                outgoing.pop(0)
                incoming.pop(0)
                sent.add((source, message))
                arrived[target, expected] = have[source][message]
                return True
        return False

    while sum(step_rank(rank) for rank in range(program.num_ranks)) or transfer():
        pass
    if any(position < len(row) for position, row in zip(positions, rows, strict=True)):
        raise WrongError(f"hangs at {positions}")
    if any(queues.values()):
        raise WrongError("messages are left over")
    return ran
