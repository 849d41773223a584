"""The schedule of this plan as a DeepSpeed PipeSchedule.

Plan sha256:1127a76597f85e6f7ff39ec001f42cfbd822e4abe100e21921ffe89d2b1655a9:
8 micro-batches through 7 stages on 2 ranks. What rank 0 does:

    for instructions in Schedule(8, 2, stage_id=0).steps():
        print(instructions)
"""

from pathlib import Path

from pipeplan.runtime.schedule import PlannedSchedule


class Schedule(PlannedSchedule):
    """Yields what program.yaml holds for each rank of tiny-jamba."""

    plan_folder = Path(__file__).resolve().parent
