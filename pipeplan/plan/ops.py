"""Ops and orders: what runs on which rank, in which sequence. Orders carry no times."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

from pipeplan.errors import PlanError


class OpKind(IntEnum):
    """Kinds of op, in torch's letters; the numbers are the codes of compiled loops."""

    F = 0
    B = 1
    I = 2  # noqa: E741  the field's own letter
    W = 3

    @property
    def is_backward_input(self) -> bool:
        """Whether the op yields the gradient that the stage before waits for."""
        return self in (OpKind.B, OpKind.I)


_OP = re.compile(r"(\d+)([FBIW])(\d+)")


@dataclass(frozen=True, slots=True, order=True)
class Op:
    """One op of the pipeline; ``str`` gives ``2F0`` (stage 2, F, micro-batch 0), ``Op.parse`` reads it."""

    stage: int
    kind: OpKind
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.name}{self.micro_batch}"

    @classmethod
    def parse(cls, text: str) -> Op:
        """Return the op that ``text`` names.

        Raises:
            PlanError: The text isn't STAGE KIND MICROBATCH.
        """
        match = _OP.fullmatch(text)
        if match is None:
            raise PlanError(f"{text!r} is not an op; expected STAGE, one of F B I W, MICROBATCH, such as 2F0")
        return cls(int(match[1]), OpKind[match[2]], int(match[3]))


@dataclass(frozen=True, slots=True)
class Order:
    """The ops of every rank, in the order in which the rank runs them."""

    ops_by_rank: tuple[tuple[Op, ...], ...]

    @classmethod
    def of(cls, ops_by_rank: Iterable[Iterable[Op]]) -> Order:
        """Return the order of the given ops."""
        return cls(tuple(tuple(ops) for ops in ops_by_rank))

    @classmethod
    def parse(cls, lines: Sequence[str]) -> Order:
        """Return the order of one text line a rank, ops separated by spaces.

        Raises:
            PlanError: A word is not an op; names the rank and the position.
        """
        ops_by_rank: list[tuple[Op, ...]] = []
        for rank, line in enumerate(lines):
            ops: list[Op] = []
            for position, word in enumerate(line.split()):
                try:
                    ops.append(Op.parse(word))
                except PlanError as error:
                    raise PlanError(f"order of rank {rank}, position {position}: {error}") from None
            ops_by_rank.append(tuple(ops))
        return cls(tuple(ops_by_rank))

    def lines(self) -> list[str]:
        """Return one text line a rank; ``Order.parse`` reads it back."""
        return [" ".join(str(op) for op in ops) for ops in self.ops_by_rank]

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return len(self.ops_by_rank)

    @property
    def num_ops(self) -> int:
        """Number of ops on all ranks."""
        return sum(len(ops) for ops in self.ops_by_rank)

    def __iter__(self) -> Iterator[tuple[Op, ...]]:
        return iter(self.ops_by_rank)

    def __getitem__(self, rank: int) -> tuple[Op, ...]:
        return self.ops_by_rank[rank]
