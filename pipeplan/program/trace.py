"""The measured trace: when every instruction of a program started and ended, and the file that holds it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from pipeplan.errors import FileFormatError, PlanError
from pipeplan.files import Document, FlowList, check_format, dump_yaml, parse_document, read_yaml, write_text
from pipeplan.plan.layout import Partition, Placement
from pipeplan.plan.ops import Order
from pipeplan.plan.types import Plan
from pipeplan.program.types import Compute, Instruction, Message, Payload, Send, WaitReceive, parse_instruction
from pipeplan.simulate import ResultKind, TimedOp, TimedTransfer, Timeline
from pipeplan.units import ms_from_ns, ns_from_ms, ns_from_us, us_from_ns

FORMAT = "pipeplan-trace/1"


@dataclass(frozen=True, slots=True)
class TimedInstruction:
    """An instruction with its start and end, in nanoseconds from the start of the batch.

    Attributes:
        layers_ns: For an op, how much of it the layers themselves (and the loss) took; the rest is the engine's work
            for any op. ``None`` where it was not recorded.
    """

    instruction: Instruction
    start_ns: int
    end_ns: int
    layers_ns: int | None = None

    @property
    def duration_ns(self) -> int:
        """From start to end."""
        return self.end_ns - self.start_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTrace:
    """What one rank did.

    Attributes:
        steps: Every instruction, in the order in which the rank executed them.
        finish_ns: When the batch was over for the rank: optimizer step, loss and logging done.
        peak_memory_bytes: What the device's allocator had handed out at its peak, if it tells.
    """

    steps: tuple[TimedInstruction, ...]
    finish_ns: int
    peak_memory_bytes: int | None = None

    @property
    def ops(self) -> Iterator[TimedOp]:
        """The ops among the instructions."""
        for step in self.steps:
            if isinstance(step.instruction, Compute):
                yield TimedOp(step.instruction.op, step.start_ns, step.end_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One measured batch. Time 0 is the first start on any rank.

    Attributes:
        plan_digest: The plan that ran.
        clock_error_ns: How far the clocks of two ranks may be apart; 0 where they read the same clock.
    """

    model: str
    plan_digest: str
    num_micro_batches: int
    partition: Partition
    placement: Placement
    ranks: tuple[RankTrace, ...]
    recomputed_stages: tuple[int, ...] = ()
    clock_error_ns: int = 0

    @property
    def num_ranks(self) -> int:
        """Number of pipeline ranks."""
        return len(self.ranks)

    @property
    def last_op_ns(self) -> int:
        """End of the last op."""
        return max((timed.end_ns for rank in self.ranks for timed in rank.ops), default=0)

    @property
    def finish_ns(self) -> int:
        """When the batch was over on every rank."""
        return max(rank.finish_ns for rank in self.ranks)

    @property
    def plan(self) -> Plan:
        """The plan that ran, as far as the trace tells: without the digest of a profile and without a prediction."""
        return Plan(
            model=self.model,
            num_micro_batches=self.num_micro_batches,
            partition=self.partition,
            placement=self.placement,
            order=Order.of([timed.op for timed in rank.ops] for rank in self.ranks),
            recomputed_stages=self.recomputed_stages,
        )

    @property
    def timeline(self) -> Timeline:
        """The trace in the form of a prediction.

        A transfer spans from the start of its send to the end of the wait for it, so it includes the time that it lay
        ready; memory is left out.
        """
        return Timeline(
            ops_by_rank=tuple(tuple(rank.ops) for rank in self.ranks),
            transfers=tuple(self._transfers()),
            memory_by_rank=(),
            last_op_ns=self.last_op_ns,
            makespan_ns=self.finish_ns,
        )

    def _transfers(self) -> Iterator[TimedTransfer]:
        end_by_message = {
            step.instruction.message: step.end_ns
            for rank in self.ranks
            for step in rank.steps
            if isinstance(step.instruction, WaitReceive)
        }
        ranks = self.placement.rank_by_stage
        for trace in self.ranks:
            for step in trace.steps:
                if not isinstance(step.instruction, Send) or step.instruction.message not in end_by_message:
                    continue
                message: Message = step.instruction.message
                yield TimedTransfer(
                    ResultKind.FORWARD if message.payload is Payload.ACTIVATION else ResultKind.INPUT_GRADIENT,
                    message.source_stage,
                    message.micro_batch,
                    ranks[message.source_stage],
                    ranks[message.target_stage],
                    step.start_ns,
                    end_by_message[message],
                )


class _RankEntry(Document):
    instructions: str
    start_ms: str
    end_ms: str
    layers_ms: str | None = None
    finish_ms: float = Field(ge=0)
    peak_memory_bytes: int | None = Field(default=None, ge=0)


class _TraceDocument(Document):
    format: Literal["pipeplan-trace/1"]
    model: str
    plan_digest: str
    num_micro_batches: int = Field(ge=1)
    partition: list[int] = Field(min_length=1)
    placement: list[int] = Field(min_length=1)
    recompute: list[int] = Field(default_factory=list)
    clock_error_us: float = Field(default=0.0, ge=0)
    ranks: list[_RankEntry] = Field(min_length=1)


