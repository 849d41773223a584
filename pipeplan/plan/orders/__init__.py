"""Named orders: the published schedules as pure functions from ranks and micro-batches, one module a family.

Stages and ranks are pipeline positions; ``onto_ranks`` carries an order and its placement over to physical ranks.
``NAMED_ORDERS`` lists them all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pipeplan.plan.layout import Placement
from pipeplan.plan.ops import Order
from pipeplan.plan.orders.dualpipev import dualpipev
from pipeplan.plan.orders.gpipe import gpipe
from pipeplan.plan.orders.interleaved import interleaved_one_f_one_b, interleaved_zero_bubble
from pipeplan.plan.orders.layouts import folded_placement, looped_placement
from pipeplan.plan.orders.one_f_one_b import one_f_one_b
from pipeplan.plan.orders.zero_bubble import zb_h1, zb_v

__all__ = [
    "NAMED_ORDERS",
    "NamedOrder",
    "dualpipev",
    "folded_placement",
    "gpipe",
    "interleaved_one_f_one_b",
    "interleaved_zero_bubble",
    "looped_placement",
    "one_f_one_b",
    "onto_ranks",
    "zb_h1",
    "zb_v",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedOrder:
    """A published schedule: what it is called, where its stages sit, and its order.

    Attributes:
        is_folded: Whether stages run down the ranks and up again, instead of in loops.
        splits_backward: Whether it puts W apart from I.
        build: From the numbers of ranks and micro-batches to the order.
    """

    name: str
    num_stages_per_rank: int
    is_folded: bool
    splits_backward: bool
    build: Callable[[int, int], Order]

    def placement(self, num_ranks: int) -> Placement:
        """Return the placement that the order is for."""
        layout = folded_placement if self.is_folded else looped_placement
        return layout(num_ranks, self.num_stages_per_rank)


def _plain(name: str, build: Callable[[int, int], Order], *, split: bool = False) -> NamedOrder:
    return NamedOrder(name=name, num_stages_per_rank=1, is_folded=False, splits_backward=split, build=build)


def _interleaved(num_stages_per_rank: int) -> NamedOrder:
    return NamedOrder(
        name=f"interleaved 1F1B v{num_stages_per_rank}",
        num_stages_per_rank=num_stages_per_rank,
        is_folded=False,
        splits_backward=False,
        build=lambda ranks, micro_batches: interleaved_one_f_one_b(ranks, num_stages_per_rank, micro_batches),
    )


def _interleaved_zero_bubble(num_stages_per_rank: int) -> NamedOrder:
    return NamedOrder(
        name=f"interleaved zero-bubble v{num_stages_per_rank}",
        num_stages_per_rank=num_stages_per_rank,
        is_folded=False,
        splits_backward=True,
        build=lambda ranks, micro_batches: interleaved_zero_bubble(ranks, num_stages_per_rank, micro_batches),
    )


def _folded(name: str, build: Callable[[int, int], Order]) -> NamedOrder:
    return NamedOrder(name=name, num_stages_per_rank=2, is_folded=True, splits_backward=True, build=build)


NAMED_ORDERS: tuple[NamedOrder, ...] = (
    _plain("GPipe", gpipe),
    _plain("1F1B", one_f_one_b),
    _interleaved(2),
    _interleaved(3),
    _interleaved(4),
    _plain("ZB-H1", zb_h1, split=True),
    _interleaved_zero_bubble(2),
    _interleaved_zero_bubble(3),
    _interleaved_zero_bubble(4),
    _folded("ZB-V", zb_v),
    _folded("DualPipeV", dualpipev),
)


def onto_ranks(order: Order, placement: Placement, rank_by_position: Sequence[int]) -> tuple[Order, Placement]:
    """Return the order and placement with pipeline position p on physical rank ``rank_by_position[p]``."""
    lines = dict(zip(rank_by_position, order, strict=True))
    moved = Placement(tuple(rank_by_position[position] for position in placement.rank_by_stage))
    return Order(tuple(lines[rank] for rank in range(order.num_ranks))), moved
