"""Waits end: work that the host doesn't wait for is watched, and what is said names it."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch

from pipeplan.deepspeed_config import message_timeout_s, refuse_unsupported
from pipeplan.errors import LaunchError
from pipeplan.runtime.deadlines import Deadlines, Watcher, is_lost_connection


class Work:
    """A message as backends hand it out."""

    def __init__(self, *, is_done: bool = False, error: str | None = None) -> None:
        self.is_done = is_done
        self._error = error

    def is_completed(self) -> bool:
        return self.is_done

    def wait(self, timeout: timedelta) -> None:
        assert timeout == timedelta(seconds=3)
        if self._error is not None:
            raise RuntimeError(self._error)


def test_the_watcher_names_the_first_work_that_is_late() -> None:
    """Completed work is forgotten; of two late ones the older is named, once."""
    said: list[str] = []
    watcher = Watcher(1e-3, end=said.append)
    watcher._thread = object()  # type: ignore[assignment]  # looked at from here
    done, late = Work(is_done=True), Work()
    watcher.watch([done], lambda: "done")
    watcher.watch([done, late], lambda: "late")
    watcher.watch([Work()], lambda: "later")
    watcher.look()
    time.sleep(2e-3)
    watcher.look()
    watcher.look()
    assert said == ["late"]


def test_the_watcher_looks_by_itself() -> None:
    """Its thread ends the rank without anybody asking."""
    said: list[str] = []
    Watcher(1e-3, end=said.append).watch([Work()], lambda: "late")
    give_up = time.monotonic() + 60
    while not said and time.monotonic() < give_up:
        time.sleep(1e-3)
    assert said == ["late"]


@pytest.mark.parametrize(
    ("error", "says"),
    [
        ("Timed out waiting 3000ms for recv operation to complete", "rank 1 waited 3 s for it, which did not come"),
        ("Connection closed by peer [127.0.0.1]:1", "rank 1 waited for it, but the connection is gone"),
    ],
)
def test_late_and_lost_messages_are_told_apart(error: str, says: str) -> None:
    """A wait that times out names the limit; one whose peer is gone says so."""
    deadlines = Deadlines(1, 3, torch.device("cpu"))
    deadlines.wait([Work()], lambda: "it")
    with pytest.raises(LaunchError, match=says):
        deadlines.wait([Work(), Work(error=error)], lambda: "it")


def test_errors_of_the_rank_itself_stay_what_they_are() -> None:
    """Running out of memory isn't taken for a lost connection."""
    assert not is_lost_connection(RuntimeError("DefaultCPUAllocator: can't allocate memory"))
    assert is_lost_connection(RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer"))


def test_the_limit_comes_from_the_config() -> None:
    """Ten minutes unless the config says otherwise."""
    assert message_timeout_s({}) == 600
    assert message_timeout_s({"pipeplan": {"digest": "sha256:0", "message_timeout_s": 5}}) == 5


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ({"message_timeout_s": 0}, "pipeplan.message_timeout_s to 0; give a positive number of seconds"),
        ({"message_timeout_s": "ten"}, "to 'ten'"),
        ({"message_timeout": 5}, r"did you mean 'message_timeout_s'\?"),
        (5, "sets 'pipeplan' to 5; an object is expected"),
    ],
)
def test_a_limit_that_is_none_is_refused(section: object, says: str) -> None:
    """Before the launch, naming the key."""
    with pytest.raises(LaunchError, match=says):
        refuse_unsupported({"pipeplan": section})
