"""Structural checks of plans; faults of orders are tested with the verifier, which runs them first."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeplan.cluster import Cluster
from pipeplan.errors import PlanError
from pipeplan.plan.check import check_plan, find_order_faults
from pipeplan.plan.findings import Finding, FindingKind, render_grid
from pipeplan.plan.layout import Partition, Placement
from pipeplan.plan.ops import Order
from pipeplan.plan.types import Plan
from pipeplan.profile.types import Profile
from tests.program.examples import V_PLAN, V_PROFILE
from tests.strategies import planned


@settings(max_examples=50, deadline=None)
@given(planned())
def test_valid_plans_pass(case: tuple[Plan, Profile, Cluster]) -> None:
    """Any order and placement that a random topological sort gives is accepted, mixed B and I + W included."""
    plan, profile, _ = case
    check_plan(plan, profile)


@settings(max_examples=50, deadline=None)
@given(case=planned(), data=st.data())
def test_every_dropped_op_is_missed(case: tuple[Plan, Profile, Cluster], data: st.DataObject) -> None:
    """Whatever op is taken out, the check names its stage and micro-batch."""
    plan, _, _ = case
    rank = data.draw(st.integers(0, plan.num_ranks - 1))
    ops = list(plan.order[rank])
    dropped = ops.pop(data.draw(st.integers(0, len(ops) - 1)))
    lines = list(plan.order.ops_by_rank)
    lines[rank] = tuple(ops)
    (fault, *_) = find_order_faults(Order(tuple(lines)), plan.placement, plan.num_micro_batches)
    assert fault.rank == rank
    assert fault.kind is FindingKind.MISSING
    assert fault.step[0] == str(dropped.stage)
    assert fault.step.endswith(str(dropped.micro_batch))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"num_micro_batches": 0}, "a batch needs at least 1 micro-batch, got 0"),
        ({"partition": Partition((1, 1, 1))}, "partition 1,1,1 covers 3 layers; the profile has 4"),
        ({"placement": Placement((0, 1, 1))}, "placement 0,1,1 names 3 stages; the partition has 4"),
        ({"placement": Placement((0, 2, 1, 0))}, "stage 1 is placed on rank 2; the cluster has ranks 0 to 1"),
        ({"placement": Placement((0, 0, 0, 0))}, "rank 1 holds no stage"),
        ({"recomputed_stages": (1, 1)}, r"recomputed stages \[1, 1\] are not in ascending order"),
        ({"recomputed_stages": (4,)}, "'recompute' names stage 4; the plan has stages 0 to 3"),
        ({"recomputed_stages": (2,)}, "stage 2, whose layer 'layers.2' has no 'recompute' figures"),
    ],
)
def test_contradictions_are_refused(change: dict[str, object], text: str) -> None:
    """Partition, placement, micro-batches and recomputation agree with each other and the profile."""
    with pytest.raises(PlanError, match=text):
        check_plan(replace(V_PLAN, **change), V_PROFILE)  # type: ignore[arg-type]


def test_long_rows_are_shown_around_the_fault() -> None:
    """The grid stays readable: a window around the marked step, and only faulty ranks of many."""
    rows = [[f"{rank}F{step}" for step in range(100)] for rank in range(40)]
    finding = Finding(kind=FindingKind.DUPLICATE, rank=21, position=50, step="21F50", reason="")
    assert render_grid(rows, finding).splitlines() == [
        "* rank 21 from step 46: ... 21F46   21F47   21F48   21F49   >21F50< 21F51   21F52   21F53   21F54 ...",
        "  (39 ranks without a fault are not shown)",
    ]


def test_a_missing_op_shows_the_end_of_its_rank() -> None:
    """There is no cell to mark; the rank is."""
    finding = Finding(kind=FindingKind.MISSING, rank=1, step="1B1", reason="")
    assert render_grid([["0F0", "0B0"], ["1F0"]], finding).splitlines() == [
        "  rank  0 from step  0: 0F0 0B0",
        "* rank  1 from step  0: 1F0",
    ]
