"""A batch of another number of micro-batches than planned: its program, derived on one rank and checked on all."""

from __future__ import annotations

from typing import Any

from deepspeed import comm as dist
from deepspeed.utils import logger

from pipeplan.errors import LaunchError, PipeplanError
from pipeplan.plan.types import Plan
from pipeplan.program.lower import lower
from pipeplan.program.resize import resize_plan
from pipeplan.program.types import Program
from pipeplan.program.verify import VerifiedProgram, verify
from pipeplan.runtime.loading import RunnablePlan
from pipeplan.units import ms_from_ns


def resize_together(runnable: RunnablePlan, num_micro_batches: int) -> VerifiedProgram:
    """Return the program of the plan's order carried over to ``num_micro_batches``; collective over all ranks.

    Rank 0 derives it, so that no rank can come to another order; every rank verifies it.

    Raises:
        LaunchError: The plan's profile isn't known, or rank 0 can't derive the order.
        PipeplanError: The program does not verify.
    """
    planned = runnable.plan.num_micro_batches
    profile, cluster = runnable.profile, runnable.cluster
    if profile is None or cluster is None:
        raise LaunchError(
            f"the engine should run {num_micro_batches} micro-batches a batch, but its plan is for {planned}, and "
            "nothing says what an op costs; load the plan from its folder, set gradient_accumulation_steps to "
            f"{planned}, or call set_program"
        )
    report: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            plan = resize_plan(runnable.plan, num_micro_batches, profile, cluster)
            report = [(plan, lower(plan, profile, cluster))]
        except PipeplanError as error:
            report = [str(error)]
    dist.broadcast_object_list(report, src=0)
    if isinstance(report[0], str):
        raise LaunchError(f"the plan's order can't be carried over to {num_micro_batches} micro-batches: {report[0]}")
    resized: tuple[Plan, Program] = report[0]
    verified = verify(resized[1], resized[0], profile, cluster)
    if dist.get_rank() == 0:
        prediction = resized[0].prediction
        step = f", predicted step {ms_from_ns(prediction.makespan_ns):.3g} ms" if prediction is not None else ""
        logger.warning(
            f"the plan is for {planned} micro-batches a batch, but {num_micro_batches} run: its order was carried over "
            f"and verified{step}; 'pipeplan optimize --micro-batches {num_micro_batches}' may find a better one"
        )
    return verified
