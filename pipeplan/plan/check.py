"""Structural checks of a plan: cheap, without a simulation, one pass over the ops.

Whether the ranks could wait for each other in a circle needs the rule of what an op waits for across
ranks; ``pipeplan.program.verify`` answers that.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from pipeplan.errors import PlanError
from pipeplan.plan.findings import Finding, FindingKind, RefusedError
from pipeplan.plan.layout import Placement
from pipeplan.plan.ops import Op, OpKind, Order
from pipeplan.plan.types import Plan
from pipeplan.profile.types import Profile


def check_plan(plan: Plan, profile: Profile | None = None) -> None:
    """Check that the plan is whole and agrees with itself and, if given, with ``profile``.

    Every stage runs F once for every micro-batch and either B, or I and later W, on the rank that holds it.

    Raises:
        PlanError: Partition, placement, micro-batches or recomputation contradict each other or the profile.
        RefusedError: The order is faulty; names rank, position and op of the first fault and holds them all.
    """
    if plan.num_micro_batches < 1:
        raise PlanError(f"a batch needs at least 1 micro-batch, got {plan.num_micro_batches}")
    if profile is not None:
        plan.partition.check(profile.layers)
    plan.placement.check(plan.num_stages, plan.num_ranks)
    recomputed = plan.recomputed_stages
    if list(recomputed) != sorted(set(recomputed)):
        raise PlanError(f"recomputed stages {list(recomputed)} are not in ascending order, each once")
    for stage in recomputed:
        if not 0 <= stage < plan.num_stages:
            raise PlanError(f"'recompute' names stage {stage}; the plan has stages 0 to {plan.num_stages - 1}")
        if profile is not None:
            for index in plan.partition.layers(stage):
                if profile.layers[index].recomputation is None:
                    raise PlanError(
                        f"'recompute' names stage {stage}, whose layer {profile.layers[index].name!r} has no "
                        "'recompute' figures in the profile; profile it with recomputation"
                    )
    findings = find_order_faults(plan.order, plan.placement, plan.num_micro_batches)
    if findings:
        raise RefusedError(findings, plan.order.ops_by_rank)


def find_order_faults(order: Order, placement: Placement, num_micro_batches: int) -> list[Finding]:
    """Return every structural fault of ``order``, by rank and position, missing ops last."""
    num_stages = placement.num_stages
    rank_by_stage = placement.rank_by_stage
    findings: list[Finding] = []
    misplaced: set[int] = set()
    # position of every op on its rank, by kind, then stage * num_micro_batches + micro-batch; -1 where missing
    position_by_kind = [[-1] * (num_stages * num_micro_batches) for _ in OpKind]
    for rank, ops in enumerate(order.ops_by_rank):
        for position, op in enumerate(ops):
            stage = op.stage
            if stage >= num_stages or op.micro_batch >= num_micro_batches:
                findings.append(_unknown(op, rank, position, num_stages, num_micro_batches))
                continue
            slot = stage * num_micro_batches + op.micro_batch
            if rank_by_stage[stage] != rank:
                reason = f"stage {stage} is placed on rank {rank_by_stage[stage]} (placement {placement})"
                findings.append(_fault(FindingKind.WRONG_RANK, rank, position, op, reason))
                misplaced.add(slot)
                continue
            positions = position_by_kind[op.kind]
            if positions[slot] >= 0:
                reason = f"it already runs at position {positions[slot]}; every op runs once"
                findings.append(_fault(FindingKind.DUPLICATE, rank, position, op, reason))
                continue
            positions[slot] = position
    findings.extend(_find_pairing_faults(position_by_kind, rank_by_stage, num_micro_batches, misplaced))
    return findings


def _find_pairing_faults(
    position_by_kind: Sequence[Sequence[int]],
    rank_by_stage: Sequence[int],
    num_micro_batches: int,
    misplaced: Collection[int],
) -> list[Finding]:
    """Return the faults among the ops of one stage and micro-batch: missing, both backwards, out of sequence.

    Slots in ``misplaced`` have a fault already, of which others would only be echoes.
    """
    early: list[Finding] = []
    missing: list[Finding] = []
    for slot, (forward, backward, input_half, weight_half) in enumerate(zip(*position_by_kind, strict=True)):
        if 0 <= forward < backward and input_half < 0 and weight_half < 0:
            continue
        if 0 <= forward < input_half < weight_half and backward < 0:
            continue
        if slot in misplaced:
            continue
        stage, micro_batch = divmod(slot, num_micro_batches)
        rank = rank_by_stage[stage]

        def op(kind: OpKind, stage: int = stage, micro_batch: int = micro_batch) -> Op:
            return Op(stage, kind, micro_batch)

        if forward < 0:
            reason = "missing; every stage runs F once for every micro-batch"
            missing.append(_fault(FindingKind.MISSING, rank, None, op(OpKind.F), reason))
        if backward >= 0 and (input_half >= 0 or weight_half >= 0):
            half = OpKind.I if input_half >= 0 else OpKind.W
            reason = f"B already does the work of {op(half)}; run either B, or I and W"
            early.append(_fault(FindingKind.BOTH_BACKWARDS, rank, backward, op(OpKind.B), reason))
        elif backward < 0 and input_half < 0 and weight_half < 0:
            reason = "missing; no B, and no I and W instead"
            missing.append(_fault(FindingKind.MISSING, rank, None, op(OpKind.B), reason))
        elif backward < 0 and input_half < 0:
            reason = f"missing; {op(OpKind.W)} needs what I keeps for it"
            missing.append(_fault(FindingKind.MISSING, rank, None, op(OpKind.I), reason))
        elif backward < 0 and weight_half < 0:
            reason = f"missing; {op(OpKind.I)} leaves the weight gradients to it"
            missing.append(_fault(FindingKind.MISSING, rank, None, op(OpKind.W), reason))
        pairs = (
            (OpKind.F, forward, OpKind.B, backward),
            (OpKind.F, forward, OpKind.I, input_half),
            (OpKind.I, input_half, OpKind.W, weight_half),
        )
        for earlier, before, later, after in pairs:
            if before > after >= 0:
                reason = f"it needs {op(earlier)}, which runs later, at position {before}"
                early.append(_fault(FindingKind.TOO_EARLY, rank, after, op(later), reason))
    return early + missing


def _fault(kind: FindingKind, rank: int, position: int | None, op: Op, reason: str) -> Finding:
    return Finding(kind=kind, rank=rank, position=position, step=str(op), reason=reason)


def _unknown(op: Op, rank: int, position: int, num_stages: int, num_micro_batches: int) -> Finding:
    if op.stage >= num_stages:
        reason = f"the plan has stages 0 to {num_stages - 1}"
    else:
        reason = f"the plan has micro-batches 0 to {num_micro_batches - 1}"
    return _fault(FindingKind.UNKNOWN, rank, position, op, reason)
