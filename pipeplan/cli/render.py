"""Tables and timelines for the terminal, by Rich."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pipeplan.emit.figure import COLOUR_BY_KIND, shade
from pipeplan.emit.tables import format_ms
from pipeplan.plan.ops import OpKind

if TYPE_CHECKING:
    import rich.text
    from rich.console import RenderableType

    from pipeplan.emit.tables import Table
    from pipeplan.simulate import TimedOp, Timeline

_IDLE = "·"
_MIN_COLUMNS = 20
_TABLE_EDGES, _GAP = 2, 3  # characters beside a table and between its columns
_INDENT = 2
_LONG_LABEL = 12  # characters; a shorter label stays on its line


def rich_table(table: Table) -> RenderableType:
    """Return a table that fits the terminal; where that is too narrow for its columns, a list of rows."""
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    from pipeplan.cli.console import result_console

    widths = _column_widths(table, result_console().width)
    if widths is None:
        return _listed(table)
    drawn = RichTable(
        title=table.heading,
        title_justify="left",
        title_style="bold",
        caption=None if table.footnote is None else Text(table.footnote),
        caption_justify="left",
        caption_style="",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    for index, (column, width) in enumerate(zip(table.columns, widths, strict=True)):
        drawn.add_column(column, justify="left" if index == 0 else "right", width=width, vertical="bottom")
    for index, row in enumerate(table.rows):
        drawn.add_row(*(Text(cell) for cell in row), style="bold" if index == table.highlighted else None)
    return drawn


def _column_widths(table: Table, num_columns: int) -> list[int] | None:
    """Return how wide each column is on a terminal of ``num_columns``; ``None`` where that is not enough.

    Headings and labels may take several lines, single words and figures may not.
    """
    widths, least = [], []
    for index, column in enumerate(table.columns):
        cells = [row[index] for row in table.rows]
        is_long = index == 0 and max(map(len, cells), default=0) > _LONG_LABEL
        words = [*column.split(), *(word for cell in cells for word in (cell.split() if is_long else [cell]))]
        widths.append(max(map(len, [column, *cells])))
        least.append(max(map(len, words), default=0))
    room = num_columns - _TABLE_EDGES - _GAP * (len(widths) - 1)
    if sum(least) > room:
        return None
    while sum(widths) > room:
        widest = max(range(len(widths)), key=lambda index: widths[index] - least[index])
        widths[widest] -= 1
    return widths


def _listed(table: Table) -> RenderableType:
    """Return each row as its label and, below it, what the columns say."""
    from rich.console import Group
    from rich.padding import Padding
    from rich.text import Text

    parts: list[RenderableType] = [Text(table.heading, style="bold"), ""]
    for index, (label, *cells) in enumerate(table.rows):
        style = "bold" if index == table.highlighted else ""
        named = (f"{column} {cell}" for column, cell in zip(table.columns[1:], cells, strict=True) if cell)
        parts += [Text(label, style=style), Padding(Text(", ".join(named), style=style), (0, 0, 0, _INDENT))]
    if table.footnote is not None:
        parts += ["", Text(table.footnote)]
    return Group(*parts)


def timeline_text(timeline: Timeline, num_columns: int) -> rich.text.Text:
    """Return one line a rank: in each column the letter of the op that fills most of it, on the op's colour."""
    from rich.text import Text

    label_width = len(f"rank {timeline.num_ranks - 1} ")
    columns = max(num_columns - label_width - 1, _MIN_COLUMNS)
    text = Text()
    for rank, ops in enumerate(timeline.ops_by_rank):
        text.append(f"rank {rank}".ljust(label_width))
        stages = sorted({timed.op.stage for timed in ops})
        for timed in _sampled(ops, timeline.makespan_ns, columns):
            if timed is None:
                text.append(_IDLE, style="dim")
                continue
            colour = shade(COLOUR_BY_KIND[timed.op.kind], stages.index(timed.op.stage), len(stages))
            text.append(timed.op.kind.name, style=f"black on {colour}")
        text.append("\n")
    text.append(" " * label_width + f"0 ms to {format_ms(timeline.makespan_ns)} ms; ")
    for kind in sorted({timed.op.kind for ops in timeline.ops_by_rank for timed in ops}):
        text.append(f" {kind.name} ", style=f"black on {COLOUR_BY_KIND[kind]}")
        text.append(f" {_NAME_BY_KIND[kind]}  ")
    text.append(f"{_IDLE} idle")
    return text


_NAME_BY_KIND = {
    OpKind.F: "forward",
    OpKind.B: "backward",
    OpKind.I: "input gradient",
    OpKind.W: "weight gradient",
}


def _sampled(ops: tuple[TimedOp, ...], end_ns: int, columns: int) -> list[TimedOp | None]:
    """Return for each of ``columns`` equal intervals the op that fills most of it, ``None`` where idling does."""
    width_ns = max(end_ns, 1) / columns
    sampled: list[TimedOp | None] = []
    first = 0
    for column in range(columns):
        start_ns, stop_ns = column * width_ns, (column + 1) * width_ns
        while first < len(ops) and ops[first].end_ns <= start_ns:
            first += 1
        best, best_ns, busy_ns = None, 0.0, 0.0
        for timed in ops[first:]:
            if timed.start_ns >= stop_ns:
                break
            overlap_ns = min(timed.end_ns, stop_ns) - max(timed.start_ns, start_ns)
            busy_ns += overlap_ns
            if overlap_ns > best_ns:
                best, best_ns = timed, overlap_ns
        sampled.append(best if busy_ns * 2 >= width_ns else None)
    return sampled
