"""The quickstart, once for real."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from pipeplan.quickstart.machine import cpu_environment, free_port
from pipeplan.quickstart.steps import QuickstartResult, TrainedRun
from pipeplan.quickstart.table import quickstart_table


def trained(name: str, *losses: float) -> TrainedRun:
    """Return a run with the given losses."""
    return TrainedRun(name=name, predicted_ms=10.0, measured_ms=12.5, losses=losses)


def test_table_shows_both_beside_one_process() -> None:
    """The table holds predicted and measured times, first and last losses, and how far from the truth they are."""
    result = QuickstartResult(
        folder=Path("plans/quickstart"),
        planned=trained("pipeplan", 5.0, 4.0),
        stock=trained("stock DeepSpeed", 5.0, 4.04),
        one_process=trained("one process", 5.0, 4.0),
    )
    rows = {row[0]: row[1:] for row in quickstart_table(result).rows}
    assert rows["pipeplan"] == ("10.0", "12.5", "5.000000", "4.000000", "0.0e+00")
    assert rows["stock DeepSpeed"][-1] == "1.0e-02"
    assert rows["one process"][-1] == ""
    assert "plans/quickstart/train.py --deepspeed_config plans/quickstart/ds_config.json" in result.launch_line


@pytest.mark.launcher
def test_quickstart_trains_and_trains_again(tmp_path: Path) -> None:
    """The command trains with the plan and with stock DeepSpeed to one process's losses, and its line runs again."""
    command = [sys.executable, "-m", "pipeplan", "quickstart", "--steps", "3", "--json", "-q", "-o", "plans/quick"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    truth = result["one_process"]["losses"]
    assert truth[-1] < truth[0]
    for run in ("pipeplan", "stock"):
        assert result[run]["losses"] == pytest.approx(truth, rel=1e-5)
        assert result[run]["predicted_ms"] > 0
        assert result[run]["measured_ms"] > 0

    environment = cpu_environment() | {"PYTHONPATH": os.pathsep.join(sys.path)}
    words = shlex.split(result["launch"])
    assert words[:2] == ["DS_ACCELERATOR=cpu", "deepspeed"]
    arguments = ["deepspeed", "--master_port", str(free_port()), *words[2:], "--losses", "again.json"]
    init = ["--init", "plans/quick/quickstart/init"]
    again = subprocess.run(
        [*arguments, *init], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert again.returncode == 0, again.stdout[-3000:] + again.stderr[-3000:]
    assert json.loads((tmp_path / "again.json").read_text())["losses"] == pytest.approx(truth, rel=1e-5)
