"""DualPipeV: DeepSeek's DualPipe cut in half, on a folded placement (arXiv 2412.19437 and the DualPipe repository)."""

from __future__ import annotations

from pipeplan.plan.ops import Op, Order
from pipeplan.plan.orders.layouts import without_padding
from pipeplan.plan.orders.walk import Walk


def dualpipev(num_ranks: int, num_micro_batches: int) -> Order:
    """Return DualPipeV for the folded placement with two stages a rank.

    Pairs that DualPipeV runs overlapped are written as F, then B. W is split off only where the pattern uses it to fill
    the ramps.
    """
    num_padded = max(num_micro_batches, 2 * num_ranks)
    ops_by_rank: list[list[Op]] = []
    for rank in range(num_ranks):
        after = num_ranks - rank - 1
        walk = Walk(first_stage=rank, second_stage=2 * num_ranks - 1 - rank)
        walk.repeat(2 * after, "F0")
        walk.repeat(rank + 1, "F0 F1")
        walk.repeat(after, "I1 W F1")
        walk.repeat(num_padded - 2 * num_ranks + rank + 1, "F0 B1 F1 B0")
        walk.repeat(after, "B1 F1 B0")
        # The second half of the closing backwards is split, so that its W fill the ramp-down.
        num_split = (rank + 1) // 2
        walk.repeat(rank + 1 - num_split - (rank + 1) % 2, "B1 B0")
        walk.repeat((rank + 1) % 2, "B1 I0")
        walk.repeat(num_split, "I1 I0")
        walk.repeat(after, "W I0")
        walk.repeat(rank + 1, "W")
        walk.flush("W1")
        walk.flush("W0")
        ops_by_rank.append(walk.ops)
    return without_padding(ops_by_rank, num_micro_batches)
