"""Programs: the instructions of every rank. Built once by ``lower``, checked by ``verify``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from pipeplan.errors import PlanError
from pipeplan.files import digest
from pipeplan.plan.ops import Op
from pipeplan.plan.types import QueueModel


class Payload(StrEnum):
    """What a message carries: ``>`` activations to the next stage, ``<`` gradients to the stage before."""

    ACTIVATION = ">"
    GRADIENT = "<"


_MESSAGE = re.compile(r"(\d+)([<>])(\d+)")


@dataclass(frozen=True, slots=True)
class Message:
    """The boundary of one stage for one micro-batch, on its way to the neighbouring stage on another rank.

    Text form: ``2>5`` (stage 2's output for micro-batch 5, to stage 3) and ``2<5`` (the gradient of stage 2's
    input for micro-batch 5, to stage 1). Source and target rank follow from the placement.
    """

    source_stage: int
    payload: Payload
    micro_batch: int

    @property
    def target_stage(self) -> int:
        """The stage that consumes the message."""
        return self.source_stage + (1 if self.payload is Payload.ACTIVATION else -1)

    def __str__(self) -> str:
        return f"{self.source_stage}{self.payload.value}{self.micro_batch}"

    @classmethod
    def parse(cls, text: str) -> Message:
        """Return the message that ``text`` names.

        Raises:
            PlanError: The text isn't STAGE, > or <, MICROBATCH.
        """
        match = _MESSAGE.fullmatch(text)
        if match is None:
            raise PlanError(f"{text!r} is not a message; expected STAGE, > or <, MICROBATCH, such as 2>5")
        return cls(int(match[1]), Payload(match[2]), int(match[3]))


@dataclass(frozen=True, slots=True)
class Compute:
    """Run an op on the inputs at hand. Text form: ``2F0``.

    Roughly::

        outputs[stage, micro_batch] = stage(inputs[stage, micro_batch])
    """

    op: Op

    def __str__(self) -> str:
        return str(self.op)


@dataclass(frozen=True, slots=True)
class Send:
    """Start sending a message to the rank of its target stage; returns at once. Text form: ``S2>5``.

    Roughly::

        pending_sends[message] = [isend(tensor, target_rank, group) for tensor in boundary]
    """

    message: Message

    def __str__(self) -> str:
        return f"S{self.message}"


@dataclass(frozen=True, slots=True)
class Receive:
    """Post the receive of a message from the rank of its source stage; returns at once. Text form: ``R2>5``.

    Roughly::

        buffers[message] = allocate(); pending_receives[message] = [irecv(buffer, source_rank, group) for buffer in ...]
    """

    message: Message

    def __str__(self) -> str:
        return f"R{self.message}"


@dataclass(frozen=True, slots=True)
class WaitReceive:
    """Wait until a posted receive has arrived; its tensors are then inputs of the next op. Text form: ``?2>5``.

    Roughly::

        for work in pending_receives.pop(message): work.wait()
    """

    message: Message

    def __str__(self) -> str:
        return f"?{self.message}"


@dataclass(frozen=True, slots=True)
class WaitSend:
    """Wait until a send has completed and let go of its tensors. Text form: ``!2>5``.

    Roughly::

        for work in pending_sends.pop(message): work.wait()
    """

    message: Message

    def __str__(self) -> str:
        return f"!{self.message}"


@dataclass(frozen=True, slots=True)
class ReduceTied:
    """Sum the gradients of tied weights over the ranks that hold them. Text form: ``reduce-tied``."""

    def __str__(self) -> str:
        return "reduce-tied"


@dataclass(frozen=True, slots=True)
class ReduceReplicas:
    """Average the gradients over the data-parallel replicas. Text form: ``reduce-replicas``."""

    def __str__(self) -> str:
        return "reduce-replicas"


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """Take the optimizer step. Text form: ``step``."""

    def __str__(self) -> str:
        return "step"


Instruction = Compute | Send | Receive | WaitReceive | WaitSend | ReduceTied | ReduceReplicas | OptimizerStep

_BY_PREFIX: dict[str, type[Send | Receive | WaitReceive | WaitSend]] = {
    "S": Send,
    "R": Receive,
    "?": WaitReceive,
    "!": WaitSend,
}
_BY_WORD: dict[str, Instruction] = {
    "reduce-tied": ReduceTied(),
    "reduce-replicas": ReduceReplicas(),
    "step": OptimizerStep(),
}


def parse_instruction(text: str) -> Instruction:
    """Return the instruction of a text form.

    Raises:
        PlanError: The text is no instruction.
    """
    if text in _BY_WORD:
        return _BY_WORD[text]
    prefix = _BY_PREFIX.get(text[:1])
    if prefix is not None:
        return prefix(Message.parse(text[1:]))
    return Compute(Op.parse(text))


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What every rank executes for one batch.

    Attributes:
        plan_digest: The plan it was lowered from.
        rank_by_stage: The placement; sources and targets of messages follow from it.
        queue_model: The queue model it was lowered for.
        instructions_by_rank: In execution order. Each rank ends with
            ``reduce-tied reduce-replicas step``.
    """

    plan_digest: str
    num_micro_batches: int
    rank_by_stage: tuple[int, ...]
    queue_model: QueueModel
    instructions_by_rank: tuple[tuple[Instruction, ...], ...]

    @property
    def num_ranks(self) -> int:
        """Number of pipeline ranks."""
        return len(self.instructions_by_rank)

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.rank_by_stage)

    def source_rank(self, message: Message) -> int:
        """Return the rank that sends ``message``."""
        return self.rank_by_stage[message.source_stage]

    def target_rank(self, message: Message) -> int:
        """Return the rank that receives ``message``."""
        return self.rank_by_stage[message.target_stage]

    def lines(self) -> list[str]:
        """Return one text line a rank."""
        return [" ".join(str(step) for step in steps) for steps in self.instructions_by_rank]

    @property
    def digest(self) -> str:
        """Digest of everything the ranks execute; compared across ranks at start."""
        return digest(
            {
                "plan": self.plan_digest,
                "num_micro_batches": self.num_micro_batches,
                "placement": list(self.rank_by_stage),
                "queue_model": self.queue_model.value,
                "instructions": self.lines(),
            }
        )
