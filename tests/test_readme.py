"""README: its figures are what the commands print, its commands exist, its diff is right."""

from __future__ import annotations

import re
from pathlib import Path

import typer.main

import pipeplan.runtime
from pipeplan.cli.app import app
from pipeplan.emit.comparison import compare_with_baselines
from pipeplan.emit.folder import EMITTED_FILES
from pipeplan.emit.tables import comparison_table
from pipeplan.plan.folder import load_plan
from pipeplan.simulate import simulate

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PLAN = "plans/nemotron-nano-9b-v2-4xh800"


def comparison_rows() -> str:
    """Return the comparison of the worked plan as README shows it."""
    loaded = load_plan(ROOT / PLAN)
    timeline = simulate(loaded.plan, loaded.profile, loaded.cluster)
    comparison = compare_with_baselines(loaded.plan, timeline, loaded.profile, loaded.cluster)
    table = comparison_table(comparison)
    rows = [table.columns[:-1], ("---", "---", *["---:"] * (len(table.columns) - 3)), *(row[:-1] for row in table.rows)]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def test_gains_are_those_of_the_worked_plan() -> None:
    """The table of gains is what ``pipeplan show`` prints for the worked plan; the message holds the table to paste."""
    assert f"pipeplan show {PLAN}" in README
    assert comparison_rows() in README, f"README's table should be:\n{comparison_rows()}"


def test_commands_exist() -> None:
    """Every pipeplan command in README is one, and so are its options."""
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    blocks = re.findall(r"```sh\n(.*?)```", README, flags=re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    used = [match for line in lines for match in re.findall(r"pipeplan ([a-z]+)([^&#\n]*)", line)]
    assert {name for name, _ in used} >= {"quickstart", "profile", "optimize", "show"}
    for name, rest in used:
        known = {option for parameter in commands[name].params for option in parameter.opts}
        assert set(re.findall(r"(?<= )--?[a-z][a-z-]*", rest)) <= known, (name, rest)


def test_plan_folder_is_described() -> None:
    """README names every file of a plan folder."""
    for name in EMITTED_FILES:
        assert f"`{name}`" in README


def test_diff_changes_two_lines() -> None:
    """The diff for existing scripts takes two lines out, and what it puts in is public."""
    [diff] = re.findall(r"```diff\n(.*?)```", README, flags=re.DOTALL)
    assert sum(line.startswith("-") for line in diff.splitlines()) == 2
    used = set(re.findall(r"pipeplan\.runtime\.(\w+)", diff))
    assert used == {"PlannedPipelineModule", "initialize", "close_groups"}
    assert all(callable(getattr(pipeplan.runtime, name)) for name in used)


if __name__ == "__main__":
    print(comparison_rows())
