"""torch's schedule CSV, with torch's own schedules on the other side."""

from __future__ import annotations

import io
from contextlib import redirect_stderr
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules

from pipeplan.errors import FileFormatError, PipeplanError, PlanError
from pipeplan.formats.outline import complete_plan
from pipeplan.formats.torch_csv import read_torch_csv, write_torch_csv
from pipeplan.plan.ops import Order
from pipeplan.plan.orders import NAMED_ORDERS, NamedOrder, gpipe, one_f_one_b
from pipeplan.program.verify import verify_plan
from tests.program.examples import devices, equal_layers
from tests.strategies import orders, placements
from tests.torch_schedules import NUM_RANKS, dump, fake_stages, torch_schedules


@pytest.mark.parametrize("num_micro_batches", [8, 12])
def test_torchs_schedules_import_and_verify(num_micro_batches: int) -> None:
    """1F1B, GPipe, interleaved, zero-bubble, ZB-V and DualPipeV: complete, lowered and free of deadlocks."""
    for schedule in torch_schedules(num_micro_batches):
        outline = read_torch_csv(dump(schedule), "schedule.csv")
        profile = equal_layers(2 * outline.placement.num_stages)
        plan = complete_plan(outline, profile, devices(NUM_RANKS))
        assert plan.num_micro_batches == num_micro_batches
        verify_plan(plan, profile, devices(NUM_RANKS))
        if isinstance(schedule, schedules.Schedule1F1B | schedules.ScheduleGPipe):
            named = one_f_one_b if isinstance(schedule, schedules.Schedule1F1B) else gpipe
            assert plan.order == named(NUM_RANKS, num_micro_batches)


def test_an_overlapped_pair_becomes_forward_then_backward() -> None:
    """DualPipeV's pairs run one after the other here; idle cells and reductions are left out."""
    text = "0F0,,None,0F1,(1F0;0B0)OVERLAP_F_B,0B1,1B0,0REDUCE_GRAD,1SEND_B0,1RESHARD"
    assert read_torch_csv(text, "schedule.csv").order.lines() == ["0F0 0F1 1F0 0B0 0B1 1B0"]


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_orders_survive_the_file(data: st.DataObject) -> None:
    """Any order and placement reads back."""
    placement = data.draw(placements(num_stages=4, num_ranks=3))
    order = data.draw(orders(placement=placement, num_micro_batches=3))
    again = read_torch_csv(write_torch_csv(order), "schedule.csv")
    assert (again.order, again.placement) == (order, placement)


@pytest.mark.parametrize("named", NAMED_ORDERS, ids=lambda named: named.name)
def test_torchs_runtime_loads_our_orders(named: NamedOrder, tmp_path: Path) -> None:
    """``_load_csv`` accepts them, adds its communication, and finds our placement."""
    order, placement = named.build(NUM_RANKS, 8), named.placement(NUM_RANKS)
    path = tmp_path / "schedule.csv"
    path.write_text(write_torch_csv(order))
    runtime = schedules._PipelineScheduleRuntime(
        fake_stages(placement.stages(0), placement.num_stages), 8, loss_fn=torch.nn.functional.mse_loss
    )
    with redirect_stderr(io.StringIO()):
        runtime._load_csv(str(path))
    assert runtime.stage_index_to_group_rank == dict(enumerate(placement.rank_by_stage))
    ours = {rank: [str(op) for op in ops] for rank, ops in enumerate(order)}
    theirs = {rank: [str(a) for a in actions] for rank, actions in runtime.pipeline_order.items()}
    assert theirs == ours
    computed = {
        rank: [str(action) for action in actions if action.is_compute_op]
        for rank, actions in runtime.pipeline_order_with_comms.items()
    }
    assert computed == ours


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("0F0,0X0", FileFormatError, "schedule.csv, line 1, column 2: '0X0' is not an action such as 2F0"),
        ("0F0\n(0B0;oops)OVERLAP_F_B", FileFormatError, "line 2, column 1"),
        ("0F0,0B0\n0F1,0B1", PlanError, "ranks 0 and 1 both run stage 0; a stage has one rank"),
        ("0F0,0B0\n2F0,2B0", PlanError, "no rank runs stage 1"),
    ],
)
def test_faulty_files_say_what_is_wrong(text: str, error: type[PipeplanError], message: str) -> None:
    """Line and column of the cell, or the stage."""
    with pytest.raises(error) as caught:
        read_torch_csv(text, "schedule.csv")
    assert message in str(caught.value)


def test_the_partition_is_balanced_unless_given() -> None:
    """The file has no layers: equal layers are split evenly."""
    outline = read_torch_csv(write_torch_csv(Order.parse(["0F0 0B0", "1F0 1B0"])), "schedule.csv")
    plan = complete_plan(outline, equal_layers(6), devices(2))
    assert str(plan.partition) == "3,3"
