"""The text data of emitted scripts: which bytes each micro-batch holds."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pipeplan.errors import FileFormatError, ModelError
from pipeplan.model.source import model_from_source
from pipeplan.runtime.batch import MicroBatches
from pipeplan.runtime.data import ByteText, text_micro_batches
from pipeplan.runtime.training import _micro_batches
from tests.model.families import config_of


def test_models_of_few_words_train_on_random_tokens() -> None:
    """The text that comes with pipeplan holds bytes up to 121; a model that doesn't know them gets tokens it knows."""
    engine = SimpleNamespace(grid=SimpleNamespace(data_parallel_size=1, data_parallel_id=0), global_samples=0)
    profile = SimpleNamespace(micro_batch_size=2, sequence_length=16)
    highest = {}
    for vocab_size in (50, 256):
        model = model_from_source({"huggingface": config_of("llama", vocab_size=vocab_size)})
        tokens, _ = next(_micro_batches(model, profile, engine, None))  # type: ignore[arg-type]
        assert tokens.shape == (2, 16)
        highest[vocab_size] = int(tokens.max())
    assert highest[50] < 50 <= highest[256] < 128


@pytest.fixture
def text(tmp_path: Path) -> ByteText:
    """Five samples of four bytes, and two bytes that are left out."""
    path = tmp_path / "text.txt"
    path.write_bytes(bytes(range(22)))
    return ByteText(path, 4)


def test_micro_batches_take_the_samples_in_order_and_wrap_round(text: ByteText) -> None:
    """Sample i is bytes [i·L, (i+1)·L); after the last comes the first again; labels are the tokens."""
    batches = list(islice(text_micro_batches(text, 2, 1, 0), 3))
    assert torch.cat([tokens for tokens, _ in batches])[:, 0].tolist() == [0, 4, 8, 12, 16, 0]
    assert all(torch.equal(tokens, labels) for tokens, labels in batches)


def test_replicas_share_every_step_between_them(text: ByteText) -> None:
    """Two replicas together read what one would."""
    both = zip(text_micro_batches(text, 1, 2, 0), text_micro_batches(text, 1, 2, 1), strict=True)
    assert [int(tokens[0, 0]) for pair in islice(both, 2) for tokens, _ in pair] == [0, 4, 8, 12]


def test_short_and_foreign_texts_are_refused(tmp_path: Path) -> None:
    """A missing file, one shorter than a sample, and a byte outside the vocabulary each have their message."""
    with pytest.raises(FileFormatError, match="can't be read"):
        ByteText(tmp_path / "missing.txt", 4)
    path = tmp_path / "short.txt"
    path.write_bytes(b"abc")
    with pytest.raises(FileFormatError, match="3 bytes, less than one sample of 4"):
        ByteText(path, 4)
    with pytest.raises(ModelError, match="byte 99, but the model knows token ids below 50"):
        ByteText(path, 3, vocab_size=50)


def test_micro_batches_are_handed_out_by_number() -> None:
    """Any order of requests gets the same content, each is fetched once, and nothing is kept after its last use."""
    content = iter(range(3))
    batches = MicroBatches(lambda: next(content), num_uses=2)
    assert [batches[number] for number in (2, 0, 1, 1, 2, 0)] == [2, 0, 1, 1, 2, 0]
    assert batches.num_kept == 0
