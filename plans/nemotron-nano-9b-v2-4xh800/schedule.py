"""The schedule of this plan as a DeepSpeed PipeSchedule.

Plan sha256:17996a96a83fbd5f17c0dcd17204a760725d1f9afb050cd97fa30907213aa2b8:
8 micro-batches through 13 stages on 4 ranks. What rank 0 does:

    for instructions in Schedule(8, 4, stage_id=0).steps():
        print(instructions)
"""

from pathlib import Path

from pipeplan.runtime.schedule import PlannedSchedule


class Schedule(PlannedSchedule):
    """Yields what program.yaml holds for each rank of nemotron-nano-9b-v2."""

    plan_folder = Path(__file__).resolve().parent
