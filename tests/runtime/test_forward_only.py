"""Evaluation programs finish on every placement, even where a send waits for its receive."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pipeplan.plan.types import QueueModel
from pipeplan.program.types import Compute, Message, Payload, Program, Receive, Send, WaitReceive, WaitSend
from pipeplan.runtime.forward_only import forward_program


def _program(rank_by_stage: tuple[int, ...]) -> Program:
    return Program(
        plan_digest="sha256:0",
        num_micro_batches=1,
        rank_by_stage=rank_by_stage,
        queue_model=QueueModel.ORDERED_PAIR,
        instructions_by_rank=((),) * (max(rank_by_stage) + 1),
    )


def _run(program: Program) -> set[tuple[int, int]]:
    """Execute under rendezvous: a send completes once its receive is posted; queues are first in, first out."""
    positions = [0] * program.num_ranks
    sent: dict[tuple[int, int], list[Message]] = {}
    posted: dict[tuple[int, int], list[Message]] = {}
    done: set[tuple[int, int]] = set()
    is_moving = True
    while is_moving:
        is_moving = False
        for rank, instructions in enumerate(program.instructions_by_rank):
            while positions[rank] < len(instructions):
                step = instructions[positions[rank]]
                if isinstance(step, Compute):
                    stage, micro_batch = step.op.stage, step.op.micro_batch
                    assert stage == 0 or (stage - 1, micro_batch) in done
                    done.add((stage, micro_batch))
                else:
                    assert isinstance(step, Send | Receive | WaitSend | WaitReceive)
                    pair = (program.source_rank(step.message), program.target_rank(step.message))
                    ends = sent.setdefault(pair, []), posted.setdefault(pair, [])
                    if isinstance(step, Send):
                        ends[0].append(step.message)
                    elif isinstance(step, Receive):
                        ends[1].append(step.message)
                    else:
                        assert step.message.payload is Payload.ACTIVATION
                        assert all(one == other for one, other in zip(*ends, strict=False)), "queues disagree"
                        if not all(step.message in end for end in ends):
                            break
                positions[rank] += 1
                is_moving = True
    assert positions == [len(instructions) for instructions in program.instructions_by_rank], "it hangs"
    return done


@given(st.lists(st.integers(0, 3), min_size=1, max_size=9), st.integers(1, 7))
def test_forward_program_finishes(ranks: list[int], num_micro_batches: int) -> None:
    """Every stage runs every micro-batch once, whatever the placement and the number of micro-batches."""
    used = sorted(set(ranks))
    rank_by_stage = tuple(used.index(rank) for rank in ranks)
    program = forward_program(_program(rank_by_stage), num_micro_batches)
    assert _run(program) == {(stage, number) for stage in range(len(ranks)) for number in range(num_micro_batches)}
    sends = sum(isinstance(step, Send) for steps in program.instructions_by_rank for step in steps)
    waits = sum(isinstance(step, WaitSend) for steps in program.instructions_by_rank for step in steps)
    assert sends == waits
