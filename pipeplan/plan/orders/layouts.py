"""Placements that named orders are written for: stages looped over the ranks, or folded back and forth."""

from __future__ import annotations

from pipeplan.plan.layout import Placement
from pipeplan.plan.ops import Op, Order


def looped_placement(num_ranks: int, num_stages_per_rank: int) -> Placement:
    """Return ranks 0, 1, .., P-1 repeated: Megatron's interleaving; with one stage a rank, the plain pipeline."""
    return Placement(tuple(range(num_ranks)) * num_stages_per_rank)


def folded_placement(num_ranks: int, num_stages_per_rank: int) -> Placement:
    """Return ranks up and down in turn: a V for two stages a rank, a W for four; neighbours share the turning rank."""
    ranks: list[int] = []
    for lap in range(num_stages_per_rank):
        ranks.extend(range(num_ranks) if lap % 2 == 0 else reversed(range(num_ranks)))
    return Placement(tuple(ranks))


def without_padding(ops_by_rank: list[list[Op]], num_micro_batches: int) -> Order:
    """Return the order without the ops of micro-batches from ``num_micro_batches`` on.

    Patterns that need a round number of micro-batches are built for the next such number and cut here. No dependency
    leads from one micro-batch to another, so what remains of an order that finishes also finishes.
    """
    return Order.of([op for op in ops if op.micro_batch < num_micro_batches] for ops in ops_by_rank)
