"""Messages between ranks: where both ends of each are posted, and whether the ends agree."""

from __future__ import annotations

from dataclasses import dataclass

from pipeplan.plan.findings import Cell, Finding, FindingKind
from pipeplan.program.boundaries import messages_between_ranks
from pipeplan.program.types import Message, Program, Receive, Send


@dataclass(frozen=True, slots=True)
class Posts:
    """Where every message is sent and where it is received, in the order of each rank's instructions."""

    send_cell: dict[Message, Cell]
    receive_cell: dict[Message, Cell]

    @classmethod
    def of(cls, program: Program) -> Posts:
        """Return the posts of ``program``."""
        sends: dict[Message, Cell] = {}
        receives: dict[Message, Cell] = {}
        for rank, steps in enumerate(program.instructions_by_rank):
            for position, step in enumerate(steps):
                if type(step) is Send:
                    sends[step.message] = Cell(rank, position)
                elif type(step) is Receive:
                    receives[step.message] = Cell(rank, position)
        return cls(sends, receives)


def find_message_faults(program: Program, posts: Posts) -> list[Finding]:
    """Return messages that lack an end, and pairs of messages that cross on their way from one rank to another."""
    findings: list[Finding] = []
    for message in messages_between_ranks(program.rank_by_stage, program.num_micro_batches):
        if message not in posts.send_cell:
            reason = f"missing; rank {program.target_rank(message)} waits for this message"
            findings.append(_missing(program.source_rank(message), Send(message), reason))
        elif message not in posts.receive_cell:
            reason = f"missing; rank {program.source_rank(message)} sends this message"
            findings.append(_missing(program.target_rank(message), Receive(message), reason))
    return findings or _find_crossed(program, posts)


def _missing(rank: int, step: Send | Receive, reason: str) -> Finding:
    return Finding(kind=FindingKind.MISSING, rank=rank, step=str(step), reason=reason)


def _find_crossed(program: Program, posts: Posts) -> list[Finding]:
    """Return, by ordered pair of ranks, the first receive that gets another message; NCCL doesn't look at tags."""
    sent: dict[tuple[int, int], list[Message]] = {}
    received: dict[tuple[int, int], list[Message]] = {}
    for by_pair, cells in ((sent, posts.send_cell), (received, posts.receive_cell)):
        for message in cells:
            by_pair.setdefault((program.source_rank(message), program.target_rank(message)), []).append(message)
    findings = []
    for (source, target), messages in sorted(sent.items()):
        for first, other in zip(messages, received[source, target], strict=True):
            if first != other:
                cell = posts.receive_cell[other]
                reason = (
                    f"rank {source} sends {first} first (position {posts.send_cell[first].position}) and {other} "
                    f"later (position {posts.send_cell[other].position}); messages between two ranks arrive in the "
                    "order in which they are sent"
                )
                findings.append(
                    Finding(
                        kind=FindingKind.CROSSED,
                        rank=target,
                        position=cell.position,
                        step=str(Receive(other)),
                        reason=reason,
                    )
                )
                break
    return findings
