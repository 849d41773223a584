"""Running the command line inside the test's process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from pipeplan.cli.app import main

GOLDEN_PROFILE = Path(__file__).parent.parent / "golden" / "nemotron-nano-9b-v2.yaml"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a command left behind."""

    status: int
    out: str
    err: str


Run = Callable[..., Outcome]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run ``pipeplan`` with arguments, as the console script does."""

    def run_command(*arguments: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["pipeplan", *map(str, arguments)])
        monkeypatch.delenv("PIPEPLAN_DEBUG", raising=False)
        capsys.readouterr()
        try:
            main()
            status = 0
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
        captured = capsys.readouterr()
        return Outcome(status, captured.out, captured.err)

    return run_command


@pytest.fixture
def golden_plan(run: Run, tmp_path: Path) -> Path:
    """A plan folder made from the published profile for 4 ranks."""
    folder = tmp_path / "golden"
    outcome = run(
        "optimize", GOLDEN_PROFILE, "--ranks", 4, "--micro-batches", 8, "--strategy", "baselines", "-o", folder, "-q"
    )
    assert outcome.status == 0, outcome.err
    return folder
