"""The dependency rule: what an op needs before it can start. The simulator, the verifier and the searchers all use it.

An op of a micro-batch needs results of the same micro-batch only. A stage yields two kinds of result: its forward
output (from F) and the gradient of its input (from B or I).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

from numba import njit

from pipeplan.plan.ops import Op, OpKind

FORWARD = 0
INPUT_GRADIENT = 1
NOTHING = -1


class ResultKind(IntEnum):
    """What a stage yields for a micro-batch; the numbers are the codes of compiled loops."""

    FORWARD = FORWARD
    INPUT_GRADIENT = INPUT_GRADIENT


@dataclass(frozen=True, slots=True)
class Result:
    """One stage's output or input gradient for one micro-batch."""

    kind: ResultKind
    stage: int
    micro_batch: int


@njit(cache=True, inline="always")
def needed_results(stage: int, kind: int, num_stages: int) -> tuple[int, int, int, int]:
    """Return the two results that an op needs, as (kind, stage, kind, stage); ``NOTHING`` where it needs fewer.

    The first is a boundary from the neighbouring stage (it may have to travel), the second stays on the stage.
    """
    if kind == 0:  # F
        if stage > 0:
            return FORWARD, stage - 1, NOTHING, NOTHING
        return NOTHING, NOTHING, NOTHING, NOTHING
    if kind == 3:  # W
        return NOTHING, NOTHING, INPUT_GRADIENT, stage
    if stage < num_stages - 1:  # B, I
        return INPUT_GRADIENT, stage + 1, FORWARD, stage
    return NOTHING, NOTHING, FORWARD, stage


def needs(op: Op, num_stages: int) -> Iterator[Result]:
    """Yield the results that ``op`` needs, the one from the neighbouring stage first."""
    boundary_kind, boundary_stage, own_kind, own_stage = needed_results.py_func(op.stage, int(op.kind), num_stages)
    if boundary_kind != NOTHING:
        yield Result(ResultKind(boundary_kind), boundary_stage, op.micro_batch)
    if own_kind != NOTHING:
        yield Result(ResultKind(own_kind), own_stage, op.micro_batch)


def result_of(op: Op) -> Result | None:
    """Return what ``op`` yields, or ``None`` for W, which nothing in the batch waits for."""
    if op.kind is OpKind.F:
        return Result(ResultKind.FORWARD, op.stage, op.micro_batch)
    if op.kind.is_backward_input:
        return Result(ResultKind.INPUT_GRADIENT, op.stage, op.micro_batch)
    return None
