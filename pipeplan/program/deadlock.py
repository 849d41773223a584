"""Circles of waits: what hangs, and the cycle that shows why."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import NoReturn, TypeVar

from pipeplan.plan.findings import Cell, Finding, FindingKind, RefusedError
from pipeplan.plan.ops import Order
from pipeplan.simulate.dependencies import Result, needs, result_of

Node = TypeVar("Node", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Wait:
    """One link of a circle: a step that can't go on, and what it waits for.

    Attributes:
        reason: A clause after "rank 0, position 3, 2F0 ": "waits for 1F0, which ...".
    """

    cell: Cell
    step: str
    reason: str


def follow_to_cycle(start: Node, blocker: Callable[[Node], Node]) -> list[Node]:
    """Return the cycle that following ``blocker`` from ``start`` ends in."""
    place_by_node: dict[Node, int] = {}
    path: list[Node] = []
    node = start
    while node not in place_by_node:
        place_by_node[node] = len(path)
        path.append(node)
        node = blocker(node)
    return path[place_by_node[node] :]


def deadlock_finding(waits: Sequence[Wait]) -> Finding:
    """Return the finding for a circle of waits."""
    first = waits[0]
    links = "; ".join(
        f"rank {wait.cell.rank}, position {wait.cell.position}, {wait.step} {wait.reason}" for wait in waits
    )
    return Finding(
        kind=FindingKind.DEADLOCK,
        rank=first.cell.rank,
        position=first.cell.position,
        step=first.step,
        reason=f"deadlock, a circle of {len(waits)} waits: {links}",
        cycle=tuple(wait.cell for wait in waits),
    )


def refuse_deadlocked_order(order: Order, num_stages: int) -> NoReturn:
    """Raise ``RefusedError`` with the cycle of a structurally sound order whose ops wait for each other in a circle."""
    maker: dict[Result, Cell] = {}
    for rank, ops in enumerate(order):
        for position, op in enumerate(ops):
            result = result_of(op)
            if result is not None:
                maker[result] = Cell(rank, position)
    done: set[Result] = set()
    positions = _run_until_stuck(order, num_stages, maker, done)

    def blocking(rank: int) -> Result:
        op = order[rank][positions[rank]]
        return next(result for result in needs(op, num_stages) if result not in done)

    stuck = next(rank for rank, ops in enumerate(order) if positions[rank] < len(ops))
    ranks = follow_to_cycle(stuck, lambda rank: maker[blocking(rank)].rank)
    waits = []
    for rank in sorted_from_lowest(ranks):
        op = order[rank][positions[rank]]
        cell = maker[blocking(rank)]
        behind = f", behind {order[cell.rank][positions[cell.rank]]}" if cell.position > positions[cell.rank] else ""
        needed = order[cell.rank][cell.position]
        reason = f"waits for {needed}, which rank {cell.rank} runs at position {cell.position}{behind}"
        waits.append(Wait(Cell(rank, positions[rank]), str(op), reason))
    raise RefusedError([deadlock_finding(waits)], order.ops_by_rank)


def sorted_from_lowest(cycle: Sequence[int]) -> list[int]:
    """Return the cycle turned so that it starts at its lowest rank: the same text whatever found it."""
    first = cycle.index(min(cycle))
    return [*cycle[first:], *cycle[:first]]


def _run_until_stuck(order: Order, num_stages: int, maker: dict[Result, Cell], done: set[Result]) -> list[int]:
    """Run every rank as far as it gets and return where each stopped; fills ``done``."""
    positions = [0] * order.num_ranks
    waiting: dict[Result, int] = {}
    runnable = list(range(order.num_ranks))
    while runnable:
        rank = runnable.pop()
        ops = order[rank]
        while positions[rank] < len(ops):
            op = ops[positions[rank]]
            missing = next((result for result in needs(op, num_stages) if result not in done), None)
            if missing is not None:
                waiting[missing] = rank
                break
            result = result_of(op)
            if result is not None:
                done.add(result)
                if result in waiting:
                    runnable.append(waiting.pop(result))
            positions[rank] += 1
    return positions