def read_trace(path: Path) -> Trace:
    """Read a trace file.

    Raises:
        FileFormatError: The file is missing, malformed, truncated, of another format, or its times run backwards.
        PlanError: A word is no instruction, or the layout contradicts itself.
    """
    content = read_yaml(path, "trace")
    check_format(content, FORMAT, path)
    document = parse_document(content, _TraceDocument, path)
    partition, placement = Partition(tuple(document.partition)), Placement(tuple(document.placement))
    try:
        placement.check(partition.num_stages, len(document.ranks))
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from None
    return Trace(
        model=document.model,
        plan_digest=document.plan_digest,
        num_micro_batches=document.num_micro_batches,
        partition=partition,
        placement=placement,
        recomputed_stages=tuple(document.recompute),
        clock_error_ns=ns_from_us(document.clock_error_us),
        ranks=tuple(
            _rank_trace(entry, f"{path}: ranks[{rank}]", placement.stages(rank))
            for rank, entry in enumerate(document.ranks)
        ),
    )


def _rank_trace(entry: _RankEntry, where: str, stages: tuple[int, ...]) -> RankTrace:
    words = entry.instructions.split()
    starts_ms, ends_ms = (
        _parse_times(entry.start_ms, f"{where}.start_ms"),
        _parse_times(entry.end_ms, f"{where}.end_ms"),
    )
    if not len(words) == len(starts_ms) == len(ends_ms):
        raise FileFormatError(
            f"{where} has {len(words)} instructions, {len(starts_ms)} starts and {len(ends_ms)} ends; "
            "expected as many of each"
        )
    layers_ms = [] if entry.layers_ms is None else _parse_times(entry.layers_ms, f"{where}.layers_ms")
    steps: list[TimedInstruction] = []
    now_ms, num_ops = 0.0, 0
    for position, (word, start_ms, end_ms) in enumerate(zip(words, starts_ms, ends_ms, strict=True)):
        try:
            instruction = parse_instruction(word)
        except PlanError as error:
            raise PlanError(f"{where}, position {position}: {error}") from None
        if not now_ms <= start_ms <= end_ms:
            raise FileFormatError(
                f"{where}, position {position}: {word} runs from {start_ms} to {end_ms} ms, but the rank was busy "
                f"until {now_ms} ms; times of a rank never run backwards"
            )
        start_ns, end_ns, layers_ns = ns_from_ms(start_ms), ns_from_ms(end_ms), None
        if isinstance(instruction, Compute):
            if instruction.op.stage not in stages:
                raise PlanError(f"{where}, position {position}: {word} runs a stage that is placed on another rank")
            if num_ops < len(layers_ms):
                layers_ns = ns_from_ms(layers_ms[num_ops])
                if not 0 <= layers_ns <= end_ns - start_ns:
                    raise FileFormatError(
                        f"{where}, position {position}: the layers of {word} take {layers_ms[num_ops]} ms, but "
                        f"the op takes {ms_from_ns(end_ns - start_ns)} ms"
                    )
            num_ops += 1
        now_ms = end_ms
        steps.append(TimedInstruction(instruction, start_ns, end_ns, layers_ns))
    if entry.layers_ms is not None and len(layers_ms) != num_ops:
        raise FileFormatError(
            f"{where} has {num_ops} ops and {len(layers_ms)} times of layers; expected as many of each"
        )
    if entry.finish_ms < now_ms:
        raise FileFormatError(
            f"{where} finishes at {entry.finish_ms} ms, before its last instruction ends ({now_ms} ms)"
        )
    return RankTrace(
        steps=tuple(steps), finish_ns=ns_from_ms(entry.finish_ms), peak_memory_bytes=entry.peak_memory_bytes
    )


def _parse_times(line: str, where: str) -> list[float]:
    times: list[float] = []
    for position, word in enumerate(line.split()):
        try:
            time_ms = float(word)
        except ValueError:
            time_ms = math.nan
        if not math.isfinite(time_ms):
            raise FileFormatError(f"{where}, position {position}: {word!r} is not a time in milliseconds")
        times.append(time_ms)
    return times


def trace_document(trace: Trace) -> dict[str, Any]:
    """Return what the trace file holds."""
    return {
        "format": FORMAT,
        "model": trace.model,
        "plan_digest": trace.plan_digest,
        "num_micro_batches": trace.num_micro_batches,
        "partition": FlowList(trace.partition.num_layers_by_stage),
        "placement": FlowList(trace.placement.rank_by_stage),
        "recompute": FlowList(trace.recomputed_stages),
        "clock_error_us": us_from_ns(trace.clock_error_ns),
        "ranks": [_rank_entry(rank) for rank in trace.ranks],
    }


def _rank_entry(rank: RankTrace) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "instructions": " ".join(str(step.instruction) for step in rank.steps),
        "start_ms": _time_line(step.start_ns for step in rank.steps),
        "end_ms": _time_line(step.end_ns for step in rank.steps),
    }
    layers_ns = [step.layers_ns for step in rank.steps if isinstance(step.instruction, Compute)]
    recorded_ns = [value for value in layers_ns if value is not None]
    if recorded_ns and len(recorded_ns) == len(layers_ns):
        entry["layers_ms"] = _time_line(recorded_ns)
    entry["finish_ms"] = ms_from_ns(rank.finish_ns)
    if rank.peak_memory_bytes is not None:
        entry["peak_memory_bytes"] = rank.peak_memory_bytes
    return entry


def _time_line(times_ns: Iterable[int]) -> str:
    return " ".join(f"{ms_from_ns(value):.6f}" for value in times_ns)


def write_trace(trace: Trace, path: Path) -> None:
    """Write the trace file whole or not at all."""
    write_text(path, dump_yaml(trace_document(trace)))
