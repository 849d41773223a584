"""The quickstart, once for real."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from pipeplan.quickstart.machine import cpu_environment, free_port
from pipeplan.quickstart.steps import QuickstartResult, TrainedRun
from pipeplan.quickstart.table import quickstart_table

ROOT = Path(__file__).parents[2]


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


@pytest.fixture
def installed_wheel(tmp_path: Path) -> Path:
    """Build a wheel and install it into a folder of its own, away from the checkout; returns that folder."""
    code = (
        "import sys\n"
        "from hatchling.builders.wheel import WheelBuilder\n"
        "print(next(WheelBuilder(sys.argv[1]).build(directory=sys.argv[2], versions=['standard'])))\n"
    )
    built = subprocess.run(
        [sys.executable, "-c", code, str(ROOT), str(tmp_path)], capture_output=True, text=True, timeout=120, check=True
    )
    folder = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder), built.stdout.strip()]
    subprocess.run(install, capture_output=True, timeout=120, check=True)
    return folder


@pytest.mark.launcher
@pytest.mark.timeout(1500)
def test_quickstart_of_a_wheel_trains_and_trains_again(installed_wheel: Path, tmp_path: Path) -> None:
    """The command trains with the plan and with stock DeepSpeed to one process's losses, and its line runs again."""
    work = tmp_path / "work"
    work.mkdir()
    environment = cpu_environment() | {"PYTHONPATH": str(installed_wheel)}

    def run(*command: str, timeout_s: int) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, cwd=work, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
        )

    where = run(sys.executable, "-c", "import pipeplan; print(pipeplan.__file__)", timeout_s=60)
    assert Path(where.stdout.strip()).is_relative_to(installed_wheel)
    done = run(
        *(sys.executable, "-m", "pipeplan", "quickstart", "--steps", "3", "--json", "-q", "-o", "plans/quick"),
        timeout_s=900,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    truth = result["one_process"]["losses"]
    assert truth[-1] < truth[0]
    for name in ("pipeplan", "stock"):
        assert result[name]["losses"] == pytest.approx(truth, rel=1e-5)
        assert result[name]["predicted_ms"] > 0
        assert result[name]["measured_ms"] > 0

    words = shlex.split(result["launch"])
    assert words[:2] == ["DS_ACCELERATOR=cpu", "deepspeed"]
    init = ["--init", "plans/quick/quickstart/init"]
    port = str(free_port())
    again = run("deepspeed", "--master_port", port, *words[2:], *init, "--losses", "again.json", timeout_s=500)
    assert again.returncode == 0, again.stdout[-3000:] + again.stderr[-3000:]
    assert json.loads((work / "again.json").read_text())["losses"] == pytest.approx(truth, rel=1e-5)
