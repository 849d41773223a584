"""No process aborts on its way out because a group's thread was at work in its last moment."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
import time
from pathlib import Path

import launching
import pytest

from pipeplan.runtime.process_groups import calm_down

_THREADS = Path("/proc/self/task")
pytestmark = pytest.mark.skipif(not _THREADS.is_dir(), reason="only Linux tells what threads do")

# Ends while 120 small collectives are under way. Without the line before the last, every launch of two such processes
# aborted (10 of 10, torch 2.14).
SCRIPT = """
import torch
from torch import distributed
from pipeplan.runtime.process_groups import calm_down_at_exit

distributed.init_process_group("gloo")
groups = [distributed.new_group([0, 1]) for _ in range(6)]
for _ in range(20):
    for group in groups:
        distributed.all_reduce(torch.zeros(4), group=group, async_op=True)
distributed.barrier()
calm_down_at_exit()
"""


@pytest.mark.launcher
def test_a_process_that_ends_with_collectives_under_way_does_not_abort() -> None:
    """Two processes whose groups are busy until the end, and held by the script, leave without a word."""
    places = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(launching.free_port())}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT],
            env=launching.cpu_environment() | places | {"RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    errors = [process.communicate(timeout=120)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], errors


class _GroupThread(threading.Thread):
    """Looks like a group's and computes for a second or so, without the interpreter's lock and without sleeping."""

    ended_s = 0.0

    def run(self) -> None:
        """Compute."""
        (_THREADS / str(threading.get_native_id()) / "comm").write_text("pt_gloo_test")
        self.is_named.set()
        hashlib.pbkdf2_hmac("sha256", b"password", b"salt", 3_000_000)
        self.ended_s = time.monotonic()

    def start(self) -> None:
        """Start, and return once the name can be seen."""
        self.is_named = threading.Event()
        super().start()
        self.is_named.wait()


def test_waits_for_what_a_group_has_at_hand() -> None:
    """Not a fixed time: until the thread has computed what it had to."""
    thread = _GroupThread()
    thread.start()
    started_s = time.monotonic()
    assert calm_down(limit_s=60)
    waited_s = time.monotonic() - started_s
    thread.join()
    assert waited_s > 0.9 * (thread.ended_s - started_s)


def test_gives_up_on_a_group_that_never_rests() -> None:
    """An exit always comes."""
    thread = _GroupThread()
    thread.start()
    assert not calm_down(limit_s=0.1)
    thread.join()
