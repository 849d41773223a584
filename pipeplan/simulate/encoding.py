"""Orders as integer arrays, the form that compiled loops work on."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeplan.plan.ops import Op, OpKind, Order

IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class EncodedOrder:
    """The ops of all ranks, one rank after the other.

    Attributes:
        stage, kind, micro_batch: int64, shape [num_ops]; kinds are ``OpKind`` numbers.
        offsets: int64, shape [num_ranks + 1]; the ops of rank r are [offsets[r], offsets[r + 1]).
    """

    stage: IntArray
    kind: IntArray
    micro_batch: IntArray
    offsets: IntArray

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return len(self.offsets) - 1

    @property
    def num_ops(self) -> int:
        """Number of ops on all ranks."""
        return len(self.stage)


def encode_order(order: Order) -> EncodedOrder:
    """Return ``order`` as arrays."""
    flat = np.array(
        [(op.stage, op.kind, op.micro_batch) for ops in order.ops_by_rank for op in ops], dtype=np.int64
    ).reshape(-1, 3)
    offsets = np.zeros(order.num_ranks + 1, dtype=np.int64)
    np.cumsum([len(ops) for ops in order.ops_by_rank], out=offsets[1:])
    columns = np.ascontiguousarray(flat.T)
    return EncodedOrder(columns[0], columns[1], columns[2], offsets)


_KINDS = tuple(OpKind)


def decode_order(encoded: EncodedOrder) -> Order:
    """Return the order that the arrays stand for."""
    ops = [
        Op(stage, _KINDS[kind], micro_batch)
        for stage, kind, micro_batch in zip(
            encoded.stage.tolist(), encoded.kind.tolist(), encoded.micro_batch.tolist(), strict=True
        )
    ]
    bounds = encoded.offsets.tolist()
    return Order(tuple(tuple(ops[first:last]) for first, last in itertools.pairwise(bounds)))
