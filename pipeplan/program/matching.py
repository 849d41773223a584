"""Messages between ranks: both ends of each, and whether all of them get through under a queue model.

Rendezvous is assumed: a transfer happens when its send and its receive are both posted and both at the head of the
queue in which their rank posted them. What has tags or buffers only does better.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from pipeplan.plan.findings import Cell, Finding, FindingKind
from pipeplan.plan.types import QueueModel
from pipeplan.program.boundaries import messages_between_ranks
from pipeplan.program.deadlock import Wait, deadlock_finding, follow_to_cycle
from pipeplan.program.lower import queue_at
from pipeplan.program.types import Message, Program, Receive, Send, WaitReceive, WaitSend


@dataclass(frozen=True, slots=True)
class Posts:
    """Where every message is sent and where it is received, in the order of each rank's instructions."""

    send_cell: dict[Message, Cell]
    receive_cell: dict[Message, Cell]

    @classmethod
    def of(cls, program: Program) -> Posts:
        """Return the posts of ``program``."""
        sends: dict[Message, Cell] = {}
        receives: dict[Message, Cell] = {}
        for rank, steps in enumerate(program.instructions_by_rank):
            for position, step in enumerate(steps):
                if type(step) is Send:
                    sends[step.message] = Cell(rank, position)
                elif type(step) is Receive:
                    receives[step.message] = Cell(rank, position)
        return cls(sends, receives)


def find_message_faults(program: Program, posts: Posts) -> list[Finding]:
    """Return messages that lack an end, and pairs of messages that cross on their way from one rank to another."""
    findings: list[Finding] = []
    for message in messages_between_ranks(program.rank_by_stage, program.num_micro_batches):
        if message not in posts.send_cell:
            reason = f"missing; rank {program.target_rank(message)} waits for this message"
            findings.append(_missing(program.source_rank(message), Send(message), reason))
        elif message not in posts.receive_cell:
            reason = f"missing; rank {program.source_rank(message)} sends this message"
            findings.append(_missing(program.target_rank(message), Receive(message), reason))
    return findings or _find_crossed(program, posts)


def _missing(rank: int, step: Send | Receive, reason: str) -> Finding:
    return Finding(kind=FindingKind.MISSING, rank=rank, step=str(step), reason=reason)


def _find_crossed(program: Program, posts: Posts) -> list[Finding]:
    """Return, by ordered pair of ranks, the first receive that gets another message; NCCL doesn't look at tags."""
    sent: dict[tuple[int, int], list[Message]] = {}
    received: dict[tuple[int, int], list[Message]] = {}
    for by_pair, cells in ((sent, posts.send_cell), (received, posts.receive_cell)):
        for message in cells:
            by_pair.setdefault((program.source_rank(message), program.target_rank(message)), []).append(message)
    findings = []
    for (source, target), messages in sorted(sent.items()):
        for first, other in zip(messages, received[source, target], strict=True):
            if first != other:
                cell = posts.receive_cell[other]
                reason = (
                    f"rank {source} sends {first} first (position {posts.send_cell[first].position}) and {other} "
                    f"later (position {posts.send_cell[other].position}); messages between two ranks arrive in the "
                    "order in which they are sent"
                )
                findings.append(
                    Finding(
                        kind=FindingKind.CROSSED,
                        rank=target,
                        position=cell.position,
                        step=str(Receive(other)),
                        reason=reason,
                    )
                )
                break
    return findings


def find_queue_faults(program: Program, posts: Posts, queue_model: QueueModel) -> list[Finding]:
    """Run all messages through their queues and return the circle of waits if the ranks don't reach their ends."""
    run = _QueueRun(program, queue_model)
    if run.stuck_ranks:
        return [_explain(run, posts)]
    return []


