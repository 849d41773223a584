"""The schedule of this plan as a DeepSpeed PipeSchedule.

Plan sha256:eb641eba932be7c894f18ef8e74ae71607da37b184cabf4452d2696558d6ff45:
8 micro-batches through 7 stages on 2 ranks. What rank 0 does:

    for instructions in Schedule(8, 2, stage_id=0).steps():
        print(instructions)
"""

from pathlib import Path

from pipeplan.runtime.schedule import PlannedSchedule


class Schedule(PlannedSchedule):
    """Yields what program.yaml holds for each rank of tiny-jamba."""

    plan_folder = Path(__file__).resolve().parent
