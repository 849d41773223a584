"""Named orders: they finish for any number of micro-batches, equal torch's own, and keep the published memory."""

from __future__ import annotations

from collections import Counter

import pytest

from pipeplan.plan.layout import Placement
from pipeplan.plan.ops import Op, OpKind, Order
from pipeplan.plan.orders import (
    NAMED_ORDERS,
    NamedOrder,
    dualpipev,
    interleaved_one_f_one_b,
    interleaved_zero_bubble,
    one_f_one_b,
    onto_ranks,
    zb_h1,
    zb_v,
)

RANKS_AND_MICRO_BATCHES = [
    (p, m) for p in (2, 3, 4, 8) for m in sorted({1, 2, p - 1, p, p + 1, 2 * p - 1, 2 * p, 3 * p + 1})
]


def finish_times(order: Order, placement: Placement, durations: dict[OpKind, int]) -> dict[Op, int]:
    """Return when each op ends, found by sweeping over the ranks until nothing moves; a test's own small clock."""
    last_stage = placement.num_stages - 1
    ended: dict[Op, int] = {}
    position = [0] * order.num_ranks
    free = [0] * order.num_ranks

    def backward_end(stage: int, micro_batch: int) -> int | None:
        for kind in (OpKind.B, OpKind.I):
            if Op(stage, kind, micro_batch) in ended:
                return ended[Op(stage, kind, micro_batch)]
        return None

    moved = True
    while moved:
        moved = False
        for rank, ops in enumerate(order):
            while position[rank] < len(ops):
                op = ops[position[rank]]
                assert placement.rank_by_stage[op.stage] == rank
                needs: list[int | None] = [free[rank]]
                if op.kind is OpKind.F:
                    needs.append(0 if op.stage == 0 else ended.get(Op(op.stage - 1, OpKind.F, op.micro_batch)))
                elif op.kind is OpKind.W:
                    needs.append(ended.get(Op(op.stage, OpKind.I, op.micro_batch)))
                else:
                    needs.append(ended.get(Op(op.stage, OpKind.F, op.micro_batch)))
                    needs.append(0 if op.stage == last_stage else backward_end(op.stage + 1, op.micro_batch))
                if any(need is None for need in needs):
                    break
                ended[op] = free[rank] = max(need for need in needs if need is not None) + durations[op.kind]
                position[rank] += 1
                moved = True
    stuck = [ops[at] for at, ops in zip(position, order, strict=True) if at < len(ops)]
    assert not stuck, f"never runs: {stuck}"
    return ended


UNIT = {OpKind.F: 1, OpKind.B: 2, OpKind.I: 1, OpKind.W: 1}


@pytest.mark.parametrize("named", NAMED_ORDERS, ids=lambda named: named.name)
@pytest.mark.parametrize(("num_ranks", "num_micro_batches"), RANKS_AND_MICRO_BATCHES)
def test_finishes_with_every_op_once(named: NamedOrder, num_ranks: int, num_micro_batches: int) -> None:
    """Every named order runs F and a whole backward of each stage and micro-batch once, and never hangs."""
    order = named.build(num_ranks, num_micro_batches)
    placement = named.placement(num_ranks)
    counts = Counter(op for ops in order for op in ops)
    assert set(counts.values()) == {1}
    for stage in range(placement.num_stages):
        for micro_batch in range(num_micro_batches):
            kinds = {kind for kind in OpKind if Op(stage, kind, micro_batch) in counts}
            assert kinds in ({OpKind.F, OpKind.B}, {OpKind.F, OpKind.I, OpKind.W})
    assert max(op.micro_batch for op in counts) < num_micro_batches
    finish_times(order, placement, UNIT)


def torch_order(schedule: str, num_ranks: int, num_stages_per_rank: int, num_micro_batches: int) -> Order:
    """Return what torch's own schedule class runs, overlapped pairs written one after the other."""
    from torch.distributed.pipelining import schedules

    class Stage:
        group_size = num_ranks
        group_rank = 0
        num_stages = num_ranks * num_stages_per_rank
        is_first = is_last = has_backward = False
        stage_index = 0

    instance = object.__new__(getattr(schedules, schedule))
    instance.pp_group_size = num_ranks
    instance.n_local_stages = num_stages_per_rank
    instance._num_stages = num_ranks * num_stages_per_rank
    instance._n_microbatches = num_micro_batches
    instance.number_of_rounds = max(1, num_micro_batches // num_ranks)
    instance.microbatches_per_round = num_micro_batches // instance.number_of_rounds
    instance.num_stages = instance._num_stages
    instance.rank = 0
    kinds = {"FORWARD": OpKind.F, "FULL_BACKWARD": OpKind.B, "BACKWARD_INPUT": OpKind.I, "BACKWARD_WEIGHT": OpKind.W}
    ops_by_rank = []
    for rank in range(num_ranks):
        actions = [action for action in instance._calculate_single_rank_operations(rank) if action is not None]
        flat = [part for action in actions for part in (action.sub_actions or (action,))]
        ops_by_rank.append([Op(a.stage_index, kinds[a.computation_type.name], a.microbatch_index) for a in flat])
    return Order.of(ops_by_rank)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("num_ranks", "num_micro_batches"), [(2, 4), (3, 6), (4, 8), (4, 16), (4, 9), (8, 16)])
