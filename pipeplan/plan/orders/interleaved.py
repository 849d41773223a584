"""Interleaved 1F1B (Megatron-LM, arXiv 2104.04473) and its zero-bubble form, for any number of stages a rank.

Both walk the same sequence of (stage, micro-batch): rounds of micro-batches, each round through all the stages of the
rank. They differ in the length of the warm-up and in W being split off and put later.
"""

from __future__ import annotations

from pipeplan.plan.ops import Op, OpKind, Order
from pipeplan.plan.orders.layouts import without_padding


def interleaved_one_f_one_b(num_ranks: int, num_stages_per_rank: int, num_micro_batches: int) -> Order:
    """Return interleaved 1F1B for the looped placement.

    Where M is no multiple of P, rounds grow (as in torch) or the last round is cut short.
    """
    return _interleaved(num_ranks, num_stages_per_rank, num_micro_batches, ahead_per_rank=2, split=False)


def interleaved_zero_bubble(num_ranks: int, num_stages_per_rank: int, num_micro_batches: int) -> Order:
    """Return interleaved 1F1B with W split off and deferred on rank r by r ops, for the looped placement."""
    return _interleaved(num_ranks, num_stages_per_rank, num_micro_batches, ahead_per_rank=1, split=True)


def _interleaved(
    num_ranks: int, num_stages_per_rank: int, num_micro_batches: int, *, ahead_per_rank: int, split: bool
) -> Order:
    num_rounds = max(1, num_micro_batches // num_ranks)
    if num_micro_batches % num_rounds == 0:
        per_round = num_micro_batches // num_rounds
    else:
        per_round = num_ranks
        num_rounds += 1
    num_walked = num_rounds * per_round * num_stages_per_rank

    def cell(rank: int, position: int, *, backward: bool) -> tuple[int, int]:
        round_, within = divmod(position, per_round * num_stages_per_rank)
        lap, offset = divmod(within, per_round)
        if backward:
            lap = num_stages_per_rank - 1 - lap
        return rank + lap * num_ranks, round_ * per_round + offset

    ops_by_rank: list[list[Op]] = []
    for rank in range(num_ranks):
        num_ahead = (num_stages_per_rank - 1) * per_round + ahead_per_rank * (num_ranks - 1 - rank)
        num_ahead = min(num_ahead, num_walked)
        deferral = rank if split else 0
        ops: list[Op] = []
        for position in range(num_walked + num_ahead):
            if position < num_walked:
                stage, micro_batch = cell(rank, position, backward=False)
                ops.append(Op(stage, OpKind.F, micro_batch))
            if position >= num_ahead:
                stage, micro_batch = cell(rank, position - num_ahead, backward=True)
                ops.append(Op(stage, OpKind.I if split else OpKind.B, micro_batch))
            if split and position >= num_ahead + deferral:
                stage, micro_batch = cell(rank, position - num_ahead - deferral, backward=True)
                ops.append(Op(stage, OpKind.W, micro_batch))
        if split:
            for position in range(max(0, num_walked - deferral), num_walked):
                stage, micro_batch = cell(rank, position, backward=True)
                ops.append(Op(stage, OpKind.W, micro_batch))
        ops_by_rank.append(ops)
    return without_padding(ops_by_rank, num_micro_batches)
