"""The schedule of this plan as a DeepSpeed PipeSchedule.

Plan sha256:cfd6f7d4476feceb054ce4441260640e0ab384663c8b9d8cc717133f748df9a4:
8 micro-batches through 4 stages on 2 ranks. What rank 0 does:

    for instructions in Schedule(8, 2, stage_id=0).steps():
        print(instructions)
"""

from pathlib import Path

from pipeplan.runtime.schedule import PlannedSchedule


class Schedule(PlannedSchedule):
    """Yields what program.yaml holds for each rank of tiny-jamba."""

    plan_folder = Path(__file__).resolve().parent
