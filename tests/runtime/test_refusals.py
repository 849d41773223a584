"""What can't run is refused at start, on every rank, with a sentence that says what to do."""

from __future__ import annotations

import pytest
from cases import REFUSALS, Refusal
from conftest import Results

pytestmark = pytest.mark.launcher


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in REFUSALS])
def test_launch_is_refused_on_every_rank(results: Results, case: Refusal) -> None:
    """Every rank raises the same error, with what is wrong, where, and what to do."""
    found = results(case)
    assert [result["refused"] for result in found] == [case.error] * case.num_processes
    for result in found:
        assert result["message"] == found[0]["message"]
        for part in case.says:
            assert part in result["message"]
