"""The schedule of this plan as a DeepSpeed PipeSchedule.

Plan sha256:06dbe14871db63c580814336c2d5c2d81703472b1499bcc967074bdff70987ea:
8 micro-batches through 4 stages on 2 ranks. What rank 0 does:

    for instructions in Schedule(8, 2, stage_id=0).steps():
        print(instructions)
"""

from pathlib import Path

from pipeplan.runtime.schedule import PlannedSchedule


class Schedule(PlannedSchedule):
    """Yields what program.yaml holds for each rank of tiny-jamba."""

    plan_folder = Path(__file__).resolve().parent
