"""The schedule of this plan as a DeepSpeed PipeSchedule.

Plan sha256:bd9056096b712fe7869f05ecf82530e9d7cf07581ce0ae2bdad935ef4bb41ce0:
8 micro-batches through 12 stages on 4 ranks. What rank 0 does:

    for instructions in Schedule(8, 4, stage_id=0).steps():
        print(instructions)
"""

from pathlib import Path

from pipeplan.runtime.schedule import PlannedSchedule


class Schedule(PlannedSchedule):
    """Yields what program.yaml holds for each rank of nemotron-nano-9b-v2."""

    plan_folder = Path(__file__).resolve().parent
