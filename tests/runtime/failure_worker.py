"""What the launcher runs in the failure tests: batches that can't finish, and what every rank says then."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
import worker
from deepspeed import comm as dist

from pipeplan.errors import LaunchError
from pipeplan.program.types import Message


def _end_of(engine: Any, data: Any) -> dict[str, Any]:
    """Train until it fails; return the error, and what a second try says."""
    found: dict[str, Any] = {"message": None, "again": None}
    started = time.monotonic()
    try:
        engine.train_batch(data_iter=data)
    except LaunchError as error:
        found |= {"message": str(error), "seconds": time.monotonic() - started}
    try:
        engine.train_batch(data_iter=data)
    except LaunchError as error:
        found["again"] = str(error)
    return found


def withhold(case: dict[str, Any]) -> dict[str, Any]:
    """From a message on, rank ``case["source"]`` sends nothing to the rank of that message."""
    engine = worker.planned_engine(case)
    engine.train_batch(data_iter=worker.batches(0, 0))
    lost = Message.parse(case["message"])
    send = engine._channels.send

    def withholding(message: Message, *rest: Any) -> None:
        if message.target_stage == lost.target_stage and message.micro_batch >= lost.micro_batch:
            engine._channels._pending_sends[message] = ([], [])
        else:
            send(message, *rest)

    if dist.get_rank() == case["source"]:
        engine._channels.send = withholding
    return _end_of(engine, worker.batches(0, 0))


def mix_lengths(case: dict[str, Any]) -> dict[str, Any]:
    """Micro-batches of other lengths than the first, and no dynamic shapes."""
    return _end_of(worker.planned_engine(case), worker.batches(0, 0, "lengths"))


def die(case: dict[str, Any]) -> dict[str, Any]:
    """Rank ``case["source"]`` ends in the middle of a batch; the others save what they say, and end too."""
    engine = worker.planned_engine(case)
    engine.train_batch(data_iter=worker.batches(0, 0))
    run_stage = engine.module.run_stage

    def dying(stage: int, boundary: Any, micro_batch: int, batch: int) -> Any:
        if micro_batch == case["micro_batch"]:
            os._exit(0)  # the launcher would end the others for any other status
        return run_stage(stage, boundary, micro_batch, batch)

    if dist.get_rank() == case["source"]:
        engine.module.run_stage = dying
    found = _end_of(engine, worker.batches(0, 0))
    torch.save(found, Path(case["results"]) / f"{case['name']}-{dist.get_rank()}.pt")
    os._exit(0)


if __name__ == "__main__":
    worker.main({"withhold": withhold, "mix-lengths": mix_lengths, "die": die})
