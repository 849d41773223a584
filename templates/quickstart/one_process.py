"""One process, plain torch: the loss that both pipelines must show. Uses neither DeepSpeed nor pipeplan's runtime."""

import argparse
import json
from pathlib import Path

import torch

from pipeplan.model.huggingface import build_reference


def main() -> None:
    """Save the model's first weights, train, and write the loss of every step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path, required=True, help="Hugging Face config")
    parser.add_argument("--ds-config", type=Path, required=True, help="for batch sizes and the optimizer")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--sequence-length", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--init", type=Path, required=True, help="where to save the first weights")
    parser.add_argument("--losses", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)

    settings = json.loads(arguments.ds_config.read_text())
    micro_batch_size = settings["train_micro_batch_size_per_gpu"]
    num_micro_batches = settings["gradient_accumulation_steps"]
    model = build_reference(json.loads(arguments.config.read_text()), seed=arguments.seed)
    model.save_pretrained(arguments.init)
    optimizer = getattr(torch.optim, settings["optimizer"]["type"])(
        model.parameters(), **settings["optimizer"]["params"]
    )

    data = torch.tensor(list(arguments.data.read_bytes()))
    samples = data[: len(data) // arguments.sequence_length * arguments.sequence_length]
    samples = samples.view(-1, arguments.sequence_length)
    losses = []
    position = 0
    model.train()
    for _ in range(arguments.steps):
        loss_sum = 0.0
        for _ in range(num_micro_batches):
            indices = [(position + offset) % len(samples) for offset in range(micro_batch_size)]
            position += micro_batch_size
            tokens = samples[indices]
            loss = model(input_ids=tokens, labels=tokens).loss / num_micro_batches
            loss.backward()
            loss_sum += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss_sum)
    arguments.losses.write_text(json.dumps({"losses": losses}))


if __name__ == "__main__":
    main()
