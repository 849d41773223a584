"""Published makespans, reproduced to the tick (AdaPtis/OctoPipe, arXiv 2509.23722)."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeplan.cluster import equal_ranks
from pipeplan.plan.layout import Partition, Placement
from pipeplan.plan.ops import Op, OpKind, Order
from pipeplan.plan.types import Plan, QueueModel
from pipeplan.profile import read_profile
from pipeplan.simulate import simulate

GOLDEN = Path(__file__).parents[1] / "golden" / "nemotron-nano-9b-v2.yaml"
NS_PER_TICK = 10_000
CLUSTER = equal_ranks(4, "h800-sxm")


def one_f_one_b(num_ranks: int, num_micro_batches: int) -> Order:
    """Written out here, so that the published number tests the simulator and not the named orders."""
    lines = []
    for rank in range(num_ranks):
        warm_up = min(num_ranks - rank, num_micro_batches)
        ops = [Op(rank, OpKind.F, micro_batch) for micro_batch in range(warm_up)]
        for micro_batch in range(num_micro_batches):
            ops.append(Op(rank, OpKind.B, micro_batch))
            if warm_up + micro_batch < num_micro_batches:
                ops.append(Op(rank, OpKind.F, warm_up + micro_batch))
        lines.append(ops)
    return Order.of(lines)


def plan_of(sizes: tuple[int, ...], queue_model: QueueModel = QueueModel.ORDERED_PAIR) -> Plan:
    return Plan(
        model="golden",
        num_micro_batches=8,
        partition=Partition(sizes),
        placement=Placement((0, 1, 2, 3)),
        order=one_f_one_b(4, 8),
        queue_model=queue_model,
    )


@pytest.mark.parametrize("queue_model", list(QueueModel))
@pytest.mark.parametrize(
    ("sizes", "ticks"),
    [((15, 14, 14, 15), 133_121), ((12, 17, 17, 12), 124_114), ((15, 16, 15, 12), 118_325)],
    ids=["even", "deepspeed-parameters", "best-contiguous"],
)
def test_published_makespans(sizes: tuple[int, ...], ticks: int, queue_model: QueueModel) -> None:
    """The published splits give the published makespans; free transfers cost nothing in any queue model."""
    timeline = simulate(plan_of(sizes, queue_model), read_profile(GOLDEN), CLUSTER)
    assert timeline.makespan_ns == ticks * NS_PER_TICK


def test_published_busy_times_and_activations() -> None:
    """The even split keeps each rank busy as published, and 1F1B keeps 56 layer x micro-batches on rank 0."""
    timeline = simulate(plan_of((15, 14, 14, 15)), read_profile(GOLDEN), CLUSTER)
    assert [busy // NS_PER_TICK for busy in timeline.busy_ns_by_rank] == [85_000, 76_160, 76_160, 103_456]
    assert [peak.activations // 10**9 for peak in timeline.memory_by_rank] == [56, 42, 28, 14]
    assert sum(timeline.busy_ns_by_rank) // 4 // NS_PER_TICK == 85_194
