"""1F1B (PipeDream-Flush, arXiv 2006.09503): one forward, one backward, after a warm-up of forwards."""

from __future__ import annotations

from pipeplan.plan.ops import Op, OpKind, Order


def one_f_one_b(num_ranks: int, num_micro_batches: int) -> Order:
    """Return 1F1B for one stage a rank; rank r keeps min(P - r, M) micro-batches."""
    ops_by_rank: list[list[Op]] = []
    for rank in range(num_ranks):
        num_ahead = min(num_ranks - rank, num_micro_batches)
        ops = [Op(rank, OpKind.F, micro_batch) for micro_batch in range(num_ahead)]
        for micro_batch in range(num_micro_batches):
            ops.append(Op(rank, OpKind.B, micro_batch))
            if micro_batch + num_ahead < num_micro_batches:
                ops.append(Op(rank, OpKind.F, micro_batch + num_ahead))
        ops_by_rank.append(ops)
    return Order.of(ops_by_rank)
