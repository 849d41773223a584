"""Training data of emitted scripts: the bytes of a text file, or a model's sample batches."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipeplan.errors import FileFormatError, ModelError
from pipeplan.model.types import SampleBatch


class ByteText:
    """Sample i of a text file: bytes [i·L, (i+1)·L) as token ids; a last part shorter than L is left out.

    Args:
        sequence_length: L.
        vocab_size: Token ids of the model; a byte that it doesn't know is an error.

    Raises:
        FileFormatError: The file can't be read, or is shorter than one sample.
        ModelError: The vocabulary is too small for the file's bytes.
    """

    def __init__(self, path: Path, sequence_length: int, vocab_size: int | None = None) -> None:
        try:
            content = path.read_bytes()
        except OSError as error:
            raise FileFormatError(f"data file {path} can't be read: {error}") from None
        num_samples = len(content) // sequence_length
        if num_samples == 0:
            raise FileFormatError(
                f"data file {path} holds {len(content)} bytes, less than one sample of {sequence_length} tokens"
            )
        tokens = torch.frombuffer(bytearray(content[: num_samples * sequence_length]), dtype=torch.uint8)
        if vocab_size is not None and int(tokens.max()) >= vocab_size:
            raise ModelError(
                f"data file {path} holds byte {int(tokens.max())}, but the model knows token ids below {vocab_size}; "
                "use a model with a vocabulary of 256 or more, or plain ASCII text"
            )
        self._samples = tokens.view(num_samples, sequence_length)

    def __len__(self) -> int:
        return len(self._samples)

    def samples(self, first: int, count: int) -> Tensor:
        """Return samples ``first`` on, wrapping round; shape (count, L), int64."""
        indices = torch.arange(first, first + count) % len(self._samples)
        return self._samples[indices].long()


def text_micro_batches(
    text: ByteText, micro_batch_size: int, num_replicas: int, replica: int, num_seen: int = 0
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (tokens, labels) without end; the labels are the tokens, which a causal loss shifts.

    Micro-batch m of a replica follows micro-batch m of the replica before it, so that a step takes the next global
    batch in order whatever the number of replicas.

    Args:
        num_seen: Micro-batches of each replica to leave out.
    """
    first = (num_seen * num_replicas + replica) * micro_batch_size
    while True:
        tokens = text.samples(first, micro_batch_size)
        yield tokens, tokens
        first += num_replicas * micro_batch_size


def sampled_micro_batches(
    sample_batch: SampleBatch,
    micro_batch_size: int,
    sequence_length: int,
    num_replicas: int,
    replica: int,
    num_seen: int = 0,
) -> Iterator[tuple[Any, Any]]:
    """Yield a model's sample batches without end, each with a seed of its own, ``num_seen`` of them left out."""
    seed = num_seen * num_replicas + replica
    while True:
        yield sample_batch(micro_batch_size, sequence_length, seed)
        seed += num_replicas
