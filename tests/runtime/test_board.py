"""Notes between ranks, here threads over torch's own stores: what is read, and what ends the waiting."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore, TCPStore

from pipeplan.errors import LaunchError, ProfileError
from pipeplan.runtime import board as board_module
from pipeplan.runtime.board import Board, OtherRankError, leaving_together

LIMIT_S = 60


def test_a_large_note_arrives_over_tcp() -> None:
    """Also one that the store doesn't take in one piece, and an empty one."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    board = Board(store, 0, 1)
    content = bytes(range(256)) * (10 * 2**20 // 256)
    board.post("large", content)
    board.post("empty", b"")
    assert board.read("large") == content
    assert board.read("empty") == b""
    board.leave()


def test_numbers_are_taken_once() -> None:
    """Two ranks that take from one counter get different numbers, from 0 on."""
    store = HashStore()
    first, second = Board(store, 0, 2), Board(store, 1, 2)
    assert [first.take("a"), second.take("a"), first.take("a"), first.take("b")] == [0, 1, 2, 0]


def test_a_failure_ends_the_waiting_of_others() -> None:
    """The rank that fails says so once, with its number; the other hears the same and says nothing; both leave."""
    store = HashStore()
    said: list[str] = []

    def rank(number: int) -> LaunchError:
        board = Board(store, number, 2)
        with pytest.raises(LaunchError) as caught, leaving_together(board, said.append):
            if number == 1:
                raise ProfileError("layer 'x' is bad")
            board.read("what never comes")
        return caught.value

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(rank, range(2), timeout=LIMIT_S)
    assert said == ["rank 1: layer 'x' is bad"]
    assert isinstance(first, OtherRankError) and not isinstance(second, OtherRankError)
    assert str(first) == str(second) == said[0]


def test_one_reason_is_said_once() -> None:
    """Where all ranks fail alike, as with a misspelt model, one of them says so; another reason is said as well."""
    store = HashStore()
    said: list[str] = []

    def rank(number: int) -> None:
        with pytest.raises(LaunchError), leaving_together(Board(store, number, 3), said.append):
            raise ProfileError("no such model" if number < 2 else "no such folder")

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(rank, range(3), timeout=LIMIT_S))
    assert sorted(sentence.partition(": ")[2] for sentence in said) == ["no such folder", "no such model"]


def test_a_failure_ends_work_too() -> None:
    """A rank that waits for nothing hears of it when it gets on."""
    store = HashStore()
    board = Board(store, 0, 2)
    board.get_on()
    Board(store, 1, 2).fail("is out of memory")
    with pytest.raises(OtherRankError, match="rank 1: is out of memory"):
        board.get_on()


def test_a_silent_rank_is_named() -> None:
    """A rank that is gone without a word ends the waiting, although others live, and nobody waits for it to leave."""
    store = HashStore()

    def rank(number: int) -> tuple[LaunchError, float]:
        board = Board(store, number, 3, silence_limit_s=1.0)
        with pytest.raises(LaunchError) as caught, leaving_together(board, lambda sentence: None):
            board.read("what never comes")
        return caught.value, time.monotonic()

    start_s = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(rank, range(2), timeout=LIMIT_S))
    for error, end_s in results:
        assert "rank 2 has not been heard of for 1 s" in str(error)
        assert end_s - start_s < board_module._LEAVE_LIMIT_S / 2


def test_waiting_ends_when_nobody_gets_on() -> None:
    """All live, but none works: the waiting ends with what it was for."""
    store = HashStore()
    boards = [Board(store, rank, 2, standstill_limit_s=0.5) for rank in (0, 1)]
    with pytest.raises(LaunchError, match=r"waited 0\.5 s for 'a note', and no rank got on"):
        boards[0].read("a note")
