"""What is wrong with a plan or a program, as typed values, and how it is shown: the rank x step grid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from pipeplan.errors import VerificationError


class FindingKind(StrEnum):
    """Kinds of fault."""

    MISSING = "missing"
    """A step that has to be there is not."""
    DUPLICATE = "duplicate"
    """A step appears twice."""
    UNKNOWN = "unknown"
    """A step names a stage, micro-batch or boundary that the plan does not have."""
    WRONG_RANK = "wrong-rank"
    """A step stands on a rank that does not hold its stage."""
    BOTH_BACKWARDS = "both-backwards"
    """A stage runs B and also I or W for one micro-batch."""
    TOO_EARLY = "too-early"
    """A step stands before what it needs on its own rank."""
    DEADLOCK = "deadlock"
    """Ranks wait for each other in a circle."""
    CROSSED = "crossed"
    """Two messages of one queue are sent in one order and received in another."""
    MISMATCH = "mismatch"
    """An op stands where the plan's order has another."""
    OUT_OF_MEMORY = "out-of-memory"
    """A rank needs more memory than it has."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One step of one rank on the rank x step grid."""

    rank: int
    position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One fault of a plan or program.

    Attributes:
        position: Where it stands on the rank, or ``None`` for a step that is missing.
        step: The op or instruction at fault, in its text form; empty for a fault of a whole rank.
        reason: A clause that completes "rank 1, position 3, 2B0: ...".
        cycle: For a deadlock, the cells that wait for each other, each for the next one.
    """

    kind: FindingKind
    rank: int
    position: int | None = None
    step: str = ""
    reason: str
    cycle: tuple[Cell, ...] = ()

    def __str__(self) -> str:
        where = f"rank {self.rank}"
        if self.position is not None:
            where += f", position {self.position}"
        if self.step:
            where += f", {self.step}"
        return f"{where}: {self.reason}"

    @property
    def cells(self) -> tuple[Cell, ...]:
        """The cells to mark on the grid."""
        if self.cycle:
            return self.cycle
        return () if self.position is None else (Cell(self.rank, self.position),)


class RefusedError(VerificationError):
    """A plan or program was refused before anything ran.

    Attributes:
        findings: Every fault found, the one the message explains first.
    """

    def __init__(self, findings: Sequence[Finding], rows: Sequence[Sequence[object]]) -> None:
        """Explain the first of ``findings`` on the grid of ``rows``, one row a rank; name all ranks short of memory."""
        self.findings = tuple(findings)
        first = self.findings[0]
        if first.kind is FindingKind.OUT_OF_MEMORY:
            super().__init__("\n".join(str(finding) for finding in self.findings))
            return
        more = len(self.findings) - 1
        text = str(first) + (f" (and {more} more {'fault' if more == 1 else 'faults'})" if more else "")
        super().__init__(f"{text}\n{render_grid(rows, first)}")


_WINDOW = 4  # steps shown before and after a marked cell
_MAX_ROWS = 16


def render_grid(rows: Sequence[Sequence[object]], finding: Finding) -> str:
    """Return the part of the rank x step grid around ``finding``, its cells marked ``>like this<``.

    Args:
        rows: The steps of every rank; anything that ``str`` turns into text.
    """
    position_by_rank = {cell.rank: cell.position for cell in reversed(finding.cells)}
    marked = {(cell.rank, cell.position) for cell in finding.cells}
    middle = 0 if finding.position is None else finding.position
    if finding.position is None and 0 <= finding.rank < len(rows):
        middle = len(rows[finding.rank])
    ranks = _shown_ranks(len(rows), [finding.rank, *position_by_rank])
    first_by_rank = {rank: max(0, position_by_rank.get(rank, middle) - _WINDOW) for rank in ranks}
    shared_first = min(first_by_rank.values())
    width = 2 * _WINDOW + 1
    if max(first_by_rank.values()) - shared_first <= _WINDOW:  # near enough for one window, whose columns line up
        width += max(first_by_rank.values()) - shared_first
        first_by_rank = dict.fromkeys(ranks, shared_first)
    cells_by_rank = {
        rank: [
            f">{rows[rank][position]}<" if (rank, position) in marked else str(rows[rank][position])
            for position in range(first, min(first + width, len(rows[rank])))
        ]
        for rank, first in first_by_rank.items()
    }
    size = max((len(text) for texts in cells_by_rank.values() for text in texts), default=0)
    lines = []
    for rank in ranks:
        first, texts = first_by_rank[rank], cells_by_rank[rank]
        before = "... " if first else ""
        after = " ..." if first + len(texts) < len(rows[rank]) else ""
        marker = "*" if rank in position_by_rank or rank == finding.rank else " "
        body = " ".join(text.ljust(size) for text in texts).rstrip()
        lines.append(f"{marker} rank {rank:>2} from step {first:>2}: {before}{body}{after}".rstrip())
    left_out = len(rows) - len(ranks)
    if left_out:
        lines.append(f"  ({left_out} ranks without a fault are not shown)")
    return "\n".join(lines)


def _shown_ranks(num_ranks: int, faulty: Sequence[int]) -> list[int]:
    if num_ranks <= _MAX_ROWS:
        return list(range(num_ranks))
    return sorted({rank for rank in faulty if 0 <= rank < num_ranks})
