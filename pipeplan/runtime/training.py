"""What an emitted ``train.py`` runs: the profiled model, trained with the plan in the script's folder."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import deepspeed
from deepspeed import comm as dist

import pipeplan.runtime
from pipeplan.errors import CheckpointError, PipeplanError, ProfileError
from pipeplan.files import write_text
from pipeplan.model.source import model_from_source
from pipeplan.model.types import ModelLayers
from pipeplan.model.weights import load_weights
from pipeplan.plan.folder import PROFILE_FILE
from pipeplan.profile.file import read_profile
from pipeplan.profile.types import Profile
from pipeplan.program.trace import write_trace
from pipeplan.resources import template_path
from pipeplan.runtime.data import ByteText, sampled_micro_batches, text_micro_batches
from pipeplan.runtime.engine import PlannedPipelineEngine
from pipeplan.runtime.module import PlannedPipelineModule
from pipeplan.runtime.process_groups import calm_down_at_exit, close_groups

_NUM_ASCII = 128  # token ids of the text that comes with pipeplan


def train(folder: Path, arguments: Sequence[str] | None = None) -> None:
    """Train the model of the plan in ``folder``; the ``deepspeed`` launcher runs this on every rank.

    Args:
        arguments: Of the command line; the process's own if not given.
    """
    options = _parser(folder).parse_args(arguments)
    try:
        _train(folder, options)
    except PipeplanError as error:
        sys.exit(f"error: {error}")
    close_groups()  # here, where the engine is gone


def _parser(folder: Path) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=f"Trains with the plan in {folder}.")
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the launcher")
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps to train")
    parser.add_argument("--seed", type=int, default=0, help="of the initial weights and of dropout")
    parser.add_argument(
        "--data",
        type=Path,
        help="text file; default: a small text that comes with pipeplan, or random tokens below 128 token ids",
    )
    parser.add_argument("--init", type=Path, help="folder of Hugging Face safetensors to start from")
    parser.add_argument("--resume", type=Path, help="folder of checkpoints; the latest goes on, under this plan")
    parser.add_argument("--save", type=Path, help="folder to save a checkpoint to after the last step")
    parser.add_argument("--save-every", type=int, default=0, metavar="STEPS", help="save that often, too")
    parser.add_argument("--losses", type=Path, help="JSON file to write the loss and time of every step to")
    parser.add_argument("--trace", type=Path, help="file to write the measured timeline of the last step to")
    return deepspeed.add_config_arguments(parser)


def _train(folder: Path, options: argparse.Namespace) -> None:
    deepspeed.init_distributed()
    calm_down_at_exit()
    profile = read_profile(folder / PROFILE_FILE)
    model = _model_of(profile, folder, options.seed)
    module = PlannedPipelineModule(
        model.layers, loss_fn=model.loss_function, plan=folder, seed_layers=True, base_seed=options.seed
    )
    if options.init is not None:
        load_weights(model, module.module_by_layer, options.init)
    engine, *_ = pipeplan.runtime.initialize(
        args=options,
        model=module,
        model_parameters=[parameter for parameter in module.parameters() if parameter.requires_grad],
    )
    if options.resume is not None:
        _resume(engine, options.resume)
    micro_batches = _micro_batches(model, profile, engine, options.data)
    losses: list[float] = []
    step_ms: list[float] = []
    for step in range(engine.global_steps, engine.global_steps + options.steps):
        start = time.perf_counter()
        losses.append(float(engine.train_batch(data_iter=micro_batches)))
        step_ms.append((time.perf_counter() - start) * 1000)
        if dist.get_rank() == 0:
            print(f"step {step + 1}: loss {losses[-1]:.4f}", flush=True)
        is_last = len(losses) == options.steps
        if options.save is not None and (is_last or (options.save_every and (step + 1) % options.save_every == 0)):
            engine.save_checkpoint(options.save)
    if options.losses is not None and dist.get_rank() == 0:
        write_text(options.losses, json.dumps({"losses": losses, "step_ms": step_ms}))
    if options.trace is not None:
        trace = engine.trace()
        if dist.get_rank() == 0:
            write_trace(trace, options.trace)


def _resume(engine: PlannedPipelineEngine, folder: Path) -> None:
    loaded, _ = engine.load_checkpoint(folder)
    if loaded is None:
        raise CheckpointError(f"{folder} holds no checkpoint to resume from; name a folder that --save wrote to")


def _model_of(profile: Profile, folder: Path, seed: int) -> ModelLayers:
    if profile.model_source is None:
        raise ProfileError(
            f"{folder / PROFILE_FILE} does not say how to build model {profile.model!r} (no model_source); profile it "
            "with 'pipeplan profile', or use PlannedPipelineModule in a script of your own"
        )
    return model_from_source(profile.model_source, name=profile.model, seed=seed)


def _micro_batches(
    model: ModelLayers, profile: Profile, engine: PlannedPipelineEngine, data: Path | None
) -> Iterator[Any]:
    num_replicas, replica = engine.grid.data_parallel_size, engine.grid.data_parallel_id
    size, length = profile.micro_batch_size, profile.sequence_length
    num_seen = engine.global_samples // (num_replicas * size)  # what a resumed run has trained on already
    if data is None and (model.vocab_size is None or model.vocab_size < _NUM_ASCII):
        # nothing says that the model reads tokens, or it doesn't know those of our text
        return sampled_micro_batches(model.sample_batch, size, length, num_replicas, replica, num_seen)
    text = ByteText(data or template_path("data/text.txt"), length, model.vocab_size)
    return text_micro_batches(text, size, num_replicas, replica, num_seen)
