"""DeepSpeed's hostfile: one line a host, ``worker-0 slots=8``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from pipeplan.cluster import Node
from pipeplan.errors import FileFormatError

_LINE = re.compile(r"(\S+)\s+slots=(\d+)")


def read_hostfile(path: Path) -> Sequence[Node]:
    """Return the hosts of a hostfile in its order, which is the order of DeepSpeed's processes.

    Empty lines and comments (``#``) count for nothing, as in DeepSpeed.

    Raises:
        FileFormatError: The file is missing, a line is not ``HOST slots=N`` or repeats a host, or no host is left;
            names the line.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")  # editors on Windows mark the start
    except FileNotFoundError:
        raise FileFormatError(f"hostfile {path} does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise FileFormatError(f"hostfile {path} can't be read: {error}") from None
    line_by_host: dict[str, int] = {}
    nodes: list[Node] = []
    for number, line in enumerate(text.splitlines(), start=1):
        content = line.partition("#")[0].strip()
        if not content:
            continue
        match = _LINE.fullmatch(content)
        if match is None:
            raise FileFormatError(f"hostfile {path}, line {number}: expected 'HOST slots=N', got {content!r}")
        host, slots = match[1], int(match[2])
        if slots < 1:
            raise FileFormatError(f"hostfile {path}, line {number}: host {host!r} has no slots; give 1 or more")
        if host in line_by_host:
            raise FileFormatError(
                f"hostfile {path}, line {number}: host {host!r} stands in line {line_by_host[host]} already; "
                "put its slots on one line"
            )
        line_by_host[host] = number
        nodes.append(Node(host, slots))
    if not nodes:
        raise FileFormatError(f"hostfile {path} names no host; write one 'HOST slots=N' a line")
    return nodes
