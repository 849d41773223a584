"""The schedule of this plan as a DeepSpeed PipeSchedule.

Plan sha256:d1ea798ad78f36090b1d040593939acf9c6eee7ab0ddd665f75fe6ccdc501bb0:
8 micro-batches through 7 stages on 2 ranks. What rank 0 does:

    for instructions in Schedule(8, 2, stage_id=0).steps():
        print(instructions)
"""

from pathlib import Path

from pipeplan.runtime.schedule import PlannedSchedule


class Schedule(PlannedSchedule):
    """Yields what program.yaml holds for each rank of tiny-jamba."""

    plan_folder = Path(__file__).resolve().parent
