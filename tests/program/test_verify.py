"""The verifier: every fault is refused with rank, position, op and reason, and nothing sound is."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeplan.cluster import Cluster
from pipeplan.errors import ClusterError, VerificationError
from pipeplan.plan.findings import Cell, FindingKind, RefusedError
from pipeplan.plan.ops import Order
from pipeplan.plan.types import Plan, QueueModel
from pipeplan.profile.types import Profile
from pipeplan.program.lower import TAIL, lower
from pipeplan.program.types import Compute, Program
from pipeplan.program.verify import VerifiedProgram, verify, verify_plan
from tests.program.examples import PAIR_PLAN, PAIR_PROFILE, V_PLAN, V_PROFILE, devices, plan_of, program_of
from tests.program.interpreter import WrongError, interpret
from tests.strategies import planned


def refusal(program: Program, plan: Plan, profile: Profile, queue_model: QueueModel | None = None) -> RefusedError:
    """Return the error that the verifier raises."""
    with pytest.raises(RefusedError) as caught:
        verify(program, plan, profile, devices(plan.num_ranks), queue_model)
    return caught.value


def with_order(plan: Plan, rank: int, change: dict[str, str]) -> Plan:
    """Return ``plan`` with words of one rank's line replaced."""
    lines = plan.order.lines()
    words = [change.get(word, word) for word in lines[rank].split()]
    lines[rank] = " ".join(word for word in words if word)
    return replace(plan, order=Order.parse(lines))


def edited(line: str, *changes: tuple[str, str]) -> str:
    """Return ``line`` with whole words replaced; each change must apply."""
    padded = f" {line} "
    for old, new in changes:
        assert f" {old} " in padded
        padded = padded.replace(f" {old} ", f" {new} " if new else " ")
    return padded.strip()


def test_only_verify_makes_a_verified_program() -> None:
    """The type is the proof: neither a constructor call nor a copy with another program gets one."""
    verified = verify_plan(PAIR_PLAN, PAIR_PROFILE, devices(2))
    with pytest.raises(TypeError, match="only pipeplan"):
        VerifiedProgram(program=verified.program, plan=PAIR_PLAN, queue_model=QueueModel.SINGLE, token=object())
    with pytest.raises((TypeError, ValueError)):
        replace(verified, queue_model=QueueModel.SINGLE)


# Hand-made orders, mutated: the list of what users run into.


@pytest.mark.parametrize(
    ("rank", "change", "kind", "text"),
    [
        (1, {"1B1": ""}, FindingKind.MISSING, "rank 1, 1B1: missing; no B, and no I and W instead"),
        (0, {"0W0": "0W0 0W0"}, FindingKind.DUPLICATE, "rank 0, position 12, 0W0: it already runs at position 11"),
        (0, {"0W1": ""}, FindingKind.MISSING, "rank 0, 0W1: missing; 0I1 leaves the weight gradients to it"),
        (1, {"1F1": "1B1", "1B1": "1F1"}, FindingKind.TOO_EARLY, "rank 1, position 2, 1B1: it needs 1F1"),
        (0, {"3I0": "3W0", "3W0": "3I0"}, FindingKind.TOO_EARLY, "rank 0, position 3, 3W0: it needs 3I0"),
        (0, {"3I0": "3B0"}, FindingKind.BOTH_BACKWARDS, "rank 0, position 3, 3B0: B already does the work of 3W0"),
        (0, {"0F2": "1F2"}, FindingKind.WRONG_RANK, "rank 0, position 4, 1F2: stage 1 is placed on rank 1"),
        (0, {"0F2": "4F2"}, FindingKind.UNKNOWN, "rank 0, position 4, 4F2: the plan has stages 0 to 3"),
        (0, {"0F2": "0F3"}, FindingKind.UNKNOWN, "rank 0, position 4, 0F3: the plan has micro-batches 0 to 2"),
    ],
    ids=[
        "drop-B",
        "duplicate-W",
        "drop-W",
        "B-before-F",
        "W-before-I",
        "B-and-W",
        "wrong-rank",
        "stage",
        "micro-batch",
    ],
)
def test_mutated_orders_are_refused(rank: int, change: dict[str, str], kind: FindingKind, text: str) -> None:
    """Each mutation is refused before launch, naming rank, position, op and reason, on the grid."""
    with pytest.raises(RefusedError) as caught:
        verify_plan(with_order(V_PLAN, rank, change), V_PROFILE, devices(2))
    assert caught.value.findings[0].kind is kind
    assert str(caught.value).startswith(text)
    assert isinstance(caught.value, VerificationError)


