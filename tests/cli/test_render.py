"""Tables on terminals of any width: nothing is cut off."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

import pipeplan.cli.console
from pipeplan.cli.render import rich_table
from pipeplan.emit.tables import Table

TABLE = Table(
    heading="Comparison",
    columns=("plan", "split", "time (ms)", "bubble", "peak memory", "time / plan's"),
    rows=(
        ("interleaved zero-bubble v2", "time-balanced", "930,000.0", "35.5%", "8.1 GB", "1.453"),
        ("this plan", "", "640,000.0", "6.2%", "9.5 GB", "1.000"),
    ),
    highlighted=1,
    footnote="The plan takes 9.9% less time than the best baseline that fits, DualPipeV, parameters split.",
)


def printed(monkeypatch: pytest.MonkeyPatch, width: int) -> list[str]:
    """Return what a terminal of ``width`` characters shows of the table."""
    console = Console(file=io.StringIO(), width=width, highlight=False)
    monkeypatch.setattr(pipeplan.cli.console, "result_console", lambda: console)
    console.print(rich_table(TABLE))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("width", [30, 40, 60, 78, 79, 80, 98, 99, 200])
def test_nothing_is_cut_off(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every word of the table is there, on lines that the terminal holds."""
    lines = printed(monkeypatch, width)
    assert max(map(len, lines)) <= width
    shown = {word.strip(",") for line in lines for word in line.split()}
    cells = [*TABLE.columns, *(cell for row in TABLE.rows for cell in row), TABLE.footnote or ""]
    assert {word.strip(",") for cell in cells for word in cell.split()} <= shown


@pytest.mark.parametrize(("width", "num_lines"), [(40, 2), (80, 1), (200, 1)])
def test_narrow_terminals_get_a_list(width: int, num_lines: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The figures of a plan stand on its line where they fit, and below its name where they don't."""
    lines = printed(monkeypatch, width)
    start = next(index for index, line in enumerate(lines) if "this plan" in line)
    assert "640,000.0" in lines[start + num_lines - 1]