class _QueueRun:
    """An abstract run: only waits block, and only messages matter.

    Attributes:
        positions: Where each rank stopped: its end, or the wait that it hangs in.
    """

    def __init__(self, program: Program, queue_model: QueueModel) -> None:
        self.program = program
        self.queue_model = queue_model
        self.positions = [0] * program.num_ranks
        self._queues: dict[Hashable, deque[Message]] = {}
        self.ends: dict[Message, tuple[Hashable, Hashable]] = {}
        self._posted: set[Message] = set()  # with at least one end
        self._both_posted: set[Message] = set()
        self.done: set[Message] = set()
        self._runnable: list[int] = []
        self._waiting: dict[Message, list[int]] = {}
        self._run()

    @property
    def stuck_ranks(self) -> list[int]:
        """Ranks that did not reach their end."""
        rows = self.program.instructions_by_rank
        return [rank for rank, position in enumerate(self.positions) if position < len(rows[rank])]

    def head(self, queue: Hashable) -> Message:
        """Return the message at the head of ``queue``."""
        return self._queues[queue][0]

    def _run(self) -> None:
        self._runnable = list(range(self.program.num_ranks))
        while self._runnable:
            self._advance(self._runnable.pop())

    def _advance(self, rank: int) -> None:
        steps = self.program.instructions_by_rank[rank]
        done = self.done
        position = self.positions[rank]
        while position < len(steps):
            step = steps[position]
            if isinstance(step, (Send, Receive)):
                self._post(rank, step.message)
            elif isinstance(step, (WaitSend, WaitReceive)) and step.message not in done:
                self._waiting.setdefault(step.message, []).append(rank)
                break
            position += 1
        self.positions[rank] = position

    def queues(self, message: Message) -> tuple[Hashable, Hashable]:
        """Return the queues at the source and the target in which ``message`` is posted."""
        source, target = self.program.source_rank(message), self.program.target_rank(message)
        return (
            queue_at(self.queue_model, source, source, target),
            queue_at(self.queue_model, target, source, target),
        )

    def _post(self, rank: int, message: Message) -> None:
        source, target = self.program.source_rank(message), self.program.target_rank(message)
        queue = queue_at(self.queue_model, rank, source, target)
        self._queues.setdefault(queue, deque()).append(message)
        if message not in self._posted:
            self._posted.add(message)
            return
        self._both_posted.add(message)
        self._complete_from(message)

    def _complete_from(self, message: Message) -> None:
        """Complete ``message`` if it is at the head of both queues, and then what moved up behind it."""
        candidates = [message]
        while candidates:
            message = candidates.pop()
            if message not in self._both_posted or message in self.done:
                continue
            queues = self.queues(message)
            if any(self._queues[queue][0] != message for queue in queues):
                continue
            self.done.add(message)
            self._runnable.extend(self._waiting.pop(message, ()))
            for queue in queues:
                waiting = self._queues[queue]
                waiting.popleft()
                if waiting:
                    candidates.append(waiting[0])


def _explain(run: _QueueRun, posts: Posts) -> Finding:
    """Return the circle: a rank waits for a message, that for a rank to post it or for the head of a queue."""
    rows = run.program.instructions_by_rank

    def is_posted(cell: Cell) -> bool:
        return cell.position < run.positions[cell.rank]

    def blocked_by(node: int | Message) -> int | Message:
        if isinstance(node, int):
            return _message(rows[node][run.positions[node]])
        for cell in (posts.send_cell[node], posts.receive_cell[node]):
            if not is_posted(cell):
                return cell.rank
        return next(head for head in map(run.head, run.queues(node)) if head != node)

    start: int | Message = run.stuck_ranks[0]
    cycle = follow_to_cycle(start, blocked_by)
    first = cycle.index(min(cycle, key=lambda node: (not isinstance(node, int), str(node))))
    cycle = [*cycle[first:], *cycle[:first]]
    waits: list[Wait] = []
    for node, following in zip(cycle, [*cycle[1:], cycle[0]], strict=True):
        if isinstance(node, int):
            cell = Cell(node, run.positions[node])
            waits.append(Wait(cell, str(rows[node][cell.position]), f"waits for {following}"))
        elif isinstance(following, int):
            cell = next(c for c in (posts.send_cell[node], posts.receive_cell[node]) if not is_posted(c))
            reason = f"is not posted before position {run.positions[following]}, where rank {following} waits"
            waits.append(Wait(cell, str(rows[cell.rank][cell.position]), reason))
        else:
            cell = _cell_behind(run, posts, node, following)
            reason = f"stands behind {following} in the queue of rank {cell.rank}"
            waits.append(Wait(cell, str(rows[cell.rank][cell.position]), reason))
    return deadlock_finding(waits)


def _cell_behind(run: _QueueRun, posts: Posts, message: Message, head: Message) -> Cell:
    """Return the post of ``message`` in the queue whose head is ``head``."""
    cells: Sequence[Cell] = (posts.send_cell[message], posts.receive_cell[message])
    return next(cell for cell, queue in zip(cells, run.queues(message), strict=True) if run.head(queue) == head)


def _message(step: object) -> Message:
    if not isinstance(step, WaitSend | WaitReceive):
        raise AssertionError(f"{step} can't block")
    return step.message
