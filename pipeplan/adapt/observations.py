"""What measured traces say about ops, messages and the end of a batch, as medians."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from pipeplan.plan.ops import OpKind
from pipeplan.program.trace import TimedInstruction, Trace
from pipeplan.program.types import Compute, Message, Receive, Send, WaitReceive, WaitSend


@dataclass(frozen=True, slots=True, kw_only=True)
class OpObservation:
    """How long one kind of op takes on one stage.

    Attributes:
        first_layer, last_layer: The stage is the layers [first, last).
        duration_ns: Median over micro-batches.
        layers_ns: Median of the part that the layers themselves take; ``None`` where a trace doesn't tell.
        spread_ns: Median distance from the median.
    """

    rank: int
    first_layer: int
    last_layer: int
    kind: OpKind
    is_recomputed: bool
    duration_ns: float
    layers_ns: float | None
    spread_ns: float
    num_samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PairObservation:
    """How long messages of one stage boundary take from one rank to another that waits for them.

    Attributes:
        boundary_layer: The layer whose output (or the gradient of it) travels.
        latency_ns: Median from the start of the send to the end of the wait.
    """

    source_rank: int
    target_rank: int
    boundary_layer: int
    latency_ns: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageObservation:
    """What messages cost; ``None`` where the traces have none of the sort.

    Attributes:
        send_ns: Host time of a message on its source: starting the send, and letting go of it later.
        wait_ns: Host time of a message on its target that has already arrived: posting its receive, and the wait.
        pairs: How long messages take that somebody waits for.
    """

    send_ns: float | None
    wait_ns: float | None
    pairs: tuple[PairObservation, ...]


def observe_ops(traces: Sequence[Trace]) -> tuple[OpObservation, ...]:
    """Return the ops' durations by stage and kind; stages of equal layers on one rank count together."""
    durations: dict[tuple[int, int, int, OpKind, bool], list[int]] = defaultdict(list)
    inside: dict[tuple[int, int, int, OpKind, bool], list[int | None]] = defaultdict(list)
    for trace in traces:
        bounds = trace.partition.bounds
        for rank, steps in enumerate(trace.ranks):
            for timed in steps.steps:
                if not isinstance(timed.instruction, Compute):
                    continue
                op = timed.instruction.op
                key = (rank, bounds[op.stage], bounds[op.stage + 1], op.kind, op.stage in trace.recomputed_stages)
                durations[key].append(timed.duration_ns)
                inside[key].append(timed.layers_ns)
    found = []
    for key, samples in sorted(durations.items()):
        rank, first, last, kind, is_recomputed = key
        middle = median(samples)
        told = [layers_ns for layers_ns in inside[key] if layers_ns is not None]
        found.append(
            OpObservation(
                rank=rank,
                first_layer=first,
                last_layer=last,
                kind=kind,
                is_recomputed=is_recomputed,
                duration_ns=middle,
                layers_ns=median(told) if len(told) == len(samples) else None,
                spread_ns=median(abs(sample - middle) for sample in samples),
                num_samples=len(samples),
            )
        )
    return tuple(found)


def observe_messages(traces: Sequence[Trace]) -> MessageObservation:
    """Return what messages cost their ranks, and how long those take that a rank waits for.

    A wait that began before the message was sent ends when it arrives. One that began well after it must have arrived
    costs host time only; those between tell neither.
    """
    waited: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    pairs: list[tuple[TimedInstruction, TimedInstruction]] = []
    for trace in traces:
        sends = _by_message(trace, Send)
        for message, wait in _by_message(trace, WaitReceive).items():
            send = sends.get(message)
            if send is None:
                continue
            pairs.append((send, wait))
            if wait.start_ns <= send.start_ns:
                placed = trace.placement.rank_by_stage
                layer = trace.partition.bounds[max(message.source_stage, message.target_stage)] - 1
                key = (placed[message.source_stage], placed[message.target_stage], layer)
                waited[key].append(wait.end_ns - send.start_ns)
    margin_ns = 2 * max((median(samples) for samples in waited.values()), default=0)
    ready = [wait.duration_ns for send, wait in pairs if wait.start_ns > send.end_ns + margin_ns]
    if not ready and pairs:  # every message was waited for: the quickest wait is the best guess
        ready = [min(wait.duration_ns for _, wait in pairs)]
    return MessageObservation(
        send_ns=_sum_of_medians(traces, Send, WaitSend) if pairs else None,
        wait_ns=median(ready) + _sum_of_medians(traces, Receive) if pairs else None,
        pairs=tuple(
            PairObservation(source_rank=source, target_rank=target, boundary_layer=layer, latency_ns=median(samples))
            for (source, target, layer), samples in sorted(waited.items())
        ),
    )


def _by_message(trace: Trace, kind: type[Send | WaitReceive]) -> dict[Message, TimedInstruction]:
    return {
        step.instruction.message: step
        for rank in trace.ranks
        for step in rank.steps
        if isinstance(step.instruction, kind)
    }


def _sum_of_medians(traces: Sequence[Trace], *kinds: type[Send | WaitSend | Receive]) -> float:
    """Return the sum over ``kinds`` of the median duration."""
    total = 0.0
    for kind in kinds:
        samples = [
            step.duration_ns
            for trace in traces
            for rank in trace.ranks
            for step in rank.steps
            if isinstance(step.instruction, kind)
        ]
        total += median(samples) if samples else 0.0
    return total


def has_backward(trace: Trace) -> bool:
    """Return whether the batch trained; the end of an evaluation says nothing about the optimizer step."""
    return any(
        isinstance(step.instruction, Compute) and step.instruction.op.kind.is_backward_input
        for rank in trace.ranks
        for step in rank.steps
    )
