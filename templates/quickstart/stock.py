"""Stock DeepSpeed on the same layers: its own partition by parameters, its own 1F1B. For comparison only."""

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path

import deepspeed
import torch
from deepspeed.pipe import PipelineModule

from pipeplan.model.source import model_from_source
from pipeplan.model.weights import load_weights
from pipeplan.profile import read_profile
from pipeplan.runtime import close_groups
from pipeplan.runtime.shared_memory import release_shared_buffers


def micro_batches(
    data: Path, micro_batch_size: int, sequence_length: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the file's bytes as (tokens, labels), in order, round and round."""
    tokens = torch.tensor(list(data.read_bytes()))
    samples = tokens[: len(tokens) // sequence_length * sequence_length].view(-1, sequence_length)
    position = 0
    while True:
        indices = [(position + offset) % len(samples) for offset in range(micro_batch_size)]
        position += micro_batch_size
        yield samples[indices], samples[indices]


def main() -> None:
    """Train, and write the loss and the time of every step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=0)
    parser.add_argument("--profile", type=Path, required=True)
    parser.add_argument("--num-ranks", type=int, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--init", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--losses", type=Path, required=True)
    deepspeed.add_config_arguments(parser)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    deepspeed.init_distributed()

    profile = read_profile(arguments.profile)
    model = model_from_source(profile.model_source)
    layers = [source.build() for source in model.layers]
    load_weights(model, dict(enumerate(layers)), arguments.init)
    module = PipelineModule(
        layers, num_stages=arguments.num_ranks, partition_method="parameters", loss_fn=model.loss_function
    )
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    engine, _, _, _ = deepspeed.initialize(args=arguments, model=module, model_parameters=parameters)
    release_shared_buffers()

    data = micro_batches(arguments.data, profile.micro_batch_size, profile.sequence_length)
    losses, step_ms = [], []
    for _ in range(arguments.steps):
        start = time.perf_counter()
        losses.append(float(engine.train_batch(data_iter=data)))
        step_ms.append((time.perf_counter() - start) * 1000)
    if engine.global_rank == 0:
        arguments.losses.write_text(json.dumps({"losses": losses, "step_ms": step_ms}))
    close_groups()


if __name__ == "__main__":
    main()
