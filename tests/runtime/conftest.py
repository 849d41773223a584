"""One launch for each number of processes, shared by all runtime tests of the session."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # the helpers beside the tests, for pytest as for the launched workers

import cases
import launching
import torch

torch.set_num_threads(1)  # as in the workers: how bf16 rounds depends on the number of threads

Results = Callable[[Any], list[dict[str, Any]]]


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Return what every rank saved for a case; the first use launches all cases of its number of processes."""

    @cache
    def launch(num_processes: int) -> Path:
        folder = tmp_path_factory.mktemp(f"processes-{num_processes}")
        chosen = [case.to_worker(folder) for case in cases.CASES if case.num_processes == num_processes]
        launching.launch(num_processes, chosen, folder)
        return folder

    return lambda case: launching.result_of(launch(case.num_processes), case.name, case.num_processes)
