"""A timeline in the trace-event format that Perfetto and chrome://tracing open."""

from __future__ import annotations

import json
from typing import Any

from pipeplan.simulate import ResultKind, TimedTransfer, Timeline
from pipeplan.units import us_from_ns

_RANKS, _LINKS = 0, 1  # process ids: one group of rows for compute, one for transfers
_NAME_BY_KIND = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}


def write_trace(timeline: Timeline) -> str:
    """Return the trace: a row for every rank, and one for every ordered pair of ranks that talks.

    Arrows lead from the op that makes a message over its transfer to the op that uses it. Times are in microseconds,
    as the format wants them.
    """
    events: list[dict[str, Any]] = [
        _name("process_name", _RANKS, 0, "ranks"),
        _name("process_name", _LINKS, 0, "links"),
    ]
    slice_by_op: dict[tuple[int, str, int], tuple[int, int, int]] = {}  # rank, start, end
    for rank, ops in enumerate(timeline.ops_by_rank):
        events.append(_name("thread_name", _RANKS, rank, f"rank {rank}"))
        for timed in ops:
            op = timed.op
            events.append(
                _slice(
                    str(op),
                    op.kind.name,
                    _RANKS,
                    rank,
                    timed.start_ns,
                    timed.end_ns,
                    {"kind": _NAME_BY_KIND[op.kind.name], "stage": op.stage, "micro_batch": op.micro_batch},
                )
            )
            phase = "F" if op.kind.name == "F" else "B" if op.kind.is_backward_input else "W"
            slice_by_op[op.stage, phase, op.micro_batch] = rank, timed.start_ns, timed.end_ns
    row_by_pair: dict[tuple[int, int], int] = {}
    for number, transfer in enumerate(timeline.transfers):
        pair = transfer.source_rank, transfer.target_rank
        if pair not in row_by_pair:
            row_by_pair[pair] = len(row_by_pair)
            events.append(_name("thread_name", _LINKS, row_by_pair[pair], f"rank {pair[0]} to rank {pair[1]}"))
        row = row_by_pair[pair]
        is_forward = transfer.kind is ResultKind.FORWARD
        target_stage = transfer.source_stage + (1 if is_forward else -1)
        name = f"{'activation' if is_forward else 'gradient'} {transfer.source_stage} to {target_stage}"
        details = {"micro_batch": transfer.micro_batch}
        events.append(_slice(name, "transfer", _LINKS, row, transfer.start_ns, transfer.end_ns, details))
        events.extend(_arrows(number, transfer, target_stage, row, slice_by_op))
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, separators=(",", ":")) + "\n"


def _name(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}


def _slice(
    name: str, category: str, process: int, thread: int, start_ns: int, end_ns: int, details: dict[str, Any]
) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": process,
        "tid": thread,
        "ts": us_from_ns(start_ns),
        "dur": us_from_ns(end_ns - start_ns),
        "args": details,
    }


def _arrows(
    number: int,
    transfer: TimedTransfer,
    target_stage: int,
    row: int,
    slice_by_op: dict[tuple[int, str, int], tuple[int, int, int]],
) -> list[dict[str, Any]]:
    """Return the flow events from the maker over the transfer to the user; each binds to the slice around its time."""
    phase = "F" if transfer.kind is ResultKind.FORWARD else "B"
    source_rank, _, made_ns = slice_by_op[transfer.source_stage, phase, transfer.micro_batch]
    target_rank, used_ns, _ = slice_by_op[target_stage, phase, transfer.micro_batch]
    common = {"name": "boundary", "cat": "boundary", "id": number}
    return [
        {"ph": "s", "pid": _RANKS, "tid": source_rank, "ts": us_from_ns(made_ns), **common},
        {"ph": "t", "pid": _LINKS, "tid": row, "ts": us_from_ns(transfer.start_ns), **common},
        {"ph": "f", "bp": "e", "pid": _RANKS, "tid": target_rank, "ts": us_from_ns(used_ns), **common},
    ]
