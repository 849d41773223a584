"""How the process keeps memory that ops on the CPU free and soon take again."""

from __future__ import annotations

import ctypes
import os
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of glibc's malloc.h
_KEPT_BYTES = 2**31 - 1  # the largest that mallopt takes
_LARGEST_BLOCK_BYTES = 32 * 2**20  # up to here glibc raises the threshold itself as such blocks are freed
_USERS_CHOICE = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """Let the allocator keep what ops free, and return whether it does; call it where layers run on the CPU.

    By default glibc hands the top of its heap back to the system as soon as a few MB are free, which every backward
    reaches; the next op pays for each page again. That took up to a quarter of the time of layers with many small
    tensors, more or less of it depending on what else lay in the heap: a layer alone paid other times than in a step.

    Does nothing where the environment sets these thresholds, or where the C library isn't glibc.
    """
    if sys.platform != "linux" or any(name in os.environ for name in _USERS_CHOICE):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)) and bool(mallopt(_MMAP_THRESHOLD, _LARGEST_BLOCK_BYTES))
