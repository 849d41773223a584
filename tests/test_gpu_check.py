"""The GPU check runs its whole course where there is no GPU, and says so when it can't."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parent / "benchmarks" / "gpu_check.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the script as a user would."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # DeepSpeed looks for ninja on it
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )


def test_small_models_on_the_cpu() -> None:
    """Every kind of layer is measured, estimated and compared, and one rank trains."""
    done = run("--device", "cpu", "--tiny", "--gpu", "h100-sxm", "--seconds", "0.1")
    assert done.returncode == 0, done.stdout + done.stderr
    for words in ("mamba+moe", "attention", "tiny-llama in bf16, one rank: loss", "all checks passed"):
        assert words in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu() -> None:
    """One line says what is missing and what to try."""
    done = run()
    assert done.returncode == 1
    assert "torch finds no usable GPU here; run this where one is, or try it with --device cpu --tiny" in done.stderr
    assert "Traceback" not in done.stderr
