"""Whether all messages get through and all ranks reach their end under a queue model.

Rendezvous is assumed: a transfer happens when its send and its receive are both posted and both at the head of the
queue in which their rank posted them. What has tags or buffers only does better.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from enum import IntEnum

from pipeplan.plan.findings import Cell, Finding
from pipeplan.plan.types import QueueModel
from pipeplan.program.deadlock import Wait, deadlock_finding, follow_to_cycle
from pipeplan.program.lower import queue_at
from pipeplan.program.matching import Posts
from pipeplan.program.types import Message, Program, Receive, Send, WaitReceive, WaitSend


def find_queue_faults(program: Program, posts: Posts, queue_model: QueueModel) -> list[Finding]:
    """Run all messages through their queues and return the circle of waits if the ranks don't reach their ends.

    Every message must have both ends in ``posts``.
    """
    run = QueueRun(program, posts, queue_model)
    stuck = run.advance_all()
    return [_explain(program, run, posts, stuck[0])] if stuck else []


class _Action(IntEnum):
    POST = 0
    WAIT = 1


class QueueRun:
    """An abstract run: only waits block, and only messages matter. Messages and queues are numbered for speed.

    Attributes:
        positions: Where each rank stands: its end, or the wait that it hangs in.
    """

    def __init__(self, program: Program, posts: Posts, queue_model: QueueModel) -> None:
        self.positions = [0] * program.num_ranks
        self._program = program
        self._messages = list(posts.send_cell)
        self._number = {message: number for number, message in enumerate(self._messages)}
        queue_number: dict[Hashable, int] = {}

        def queue_of(rank: int, source: int, target: int) -> int:
            return queue_number.setdefault(queue_at(queue_model, rank, source, target), len(queue_number))

        self._queues_by_message: list[tuple[int, int]] = []
        for message in self._messages:
            source, target = posts.send_cell[message].rank, posts.receive_cell[message].rank
            self._queues_by_message.append((queue_of(source, source, target), queue_of(target, source, target)))
        self._queues: list[deque[int]] = [deque() for _ in queue_number]
        self._num_posted = bytearray(len(self._messages))
        self._is_done = bytearray(len(self._messages))
        self._waiting: dict[int, list[int]] = {}
        self._runnable = list(range(program.num_ranks))
        self._actions_by_rank = [self._actions(rank) for rank in range(program.num_ranks)]
        self._next_action = [0] * program.num_ranks

    def _actions(self, rank: int) -> list[tuple[int, int, int, int]]:
        """Return the messaging steps of a rank as (position, action, message, queue)."""
        actions: list[tuple[int, int, int, int]] = []
        for position, step in enumerate(self._program.instructions_by_rank[rank]):
            if isinstance(step, (Send, Receive)):
                number = self._number[step.message]
                queue = self._queues_by_message[number][isinstance(step, Receive)]
                actions.append((position, _Action.POST, number, queue))
            elif isinstance(step, (WaitSend, WaitReceive)):
                actions.append((position, _Action.WAIT, self._number[step.message], -1))
        return actions

    def advance_all(self) -> list[int]:
        """Run until nothing moves and return the ranks that did not reach their end."""
        while self._runnable:
            self._advance(self._runnable.pop())
        rows = self._program.instructions_by_rank
        return [rank for rank, position in enumerate(self.positions) if position < len(rows[rank])]

    def head(self, queue: int) -> Message:
        """Return the message at the head of ``queue``."""
        return self._messages[self._queues[queue][0]]

    def queues(self, message: Message) -> tuple[int, int]:
        """Return the queues at the source and at the target in which ``message`` is posted."""
        return self._queues_by_message[self._number[message]]

    def _advance(self, rank: int) -> None:
        actions = self._actions_by_rank[rank]
        index = self._next_action[rank]
        while index < len(actions):
            position, action, message, queue = actions[index]
            if action == _Action.POST:
                self._queues[queue].append(message)
                self._num_posted[message] += 1
                if self._num_posted[message] == 2:
                    self._complete_from(message)
            elif not self._is_done[message]:
                self._waiting.setdefault(message, []).append(rank)
                self.positions[rank] = position
                break
            index += 1
        else:
            self.positions[rank] = len(self._program.instructions_by_rank[rank])
        self._next_action[rank] = index

    def _complete_from(self, message: int) -> None:
        """Complete ``message`` if it is at the head of both queues, and then what moved up behind it."""
        candidates = [message]
        while candidates:
            message = candidates.pop()
            if self._num_posted[message] < 2 or self._is_done[message]:
                continue
            source, target = (self._queues[queue] for queue in self._queues_by_message[message])
            if source[0] != message or target[0] != message:
                continue
            self._is_done[message] = 1
            self._runnable.extend(self._waiting.pop(message, ()))
            for queue in (source, target):
                queue.popleft()
                if queue:
                    candidates.append(queue[0])


def _explain(program: Program, run: QueueRun, posts: Posts, stuck_rank: int) -> Finding:
    """Return the circle: a rank waits for a message, that for a rank to post it or for the head of a queue."""
    rows = program.instructions_by_rank

    def is_posted(cell: Cell) -> bool:
        return cell.position < run.positions[cell.rank]

    def blocked_by(node: int | Message) -> int | Message:
        if isinstance(node, int):
            return _message(rows[node][run.positions[node]])
        for cell in (posts.send_cell[node], posts.receive_cell[node]):
            if not is_posted(cell):
                return cell.rank
        return next(head for head in map(run.head, run.queues(node)) if head != node)

    start: int | Message = stuck_rank
    cycle = follow_to_cycle(start, blocked_by)
    first = cycle.index(min(cycle, key=lambda node: (not isinstance(node, int), str(node))))
    cycle = [*cycle[first:], *cycle[:first]]
    waits: list[Wait] = []
    for node, following in zip(cycle, [*cycle[1:], cycle[0]], strict=True):
        if isinstance(node, int):
            cell = Cell(node, run.positions[node])
            reason = f"waits for {following}"
        elif isinstance(following, int):
            cell = next(cell for cell in (posts.send_cell[node], posts.receive_cell[node]) if not is_posted(cell))
            reason = f"is not posted before position {run.positions[following]}, where rank {following} waits"
        else:
            cells = (posts.send_cell[node], posts.receive_cell[node])
            ends = zip(cells, run.queues(node), strict=True)
            cell = next(cell for cell, queue in ends if run.head(queue) == following)
            reason = f"stands behind {following} in the queue of rank {cell.rank}"
        waits.append(Wait(cell, str(rows[cell.rank][cell.position]), reason))
    return deadlock_finding(waits)


def _message(step: object) -> Message:
    if not isinstance(step, WaitSend | WaitReceive):
        raise AssertionError(f"{step} can't block")
    return step.message
