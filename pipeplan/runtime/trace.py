"""Records when every instruction of a batch starts and ends, and gathers it from all ranks on one clock.

A rank executes its instructions one after another, so one mark between two of them is the end of the first and the
start of the second: a clock reading on CPUs, an event on the compute stream on GPUs (where the host runs ahead).
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from deepspeed import comm as dist

from pipeplan.errors import LaunchError
from pipeplan.program.trace import RankTrace, TimedInstruction
from pipeplan.program.types import Compute, Instruction

_NUM_PINGS = 30  # the quickest of them counts; the others met a busy host

Clock = Callable[[], int]


class Marks(Protocol):
    """The moments that were marked, in the order of marking."""

    def mark(self) -> None:
        """Mark this moment."""

    def readings_ns(self) -> list[int]:
        """Return every moment on this host's clock; may wait for the device."""


class HostMarks:
    """Moments on the host's clock: where ops run on the CPU, they are the ops' own."""

    def __init__(self, clock: Clock) -> None:
        self._readings: list[int] = []
        self._clock = clock

    def mark(self) -> None:
        """Mark this moment."""
        self._readings.append(self._clock())

    def readings_ns(self) -> list[int]:
        """Return every moment."""
        return list(self._readings)


class DeviceMarks:
    """Moments on the compute stream of a GPU, placed on the host's clock when they are read."""

    def __init__(self, clock: Clock) -> None:
        self._events: list[torch.cuda.Event] = []
        self._clock = clock

    def mark(self) -> None:
        """Mark the moment when the stream gets here."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._events.append(event)

    def readings_ns(self) -> list[int]:
        """Wait for the device and return every moment."""
        anchor = torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        anchor.record()
        anchor.synchronize()
        now_ns = self._clock()
        return [now_ns - round(event.elapsed_time(anchor) * 1e6) for event in self._events]


class BatchRecorder:
    """Records the last batch of one rank.

    Attributes:
        is_enabled: Whether batches are recorded; a mark takes less than a microsecond on CPUs.
    """

    def __init__(self, device: torch.device, clock: Clock = time.perf_counter_ns) -> None:
        self.is_enabled = True
        self.clock = clock
        self._make_marks: type[HostMarks] | type[DeviceMarks] = DeviceMarks if device.type == "cuda" else HostMarks
        self._instructions: Sequence[Instruction] = ()
        self._marks: Marks | None = None
        self._layer_marks: Marks | None = None

    def start_batch(self, instructions: Sequence[Instruction]) -> Callable[[], None]:
        """Start recording; call what is returned after every instruction."""
        self._instructions = instructions
        self._marks = self._make_marks(self.clock) if self.is_enabled else None
        self._layer_marks = self._make_marks(self.clock) if self.is_enabled else None
        if self._marks is None:
            return _mark_nothing
        self._marks.mark()
        return self._marks.mark

    @contextmanager
    def layers(self) -> Iterator[None]:
        """Within this, once an op, its layers compute; all else that the op takes is the engine's."""
        marks = self._layer_marks
        if marks is None:
            yield
            return
        marks.mark()
        yield
        marks.mark()

    def no_layers(self) -> None:
        """Record an op in which no layer has anything to compute."""
        with self.layers():
            pass

    def finish_batch(self) -> None:
        """Mark the end of the batch, when everything after the last instruction is done."""
        if self._marks is not None:
            self._marks.mark()

    def read(self) -> tuple[Sequence[Instruction], list[int]]:
        """Return the instructions of the last batch and their marks: before the first, after each, at the end.

        Raises:
            LaunchError: No batch was recorded to its end.
        """
        if self._marks is None:
            raise LaunchError("there is no batch to trace; run train_batch() first, with trace recording enabled")
        readings = self._marks.readings_ns()
        missing = len(self._instructions) + 2 - len(readings)
        if missing == 1:  # a batch whose caller doesn't mark the end ends with its last instruction
            readings.append(readings[-1])
        elif missing:
            raise LaunchError("the last batch was interrupted; there is no trace of it")
        return self._instructions, readings

    def layers_ns(self) -> list[int] | None:
        """Return how long the layers of each op of the last batch took, in the ops' order; ``None`` if unknown."""
        if self._layer_marks is None:
            return None
        moments = self._layer_marks.readings_ns()
        durations = [end - start for start, end in zip(moments[::2], moments[1::2], strict=True)]
        num_ops = sum(isinstance(instruction, Compute) for instruction in self._instructions)
        return durations if len(durations) == num_ops else None


def _mark_nothing() -> None:
    """Stand in for a mark where nothing is recorded."""


