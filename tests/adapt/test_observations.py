"""What is read off a trace, by hand."""

from __future__ import annotations

from pipeplan.adapt.observations import PairObservation, observe_messages, observe_ops
from pipeplan.plan.layout import Partition, Placement
from pipeplan.plan.ops import OpKind
from pipeplan.program.trace import RankTrace, TimedInstruction, Trace
from pipeplan.program.types import parse_instruction


def trace_of(*lines: str) -> Trace:
    """Return the trace of two stages on two ranks; a line holds instructions, start and end in us: ``0F0@0-100``."""
    ranks = []
    for line in lines:
        steps = []
        for word in line.split():
            text, times = word.split("@")
            start_us, end_us = map(int, times.split("-"))
            steps.append(TimedInstruction(parse_instruction(text), start_us * 1000, end_us * 1000))
        ranks.append(RankTrace(steps=tuple(steps), finish_ns=steps[-1].end_ns))
    return Trace(
        model="by hand",
        plan_digest="",
        num_micro_batches=3,
        partition=Partition((3, 2)),
        placement=Placement((0, 1)),
        ranks=tuple(ranks),
    )


TRACE = trace_of(
    "0F0@0-1000 S0>0@1000-1030 0F1@1030-2130 S0>1@2130-2150 0F2@2150-3150 S0>2@3150-3170 !0>0@3170-3174",
    "R0>0@0-10 ?0>0@10-1100 R0>1@1100-1108 1F0@1108-8108 ?0>1@8108-8111 1F1@8111-9111 R0>2@9111-9117 ?0>2@9117-9120",
)


def test_messages_by_hand() -> None:
    """A send costs its start and its release; a receive its posting and, once arrived, its wait; links the rest."""
    found = observe_messages([TRACE])
    assert found.send_ns == 20_000 + 4_000
    assert found.wait_ns == 8_000 + 3_000
    assert found.pairs == (PairObservation(source_rank=0, target_rank=1, boundary_layer=2, latency_ns=100_000),)


def test_waits_that_could_go_either_way_are_left_out() -> None:
    """A wait that begins just after its send may or may not be for a message under way: it counts for nothing."""
    between = trace_of(
        "0F0@0-1000 S0>0@1000-1030 0F1@1030-2130 S0>1@2130-2150",
        "?0>0@10-1100 1F0@1100-2160 ?0>1@2160-2240 1F1@2240-3240",
    )
    found = observe_messages([between])
    assert found.pairs[0].latency_ns == 100_000
    assert found.wait_ns == 80_000  # no message lay ready for sure, so the quickest wait is taken


def test_no_messages_on_one_rank() -> None:
    """Without messages nothing is made up."""
    trace = trace_of("0F0@0-1000 1F0@1000-1500", "step@0-1")
    found = observe_messages([trace])
    assert (found.send_ns, found.wait_ns, found.pairs) == (None, None, ())


def test_ops_by_hand() -> None:
    """Durations are medians by stage and kind, over micro-batches and over traces."""
    first, second = observe_ops([TRACE])
    assert (first.rank, first.first_layer, first.last_layer, first.kind) == (0, 0, 3, OpKind.F)
    assert (first.duration_ns, first.spread_ns, first.num_samples) == (1_000_000, 0, 3)
    assert (second.first_layer, second.last_layer, second.num_samples) == (3, 5, 2)
    assert observe_ops([TRACE, TRACE])[0].num_samples == 6
