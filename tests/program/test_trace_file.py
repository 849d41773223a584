"""The trace file: it reads back equal, and faults are named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings

from pipeplan.cluster import Cluster
from pipeplan.errors import FileFormatError, PipeplanError
from pipeplan.plan.layout import Partition, Placement
from pipeplan.plan.ops import Op, OpKind
from pipeplan.plan.types import Plan
from pipeplan.profile.types import Profile
from pipeplan.program.trace import RankTrace, TimedInstruction, Trace, read_trace, write_trace
from pipeplan.program.types import Compute, Message, OptimizerStep, Payload, Send, WaitReceive
from pipeplan.simulate import ResultKind, TimedTransfer, simulate
from tests.adapt.synthetic import trace_of
from tests.strategies import planned


def small_trace() -> Trace:
    """Return a trace of one forward and backward over two ranks, written by hand."""
    message, answer = Message(0, Payload.ACTIVATION, 0), Message(1, Payload.GRADIENT, 0)
    return Trace(
        model="toy",
        plan_digest="sha256:1",
        num_micro_batches=1,
        partition=Partition((2, 1)),
        placement=Placement((0, 1)),
        clock_error_ns=1_500,
        ranks=(
            RankTrace(
                steps=(
                    TimedInstruction(Compute(Op(0, OpKind.F, 0)), 0, 1_000_000),
                    TimedInstruction(Send(message), 1_000_000, 1_200_000),
                    TimedInstruction(WaitReceive(answer), 1_200_000, 5_400_000),
                    TimedInstruction(Compute(Op(0, OpKind.B, 0)), 5_400_000, 7_400_001),
                    TimedInstruction(OptimizerStep(), 7_400_001, 7_500_000),
                ),
                finish_ns=7_600_000,
                peak_memory_bytes=123,
            ),
            RankTrace(
                steps=(
                    TimedInstruction(WaitReceive(message), 100_000, 1_500_000),
                    TimedInstruction(Compute(Op(1, OpKind.F, 0)), 1_500_000, 2_500_000),
                    TimedInstruction(Compute(Op(1, OpKind.B, 0)), 2_500_000, 5_000_000),
                    TimedInstruction(Send(answer), 5_000_000, 5_100_000),
                    TimedInstruction(OptimizerStep(), 5_100_000, 7_500_000),
                ),
                finish_ns=7_500_000,
            ),
        ),
    )


def test_a_trace_survives_its_file(tmp_path: Path) -> None:
    """What was written reads back equal, to the nanosecond."""
    write_trace(small_trace(), tmp_path / "trace.yaml")
    assert read_trace(tmp_path / "trace.yaml") == small_trace()


def told(trace: Trace) -> Trace:
    """Return the trace with the time within the layers of every op: all of it but 0.25 ms."""

    def inside(step: TimedInstruction) -> TimedInstruction:
        is_op = isinstance(step.instruction, Compute)
        return replace(step, layers_ns=step.duration_ns - 250_000) if is_op else step

    return replace(trace, ranks=tuple(replace(rank, steps=tuple(map(inside, rank.steps))) for rank in trace.ranks))


def test_times_within_layers_survive_the_file(tmp_path: Path) -> None:
    """They read back equal, and older traces without them still do."""
    write_trace(told(small_trace()), tmp_path / "trace.yaml")
    assert read_trace(tmp_path / "trace.yaml") == told(small_trace())
    assert "layers_ms: 0.750000 1.750001" in (tmp_path / "trace.yaml").read_text()


def test_timeline_of_a_trace_by_hand() -> None:
    """Ops keep their times, a transfer spans from its send to the end of its wait, the batch from first to last."""
    timeline = small_trace().timeline
    assert [str(timed.op) for timed in timeline.ops_by_rank[0]] == ["0F0", "0B0"]
    assert timeline.busy_ns_by_rank == (3_000_001, 3_500_000)
    assert timeline.transfers == (
        TimedTransfer(ResultKind.FORWARD, 0, 0, 0, 1, 1_000_000, 1_500_000),
        TimedTransfer(ResultKind.INPUT_GRADIENT, 1, 0, 1, 0, 5_000_000, 5_400_000),
    )
    assert (timeline.last_op_ns, timeline.makespan_ns) == (7_400_001, 7_600_000)
    assert timeline.bubble_by_rank[1].ramp_up_ns == 1_500_000


@settings(deadline=None, max_examples=50)
@given(planned())
def test_the_trace_of_any_plan_holds_that_plan(case: tuple[Plan, Profile, Cluster]) -> None:
    """A trace of any plan gives back the plan's digest and, of a perfect run, the predicted times of its ops."""
    plan, profile, cluster = case
    trace = trace_of(plan, profile, cluster)
    assert replace(trace.plan, queue_model=plan.queue_model).digest == plan.digest
    assert trace.timeline.ops_by_rank == simulate(plan, profile, cluster).ops_by_rank