def gather_rank_traces(
    recorder: BatchRecorder, global_ranks: Sequence[int], group: Any, device: torch.device
) -> tuple[tuple[RankTrace, ...], int]:
    """Return the traces of all ranks of a pipeline on the first one's clock, and how wrong its alignment may be, in ns.

    Collective over ``group``, whose members are ``global_ranks``, in the order of the pipeline.

    Raises:
        LaunchError: A rank has no trace; raised on every rank.
    """
    report: dict[str, Any] = {"host": host_identity(), "error": None}
    try:
        instructions, readings = recorder.read()
        report |= {
            "instructions": tuple(instructions),
            "readings": readings,
            "layers_ns": recorder.layers_ns(),
            "peak": _peak_memory_bytes(device),
        }
    except LaunchError as error:
        report["error"] = str(error)
    reports: list[dict[str, Any]] = [{}] * len(global_ranks)
    dist.all_gather_object(reports, report, group=group)
    for rank, one in enumerate(reports):
        if one["error"] is not None:
            raise LaunchError(f"rank {rank}: {one['error']}")
    offsets, error_ns = align_clocks([one["host"] for one in reports], recorder.clock, global_ranks, group, device)
    aligned = [[ns - offset for ns in one["readings"]] for one, offset in zip(reports, offsets, strict=True)]
    first_ns = min(readings[0] for readings in aligned)
    return (
        tuple(
            _rank_trace(one["instructions"], [ns - first_ns for ns in readings], one["layers_ns"], one["peak"])
            for one, readings in zip(reports, aligned, strict=True)
        ),
        error_ns,
    )


def _rank_trace(
    instructions: Sequence[Instruction], readings: Sequence[int], layers_ns: Sequence[int] | None, peak: int | None
) -> RankTrace:
    remaining = iter(layers_ns or ())
    steps = []
    for index, instruction in enumerate(instructions):
        start_ns, end_ns = readings[index], readings[index + 1]
        inside_ns = next(remaining, None) if isinstance(instruction, Compute) else None
        if inside_ns is not None:  # device events are read to half a microsecond
            inside_ns = min(max(inside_ns, 0), end_ns - start_ns)
        steps.append(TimedInstruction(instruction, start_ns, end_ns, inside_ns))
    return RankTrace(
        steps=tuple(steps),
        finish_ns=readings[-1],
        peak_memory_bytes=peak,
    )


def _peak_memory_bytes(device: torch.device) -> int | None:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def host_identity() -> str:
    """Return a name that processes share if they read the same monotonic clock."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    if not boot.is_file():
        return platform.node()
    namespace = Path("/proc/self/ns/time")  # a container may shift the clock
    return boot.read_text().strip() + (str(namespace.readlink()) if namespace.is_symlink() else "")


def align_clocks(
    hosts: Sequence[str], clock: Clock, global_ranks: Sequence[int], group: Any, device: torch.device
) -> tuple[list[int], int]:
    """Return how far each rank's clock is ahead of the first rank's, and the largest error of that, in nanoseconds.

    Ranks of one host share a clock. The first rank of every other host answers pings of the first rank: the quickest
    round trip bounds the error by its half. Collective over ``group``.
    """
    offset_by_host = {hosts[0]: 0}
    error_ns = 0
    own = dist.get_rank()
    for host, answering in zip(hosts, global_ranks, strict=True):
        if host in offset_by_host:
            continue
        measured = torch.zeros(2, dtype=torch.int64, device=device)  # offset, error
        if own == global_ranks[0]:
            measured = torch.tensor(_ping(answering, clock, group, device), dtype=torch.int64, device=device)
        elif own == answering:
            _answer_pings(global_ranks[0], clock, group, device)
        dist.broadcast(measured, src=global_ranks[0], group=group)
        offset_by_host[host] = int(measured[0])
        error_ns = max(error_ns, int(measured[1]))
    return [offset_by_host[host] for host in hosts], error_ns


def _ping(peer: int, clock: Clock, group: Any, device: torch.device) -> tuple[int, int]:
    """Return (offset of the peer's clock, error) from the quickest of several round trips."""
    token = torch.zeros(1, dtype=torch.int64, device=device)
    best = (0, 2**62)
    for _ in range(_NUM_PINGS):
        sent_ns = clock()
        dist.send(token, peer, group=group)
        dist.recv(token, peer, group=group)
        answered_ns = int(token.item())
        round_trip_ns = clock() - sent_ns
        best = min(best, (answered_ns - sent_ns - round_trip_ns // 2, round_trip_ns // 2), key=lambda pair: pair[1])
    return best


def _answer_pings(peer: int, clock: Clock, group: Any, device: torch.device) -> None:
    token = torch.zeros(1, dtype=torch.int64, device=device)
    for _ in range(_NUM_PINGS):
        dist.recv(token, peer, group=group)
        token.fill_(clock())
        dist.send(token, peer, group=group)
