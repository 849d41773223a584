"""How long lowering and verifying take for a large plan: python -m tests.benchmarks.lowering [RANKS MICRO_BATCHES]."""

from __future__ import annotations

import sys
import time

from pipeplan.plan.layout import Partition
from pipeplan.plan.orders import folded_placement, zb_v
from pipeplan.plan.types import Plan, QueueModel
from pipeplan.program.lower import lower
from pipeplan.program.verify import verify
from tests.program.examples import devices, equal_layers


def main(num_ranks: int = 64, num_micro_batches: int = 512) -> None:
    """Print a line for each queue model; the first one includes loading compiled code."""
    placement = folded_placement(num_ranks, 2)
    profile, cluster = equal_layers(placement.num_stages), devices(num_ranks)
    plan = Plan(
        model=profile.model,
        num_micro_batches=num_micro_batches,
        partition=Partition((1,) * placement.num_stages),
        placement=placement,
        order=zb_v(num_ranks, num_micro_batches),
    )
    for queue_model in QueueModel:
        began_s = time.perf_counter()
        program = lower(plan, profile, cluster, queue_model)
        lowered_s = time.perf_counter()
        verify(program, plan, profile, cluster)
        verified_s = time.perf_counter()
        num_instructions = sum(len(steps) for steps in program.instructions_by_rank)
        print(
            f"{queue_model:12} {num_instructions:,} instructions: lowered in {lowered_s - began_s:.1f} s, "
            f"verified in {verified_s - lowered_s:.1f} s"
        )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
