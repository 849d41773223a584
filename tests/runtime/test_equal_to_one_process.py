"""Training under any plan gives the numbers of one process, through the real ``deepspeed`` launcher."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import toy
from cases import NO_CLIPPING, NUM_STEPS, TRAINING, Training
from conftest import Results

pytestmark = pytest.mark.launcher


@cache
def _in_one_process(
    model: str, num_micro_batches: int, num_replicas: int, max_norm: float, is_bf16: bool, is_seeded: bool
) -> dict[str, Any]:
    return toy.train_in_one_process(
        model,
        num_steps=NUM_STEPS,
        num_micro_batches=num_micro_batches,
        num_replicas=num_replicas,
        max_norm=max_norm,
        is_bf16=is_bf16,
        is_seeded=is_seeded,
    )


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in TRAINING])
def test_training_equals_one_process(results: Results, case: Training) -> None:
    """Losses, gradients, their norm and the weights after SGD with momentum are those of one process."""
    expected = _in_one_process(
        case.model, case.num_micro_batches, case.num_replicas, case.max_norm, case.is_bf16, case.is_seeded
    )
    seen: set[str] = set()
    for rank, result in enumerate(results(case)):
        assert result["losses"] == pytest.approx(expected["losses"], rel=1e-5), f"losses on rank {rank}"
        assert result["norms"] == pytest.approx(expected["norms"], rel=1e-5), f"norms on rank {rank}"
        for what in ("gradients", "weights"):
            for name, tensor in result[what].items():
                assert _difference(tensor, expected[what][name]) < 1e-5, f"{what} of {name} on rank {rank}"
        seen |= set(result["weights"])
        assert set(result["gradients"]) in (set(result["weights"]), set())
    assert seen == set(expected["weights"])


def test_gradients_are_seen(results: Results) -> None:
    """The comparison of gradients isn't empty: every case without ZeRO and clipping kept them."""
    kept = [case for case in TRAINING if any(result["gradients"] for result in results(case))]
    assert {case.name for case in kept} == {
        case.name for case in TRAINING if not case.config and case.max_norm == NO_CLIPPING
    }


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in TRAINING if case.evaluations])
def test_evaluation_equals_one_process(results: Results, case: Training) -> None:
    """Evaluations of any number of micro-batches between training steps give one process's losses, on every rank."""
    expected = toy.train_in_one_process(
        case.model, num_steps=NUM_STEPS, num_micro_batches=case.num_micro_batches, evaluations=case.evaluations
    )["evaluations"]
    assert len(expected) == sum(map(len, case.evaluations.values()))
    for result in results(case):
        assert result["evaluations"] == pytest.approx(expected, rel=1e-5)


def _difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm().clamp_min(1e-12))
