"""No process aborts on its way out because a group's thread was at work in its last moment."""

from __future__ import annotations

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


def _thread_of_a_group(busy_s: float) -> threading.Thread:
    """Start a thread that looks like a group's and computes all the time, without ever sleeping."""

    def compute() -> None:
        (_THREADS / str(threading.get_native_id()) / "comm").write_text("pt_gloo_test")
        is_named.set()
        end_s = time.monotonic() + busy_s
        while time.monotonic() < end_s:
            pass

    is_named = threading.Event()
    thread = threading.Thread(target=compute)
    thread.start()
    is_named.wait()
    return thread


def test_waits_for_what_a_group_has_at_hand() -> None:
    """Not a fixed time: until the thread is done."""
    thread = _thread_of_a_group(busy_s=0.5)
    assert calm_down(limit_s=60)
    assert not thread.is_alive()


def test_gives_up_on_a_group_that_never_rests() -> None:
    """An exit always comes."""
    thread = _thread_of_a_group(busy_s=0.8)
    assert not calm_down(limit_s=0.1)
    thread.join()
