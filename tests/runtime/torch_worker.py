"""What the launcher runs to execute our exported orders with torch's own pipeline runtime."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

WIDTH = 8
SAMPLES = 2


class Block(nn.Module):
    """A residual layer."""

    def __init__(self, index: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(index)
            self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + torch.tanh(self.linear(hidden))


def batch(num_micro_batches: int) -> tuple[Tensor, Tensor]:
    """Return the inputs and targets of a batch."""
    generator = torch.Generator().manual_seed(1)
    inputs, targets = torch.randn(2, num_micro_batches * SAMPLES, WIDTH, generator=generator)
    return inputs, targets


def gradients_in_one_process(num_stages: int, num_micro_batches: int) -> dict[str, Tensor]:
    """Return the gradients of the mean over micro-batches, by "STAGE.NAME"."""
    layers = [Block(stage) for stage in range(num_stages)]
    inputs, targets = batch(num_micro_batches)
    nn.functional.mse_loss(nn.Sequential(*layers)(inputs), targets).backward()
    return {
        f"{stage}.{name}": parameter.grad
        for stage, layer in enumerate(layers)
        for name, parameter in layer.named_parameters()
        if parameter.grad is not None
    }


def execute(case: dict[str, Any], rank: int) -> dict[str, Tensor]:
    """Run one batch in the order of a CSV; return the gradients of this rank's stages."""
    placement, num_micro_batches = case["placement"], case["num_micro_batches"]
    own = {stage: Block(stage) for stage, holder in enumerate(placement) if holder == rank}
    stages = [
        PipelineStage(layer, stage, len(placement), torch.device("cpu"), group=distributed.group.WORLD)
        for stage, layer in own.items()
    ]
    schedule = _PipelineScheduleRuntime(stages, num_micro_batches, loss_fn=nn.functional.mse_loss)
    schedule._load_csv(case["csv"])
    inputs, targets = batch(num_micro_batches)
    schedule.step(*([inputs] if placement[0] == rank else []), **({"target": targets} if placement[-1] == rank else {}))
    return {
        f"{stage}.{name}": parameter.grad
        for stage, layer in own.items()
        for name, parameter in layer.named_parameters()
        if parameter.grad is not None
    }


def main() -> None:
    """Run every case of the list."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=0)
    parser.add_argument("--cases", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    for case in json.loads(arguments.cases.read_text()):
        torch.save(execute(case, rank), arguments.cases.parent / f"{case['name']}-{rank}.pt")
        distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
