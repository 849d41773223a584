"""torch's own pipeline schedules and their compute-only CSV."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.pipelining import schedules

NUM_RANKS = 4


def fake_stages(stages: tuple[int, ...], num_stages: int, rank: int = 0, num_ranks: int = NUM_RANKS) -> list[Any]:
    """Return what torch's schedules read of their stages; nothing is ever run."""
    return [
        SimpleNamespace(
            stage_index=stage,
            num_stages=num_stages,
            group_size=num_ranks,
            group_rank=rank,
            is_first=stage == 0,
            is_last=stage == num_stages - 1,
            has_backward=True,
            submod=torch.nn.Identity(),
            stage_index_to_group_rank=None,
        )
        for stage in stages
    ]


def torch_schedules(num_micro_batches: int) -> Iterator[Any]:
    """Yield torch's schedules for four ranks."""
    looped, folded = fake_stages((0, 4), 8), fake_stages((0, 7), 8)
    options = {"n_microbatches": num_micro_batches, "loss_fn": torch.nn.functional.mse_loss}
    yield schedules.Schedule1F1B(fake_stages((0,), 4)[0], **options)
    yield schedules.ScheduleGPipe(fake_stages((0,), 4)[0], **options)
    yield schedules.ScheduleInterleaved1F1B(looped, **options)
    yield schedules.ScheduleInterleavedZeroBubble(looped, **options)
    yield schedules.ScheduleZBVZeroBubble(folded, **options)
    yield schedules.ScheduleDualPipeV(folded, **options)


def dump(schedule: Any) -> str:
    """Return the compute-only CSV of a schedule, as ``_dump_csv`` writes it: None is an empty cell."""
    rows = [schedule.pipeline_order[rank] for rank in range(NUM_RANKS)]
    return "\n".join(",".join("" if action is None else str(action) for action in row) for row in rows)
