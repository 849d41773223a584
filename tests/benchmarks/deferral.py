"""I, W and B of Linear-heavy blocks side by side: ``python tests/benchmarks/deferral.py [--device cuda]``.

Target: I + W at most 1.10 x B. "fresh" is the first micro-batch of a batch, whose gradients become ``.grad``; "added"
is every later one, whose gradients are added. The last column is W the naive way, which hands ready gradients to the
engine: as the caller still refers to them, the engine copies every gradient that should have become ``.grad``.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional

from pipeplan.deferral import WeightGradientStore, defer_weight_gradients
from pipeplan.profile.sampling import Clock, clock_for

NUM_ROUNDS = 15
CASES = [  # hidden, feed-forward, layers, tokens, dtype
    (512, 2048, 2, 256, torch.float32),
    (1024, 4096, 2, 256, torch.float32),
    (1024, 4096, 2, 512, torch.bfloat16),
]
CUDA_CASES = [(4096, 16384, 4, 4096, torch.bfloat16), (8192, 28672, 1, 4096, torch.bfloat16)]


class Block(nn.Module):
    """Residual feed-forward layers."""

    def __init__(self, hidden: int, feed_forward: int, num_layers: int) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(hidden, feed_forward) for _ in range(num_layers))
        self.down = nn.ModuleList(nn.Linear(feed_forward, hidden) for _ in range(num_layers))

    def forward(self, value: Tensor) -> Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            value = value + down(functional.relu(up(value)))
        return value


def run_with_ready_gradients(store: WeightGradientStore, key: int) -> None:
    """Run W by passing computed gradients to the engine."""
    pairs = [pair for entry in store._stashed_by_key.pop(key) for pair in entry.contributions()]
    torch.autograd.backward([target for target, _ in pairs], [compute() for _, compute in pairs])


def time_full(module: nn.Module, value: Tensor, gradient: Tensor, clock: Clock) -> int:
    """Return how long B takes."""
    output = module(value)
    return clock.time(lambda: torch.autograd.backward(output, gradient))[1]


def time_halves(
    module: nn.Module,
    value: Tensor,
    gradient: Tensor,
    clock: Clock,
    run: Callable[[WeightGradientStore, int], None],
) -> tuple[int, int]:
    """Return how long I and W take."""
    store = WeightGradientStore()
    with defer_weight_gradients(store, 0):
        output = module(value)

    def input_half() -> None:
        with defer_weight_gradients(store, 0):
            torch.autograd.backward(output, gradient)

    return clock.time(input_half)[1], clock.time(lambda: run(store, 0))[1]


def main() -> None:
    """Measure every case and print one table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    device = torch.device(parser.parse_args().device)
    torch.set_num_threads(1)
    clock = clock_for(device)
    table = Table("block", "gradients", "B ms", "I ms", "W ms", "(I + W) / B", "W ms, ready gradients")
    for hidden, feed_forward, num_layers, num_tokens, dtype in CUDA_CASES if device.type == "cuda" else CASES:
        module = Block(hidden, feed_forward, num_layers).to(device, dtype)
        value = torch.randn(num_tokens, hidden, device=device, dtype=dtype, requires_grad=True)
        gradient = torch.randn_like(value)
        name = f"{num_layers} x {hidden}-{feed_forward}, {num_tokens} tokens, {str(dtype).removeprefix('torch.')}"
        for is_fresh in (True, False):

            def forget(module: nn.Module = module, value: Tensor = value, is_fresh: bool = is_fresh) -> None:
                value.grad = None
                if is_fresh:
                    module.zero_grad(set_to_none=True)

            rounds = []
            for _ in range(NUM_ROUNDS + 2):
                forget()
                full_ns = time_full(module, value, gradient, clock)
                forget()
                halves_ns = time_halves(module, value, gradient, clock, WeightGradientStore.run)
                forget()
                ready_ns = time_halves(module, value, gradient, clock, run_with_ready_gradients)[1]
                rounds.append((full_ns, *halves_ns, ready_ns))
            full, first, second, ready = (statistics.median(column) / 1e6 for column in zip(*rounds[2:], strict=True))
            table.add_row(
                name,
                "fresh" if is_fresh else "added",
                f"{full:.2f}",
                f"{first:.2f}",
                f"{second:.2f}",
                f"{(first + second) / full:.3f}",
                f"{ready:.2f}",
            )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
