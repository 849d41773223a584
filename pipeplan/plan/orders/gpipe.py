"""GPipe (arXiv 1811.06965): all forwards, then all backwards."""

from __future__ import annotations

from pipeplan.plan.ops import Op, OpKind, Order


def gpipe(num_ranks: int, num_micro_batches: int) -> Order:
    """Return GPipe for one stage a rank; every rank keeps all micro-batches."""
    return Order.of(
        [Op(rank, kind, micro_batch) for kind in (OpKind.F, OpKind.B) for micro_batch in range(num_micro_batches)]
        for rank in range(num_ranks)
    )
