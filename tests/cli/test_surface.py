"""The command line as a whole: its surface is frozen, help is light, statuses mean what they should."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
import typer.main

from pipeplan.cli.app import app
from pipeplan.cli.optimize import Strategy
from pipeplan.search import STRATEGIES
from tests.cli.conftest import Run

SURFACE_FILE = Path(__file__).parent / "surface.txt"
HEAVY = ("torch", "deepspeed", "numba", "scipy", "transformers", "matplotlib", "numpy", "jinja2")


def surface() -> list[str]:
    """Return every command with its arguments and options, one line each."""
    group = typer.main.get_command(app)
    lines = [f"pipeplan {name}" for parameter in group.params for name in sorted(parameter.opts)]
    for command_name, command in sorted(group.commands.items()):  # type: ignore[attr-defined]
        for parameter in command.params:
            names = sorted(parameter.opts) if parameter.opts[0].startswith("-") else [parameter.metavar]
            lines.append(f"{command_name} {' '.join(names)}")
    return lines


def test_command_surface_is_frozen() -> None:
    """Scripts rely on the commands and options; a changed one shows up here and belongs into the changelog.

    After a change on purpose: ``python -m tests.cli.test_surface`` writes the file again.
    """
    assert "\n".join(surface()) + "\n" == SURFACE_FILE.read_text()


@pytest.mark.parametrize("command", [[], ["profile"], ["optimize"], ["quickstart"]])
def test_help_loads_nothing_heavy(command: list[str]) -> None:
    """``--help`` of the whole and of each command imports no framework, so that it answers at once."""
    code = (
        "import sys\n"
        f"sys.argv = ['pipeplan', *{command!r}, '--help']\n"
        "from pipeplan.cli.app import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr.strip() == "[]"
    assert "Example" in done.stdout


def test_optimize_loads_no_framework(tmp_path: Path) -> None:
    """Planning from a profile pays for neither torch nor DeepSpeed."""
    golden = Path(__file__).parent.parent / "golden" / "nemotron-nano-9b-v2.yaml"
    arguments = ["optimize", str(golden), "--ranks", "2", "--strategy", "baselines", "-q", "-o", str(tmp_path / "plan")]
    code = (
        "import sys\n"
        f"sys.argv = ['pipeplan', *{arguments!r}]\n"
        "from pipeplan.cli.app import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code\n"
        "print([name for name in ('torch', 'deepspeed', 'transformers') if name in sys.modules], file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stderr.strip() == "[]"


def test_every_command_shows_an_example(run: Run) -> None:
    """Each command's help holds a line that can be typed."""
    group = typer.main.get_command(app)
    for name in group.commands:  # type: ignore[attr-defined]
        outcome = run(name, "--help")
        assert outcome.status == 0
        assert f"Example: pipeplan {name}" in " ".join(outcome.out.split())


def test_version(run: Run) -> None:
    """``--version`` prints the version on stdout."""
    outcome = run("--version")
    assert (outcome.status, outcome.err) == (0, "")
    assert outcome.out.startswith("pipeplan 0.")


@pytest.mark.parametrize(
    "arguments",
    [
        ["nonsense"],
        ["optimize"],
        ["optimize", "p.yaml", "-o", "x", "--rank", "2"],
        ["show", "--frobnicate", "x"],
        ["optimize", "p.yaml", "-o", "x", "--strategy", "octopus"],
    ],
)
def test_wrong_usage_exits_2(run: Run, arguments: list[str]) -> None:
    """Unknown commands and options, and missing ones, are usage errors with status 2 and a message on stderr."""
    outcome = run(*arguments)
    assert outcome.status == 2
    assert outcome.out == ""
    assert outcome.err


def test_strategies_are_the_searchs() -> None:
    """--strategy offers what the search knows, in its order."""
    assert get_args(Strategy) == STRATEGIES


def test_debug_shows_the_traceback() -> None:
    """An error is one message; with --debug its traceback comes first."""
    environment = {key: value for key, value in os.environ.items() if key != "PIPEPLAN_DEBUG"}
    for flags, has_traceback in ([], False), (["--debug"], True):
        command = [sys.executable, "-m", "pipeplan", *flags, "show", "missing"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=False)
        assert done.returncode == 1
        assert ("Traceback" in done.stderr) == has_traceback
        assert "missing" in done.stderr


def test_a_closed_pipe_is_no_error(golden_plan: Path) -> None:
    """``pipeplan show PLAN | head -1`` ends without a traceback."""
    command = f"{sys.executable} -m pipeplan show {golden_plan} --json | head -c 1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "{"
    assert done.stderr == ""


if __name__ == "__main__":
    SURFACE_FILE.write_text("\n".join(surface()) + "\n")
