"""The schedule of this plan as a DeepSpeed PipeSchedule.

Plan sha256:6b929bdd534397eb99faba95302da70c026a5397d309f4e1d2011c1245b0f280:
32 micro-batches through 16 stages on 8 ranks. What rank 0 does:

    for instructions in Schedule(32, 8, stage_id=0).steps():
        print(instructions)
"""

from pathlib import Path

from pipeplan.runtime.schedule import PlannedSchedule


class Schedule(PlannedSchedule):
    """Yields what program.yaml holds for each rank of jamba-1.5-large."""

    plan_folder = Path(__file__).resolve().parent
