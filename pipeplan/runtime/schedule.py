"""The plan's program as a DeepSpeed schedule: each of our instructions wrapped in a ``PipeInstruction``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from deepspeed.runtime.pipe.schedule import PipeInstruction, PipeSchedule

from pipeplan.errors import LaunchError
from pipeplan.program import types as program_types
from pipeplan.program.types import Instruction, Program
from pipeplan.runtime.loading import load_runnable_plan


class PlannedInstruction(PipeInstruction):
    """Base of our instructions; ``instruction`` is the one of the program."""

    def __init__(self, instruction: Instruction) -> None:
        super().__init__(instruction=instruction)

    def __repr__(self) -> str:
        return f"{self.name}({self.kwargs['instruction']})"


class Compute(PlannedInstruction):
    """Runs F, B, I or W of one stage and micro-batch."""


class Send(PlannedInstruction):
    """Starts sending a boundary."""


class Receive(PlannedInstruction):
    """Posts the receive of a boundary, early."""


class WaitReceive(PlannedInstruction):
    """Waits for a boundary to arrive."""


class WaitSend(PlannedInstruction):
    """Waits for a boundary to have left, and lets go of it."""


class ReduceTied(PlannedInstruction):
    """Sums the gradients of tied weights over their owners."""


class ReduceReplicas(PlannedInstruction):
    """Averages the gradients over the data-parallel replicas."""


class OptimizerStep(PlannedInstruction):
    """Takes the optimizer step."""


_WRAPPER_BY_TYPE: dict[type, type[PlannedInstruction]] = {
    program_types.Compute: Compute,
    program_types.Send: Send,
    program_types.Receive: Receive,
    program_types.WaitReceive: WaitReceive,
    program_types.WaitSend: WaitSend,
    program_types.ReduceTied: ReduceTied,
    program_types.ReduceReplicas: ReduceReplicas,
    program_types.OptimizerStep: OptimizerStep,
}


class PlannedSchedule(PipeSchedule):
    """The instructions of one rank for one batch.

    An emitted ``schedule.py`` subclasses it and names its plan::

        class Schedule(PlannedSchedule):
            plan_folder = Path(__file__).parent

    Args:
        micro_batches: Micro-batches of the batch; must be the program's.
        stages: Pipeline ranks (DeepSpeed's "stages"); must be the program's.
        stage_id: The pipeline rank.
        program: What to run; read from ``plan_folder`` if missing.

    Raises:
        LaunchError: The counts are not the program's, or there is no program.
    """

    plan_folder: ClassVar[Path | None] = None

    def __init__(self, micro_batches: int, stages: int, stage_id: int, program: Program | None = None) -> None:
        super().__init__(micro_batches, stages, stage_id)
        if program is None:
            if self.plan_folder is None:
                raise LaunchError(f"{type(self).__name__} names no plan; set plan_folder, or pass a program")
            program = load_runnable_plan(self.plan_folder).program
        if (micro_batches, stages) != (program.num_micro_batches, program.num_ranks):
            raise LaunchError(
                f"the program runs {program.num_micro_batches} micro-batches on {program.num_ranks} pipeline ranks, "
                f"but the schedule was asked for {micro_batches} on {stages}"
            )
        self.program = program
        self._commands = [
            _WRAPPER_BY_TYPE[type(instruction)](instruction) for instruction in program.instructions_by_rank[stage_id]
        ]

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Yield one instruction a step."""
        for command in self._commands:
            yield [command]

    def num_pipe_buffers(self) -> int:
        """Return 0: the engine keeps its own buffers, keyed by stage and micro-batch."""
        return 0
