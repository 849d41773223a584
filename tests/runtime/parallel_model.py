"""A model of three different layers, the middle one of which may run out of memory, as a launch profiles it."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 16


class Embedding(nn.Linear):
    """The first layer."""


class Crowded(nn.Linear):
    """Runs out of memory where the environment says so."""

    def forward(self, value: Tensor) -> Tensor:
        if "CROWDED" in os.environ:
            raise torch.OutOfMemoryError("out of memory")
        return super().forward(value)


def factory() -> tuple[list[nn.Module], Any, Any]:
    """Return four layers, two of them equal."""
    layers = [Embedding(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), Crowded(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]

    def sample_batch(micro_batch_size: int, sequence_length: int, seed: int) -> tuple[Tensor, Tensor]:
        return torch.ones(micro_batch_size, WIDTH), torch.zeros(micro_batch_size, WIDTH)

    return layers, nn.functional.mse_loss, sample_batch
