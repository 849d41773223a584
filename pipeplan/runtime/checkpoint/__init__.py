"""Checkpoints that any plan, any number of ranks and one process share.

``engine.save_checkpoint`` and ``engine.load_checkpoint`` write and read them under a plan. Without DeepSpeed::

    checkpoint = read_checkpoint(folder)                      # weights and optimizer state by layer and name
    checkpoint.layers[3].weights["out.weight"]
    checkpoint.layers[3].optimizer["out.weight"].tensors["exp_avg"]
    restore_checkpoint(checkpoint, layers, optimizer)         # into a model in one process

    write_checkpoint(capture_checkpoint(layers, optimizer), folder)   # and back

State is keyed by layer and name, never by position on a rank, so it can't end up in another layer. Random states are
not saved: with ``seed_layers`` dropout depends on the micro-batch and the layer, and goes on where it was.
"""

from __future__ import annotations

from pipeplan.runtime.checkpoint.plain import (
    capture_checkpoint,
    read_checkpoint,
    restore_checkpoint,
    write_checkpoint,
)
from pipeplan.runtime.checkpoint.types import (
    Checkpoint,
    LayerOutline,
    LayerState,
    Outline,
    Progress,
    WeightOutline,
    WeightState,
)

__all__ = [
    "Checkpoint",
    "LayerOutline",
    "LayerState",
    "Outline",
    "Progress",
    "WeightOutline",
    "WeightState",
    "capture_checkpoint",
    "read_checkpoint",
    "restore_checkpoint",
    "write_checkpoint",
]
