"""The program of a plan that was loaded: the one beside it, or a fresh one."""

from __future__ import annotations

from pipeplan.plan.folder import PROGRAM_FILE, LoadedPlan
from pipeplan.plan.types import QueueModel
from pipeplan.program.file import read_program
from pipeplan.program.verify import VerifiedProgram, verify, verify_plan


def verify_loaded(loaded: LoadedPlan, queue_model: QueueModel | None = None) -> VerifiedProgram:
    """Verify the program in the plan's folder; without one, lower the plan for the queue model in use and verify that.

    Raises:
        FileFormatError: The program file is malformed.
        RefusedError: The plan or the program would hang, compute something wrong or not fit; shows where.
        PlanError, ClusterError, ProfileError: As ``verify``.
    """
    path = None if loaded.folder is None else loaded.folder / PROGRAM_FILE
    if path is not None and path.is_file():
        return verify(read_program(path), loaded.plan, loaded.profile, loaded.cluster, queue_model)
    return verify_plan(loaded.plan, loaded.profile, loaded.cluster, queue_model)
