"""The schedule of this plan as a DeepSpeed PipeSchedule.

Plan sha256:7d4f8b8fbba0f76857efa3d03ede830b7dfe9410b3e39562068460acffaa85c9:
32 micro-batches through 32 stages on 8 ranks. What rank 0 does:

    for instructions in Schedule(32, 8, stage_id=0).steps():
        print(instructions)
"""

from pathlib import Path

from pipeplan.runtime.schedule import PlannedSchedule


class Schedule(PlannedSchedule):
    """Yields what program.yaml holds for each rank of jamba-1.5-large."""

    plan_folder = Path(__file__).resolve().parent
