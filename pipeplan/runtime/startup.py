"""Checks before anything is built: the same plan on every rank, and a world that it fits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed
from deepspeed import comm as dist

from pipeplan.errors import LaunchError, PipeplanError
from pipeplan.program.verify import VerifiedProgram
from pipeplan.runtime.loading import RunnablePlan, load_runnable_plan
from pipeplan.runtime.process_groups import calm_down_at_exit
from pipeplan.runtime.shared_memory import release_shared_buffers


def load_same_plan(plan: str | Path | VerifiedProgram | RunnablePlan) -> RunnablePlan:
    """Load the plan on every rank and check that all ranks hold the same one and that it fits the launch.

    Collective: every rank of the launch calls it, and either all return or all raise.

    Raises:
        LaunchError: A rank can't load its plan, holds another one, or the world has another size than the plan.
    """
    if not dist.is_initialized():
        deepspeed.init_distributed()
    calm_down_at_exit()
    runnable: RunnablePlan | None = None
    report: dict[str, Any]
    try:
        if isinstance(plan, VerifiedProgram):
            plan = RunnablePlan(verified=plan)
        runnable = plan if isinstance(plan, RunnablePlan) else load_runnable_plan(Path(plan))
        report = {"digests": (runnable.plan.digest, runnable.program.digest), "error": None}
    except PipeplanError as error:
        report = {"digests": None, "error": str(error)}
    reports: list[dict[str, Any]] = [{}] * dist.get_world_size()
    dist.all_gather_object(reports, report)
    release_shared_buffers()
    for rank, other in enumerate(reports):
        if other["error"] is not None:
            raise LaunchError(f"rank {rank} can't use the plan: {other['error']}")
    for rank, other in enumerate(reports):
        if other["digests"] != reports[0]["digests"]:
            what = "plan" if other["digests"][0] != reports[0]["digests"][0] else "program"
            index = 0 if what == "plan" else 1
            raise LaunchError(
                f"rank {rank} holds another {what} ({_short(other['digests'][index])}) than rank 0 "
                f"({_short(reports[0]['digests'][index])}); copy one plan folder to every node"
            )
    assert runnable is not None
    check_world(runnable, dist.get_world_size())
    return runnable


def check_world(runnable: RunnablePlan, world_size: int) -> None:
    """Check that the launch has the ranks that the plan needs.

    Raises:
        LaunchError: It has more or fewer.
    """
    num_ranks = runnable.plan.num_ranks
    if runnable.num_replicas is not None and world_size != num_ranks * runnable.num_replicas:
        raise LaunchError(
            f"the plan is for {num_ranks} pipeline ranks x {runnable.num_replicas} data-parallel replicas = "
            f"{num_ranks * runnable.num_replicas} processes, but {world_size} were launched; launch "
            f"{num_ranks * runnable.num_replicas}, or set data_parallel in the cluster file and optimize again"
        )
    if world_size % num_ranks:
        raise LaunchError(
            f"the plan is for {num_ranks} pipeline ranks, but {world_size} processes were launched; launch a "
            f"multiple of {num_ranks}, or optimize for another number of ranks"
        )


def _short(digest: str) -> str:
    return digest[:19] + "..."
