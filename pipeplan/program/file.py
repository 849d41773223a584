"""The program file: the instructions of every rank as text lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from pipeplan.errors import PlanError
from pipeplan.files import Document, FlowList, check_format, dump_yaml, parse_document, read_yaml, write_text
from pipeplan.plan.types import QueueModel
from pipeplan.program.types import Instruction, Program, parse_instruction
from pipeplan.program.verify import VerifiedProgram

FORMAT = "pipeplan-program/1"


class _ProgramDocument(Document):
    format: Literal["pipeplan-program/1"]
    plan_digest: str
    num_micro_batches: int = Field(ge=1)
    placement: list[int] = Field(min_length=1)
    queue_model: Literal["ordered-pair", "pair", "single"]
    instructions: list[str] = Field(min_length=1)


def read_program(path: Path) -> Program:
    """Read a program file; ``verify`` shows whether it belongs to a plan and finishes.

    Raises:
        FileFormatError: The file is missing, malformed, truncated or of another format.
        PlanError: A word is no instruction; names the rank and the position.
    """
    content = read_yaml(path, "program")
    check_format(content, FORMAT, path)
    document = parse_document(content, _ProgramDocument, path)
    num_ranks = len(document.instructions)
    for stage, rank in enumerate(document.placement):
        if not 0 <= rank < num_ranks:
            raise PlanError(f"{path}: stage {stage} is placed on rank {rank}; the program has {num_ranks} ranks")
    return Program(
        plan_digest=document.plan_digest,
        num_micro_batches=document.num_micro_batches,
        rank_by_stage=tuple(document.placement),
        queue_model=QueueModel(document.queue_model),
        instructions_by_rank=tuple(
            _parse_line(line, f"{path}: instructions of rank {rank}") for rank, line in enumerate(document.instructions)
        ),
    )


def _parse_line(line: str, where: str) -> tuple[Instruction, ...]:
    steps: list[Instruction] = []
    for position, word in enumerate(line.split()):
        try:
            steps.append(parse_instruction(word))
        except PlanError as error:
            raise PlanError(f"{where}, position {position}: {error}") from None
    return tuple(steps)


def program_document(program: Program) -> dict[str, Any]:
    """Return what the program file holds."""
    return {
        "format": FORMAT,
        "plan_digest": program.plan_digest,
        "num_micro_batches": program.num_micro_batches,
        "placement": FlowList(program.rank_by_stage),
        "queue_model": program.queue_model.value,
        "instructions": program.lines(),
    }


def write_program(verified: VerifiedProgram, path: Path) -> None:
    """Write the program file whole or not at all; only a verified program is written."""
    write_text(path, dump_yaml(program_document(verified.program)))
