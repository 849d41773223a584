"""Where text goes: results on stdout, messages on stderr, progress on a terminal only."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_PLAIN_WIDTH = 120  # of tables in files and pipes, where no terminal says how wide it is
_SILENT_SECONDS = 2.0  # work shorter than this shows no progress


def print_message(text: str) -> None:
    """Print a message for people on stderr; line breaks, such as those of a grid, are kept."""
    print(text, file=sys.stderr)


def result_console() -> Console:
    """Return the console of results; pipes get plain text of a fixed width."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else _PLAIN_WIDTH, highlight=False, soft_wrap=False)


def print_result(*parts: RenderableType) -> None:
    """Print tables, text or other Rich renderables on stdout, an empty line between them."""
    console = result_console()
    for index, part in enumerate(parts):
        if index:
            console.print()
        console.print(part)


def print_json(content: Any) -> None:
    """Print the result for scripts: one JSON document on stdout."""
    print(json.dumps(content, indent=2))


@contextmanager
def progress(description: str, *, quiet: bool) -> Iterator[Callable[[str], None]]:
    """Show a spinner with the elapsed time on a terminal once the work has lasted two seconds.

    Yields a function that replaces the description.
    """
    if quiet or not sys.stderr.isatty():
        yield lambda text: None
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    task = bar.add_task(description)
    timer = threading.Timer(_SILENT_SECONDS, bar.start)
    timer.daemon = True
    timer.start()
    try:
        yield lambda text: bar.update(task, description=text)
    finally:
        timer.cancel()
        bar.stop()
