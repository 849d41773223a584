"""The program of an evaluation batch: forward ops only, derived from the placement for any number of micro-batches."""

from __future__ import annotations

from collections.abc import Sequence

from pipeplan.plan.ops import Op, OpKind
from pipeplan.program.types import (
    Compute,
    Instruction,
    Message,
    Payload,
    Program,
    Receive,
    Send,
    WaitReceive,
    WaitSend,
)

_SENDS_IN_FLIGHT = 2  # of one stage: enough to overlap, and memory stays flat however many micro-batches there are


def forward_program(program: Program, num_micro_batches: int) -> Program:
    """Return the forward-only program of the same placement.

    Every rank runs its ops in one order that all ranks share, (micro-batch + stage, stage), along which every
    dependency points forward; each wait but those at the very end is for something that comes earlier in it, so no
    circle of waits can close.
    """
    ranks: Sequence[int] = program.rank_by_stage
    num_stages = len(ranks)
    steps: list[list[Instruction]] = [[] for _ in range(program.num_ranks)]
    sent: list[list[Message]] = [[] for _ in range(program.num_ranks)]
    order = sorted(
        ((stage, micro_batch) for stage in range(num_stages) for micro_batch in range(num_micro_batches)),
        key=lambda item: (item[0] + item[1], item[0]),
    )
    for stage, micro_batch in order:
        own = steps[ranks[stage]]
        if stage > 0 and ranks[stage - 1] != ranks[stage]:
            incoming = Message(stage - 1, Payload.ACTIVATION, micro_batch)
            own += [Receive(incoming), WaitReceive(incoming)]
        own.append(Compute(Op(stage, OpKind.F, micro_batch)))
        if stage + 1 < num_stages and ranks[stage + 1] != ranks[stage]:
            own.append(Send(Message(stage, Payload.ACTIVATION, micro_batch)))
            sent[ranks[stage]].append(Message(stage, Payload.ACTIVATION, micro_batch))
            if micro_batch >= _SENDS_IN_FLIGHT:
                left = Message(stage, Payload.ACTIVATION, micro_batch - _SENDS_IN_FLIGHT)
                own.append(WaitSend(left))
                sent[ranks[stage]].remove(left)
    for own, pending in zip(steps, sent, strict=True):
        own += [WaitSend(message) for message in pending]
    return Program(
        plan_digest=program.plan_digest,
        num_micro_batches=num_micro_batches,
        rank_by_stage=program.rank_by_stage,
        queue_model=program.queue_model,
        instructions_by_rank=tuple(tuple(instructions) for instructions in steps),
    )
