"""Zero-bubble orders of arXiv 2401.10241 and 2405.15362: ZB-H1 and ZB-V."""

from __future__ import annotations

from pipeplan.plan.ops import Op, OpKind, Order
from pipeplan.plan.orders.layouts import without_padding
from pipeplan.plan.orders.walk import Walk


def zb_h1(num_ranks: int, num_micro_batches: int) -> Order:
    """Return ZB-H1 for one stage a rank: 1F1B with W split off and deferred by r micro-batches on rank r.

    Every rank keeps at most min(P, M) micro-batches, as rank 0 of 1F1B does. With F = I = W, the bubble is a third of
    1F1B's.
    """
    ops_by_rank: list[list[Op]] = []
    for rank in range(num_ranks):
        num_ahead = min(num_ranks - rank, num_micro_batches)
        ops = [Op(rank, OpKind.F, micro_batch) for micro_batch in range(num_ahead)]
        for micro_batch in range(num_micro_batches):
            ops.append(Op(rank, OpKind.I, micro_batch))
            if micro_batch >= rank:
                ops.append(Op(rank, OpKind.W, micro_batch - rank))
            if micro_batch + num_ahead < num_micro_batches:
                ops.append(Op(rank, OpKind.F, micro_batch + num_ahead))
        first_left = max(0, num_micro_batches - rank)
        ops.extend(Op(rank, OpKind.W, micro_batch) for micro_batch in range(first_left, num_micro_batches))
        ops_by_rank.append(ops)
    return Order.of(ops_by_rank)


def zb_v(num_ranks: int, num_micro_batches: int) -> Order:
    """Return ZB-V for the folded placement with two stages a rank.

    No bubble when F = I = W and M >= 2P, within the memory of 1F1B.
    """
    num_padded = max(num_micro_batches, 2 * num_ranks - 1)
    ops_by_rank: list[list[Op]] = []
    for rank in range(num_ranks):
        walk = Walk(first_stage=rank, second_stage=2 * num_ranks - 1 - rank)
        walk.repeat(2 * (num_ranks - rank) - 1, "F0")
        walk.repeat(rank, "F1 F0")
        walk.repeat(num_ranks - rank, "F1 I1 W1")
        while walk.num_forward(1) < num_padded:
            if walk.num_forward(0) < num_padded:
                walk.repeat(1, "F0")
            walk.repeat(1, "I0 W0 F1 I1 W1")
        walk.repeat(rank, "I0 I1")
        walk.repeat(num_ranks - rank, "I0 W0")
        walk.flush("W1")
        walk.flush("W0")
        ops_by_rank.append(walk.ops)
    return without_padding(ops_by_rank, num_micro_batches)
