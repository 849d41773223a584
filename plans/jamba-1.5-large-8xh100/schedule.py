"""The schedule of this plan as a DeepSpeed PipeSchedule.

Plan sha256:4e7c380dfd170c8d2f596d3f4b6860a480d8771522b1954d975585f2cec575ae:
32 micro-batches through 24 stages on 8 ranks. What rank 0 does:

    for instructions in Schedule(32, 8, stage_id=0).steps():
        print(instructions)
"""

from pathlib import Path

from pipeplan.runtime.schedule import PlannedSchedule


class Schedule(PlannedSchedule):
    """Yields what program.yaml holds for each rank of jamba-1.5-large."""

    plan_folder = Path(__file__).resolve().parent