def faulty(tmp_path: Path, **changes: Any) -> str:
    """Return the message about a file with other values, ``ranks`` changed in the first rank's entry."""
    path = tmp_path / "trace.yaml"
    write_trace(small_trace(), path)
    content = yaml.safe_load(path.read_text())
    content["ranks"][0] |= changes.pop("rank", {})
    path.write_text(yaml.safe_dump(content | changes))
    with pytest.raises(PipeplanError) as caught:
        read_trace(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_faults_are_named(tmp_path: Path) -> None:
    """Unknown keys, unequal counts, wrong words, foreign stages and backward times are refused with their place."""
    assert "unknown key 'placements' (did you mean 'placement'?)" in faulty(tmp_path, placements=[0])
    assert "newer" in faulty(tmp_path, format="pipeplan-trace/2")
    assert "5 instructions, 4 starts and 5 ends" in faulty(tmp_path, rank={"start_ms": "0.0 1.0 1.2 5.4"})
    words = "0F0 S0>0 ?1<0 0X0 step"
    assert "ranks[0], position 3: '0X0'" in faulty(tmp_path, rank={"instructions": words})
    words = "1F0 S0>0 ?1<0 0B0 step"
    assert "position 0: 1F0 runs a stage that is placed on another rank" in faulty(
        tmp_path, rank={"instructions": words}
    )
    backwards = "0.0 1.0 1.1 5.4 7.5"
    assert "position 2: ?1<0 runs from 1.1" in faulty(tmp_path, rank={"start_ms": backwards})
    assert "start_ms, position 1: 'soon' is not a time" in faulty(tmp_path, rank={"start_ms": "0.0 soon 1 2 3"})
    assert "'inf' is not a time" in faulty(tmp_path, rank={"end_ms": "0.0 1.0 1.2 inf inf"})
    assert "finishes at 7.0 ms, before" in faulty(tmp_path, rank={"finish_ms": 7.0})
    assert "stage 1 is placed on rank 4" in faulty(tmp_path, placement=[0, 4])
    assert "2 ops and 3 times of layers" in faulty(tmp_path, rank={"layers_ms": "0.5 1.0 1.0"})
    assert "layers of 0B0 take 2.5 ms, but the op takes 2.000001 ms" in faulty(tmp_path, rank={"layers_ms": "0.5 2.5"})


def test_missing_and_truncated_files_are_refused(tmp_path: Path) -> None:
    """A file that isn't there, and one cut anywhere, give one sentence and no traceback."""
    with pytest.raises(FileFormatError, match="does not exist"):
        read_trace(tmp_path / "none.yaml")
    path = tmp_path / "trace.yaml"
    write_trace(small_trace(), path)
    text = path.read_text()
    for end in range(0, len(text) - 40, 97):
        path.write_text(text[:end])
        with pytest.raises(PipeplanError):
            read_trace(path)
