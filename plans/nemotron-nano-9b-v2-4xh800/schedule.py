"""The schedule of this plan as a DeepSpeed PipeSchedule.

Plan sha256:23193af5e92e43d605db3d57ea232d276a64c4932da2436fa6739189da68f810:
8 micro-batches through 20 stages on 4 ranks. What rank 0 does:

    for instructions in Schedule(8, 4, stage_id=0).steps():
        print(instructions)
"""

from pathlib import Path

from pipeplan.runtime.schedule import PlannedSchedule


class Schedule(PlannedSchedule):
    """Yields what program.yaml holds for each rank of nemotron-nano-9b-v2."""

    plan_folder = Path(__file__).resolve().parent