def test_equals_torch(num_ranks: int, num_micro_batches: int) -> None:
    """Interleaved 1F1B, ZB-V and DualPipeV are those that torch runs, op for op."""
    if num_micro_batches % max(1, num_micro_batches // num_ranks) == 0:
        for per_rank in (2, 3):
            assert interleaved_one_f_one_b(num_ranks, per_rank, num_micro_batches) == torch_order(
                "ScheduleInterleaved1F1B", num_ranks, per_rank, num_micro_batches
            )
            ours = interleaved_zero_bubble(num_ranks, per_rank, num_micro_batches)
            theirs = torch_order("ScheduleInterleavedZeroBubble", num_ranks, per_rank, num_micro_batches)
            assert ours == theirs
    assert zb_v(num_ranks, num_micro_batches) == torch_order("ScheduleZBVZeroBubble", num_ranks, 2, num_micro_batches)
    assert dualpipev(num_ranks, num_micro_batches) == torch_order("ScheduleDualPipeV", num_ranks, 2, num_micro_batches)


def peak_in_flight(ops: tuple[Op, ...]) -> int:
    """Return the most (stage, micro-batch) pairs between their F and the end of their backward."""
    alive = peak = 0
    for op in ops:
        alive += {OpKind.F: 1, OpKind.B: -1, OpKind.I: 0, OpKind.W: -1}[op.kind]
        peak = max(peak, alive)
    return peak


@pytest.mark.parametrize(("num_ranks", "num_micro_batches"), RANKS_AND_MICRO_BATCHES)
def test_published_memory(num_ranks: int, num_micro_batches: int) -> None:
    """1F1B keeps min(P - r, M) micro-batches on rank r; ZB-H1 min(P, M); ZB-V as many half stages as 1F1B on rank 0."""
    for rank in range(num_ranks):
        assert peak_in_flight(one_f_one_b(num_ranks, num_micro_batches)[rank]) == min(
            num_ranks - rank, num_micro_batches
        )
        assert peak_in_flight(zb_h1(num_ranks, num_micro_batches)[rank]) <= min(num_ranks, num_micro_batches)
        assert peak_in_flight(zb_v(num_ranks, num_micro_batches)[rank]) <= 2 * num_ranks


def bubble(named_order: Order, placement: Placement, num_micro_batches: int, durations: dict[OpKind, int]) -> int:
    """Return the idle time of a rank: makespan less its work."""
    per_rank = placement.num_stages // named_order.num_ranks
    work = per_rank * num_micro_batches * (durations[OpKind.F] + durations[OpKind.I] + durations[OpKind.W])
    return max(finish_times(named_order, placement, durations).values()) - work


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
def test_published_bubbles(num_ranks: int) -> None:
    """With F = I = W: (P-1)(F+B) for GPipe and 1F1B, a v-th interleaved, a third for ZB-H1, almost none for ZB-V."""
    by_name = {named.name: named for named in NAMED_ORDERS}
    num_micro_batches = 4 * num_ranks
    bubbles = {
        name: bubble(
            by_name[name].build(num_ranks, num_micro_batches),
            by_name[name].placement(num_ranks),
            num_micro_batches,
            UNIT,
        )
        for name in ("GPipe", "1F1B", "interleaved 1F1B v2", "ZB-H1", "ZB-V")
    }
    full = 3 * (num_ranks - 1)
    assert bubbles["GPipe"] == bubbles["1F1B"] == full
    assert bubbles["interleaved 1F1B v2"] == full  # half the bubble, in stages of half the length
    assert bubbles["ZB-H1"] == full // 3
    # Counting from the first op of a rank to its last, ZB-V is gapless; rank 0 also waits for nothing.
    assert bubbles["ZB-V"] <= num_ranks


def test_onto_ranks_keeps_meaning() -> None:
    """Moving pipeline positions to other ranks moves lines and placement together."""
    order, placement = onto_ranks(one_f_one_b(3, 4), Placement((0, 1, 2)), [2, 0, 1])
    assert placement == Placement((2, 0, 1))
    assert order[2] == one_f_one_b(3, 4)[0]
    finish_times(order, placement, UNIT)
