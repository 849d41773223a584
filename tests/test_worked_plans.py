"""The worked plans under plans/ are what today's pipeplan makes of their profiles."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from pipeplan.emit.folder import EMITTED_FILES

PLANS = Path(__file__).parent.parent / "plans"
DRAWN = "report.html"  # its SVG varies with the version of matplotlib


def test_worked_plans_are_made_again(tmp_path: Path) -> None:
    """remake.sh makes every committed plan again, byte for byte, with the same set of files."""
    environment = os.environ | {"PYTHON": sys.executable, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        ["sh", str(PLANS / "remake.sh"), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    committed = {path.parent.name for path in PLANS.glob("*/plan.yaml")}
    assert {path.name for path in tmp_path.iterdir()} == committed
    for name in sorted(committed):
        made = {path.name: path.read_text() for path in (tmp_path / name).iterdir()}
        kept = {path.name: path.read_text() for path in (PLANS / name).iterdir() if path.name in EMITTED_FILES}
        assert made.keys() == kept.keys(), name
        for file in kept.keys() - {DRAWN}:
            assert made[file] == kept[file], f"{name}/{file}: run plans/remake.sh"
