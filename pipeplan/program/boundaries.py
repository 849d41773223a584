"""Which op makes and which op uses a message: the dependency rule, in the words of programs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from pipeplan.plan.ops import Op, OpKind
from pipeplan.program.types import Message, Payload
from pipeplan.simulate.dependencies import Result, ResultKind, needs, result_of
from pipeplan.simulate.encoding import IntArray

PAYLOAD_BY_RESULT = {ResultKind.FORWARD: Payload.ACTIVATION, ResultKind.INPUT_GRADIENT: Payload.GRADIENT}


class Boundaries:
    """The boundaries that the ops of a model with ``num_stages`` make and use, looked up once from the rule.

    Attributes:
        made_codes, used_codes: int64, [num_stages, 4] by stage and kind of op: result kind * num_stages + source
            stage of the message, -1 for none.
    """

    def __init__(self, num_stages: int) -> None:
        self._num_stages = num_stages
        ops_by_stage = [[Op(stage, kind, 0) for kind in OpKind] for stage in range(num_stages)]
        self._made = [[self._source_made(op) for op in ops] for ops in ops_by_stage]
        self._used = [[self._source_used(op) for op in ops] for ops in ops_by_stage]
        self.made_codes = self._codes(self._made)
        self.used_codes = self._codes(self._used)

    def made(self, op: Op) -> Message | None:
        """Return the message that carries what ``op`` hands to another stage, or ``None``."""
        source = self._made[op.stage][op.kind]
        return None if source is None else Message(*source, op.micro_batch)

    def used(self, op: Op) -> Message | None:
        """Return the message that carries what ``op`` needs from another stage, or ``None``."""
        source = self._used[op.stage][op.kind]
        return None if source is None else Message(*source, op.micro_batch)

    def _source_made(self, op: Op) -> tuple[int, Payload] | None:
        result = result_of(op)
        if result is None or not 0 <= _message(result).target_stage < self._num_stages:
            return None
        return result.stage, PAYLOAD_BY_RESULT[result.kind]

    def _source_used(self, op: Op) -> tuple[int, Payload] | None:
        for result in needs(op, self._num_stages):
            if result.stage != op.stage:
                return result.stage, PAYLOAD_BY_RESULT[result.kind]
        return None

    def _codes(self, sources: Sequence[Sequence[tuple[int, Payload] | None]]) -> IntArray:
        number = {payload: int(kind) for kind, payload in PAYLOAD_BY_RESULT.items()}
        return np.array(
            [
                [-1 if source is None else number[source[1]] * self._num_stages + source[0] for source in by_kind]
                for by_kind in sources
            ],
            dtype=np.int64,
        )


def _message(result: Result) -> Message:
    return Message(result.stage, PAYLOAD_BY_RESULT[result.kind], result.micro_batch)


def messages_between_ranks(rank_by_stage: Sequence[int], num_micro_batches: int) -> Iterator[Message]:
    """Yield every message of a batch whose two stages sit on different ranks."""
    num_stages = len(rank_by_stage)
    for payload in Payload:
        for stage in range(num_stages):
            target = Message(stage, payload, 0).target_stage
            if 0 <= target < num_stages and rank_by_stage[target] != rank_by_stage[stage]:
                for micro_batch in range(num_micro_batches):
                    yield Message(stage, payload, micro_batch)
