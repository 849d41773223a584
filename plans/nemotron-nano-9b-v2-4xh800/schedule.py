"""The schedule of this plan as a DeepSpeed PipeSchedule.

Plan sha256:d2a3bab5f20eff4dec8933f8fa63b869f9b5543b34289eb96edcd653cdc243ad:
8 micro-batches through 16 stages on 4 ranks. What rank 0 does:

    for instructions in Schedule(8, 4, stage_id=0).steps():
        print(instructions)
"""

from pathlib import Path

from pipeplan.runtime.schedule import PlannedSchedule


class Schedule(PlannedSchedule):
    """Yields what program.yaml holds for each rank of nemotron-nano-9b-v2."""

    plan_folder = Path(__file__).resolve().parent
