"""The emitted schedule.py: a real DeepSpeed schedule that yields the plan's program."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from pipeplan.cluster import Cluster
from pipeplan.emit.folder import emit_plan_folder
from pipeplan.errors import LaunchError
from pipeplan.profile.types import Profile
from pipeplan.program.verify import VerifiedProgram


def imported_schedule(folder: Path) -> Any:
    """Import schedule.py of a plan folder and return its class."""
    spec = importlib.util.spec_from_file_location("emitted_schedule", folder / "schedule.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Schedule


def test_schedule_yields_the_program(
    tmp_path: Path, verified: VerifiedProgram, profile: Profile, cluster: Cluster
) -> None:
    """Every rank's steps are its instructions in program.yaml, one DeepSpeed instruction each."""
    from deepspeed.runtime.pipe.schedule import PipeInstruction, PipeSchedule

    emit_plan_folder(tmp_path / "plan", verified, profile, cluster)
    schedule_class = imported_schedule(tmp_path / "plan")
    assert issubclass(schedule_class, PipeSchedule)
    for rank, expected in enumerate(verified.program.instructions_by_rank):
        steps = list(schedule_class(micro_batches=4, stages=2, stage_id=rank).steps())
        assert all(isinstance(command, PipeInstruction) for step in steps for command in step)
        assert [command.instruction for step in steps for command in step] == list(expected)


def test_schedule_of_another_batch_is_refused(
    tmp_path: Path, verified: VerifiedProgram, profile: Profile, cluster: Cluster
) -> None:
    """Asked for another number of micro-batches or ranks than the plan's, it says both numbers."""
    emit_plan_folder(tmp_path / "plan", verified, profile, cluster)
    schedule_class = imported_schedule(tmp_path / "plan")
    for micro_batches, stages in (5, 2), (4, 3):
        with pytest.raises(LaunchError, match=f"4 micro-batches on 2 .* {micro_batches} on {stages}"):
            schedule_class(micro_batches=micro_batches, stages=stages, stage_id=0)
