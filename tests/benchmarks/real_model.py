"""A small model with real compute: residual feed-forward blocks between two projections."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH = 256
NUM_BLOCKS = 8
NUM_TOKENS = 256


class Block(nn.Module):
    """Residual feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, value: Tensor) -> Tensor:
        return value + self.down(functional.relu(self.up(value)))


def factory() -> tuple[list[nn.Module], object, object]:
    """Return (layers, loss function, sample batch), as pipeplan takes them."""
    layers = [nn.Linear(WIDTH, WIDTH), *(Block() for _ in range(NUM_BLOCKS)), nn.Linear(WIDTH, WIDTH)]
    return layers, functional.mse_loss, sample_batch


def sample_batch(micro_batch_size: int, sequence_length: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return random inputs and targets."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(micro_batch_size, sequence_length, WIDTH, generator=generator)
    return inputs, inputs.roll(1, -1)
