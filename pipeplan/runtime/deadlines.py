"""Waiting with a limit: what never arrives ends the rank with a sentence instead of a silent hang."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from pipeplan.errors import LaunchError

_LOOKS_A_LIMIT = 20  # how often a watcher looks while one limit passes
_LONGEST_NAP_S = 1.0
_GRACE = timedelta(seconds=30)  # for the watcher, which says more than NCCL, to be first

Describe = Callable[[], str]


def end_process(sentence: str) -> None:
    """Print the sentence and end the process at once: its main thread may be stuck in the device's driver."""
    print(f"error: {sentence}", file=sys.stderr, flush=True)
    os._exit(1)


class Watcher:
    """Watches work that the host doesn't wait for (NCCL's), from a thread of its own.

    All limits are equal, so the oldest work runs out first, and only that one is looked at.

    Args:
        end: Called with the sentence of work that ran out of time.
    """

    def __init__(self, limit_s: float, end: Callable[[str], None] = end_process) -> None:
        self._limit_s = limit_s
        self._end = end
        self._watched: deque[tuple[float, Sequence[Any], Describe]] = deque()
        self._thread: threading.Thread | None = None

    def watch(self, works: Sequence[Any], describe: Describe) -> None:
        """Watch ``works`` from now on."""
        self._watched.append((time.monotonic() + self._limit_s, works, describe))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="pipeplan-watcher", daemon=True)
            self._thread.start()

    def look(self) -> None:
        """Let go of completed work; end the rank if the oldest is late."""
        while self._watched:
            deadline, works, describe = self._watched[0]
            if not all(work.is_completed() for work in works):
                if time.monotonic() > deadline:
                    self._watched.clear()
                    self._end(describe())
                return
            self._watched.popleft()

    def _run(self) -> None:
        while True:
            time.sleep(min(_LONGEST_NAP_S, self._limit_s / _LOOKS_A_LIMIT))
            self.look()


class Deadlines:
    """Waits for the messages of one rank, each for at most ``limit_s`` seconds.

    On CPUs (gloo) a wait blocks, and raises when the limit is over or the peer is gone. On GPUs (NCCL) it only orders
    streams, so a watcher ends the process instead; there the limit also covers what the device had queued before.
    """

    def __init__(self, rank: int, limit_s: float, device: torch.device) -> None:
        self._rank = rank
        self._limit_s = limit_s
        self._limit = timedelta(seconds=limit_s)
        self._watcher = Watcher(limit_s) if device.type == "cuda" else None

    def wait(self, works: Sequence[Any], describe: Describe) -> None:
        """Wait for all of ``works``.

        Args:
            describe: What is waited for, such as "message 0>2 from rank 0, the input of 1F2".

        Raises:
            LaunchError: It did not come through in time, or the other end is gone.
        """
        if self._watcher is not None:
            if works:
                self._watcher.watch(works, lambda: self._late(describe()))
            for work in works:
                work.wait()
            return
        try:
            for work in works:
                work.wait(self._limit)
        except RuntimeError as error:
            if "timed out" in str(error).lower():
                raise LaunchError(self._late(describe())) from error
            raise LaunchError(
                f"rank {self._rank} waited for {describe()}, but the connection is gone: that rank ended, or gave up "
                f"first; its own error says why ({_first_line(error)})"
            ) from error

    def limit_collectives(self, groups: Sequence[Any]) -> None:
        """Give the collectives of ``groups`` the same limit."""
        limit = self._limit if self._watcher is None else self._limit + _GRACE
        set_timeout = getattr(distributed, "set_timeout", None) or distributed.distributed_c10d._set_pg_timeout
        for group in groups:
            if group is not None:
                set_timeout(limit, group)

    def _late(self, what: str) -> str:
        return (
            f"rank {self._rank} waited {self._limit_s:g} s for {what}, which did not come through; see what that rank "
            "is doing, or raise pipeplan.message_timeout_s in the DeepSpeed config if steps may take that long"
        )


def is_lost_connection(error: RuntimeError) -> bool:
    """Whether a collective failed because another rank is gone or late, and not for something of this rank."""
    text = str(error).lower()
    return isinstance(error, distributed.DistError) or any(
        sign in text for sign in ("gloo", "connection closed", "connection reset", "timed out", "nccl")
    )


def _first_line(error: RuntimeError) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
