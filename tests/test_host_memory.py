"""The allocator keeps what ops free, unless the user chose otherwise."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's allocator is told")

# Prints the answer, and how many pages it costs to take blocks again that were all freed the time before.
_SCRIPT = """
import ctypes
import resource
import sys
from pipeplan.host_memory import keep_freed_memory

SIZE, NUM_BLOCKS = 100_000, 400  # 9,766 pages of 4 KiB
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
blocks = (ctypes.c_void_p * NUM_BLOCKS)()

def take_and_free():
    for index in range(NUM_BLOCKS):
        blocks[index] = libc.malloc(SIZE)
        ctypes.memset(blocks[index], 1, SIZE)
    for block in blocks:
        libc.free(block)

is_kept = keep_freed_memory() if sys.argv[1] == "keep" else False
take_and_free()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
take_and_free()
print(is_kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def run(choice: str, **environment: str) -> tuple[bool, int]:
    """Return the answer and the page faults of a process of its own."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, choice], env=clean | environment, capture_output=True, text=True, check=True
    )
    answer, faults = done.stdout.split()
    return answer == "True", int(faults)


def test_freed_blocks_are_used_again_without_page_faults() -> None:
    """What a backward frees costs the next op no page faults, where it did before."""
    _, faults_before = run("leave")
    is_kept, faults = run("keep")
    assert is_kept
    assert 10 * faults < faults_before


@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"])
def test_the_environment_wins(name: str) -> None:
    """Who set glibc's thresholds keeps them."""
    is_kept, _ = run("keep", **{name: "1048576"})
    assert not is_kept
