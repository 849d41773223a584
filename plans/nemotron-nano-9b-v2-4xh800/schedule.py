"""The schedule of this plan as a DeepSpeed PipeSchedule.

Plan sha256:db90db788423babd454a1f941f4c362f7d770d10fe5024bf787d1c0c475eae98:
8 micro-batches through 12 stages on 4 ranks. What rank 0 does:

    for instructions in Schedule(8, 4, stage_id=0).steps():
        print(instructions)
"""

from pathlib import Path

from pipeplan.runtime.schedule import PlannedSchedule


class Schedule(PlannedSchedule):
    """Yields what program.yaml holds for each rank of nemotron-nano-9b-v2."""

    plan_folder = Path(__file__).resolve().parent
