"""The measured trace, through the real ``deepspeed`` launcher."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import launching
import pytest
from launching import result_of, write_folder

from pipeplan.plan.folder import load_plan
from pipeplan.plan.layout import Placement
from pipeplan.plan.orders import folded_placement, zb_v
from pipeplan.program.file import read_program
from pipeplan.program.trace import Trace, read_trace, write_trace
from pipeplan.program.types import Compute, Send, WaitReceive

pytestmark = pytest.mark.launcher

SKEW_S = 5.0  # of the next rank's clock in the run on "different hosts"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trace a V order with halves, a random one with whole backwards, and the first again with skewed clocks."""
    folder = tmp_path_factory.mktemp("trace")
    random = Placement.parse("1,0,0,1,1")
    written = {
        "v": write_folder(folder / "v", "hybrid", folded_placement(2, 2), zb_v(2, 4)),
        "random": write_folder(folder / "random", "tied", random, launching.random_order(random, 3, seed=7)),
    }
    common = {"kind": "trace"}
    cases = [
        {**common, "name": "v", "model": "hybrid", "folder": str(written["v"]), "num_micro_batches": 4},
        {**common, "name": "random", "model": "tied", "folder": str(written["random"]), "num_micro_batches": 3},
        {
            **common,
            "name": "skewed",
            "model": "hybrid",
            "folder": str(written["v"]),
            "num_micro_batches": 4,
            "clock_skew_s": SKEW_S,
        },
    ]
    launching.launch(2, cases, folder)
    return folder


NAMES = ("v", "random", "skewed")


def trace_of(folder: Path, name: str) -> Trace:
    """Return what rank 0 got."""
    trace: Trace = result_of(folder, name, 2)[0]["trace"]
    return trace


@pytest.mark.parametrize("name", NAMES)
def test_trace_holds_the_program(folder: Path, name: str) -> None:
    """Every instruction of the program is in the trace, in the program's order, and both ranks get the same trace."""
    trace = trace_of(folder, name)
    planned = folder / ("v" if name == "skewed" else name)
    program = read_program(planned / "program.yaml")
    executed = tuple(tuple(step.instruction for step in rank.steps) for rank in trace.ranks)
    assert executed == program.instructions_by_rank
    plan = load_plan(planned).plan
    assert (trace.plan_digest, trace.partition, trace.placement) == (plan.digest, plan.partition, plan.placement)
    assert result_of(folder, name, 2)[1]["trace"] == trace


@pytest.mark.parametrize("name", NAMES)
def test_times_of_a_rank_never_run_backwards(folder: Path, name: str) -> None:
    """Instructions of a rank don't overlap, none ends before it starts, and the batch ends after them."""
    for rank in trace_of(folder, name).ranks:
        assert all(step.duration_ns >= 0 for step in rank.steps)
        assert all(one.end_ns <= next_.start_ns for one, next_ in pairwise(rank.steps))
        assert rank.steps[0].start_ns >= 0
        assert rank.finish_ns >= rank.steps[-1].end_ns


@pytest.mark.parametrize("name", NAMES)
def test_time_within_the_layers_is_told_for_every_op(folder: Path, name: str) -> None:
    """The layers take a part of each op, and all kinds of ops together most of it."""
    steps = [step for rank in trace_of(folder, name).ranks for step in rank.steps]
    ops = [(step.instruction.op.kind, step) for step in steps if isinstance(step.instruction, Compute)]
    assert all(step.layers_ns is not None and 0 < step.layers_ns < step.duration_ns for _, step in ops)
    for kind in {kind for kind, _ in ops}:
        same = [step for other, step in ops if other is kind]
        assert sum(step.layers_ns or 0 for step in same) > 0.3 * sum(step.duration_ns for step in same), kind


@pytest.mark.parametrize("name", NAMES)
def test_clocks_are_aligned(folder: Path, name: str) -> None:
    """No receive ends before its send started, whatever the clocks of the hosts say; the alignment's error is known."""
    trace = trace_of(folder, name)
    sent = {
        step.instruction.message: step.start_ns
        for rank in trace.ranks
        for step in rank.steps
        if isinstance(step.instruction, Send)
    }
    received = {
        step.instruction.message: step.end_ns
        for rank in trace.ranks
        for step in rank.steps
        if isinstance(step.instruction, WaitReceive)
    }
    assert sent.keys() == received.keys()
    assert sent
    for message, end_ns in received.items():
        assert end_ns > sent[message] - 2 * trace.clock_error_ns
    if name == "skewed":
        assert 0 < trace.clock_error_ns < SKEW_S * 1e9 / 10
        assert max(rank.finish_ns for rank in trace.ranks) < SKEW_S * 1e9
    else:
        assert trace.clock_error_ns == 0


def test_timeline_has_the_form_of_a_prediction(folder: Path) -> None:
    """The trace's timeline holds every op and message of the plan; busy, idle and total time fit together."""
    trace = trace_of(folder, "v")
    timeline = trace.timeline
    order = load_plan(folder / "v").plan.order
    assert tuple(tuple(timed.op for timed in ops) for ops in timeline.ops_by_rank) == order.ops_by_rank
    num_sends = sum(isinstance(step.instruction, Send) for rank in trace.ranks for step in rank.steps)
    assert len(timeline.transfers) == num_sends
    for busy_ns, bubble in zip(timeline.busy_ns_by_rank, timeline.bubble_by_rank, strict=True):
        assert busy_ns + bubble.total_ns == timeline.last_op_ns
    assert timeline.last_op_ns < timeline.makespan_ns


def test_no_trace_before_a_batch(folder: Path) -> None:
    """Asked for before the first batch, every rank says so instead of hanging."""
    for result in result_of(folder, "v", 2):
        assert "no batch to trace" in result["messages"][0]


def test_trace_survives_its_file(folder: Path, tmp_path: Path) -> None:
    """A written trace reads back equal."""
    for name in NAMES:
        trace = trace_of(folder, name)
        write_trace(trace, tmp_path / name)
        assert read_trace(tmp_path / name) == trace


def test_every_replica_traces_its_own_pipeline(tmp_path: Path) -> None:
    """With two replicas on skewed clocks, the ranks of each get the trace of their own, on one clock, and no other."""
    plan = write_folder(tmp_path / "plan", "hybrid", folded_placement(2, 2), zb_v(2, 4), num_replicas=2)
    case = {"kind": "trace", "name": "replicas", "model": "hybrid", "folder": str(plan), "num_micro_batches": 4}
    launching.launch(4, [case | {"clock_skew_s": SKEW_S}], tmp_path)
    traces = [result["trace"] for result in result_of(tmp_path, "replicas", 4)]
    of_replica = [[traces[rank] for rank in range(4) if rank % 2 == replica] for replica in range(2)]
    program = read_program(plan / "program.yaml")
    for first, second in of_replica:
        assert first == second
        executed = tuple(tuple(step.instruction for step in rank.steps) for rank in first.ranks)
        assert executed == program.instructions_by_rank
        assert first.finish_ns < SKEW_S * 1e9
    assert of_replica[0][0] != of_replica[1][0]
