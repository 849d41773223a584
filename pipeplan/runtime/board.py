"""Notes that the ranks of a launch leave for each other while each does work of its own.

Collectives need all ranks at the same place at the same time; a note is read whenever its reader needs it. The notes
lie in the store that the launcher's rendezvous gives (in rank 0's process, over TCP), so that nodes need no common
disk and no process group.

Every wait ends: with the note, because a rank failed, because one is no longer heard of, or because nobody gets on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

from torch import distributed
from torch.distributed.rendezvous import rendezvous

from pipeplan.errors import LaunchError, PipeplanError

_JOIN_LIMIT_S = 300.0
_SILENCE_LIMIT_S = 60.0
_STANDSTILL_LIMIT_S = 3600.0  # more than any layer takes
_LEAVE_LIMIT_S = 60.0
_GOODBYE_LIMIT_S = 2.0
_FIRST_NAP_S, _LONGEST_NAP_S = 0.005, 0.2  # of who waits; the store's own waiting warns of every limit that passes
_BEATS_A_LIMIT = 12
_CHUNK_BYTES = 4 * 2**20  # the store takes up to 8 MiB at once (torch 2.14)


class OtherRankError(LaunchError):
    """Another rank failed, which says so itself."""


class Board:
    """The notes as one rank sees them; a ``pipeplan.profile.sharing.Board``.

    Args:
        silence_limit_s: How long a rank may give no sign of life.
        standstill_limit_s: How long nobody may ``get_on`` while somebody waits.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        num_ranks: int,
        *,
        silence_limit_s: float = _SILENCE_LIMIT_S,
        standstill_limit_s: float = _STANDSTILL_LIMIT_S,
    ) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self._store = store
        self._silence_limit_s = silence_limit_s
        self._standstill_limit_s = standstill_limit_s
        self._last_signs: dict[int, tuple[int, float]] = {}  # by rank: beats, and when they were first that many
        self._has_left = threading.Event()
        # A store's client is busy while it waits, so the heart has one of its own.
        self._heart = threading.Thread(target=self._beat, args=(store.clone(),), name="pipeplan-heart", daemon=True)
        self._heart.start()

    def take(self, counter: str) -> int:
        """Return 0, 1, 2 and so on, each number to one rank only."""
        with _naming_lost_store():
            return int(self._store.add(f"counter/{counter}", 1)) - 1

    def post(self, name: str, content: bytes) -> None:
        """Leave a note, once."""
        chunks = [content[start : start + _CHUNK_BYTES] for start in range(0, len(content), _CHUNK_BYTES)]
        with _naming_lost_store():
            for number, chunk in enumerate(chunks):
                self._store.set(f"note/{name}/{number}", chunk)
            self._store.set(f"note/{name}", str(len(chunks)))

    def read(self, name: str) -> bytes:
        """Return a note, once it is there.

        Raises:
            OtherRankError: A rank failed.
            LaunchError: A rank isn't heard of any more, or none gets on.
        """
        with _naming_lost_store():
            self._wait(f"note/{name}", name)
            num_chunks = int(self._store.get(f"note/{name}"))
            return b"".join(self._store.get(f"note/{name}/{number}") for number in range(num_chunks))

    def gather(self, name: str, content: bytes) -> list[bytes]:
        """Return the notes of all ranks, by rank; each of them posts one. Raises as ``read``."""
        self.post(f"{name}/{self.rank}", content)
        return [self.read(f"{name}/{rank}") for rank in range(self.num_ranks)]

    def get_on(self) -> None:
        """Say that this rank gets on with its work; raises as ``read`` when another rank failed."""
        with _naming_lost_store():
            self._check_failure()
            self._store.add("steps", 1)

    def fail(self, reason: str) -> bool:
        """Let every other rank's next look at the board fail; returns whether no other has failed for that reason."""
        with suppress(RuntimeError):
            self._store.set("failure", f"rank {self.rank}: {reason}")
            return int(self._store.add(f"failure/{reason}", 1)) == 1
        return True

    def leave(self) -> None:
        """Leave when all ranks do, or before long; rank 0, which has the store, goes last."""
        self._has_left.set()
        self._heart.join()
        with suppress(RuntimeError):
            self._store.set(f"left/{self.rank}", "")
            if self.rank == 0:
                self._watch(self._is_nobody_here, _LEAVE_LIMIT_S)
                self._store.set("closed", "")
                self._watch(lambda: self._store.add("gone", 0) == self.num_ranks - 1, _GOODBYE_LIMIT_S)
            elif self._watch(lambda: self._store.check(["closed"]), _LEAVE_LIMIT_S + _GOODBYE_LIMIT_S):
                self._store.add("gone", 1)

    def _is_nobody_here(self) -> bool:
        return all(self._store.check([f"left/{rank}"]) or self._is_silent(rank) for rank in range(self.num_ranks))

    def _watch(self, is_so: Callable[[], bool], limit_s: float) -> bool:
        """Wait until something is so; returns whether it is."""
        end_s = time.monotonic() + limit_s
        for nap_s in _naps():
            if is_so():
                return True
            if time.monotonic() > end_s:
                break
            time.sleep(nap_s)
        return False

    def _wait(self, key: str, name: str) -> None:
        steps, last_step_s = -1, 0.0
        for nap_s in _naps():
            if self._store.check([key]):
                return
            self._check_failure()
            self._check_signs_of_life()
            now_s, now_steps = time.monotonic(), int(self._store.add("steps", 0))
            if now_steps != steps:
                steps, last_step_s = now_steps, now_s
            elif now_s - last_step_s > self._standstill_limit_s:
                raise LaunchError(
                    f"waited {self._standstill_limit_s:g} s for {name!r}, and no rank got on in the meantime; see what "
                    "they are doing"
                )
            time.sleep(nap_s)

    def _check_failure(self) -> None:
        if self._store.check(["failure"]):
            raise OtherRankError(self._store.get("failure").decode())

    def _check_signs_of_life(self) -> None:
        for rank in range(self.num_ranks):
            if self._is_silent(rank):
                raise LaunchError(
                    f"rank {rank} has not been heard of for {self._silence_limit_s:g} s; was it killed, or did its "
                    "host run out of memory?"
                )

    def _is_silent(self, rank: int) -> bool:
        beats, now_s = int(self._store.add(f"beats/{rank}", 0)), time.monotonic()
        last_beats, since_s = self._last_signs.get(rank, (-1, now_s))
        if beats != last_beats:
            self._last_signs[rank] = (beats, now_s)
            return False
        return rank != self.rank and now_s - since_s > self._silence_limit_s

    def _beat(self, store: Any) -> None:
        with suppress(RuntimeError):  # without a store there is nobody to hear it
            while not self._has_left.wait(self._silence_limit_s / _BEATS_A_LIMIT):
                store.add(f"beats/{self.rank}", 1)


