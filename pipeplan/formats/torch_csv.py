"""torch's schedule CSV, compute only: one line a rank, one action a cell, such as ``0F0,1I0,1W0``.

``_PipelineScheduleRuntime._load_csv`` reads it and adds communication; ``_dump_csv`` writes it. The file has no layers.
torch's runtime (2.14) runs only orders whose last stage takes the micro-batches in ascending order: it keeps their
losses in a list.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator

from pipeplan.errors import FileFormatError, PlanError
from pipeplan.formats.outline import Outline
from pipeplan.plan.layout import Placement
from pipeplan.plan.ops import Op, OpKind, Order

# What torch's own lowering adds around the ops; ours adds its own.
_ADDED = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD|SEND_F|RECV_F|SEND_B|RECV_B)\d*")
_OVERLAPPED = re.compile(r"\(([^()]*)\)OVERLAP_F_B")


def write_torch_csv(order: Order) -> str:
    """Return the order as torch reads it."""
    return "".join(",".join(str(op) for op in ops) + "\n" for ops in order)


def read_torch_csv(text: str, name: str) -> Outline:
    """Return the order of a CSV and the placement that follows from it.

    Empty cells (torch's idle steps) and communication are left out; an overlapped pair becomes its forward, then its
    backward.

    Args:
        name: The file, for messages.

    Raises:
        FileFormatError: A cell is no action; names line and column.
        PlanError: Two ranks run the same stage, or a stage is run by none.
    """
    ops_by_rank: list[list[Op]] = []
    for rank, row in enumerate(csv.reader(io.StringIO(text.rstrip()))):
        ops: list[Op] = []
        for column, cell in enumerate(row):
            try:
                ops.extend(_read_cell(cell.strip()))
            except PlanError:
                raise FileFormatError(
                    f"{name}, line {rank + 1}, column {column + 1}: {cell.strip()!r} is not an action such as 2F0"
                ) from None
        ops_by_rank.append(ops)
    order = Order.of(_renumbered(ops) for ops in ops_by_rank)
    return Outline(placement=placement_of(order, name), order=order)


def _read_cell(cell: str) -> Iterator[Op]:
    overlapped = _OVERLAPPED.fullmatch(cell)
    if overlapped is not None:
        for part in overlapped[1].split(";"):
            yield from _read_cell(part.strip())
    elif cell not in ("", "None") and _ADDED.fullmatch(cell) is None:
        yield Op.parse(cell)


def _renumbered(ops: list[Op]) -> list[Op]:
    """Return the ops of a rank with forwards that count from 1 counted from 0.

    torch 2.14 writes the last rank of Schedule1F1B so: forwards of micro-batches 1 to M, backwards of 0 to M - 1.
    """
    forwards = [op.micro_batch for op in ops if op.kind is OpKind.F]
    backwards = [op.micro_batch for op in ops if op.kind is OpKind.B]
    is_off = len({op.stage for op in ops}) == 1 and forwards == [micro_batch + 1 for micro_batch in backwards]
    if not is_off or backwards != list(range(len(backwards))):
        return ops
    return [Op(op.stage, op.kind, op.micro_batch - 1) if op.kind is OpKind.F else op for op in ops]


def placement_of(order: Order, name: str) -> Placement:
    """Return the placement that follows from who runs what.

    Raises:
        PlanError: Two ranks run the same stage, or a stage is run by none.
    """
    rank_by_stage: dict[int, int] = {}
    for rank, ops in enumerate(order):
        for op in ops:
            holder = rank_by_stage.setdefault(op.stage, rank)
            if holder != rank:
                raise PlanError(f"{name}: ranks {holder} and {rank} both run stage {op.stage}; a stage has one rank")
    for stage in range(max(rank_by_stage, default=0) + 1):
        if stage not in rank_by_stage:
            raise PlanError(f"{name}: no rank runs stage {stage}")
    return Placement(tuple(rank_by_stage[stage] for stage in range(len(rank_by_stage))))
