"""The command line's entry: assembles the commands and turns errors into one message and an exit status."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from pipeplan import __version__
from pipeplan.cli.calibrate import calibrate
from pipeplan.cli.cluster import cluster
from pipeplan.cli.console import print_message
from pipeplan.cli.convert import convert
from pipeplan.cli.export import export
from pipeplan.cli.fit_efficiency import fit_efficiency
from pipeplan.cli.import_ import import_plan
from pipeplan.cli.merge import merge
from pipeplan.cli.optimize import optimize
from pipeplan.cli.profile import profile
from pipeplan.cli.quickstart import quickstart
from pipeplan.cli.show import show
from pipeplan.cli.simulate import simulate
from pipeplan.cli.verify import verify
from pipeplan.errors import PipeplanError

EXIT_ERROR = 1

app = typer.Typer(
    name="pipeplan",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

# In the order of a user's way through them. Their modules import nothing heavy, so that --help stays quick.
app.command()(profile)
app.command()(merge)
app.command("fit-efficiency")(fit_efficiency)
app.command()(cluster)
app.command()(optimize)
app.command()(show)
app.command()(verify)
app.command()(simulate)
app.command()(export)
app.command("import")(import_plan)
app.command()(calibrate)
app.command()(convert)
app.command()(quickstart)


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
    """Run the command line; exits 0 when done, 1 on a PipeplanError, 2 on wrong usage, 130 on Ctrl-C."""
    try:
        app(prog_name="pipeplan")
    except PipeplanError as error:
        if os.environ.get("PIPEPLAN_DEBUG"):
            raise
        print_message(f"error: {error}")
        sys.exit(EXIT_ERROR)