def test_a_v_order_with_a_loop_placement_is_refused() -> None:
    """The order's stages must sit where the placement says; the first op that doesn't is marked on the grid."""
    looped = replace(V_PLAN, placement=replace(V_PLAN.placement, rank_by_stage=(0, 1, 0, 1)))
    with pytest.raises(RefusedError) as caught:
        verify_plan(looped, V_PROFILE, devices(2))
    assert str(caught.value).splitlines() == [
        "rank 0, position 2, 3F0: stage 3 is placed on rank 1 (placement 0,1,0,1) (and 14 more faults)",
        "* rank  0 from step  0: 0F0   0F1   >3F0< 3I0   0F2   3F1   3I1   3W0   0I0 ...",
        "  rank  1 from step  0: 1F0   2F0   1F1   2F1   2B0   1B0   1F2   2F2   2B1 ...",
    ]


def test_an_order_that_waits_in_a_circle_is_refused_with_the_cycle() -> None:
    """Rank 0 wants the gradient of micro-batch 0 before it sends micro-batch 1, which rank 1 wants first."""
    plan = plan_of(["0F0 0B0 0F1 0B1", "1F0 1F1 1B1 1B0"], "0,1", 2)
    with pytest.raises(RefusedError) as caught:
        verify_plan(plan, PAIR_PROFILE, devices(2))
    (finding,) = caught.value.findings
    assert finding.kind is FindingKind.DEADLOCK
    assert finding.cycle == (Cell(0, 1), Cell(1, 1))
    assert str(caught.value).splitlines() == [
        (
            "rank 0, position 1, 0B0: deadlock, a circle of 2 waits: rank 0, position 1, 0B0 waits for 1B0, which rank "
            "1 runs at position 3, behind 1F1; rank 1, position 1, 1F1 waits for 0F1, which rank 0 runs at position 2, "
            "behind 0B0"
        ),
        "* rank  0 from step  0: 0F0   >0B0< 0F1   0B1",
        "* rank  1 from step  0: 1F0   >1F1< 1B1   1B0",
    ]


def test_a_stage_before_its_neighbour_on_one_rank_is_refused() -> None:
    """A rank can wait for itself: stage 2 runs before stage 1, which the same rank holds."""
    plan = with_order(V_PLAN, 1, {"1F0": "2F0", "2F0": "1F0"})
    with pytest.raises(RefusedError, match="rank 1, position 0, 2F0: deadlock, a circle of 1 waits") as caught:
        verify_plan(plan, V_PROFILE, devices(2))
    assert caught.value.findings[0].cycle == (Cell(1, 0),)


# Hand-edited programs.

SENDS_FIRST = [
    "0F0 S0>0 0F1 S0>1 R1<0 R1<1 !0>0 ?1<0 0B0 !0>1 ?1<1 0B1 reduce-tied reduce-replicas step",
    "R0>0 ?0>0 1F0 1B0 S1<0 R0>1 !1<0 ?0>1 1F1 1B1 S1<1 !1<1 reduce-tied reduce-replicas step",
]
TWO_BATCHES = plan_of(["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"], "0,1", 2)


def test_two_sends_first_under_a_blocking_queue_are_refused() -> None:
    """Both ranks send before they receive: fine with a queue a direction, a deadlock where directions share one."""
    program = program_of(SENDS_FIRST, TWO_BATCHES)
    verify(program, TWO_BATCHES, PAIR_PROFILE, devices(2), QueueModel.ORDERED_PAIR)
    for queue_model in (QueueModel.PAIR, QueueModel.SINGLE):
        error = refusal(program, TWO_BATCHES, PAIR_PROFILE, queue_model)
        (finding,) = error.findings
        assert finding.kind is FindingKind.DEADLOCK
        assert "0>1" in str(error)
        assert "1<0" in str(error)
        assert {cell.rank for cell in finding.cycle} == {0, 1}


def test_two_sends_swapped_are_refused() -> None:
    """Tags don't help on NCCL: what is sent first is what the first receive gets."""
    plan = plan_of(["0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"], "0,1", 2)
    lines = lower(plan, PAIR_PROFILE, devices(2)).lines()
    lines[0] = "0F0 0F1 S0>1 S0>0 R1<0 R1<1 !0>0 !0>1 ?1<0 0B0 ?1<1 0B1 reduce-tied reduce-replicas step"
    for queue_model in QueueModel:
        error = refusal(program_of(lines, plan), plan, PAIR_PROFILE, queue_model)
        assert error.findings[0].kind is FindingKind.CROSSED
        assert "rank 0 sends 0>1 first (position 2) and 0>0 later (position 3)" in str(error)


