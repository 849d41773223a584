"""Recording one rank's batch: marks on the host and on a device, whole and interrupted batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count

import pytest
import torch

from pipeplan.errors import LaunchError
from pipeplan.program.types import Instruction, parse_instruction
from pipeplan.runtime.trace import BatchRecorder

INSTRUCTIONS: tuple[Instruction, ...] = tuple(map(parse_instruction, ("0F0", "S0>0", "step")))


def ticking(step_ns: int = 10) -> Callable[[], int]:
    """Return a clock that advances by a step at every reading."""
    readings: Iterator[int] = count(1000, step_ns)
    return lambda: next(readings)


def recorder(clock: Callable[[], int]) -> BatchRecorder:
    """Return a recorder of a CPU rank."""
    return BatchRecorder(torch.device("cpu"), clock)


def test_one_reading_between_two_instructions() -> None:
    """A batch of n instructions takes n + 2 readings: before the first, after each, at the end."""
    recording = recorder(ticking())
    mark = recording.start_batch(INSTRUCTIONS)
    for _ in INSTRUCTIONS:
        mark()
    recording.finish_batch()
    assert recording.read() == (INSTRUCTIONS, [1000, 1010, 1020, 1030, 1040])


def test_a_batch_whose_end_is_not_marked_ends_with_its_last_instruction() -> None:
    """Evaluation has no optimizer step to wait for: its last instruction is its end."""
    recording = recorder(ticking())
    mark = recording.start_batch(INSTRUCTIONS)
    for _ in INSTRUCTIONS:
        mark()
    assert recording.read()[1] == [1000, 1010, 1020, 1030, 1030]


def test_only_whole_batches_are_read() -> None:
    """No batch, an interrupted one and one that wasn't recorded are refused, each with what is the matter."""
    recording = recorder(ticking())
    with pytest.raises(LaunchError, match="no batch to trace"):
        recording.read()
    recording.start_batch(INSTRUCTIONS)()
    with pytest.raises(LaunchError, match="interrupted"):
        recording.read()
    recording.is_enabled = False
    mark = recording.start_batch(INSTRUCTIONS)
    for _ in INSTRUCTIONS:
        mark()
    recording.finish_batch()
    with pytest.raises(LaunchError, match="enabled"):
        recording.read()


def test_marks_of_a_device_land_on_the_hosts_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events on a stream that lags behind the host are placed by an event that both clocks know.

    The device is a stand-in: its stream reaches an event 7 ms after the one before it.
    """
    stream_ms = count(100.0, 7.0)

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at_ms = next(stream_ms)

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, later: Event) -> float:
            return later.at_ms - self.at_ms

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    recording = BatchRecorder(torch.device("cuda"), lambda: 1_000_000_000)
    mark = recording.start_batch(INSTRUCTIONS)
    for _ in INSTRUCTIONS:
        mark()
    recording.finish_batch()
    readings = recording.read()[1]
    # Five marks, then the anchor, which the host saw at 1,000 ms.
    assert readings == [965_000_000, 972_000_000, 979_000_000, 986_000_000, 993_000_000]
