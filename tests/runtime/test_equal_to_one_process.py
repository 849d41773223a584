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


def _in_one_process(case: Training) -> dict[str, Any]:
    return _train(
        case.model,
        num_micro_batches=case.num_micro_batches,
        num_replicas=case.num_replicas,
        max_norm=case.max_norm,
        is_bf16=case.is_bf16,
        is_seeded=case.is_seeded,
        data=case.data,
        by_tokens="loss_reduction" in case.module,
        counts=tuple(case.all_counts_by_step.items()),
    )


@cache
def _train(model: str, *, counts: tuple[tuple[int, int], ...], **rest: Any) -> dict[str, Any]:
    return toy.train_in_one_process(model, num_steps=NUM_STEPS, counts_by_step=dict(counts), **rest)


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in TRAINING])
def test_training_equals_one_process(results: Results, case: Training) -> None:
    """Losses, gradients, their norm and the weights after SGD with momentum are those of one process."""
    expected = _in_one_process(case)
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


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in TRAINING])
def test_only_layers_that_are_split_hold_anything_after_i(results: Results, case: Training) -> None:
    """Stages with I and W hold something for W of each layer but the head, or of those that the layers choose."""
    classes = toy.CLASSES_BY_MODEL[case.model]
    chosen = toy.SPLITTABLE_BY_CLASS.get(case.model, {})
    held: set[int] = set()
    for result in results(case):
        held |= result["held"]
    bounds = result["bounds"]
    assert held == {
        index
        for stage in result["split"]
        for index in range(bounds[stage], bounds[stage + 1])
        if chosen.get(classes[index], index < len(classes) - 1) and classes[index] not in toy.WITHOUT_W
    }


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in TRAINING if case.evaluations])
def test_evaluation_equals_one_process(results: Results, case: Training) -> None:
    """Evaluations of any number of micro-batches between training steps give one process's losses, on every rank."""
    expected = _with_evaluations(case)["evaluations"]
    assert len(expected) == sum(map(len, case.evaluations.values()))
    for result in results(case):
        assert result["evaluations"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in TRAINING if case.evaluations])
def test_logits_and_losses_where_they_are_computed(results: Results, case: Training) -> None:
    """Logits, and a loss that isn't broadcast, are on the rank of the last stage, whichever it is, and only there."""
    expected = _with_evaluations(case)
    found = results(case)
    holders = {rank for rank, result in enumerate(found) if any(name.startswith("9.") for name in result["weights"])}
    assert len(holders) == 1
    for rank, result in enumerate(found):
        if rank not in holders:
            assert result["logits"] == result["unshared"] == [None] * len(expected["logits"])
            continue
        assert [float(loss) for loss in result["unshared"]] == pytest.approx(expected["evaluations"], rel=1e-5)
        for logits, others in zip(result["logits"], expected["logits"], strict=True):
            assert len(logits) == len(others)
            assert all(_difference(one, other) < 1e-5 for one, other in zip(logits, others, strict=True))


def _with_evaluations(case: Training) -> dict[str, Any]:
    return toy.train_in_one_process(
        case.model, num_steps=NUM_STEPS, num_micro_batches=case.num_micro_batches, evaluations=case.evaluations
    )


def _difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm().clamp_min(1e-12))