@pytest.mark.parametrize(
    ("rank", "changes", "kind", "text"),
    [
        (0, [("S0>1", "")], FindingKind.TOO_EARLY, ", !0>1: its send is not started before"),
        (0, [("S0>1", ""), ("!0>1", "")], FindingKind.MISSING, "rank 0, S0>1: missing; rank 1 waits for this message"),
        (0, [("!0>1", "")], FindingKind.MISSING, "S0>1: no !0>1 after it keeps its tensors until they are sent"),
        (0, [("!0>1", "!0>1 !0>1")], FindingKind.DUPLICATE, "!0>1: its send is already waited for"),
        (0, [("S0>1", "S0>1 S0>1")], FindingKind.DUPLICATE, "S0>1: sent before"),
        (0, [("S0>1", ""), ("!0>1", "!0>1 S0>1")], FindingKind.TOO_EARLY, "!0>1: its send is not started before"),
        (0, [("0F0", "S0>0 0F0")], FindingKind.TOO_EARLY, "S0>0: no op before it on this rank makes what it sends"),
        (0, [("S0>1", "S1<1")], FindingKind.WRONG_RANK, "S1<1: stage 1 is placed on rank 1"),
        (0, [("S0>1", "S1>1")], FindingKind.UNKNOWN, "S1>1: no such boundary; the plan has stages 0 to 1"),
        (0, [("S0>1", "S0>7")], FindingKind.UNKNOWN, "S0>7: the plan has micro-batches 0 to 1"),
        (1, [("?0>1", "")], FindingKind.TOO_EARLY, "1F1: it needs 0>1 from rank 0, which no ?0>1 before it waits for"),
        (1, [("R0>1", ""), ("?0>1", "")], FindingKind.TOO_EARLY, "1F1: it needs 0>1 from rank 0"),
        (1, [("R0>1", "")], FindingKind.TOO_EARLY, "?0>1: its receive is not posted before"),
        (1, [("R0>1", "R0>1 R0>1")], FindingKind.DUPLICATE, "R0>1: posted before"),
        (1, [("?0>1", "?0>1 ?0>1")], FindingKind.DUPLICATE, "?0>1: its receive is already waited for"),
        (1, [("1B1", "step 1B1")], FindingKind.TOO_EARLY, "step: every rank ends with 'reduce-tied"),
        (1, [("step", "")], FindingKind.MISSING, "it does not end with 'reduce-tied reduce-replicas step'"),
        (1, [("1B1", "reduce-tied 1B1"), ("reduce-replicas", "")], FindingKind.TOO_EARLY, "reduce-tied: every rank"),
        (1, [("1B1", "1B1 1B1")], FindingKind.DUPLICATE, "1B1: it already runs at position"),
        (1, [("1B1", "")], FindingKind.MISSING, "rank 1, 1B1: missing; no B"),
    ],
)
def test_mutated_programs_are_refused(rank: int, changes: list[tuple[str, str]], kind: FindingKind, text: str) -> None:
    """A program edited by hand is refused at the instruction that is wrong."""
    lines = lower(TWO_BATCHES, PAIR_PROFILE, devices(2)).lines()
    lines[rank] = edited(lines[rank], *changes)
    findings = refusal(program_of(lines, TWO_BATCHES), TWO_BATCHES, PAIR_PROFILE).findings
    assert [finding for finding in findings if finding.kind is kind and text in str(finding)]


def test_a_wait_moved_before_its_op_hangs_and_is_refused() -> None:
    """Rank 0 waits for a gradient before it sends what the gradient comes from: a circle under every queue model."""
    lines = lower(TWO_BATCHES, PAIR_PROFILE, devices(2)).lines()
    lines[0] = "R1<0 0F0 ?1<0 S0>0 0F1 S0>1 R1<1 !0>0 !0>1 0B0 ?1<1 0B1 reduce-tied reduce-replicas step"
    for queue_model in QueueModel:
        error = refusal(program_of(lines, TWO_BATCHES), TWO_BATCHES, PAIR_PROFILE, queue_model)
        assert error.findings[0].kind is FindingKind.DEADLOCK
        assert str(error).startswith("rank 0, position 2, ?1<0: deadlock")


