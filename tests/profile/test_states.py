"""The memory of model and optimizer states, against counts by hand."""

from __future__ import annotations

import pytest

from pipeplan.errors import ProfileError
from pipeplan.profile.states import StateBytes, state_bytes


@pytest.mark.parametrize(
    ("dtype", "optimizer", "zero_stage", "num_replicas", "parts"),
    [
        # weights, gradients, master weights, moments
        ("fp32", "adam", 0, 1, (4, 4, 0, 8)),
        ("fp32", "adamw", 0, 8, (4, 4, 0, 8)),
        ("fp32", "sgd", 0, 1, (4, 4, 0, 0)),
        ("fp32", "sgd-momentum", 0, 1, (4, 4, 0, 4)),
        ("fp32", "adam", 1, 4, (4, 4, 1, 2)),
        ("bf16", "adam", 1, 1, (2, 4, 4, 8)),
        ("bf16", "adam", 1, 8, (2, 4, 0.5, 1)),
        ("bf16", "lion", 1, 2, (2, 4, 2, 2)),
        ("bf16", "adam", 0, 1, (2, 2, 4, 8)),
        ("bf16", "adam", 0, 4, (2, 2, 1, 2)),
        ("fp16", "adam", 0, 4, (2, 2, 4, 8)),
        ("fp16", "lamb", 1, 4, (2, 2, 1, 2)),
        ("fp16", "adagrad", 1, 2, (2, 2, 2, 2)),
    ],
)
def test_states_equal_a_hand_count(
    dtype: str, optimizer: str, zero_stage: int, num_replicas: int, parts: tuple[float, float, float, float]
) -> None:
    """Every part, by dtype, optimizer, ZeRO stage and number of replicas."""
    found = state_bytes(dtype, optimizer=optimizer, zero_stage=zero_stage, num_replicas=num_replicas)
    weights, gradients, master_weights, moments = parts
    assert found == StateBytes(weights=weights, gradients=gradients, master_weights=master_weights, moments=moments)
    assert found.per_parameter == sum(parts)


@pytest.mark.parametrize(("dtype", "expected"), [("fp32", 16), ("bf16", 18), ("fp16", 16)])
def test_the_usual_setting_is_the_emitted_configs(dtype: str, expected: float) -> None:
    """Without more said: AdamW as in the DeepSpeed config that pipeplan writes, on one replica."""
    assert state_bytes(dtype).per_parameter == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtype": "bf61"}, "unknown dtype 'bf61' \\(did you mean 'bf16'"),
        ({"dtype": "bf16", "optimizer": "adma"}, "unknown optimizer 'adma' \\(did you mean 'adam'"),
        ({"dtype": "bf16", "zero_stage": 2}, "ZeRO stage 2 shards gradients"),
        ({"dtype": "bf16", "num_replicas": 0}, "at least 1 replica"),
    ],
)
def test_what_no_plan_runs_with_is_refused(arguments: dict[str, object], message: str) -> None:
    """Unknown names and ZeRO-2 and 3 are refused with what to use."""
    with pytest.raises(ProfileError, match=message):
        state_bytes(**arguments)  # type: ignore[arg-type]
