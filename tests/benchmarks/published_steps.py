"""Estimates against published training throughputs. Run: ``python -m tests.benchmarks.published_steps``.

Nobody publishes times per layer but for one model, on which the efficiency table was fitted. Throughputs of whole
training steps are published for many: dense models from 0.8 to 13 billion parameters and mixtures of experts, on two
kinds of GPU, at sequence lengths from 1 K to 32 K (``published_steps.yaml`` names the sources). None of them had a part
in fitting the table. A step is estimated as all layers forward and backward; communication and the optimizer are not in
it, so that a perfect table gives somewhat less than what was measured.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import yaml

from pipeplan.model.source import model_from_source
from pipeplan.profile.estimate.efficiency import read_efficiency
from pipeplan.profile.estimate.gpus import read_gpus
from pipeplan.profile.estimate.kernels import LayerCost
from pipeplan.profile.estimate.model import layer_costs


@dataclass(frozen=True, slots=True)
class Step:
    """One micro-batch on one GPU, as published and as estimated."""

    model: str
    gpu: str
    sequence_length: int
    micro_batch_size: int
    published_ms: float
    estimated_ms: float

    @property
    def difference(self) -> float:
        """Estimate over publication, less one."""
        return self.estimated_ms / self.published_ms - 1


@cache
def _content() -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
    return content


@cache
def _costs(model: str, sequence_length: int, micro_batch_size: int) -> list[LayerCost]:
    config = _content()["models"][model] | {"max_position_embeddings": sequence_length}
    layers = model_from_source({"huggingface": config})
    return layer_costs(layers, micro_batch_size=micro_batch_size, sequence_length=sequence_length, dtype="bf16")


def steps(models: frozenset[str] | None = None) -> Iterator[Step]:
    """Estimate every published step, or those of some models."""
    efficiency, gpus = read_efficiency(), read_gpus()
    for model, gpu, length, size, tokens_per_s in _content()["steps"]:
        if models is None or model in models:
            times = [efficiency.times(cost, gpus[gpu], "bf16") for cost in _costs(model, length, size)]
            estimated_ms = sum(one.forward_ns + one.backward_ns for one in times) / 1e6
            yield Step(model, gpu, length, size, size * length / tokens_per_s * 1e3, estimated_ms)


def main() -> None:
    """Print a line for each step and what they come to by GPU."""
    torch.set_num_threads(1)
    by_gpu: dict[str, list[float]] = {}
    print(f"{'model':<14} {'GPU':<10} {'micro-batch':>11}  {'published':>9} {'estimated':>9}")
    for step in steps():
        by_gpu.setdefault(step.gpu, []).append(step.difference)
        print(
            f"{step.model:<14} {step.gpu:<10} {step.micro_batch_size:>3} x {step.sequence_length:<6} "
            f"{step.published_ms:>8.0f}  {step.estimated_ms:>8.0f} ms  {step.difference:+.0%}"
        )
    for gpu, differences in by_gpu.items():
        print(
            f"{gpu}: {len(differences)} steps, median {statistics.median(differences):+.0%}, "
            f"{min(differences):+.0%} to {max(differences):+.0%}; "
            f"{sum(abs(one) <= 0.25 for one in differences)} within 25 %"
        )


if __name__ == "__main__":
    main()
