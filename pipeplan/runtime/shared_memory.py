"""DeepSpeed's shared-memory buffers on CPU: gone when the last rank ends, however it ends.

On CPU, ``deepspeed.init_distributed`` gives every rank a 66 MiB buffer under ``/dev/shm`` that nothing removes (seen
in 0.19.8): every launch costs memory until the machine restarts. A mapped file may lose its name: once all ranks have
mapped all buffers, each removes the name of its own.
"""

from __future__ import annotations

import os
from pathlib import Path

from deepspeed import comm as dist

SHARED_MEMORY = Path("/dev/shm")


def release_shared_buffers() -> None:
    """Remove the name of this rank's buffer; call it when every rank has left ``init_distributed``."""
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if address is None or port is None:
        return
    name = f"deepspeed_allreduce_buffer_{os.getuid()}_{address}_{port}_{dist.get_rank()}"
    (SHARED_MEMORY / name).unlink(missing_ok=True)
