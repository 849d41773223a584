"""The end of the process groups: no rank aborts on its way out after all went well.

A gloo group computes in threads of its own. Such a thread needs the interpreter's lock when it lets go of the tensors
of its last op, a moment after whoever waited for that op goes on; where the interpreter ends in that moment, CPython
(3.11) ends the thread, and with it the process: "terminate called without an active exception", exit status 134. A
process that ends right after its last collective does so in up to every fourth launch (torch 2.14 on 2 cores).
"""

from __future__ import annotations

import atexit
import gc
import time
from contextlib import suppress
from pathlib import Path

import torch
from deepspeed import comm as dist
from deepspeed.runtime.pipe import p2p
from deepspeed.utils import groups

from pipeplan.runtime.channels import forget_groups

_THREADS = Path("/proc/self/task")
_GROUP_THREADS = "gloo"  # in their names
_NAP_S, _NUM_LOOKS, _LIMIT_S = 0.05, 2, 2.0


def close_groups() -> None:
    """Close every process group once all ranks are here; collective, the last thing that a script does.

    A group's threads end when nothing refers to it, so DeepSpeed's own references go as well. Where the script's engine
    still holds a group, ``calm_down_at_exit`` sees to its threads.
    """
    calm_down_at_exit()
    dist.barrier()
    forget_groups()
    torch.distributed.destroy_process_group()
    p2p._grid = groups.mpu = dist.comm.cdb = None
    gc.collect()


def calm_down_at_exit() -> None:
    """Let the groups' threads finish what they have at hand before the interpreter ends, however it ends."""
    atexit.unregister(calm_down)
    atexit.register(calm_down)


def calm_down(limit_s: float = _LIMIT_S) -> bool:
    """Wait until no thread of a process group runs any more, or ``limit_s`` seconds; returns whether none does.

    A thread that waits for the interpreter's lock gets it when this one sleeps, and runs from then on until it is done.
    It may want the lock again just when this one looks, and seem to rest, so that two looks must agree.
    """
    end_s = time.monotonic() + limit_s
    num_calm = 0
    while num_calm < _NUM_LOOKS:
        time.sleep(_NAP_S)
        num_calm = 0 if _is_group_running() else num_calm + 1
        if num_calm == 0 and time.monotonic() > end_s:
            return False
    return True


def _is_group_running() -> bool:
    for thread in _THREADS.glob("*/stat"):
        with suppress(OSError):  # it has ended
            _, _, rest = thread.read_text().partition("(")
            name, _, numbers = rest.rpartition(")")
            if _GROUP_THREADS in name and numbers.split()[0] == "R":
                return True
    return False
