"""The command line's entry: assembles the commands and turns errors into one message and an exit status."""

from __future__ import annotations

import keyword
import os
import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Annotated

import typer

from pipeplan import __version__
from pipeplan.cli.console import print_message
from pipeplan.errors import PipeplanError

EXIT_ERROR = 1
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it

app = typer.Typer(
    name="pipeplan",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

# In the order of a user's way through them. Each lives in a module of the same name (keywords get an underscore) that
# imports nothing heavy, so that --help stays quick.
_COMMANDS = ("profile", "optimize", "show", "verify", "simulate", "export", "import", "quickstart")


def _register_commands() -> None:
    for name in _COMMANDS:
        identifier = f"{name}_" if keyword.iskeyword(name) else name
        if find_spec(f"pipeplan.cli.{identifier}") is None:
            continue
        module = import_module(f"pipeplan.cli.{identifier}")
        app.command(name)(getattr(module, identifier))


_register_commands()


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"pipeplan {__version__}")
        raise typer.Exit


@app.callback(epilog="Example: pipeplan quickstart")
def pipeplan(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error.", envvar="PIPEPLAN_DEBUG")
    ] = False,
) -> None:
    """Plan pipeline-parallel training of heterogeneous models and train with the plan on DeepSpeed."""
    if debug:
        os.environ["PIPEPLAN_DEBUG"] = "1"


def main() -> None:
    """Run the command line; exits 0 when done, 1 on a PipeplanError, 2 on wrong usage."""
    try:
        app(prog_name="pipeplan")
    except PipeplanError as error:
        if os.environ.get("PIPEPLAN_DEBUG"):
            raise
        print_message(f"error: {error}")
        sys.exit(EXIT_ERROR)
    except KeyboardInterrupt:
        print_message("interrupted")
        sys.exit(EXIT_INTERRUPTED)
    except BrokenPipeError:
        # The reader of our output went away (`| head`): nothing to say, and Python must not say it at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(EXIT_ERROR)