def test_a_message_that_stays_on_its_rank_is_refused() -> None:
    """Stages of one rank hand over without a message."""
    lines = lower(V_PLAN, V_PROFILE, devices(2)).lines()
    lines[1] = edited(lines[1], ("1F0", "1F0 S1>0"))
    error = refusal(program_of(lines, V_PLAN), V_PLAN, V_PROFILE)
    assert "S1>0: both of its stages are on rank 1; they hand over without a message" in str(error)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"plan_digest": "sha256:0"}, "plan digest is sha256:0"),
        ({"num_micro_batches": 3}, "number of micro-batches is 3, the plan's 2"),
        ({"rank_by_stage": (1, 0)}, "placement is [1, 0], the plan's [0, 1]"),
    ],
)
def test_a_program_of_another_plan_is_refused(change: dict[str, object], text: str) -> None:
    """What the program was lowered from is compared with the plan first."""
    program = replace(lower(TWO_BATCHES, PAIR_PROFILE, devices(2)), **change)  # type: ignore[arg-type]
    with pytest.raises(VerificationError) as caught:
        verify(program, TWO_BATCHES, PAIR_PROFILE, devices(2))
    assert text in str(caught.value)


def test_ops_in_another_order_than_the_plan_are_refused() -> None:
    """Valid in itself, but not what the plan, its prediction and its memory say."""
    other = replace(TWO_BATCHES, order=Order.parse(["0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"]))
    program = replace(lower(other, PAIR_PROFILE, devices(2)), plan_digest=TWO_BATCHES.digest)
    assert ", 1F1: the plan's order has 1B0 here" in str(refusal(program, TWO_BATCHES, PAIR_PROFILE))


def test_memory_over_the_cap_names_the_rank_and_the_excess() -> None:
    """2 layers x 10 M parameters x 10 bytes and the activations do not fit into 0.4 GB less the reserve."""
    roomy = devices(2, memory_gb=10.0)
    verify_plan(V_PLAN, V_PROFILE, roomy)
    tight = replace(devices(2, memory_gb=0.5), memory_reserve_bytes=100_000_000)
    with pytest.raises(RefusedError) as caught:
        verify_plan(V_PLAN, V_PROFILE, tight)
    finding = caught.value.findings[0]
    assert finding.kind is FindingKind.OUT_OF_MEMORY
    assert "MB at its peak and has 400.0 MB:" in finding.reason
    assert str(caught.value).splitlines() == [str(finding) for finding in caught.value.findings]
    assert "move layers" in finding.reason


def test_the_cluster_must_have_the_plans_ranks() -> None:
    """A cluster of three does not silently run a plan for two."""
    with pytest.raises(ClusterError, match="the plan is for 2 ranks; the cluster has 3"):
        verify(lower(PAIR_PLAN, PAIR_PROFILE, devices(2)), PAIR_PLAN, PAIR_PROFILE, devices(3))


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    case=planned(max_ranks=3, max_micro_batches=3, max_stages=4),
    lowered_for=st.sampled_from(QueueModel),
    queue_model=st.sampled_from(QueueModel),
    data=st.data(),
)
def test_the_verdict_is_the_literal_interpreters(
    case: tuple[Plan, Profile, Cluster], lowered_for: QueueModel, queue_model: QueueModel, data: st.DataObject
) -> None:
    """Sends, receives and waits moved at random: refused exactly if the program hangs or computes something wrong."""
    plan, profile, cluster = case
    program = lower(plan, profile, cluster, lowered_for)
    rows = [list(steps) for steps in program.instructions_by_rank]
    for _ in range(data.draw(st.integers(0, 3))):
        row = rows[data.draw(st.integers(0, len(rows) - 1))]
        num_steps = len(row) - len(TAIL)
        movable = [position for position in range(num_steps) if not isinstance(row[position], Compute)]
        if movable:
            first = data.draw(st.sampled_from(movable))
            second = first + data.draw(st.integers(-4, 4))
            row.insert(min(max(second, 0), num_steps - 1), row.pop(first))
    moved = replace(program, instructions_by_rank=tuple(tuple(row) for row in rows))
    try:
        interpret(moved, queue_model)
        runs = True
    except WrongError:
        runs = False
    try:
        verify(moved, plan, profile, cluster, queue_model)
        passes = True
    except RefusedError:
        passes = False
    assert passes == runs
