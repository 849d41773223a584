"""A batch that can't finish ends every rank with a sentence, through the real ``deepspeed`` launcher."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import launching
import pytest
from launching import result_of, write_folder

from pipeplan.plan.orders import looped_placement, one_f_one_b

pytestmark = pytest.mark.launcher

LIMIT_S = 12  # long for a message on a busy machine, short for a test
NUM_RANKS = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Lose a message, mix lengths, and end a rank, one after the other."""
    folder = tmp_path_factory.mktemp("failure")
    plan = write_folder(folder / "plan", "hybrid", looped_placement(NUM_RANKS, 1), one_f_one_b(NUM_RANKS, 4))
    common = {
        "model": "hybrid",
        "folder": str(plan),
        "num_micro_batches": 4,
        "config": {"pipeplan": {"message_timeout_s": LIMIT_S}},
    }
    cases: list[dict[str, Any]] = [
        {**common, "name": "withheld", "kind": "withhold", "source": 1, "message": "1>2"},
        {**common, "name": "lengths", "kind": "mix-lengths"},
        {**common, "name": "dead", "kind": "die", "source": 1, "micro_batch": 2, "results": str(folder)},
    ]
    launching.launch(NUM_RANKS, cases, folder, script="failure_worker.py")
    return folder


def test_a_message_that_never_comes_is_named(folder: Path) -> None:
    """The rank that waits names itself, the message, the op that needs it, the sender and the limit; all ranks end."""
    found = result_of(folder, "withheld", NUM_RANKS)
    assert f"rank 2 waited {LIMIT_S} s for message 1>2 from rank 1, which 2F2 needs" in found[2]["message"]
    assert "message_timeout_s" in found[2]["message"]
    for rank, result in enumerate(found):
        assert result["message"].startswith(f"rank {rank} ")
        assert result["seconds"] < 4 * LIMIT_S


def test_another_length_is_refused_by_its_micro_batch(folder: Path) -> None:
    """Without dynamic shapes the first boundary of another shape is named with its micro-batch; all ranks end."""
    found = result_of(folder, "lengths", NUM_RANKS)
    assert "stage 0, micro-batch 1: tensor 0 of the boundary is float32[2, 24, 16]" in found[0]["message"]
    assert "float32[2, 16, 16] in the first batch" in found[0]["message"]
    assert "dynamic_shapes=True" in found[0]["message"]
    assert all(result["message"] for result in found)
    assert "from rank 0, which 1F1 needs" in found[1]["message"]


def test_a_dead_rank_ends_the_others(folder: Path) -> None:
    """Both neighbours of a rank that dies in a batch name themselves, it, and what they wait for."""
    first, last = (result_of(folder, "dead", NUM_RANKS, ranks=(0, 2))[number] for number in (0, 1))
    assert first["message"].startswith("rank 0 ")
    assert "rank 1" in first["message"]
    assert "rank 2 waited for message 1>2 from rank 1, which 2F2 needs, but the connection is gone" in last["message"]


@pytest.mark.parametrize("name", ["withheld", "lengths"])
def test_an_interrupted_engine_does_not_go_on(folder: Path, name: str) -> None:
    """After that, the engine refuses another batch, which would take messages of the one before for its own."""
    for result in result_of(folder, name, NUM_RANKS):
        assert "was interrupted" in result["again"]
