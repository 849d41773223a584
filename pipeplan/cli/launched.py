"""Commands that the ``deepspeed`` launcher starts, one process a rank."""

from __future__ import annotations

import os


def check_launched(what: str, arguments: str) -> None:
    """Check that the launcher started this process.

    Args:
        what: What needs several processes, for the message.
        arguments: Of ``pipeplan``, as the launcher's command line should have them.

    Raises:
        LaunchError: It did not; says how it would.
    """
    from pipeplan.errors import LaunchError

    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        raise LaunchError(
            f"{what} processes that the launcher started; run: deepspeed --no_local_rank --num_gpus N --module "
            f"pipeplan {arguments} (or --hostfile FILE for several nodes)"
        )