def join() -> Board:
    """Return the board of the launch that this process belongs to, once all its processes are there.

    Raises:
        LaunchError: Not all of them come.
    """
    try:
        store, rank, num_ranks = next(rendezvous("env://", timeout=timedelta(seconds=_JOIN_LIMIT_S)))
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise LaunchError(f"the processes of the launch can't reach each other: {reason}") from error
    return Board(store, rank, num_ranks)


@contextmanager
def leaving_together(board: Board, on_error: Callable[[str], None]) -> Iterator[None]:
    """Leave the board with all other ranks; what goes wrong inside on one ends the others at their next look.

    Args:
        on_error: Called on the rank that fails, with a sentence that names it, before any rank ends; on one rank where
            several fail for the same reason.

    Raises:
        LaunchError: Any ``PipeplanError`` from inside, with the rank before it.
        OtherRankError: Another rank failed, and has said so.
    """
    try:
        yield
    except OtherRankError:
        board.leave()
        raise
    except PipeplanError as error:
        sentence = f"rank {board.rank}: {error}"
        if board.fail(str(error)):
            on_error(sentence)
        board.leave()
        raise LaunchError(sentence) from error
    except BaseException as error:
        board.fail(f"{type(error).__name__}: {error}")
        if isinstance(error, Exception):
            board.leave()
        raise
    board.leave()


def _naps() -> Iterator[float]:
    nap_s = _FIRST_NAP_S
    while True:
        yield nap_s
        nap_s = min(2 * nap_s, _LONGEST_NAP_S)


@contextmanager
def _naming_lost_store() -> Iterator[None]:
    try:
        yield
    except distributed.DistNetworkError as error:
        raise LaunchError(
            "rank 0, which keeps what the ranks tell each other, is gone; its own error says why"
        ) from error
