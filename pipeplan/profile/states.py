"""What DeepSpeed keeps of every parameter through a whole batch: weights, gradients, master weights and moments."""

from __future__ import annotations

from dataclasses import dataclass, replace

from pipeplan.errors import ProfileError, nearest
from pipeplan.profile.types import Profile

# fp32 values that the optimizer keeps of a parameter.
_MOMENTS_BY_OPTIMIZER = {
    "adam": 2,
    "adamw": 2,
    "lamb": 2,
    "adagrad": 1,
    "lion": 1,
    "sgd": 0,
    "sgd-momentum": 1,
}
OPTIMIZERS = tuple(_MOMENTS_BY_OPTIMIZER)
_FP32_BYTES = 4
_WEIGHT_BYTES_BY_DTYPE = {"fp32": 4, "bf16": 2, "fp16": 2}
_USUAL_ZERO_STAGE_BY_DTYPE = {"fp32": 0, "bf16": 1, "fp16": 0}  # as in the DeepSpeed configs that pipeplan writes


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """Bytes of one parameter on one rank, after sharding over the data-parallel replicas."""

    weights: float
    gradients: float
    master_weights: float
    moments: float

    @property
    def per_parameter(self) -> float:
        """Everything."""
        return self.weights + self.gradients + self.master_weights + self.moments


def state_bytes(
    dtype: str, *, optimizer: str = "adamw", zero_stage: int | None = None, num_replicas: int = 1
) -> StateBytes:
    """Return what a parameter takes in DeepSpeed 0.19's optimizers.

    Gradients stay whole on every rank: they accumulate over the micro-batches of a pipeline. Copies that exist only
    while the optimizer steps, when no activation is held, don't count.

    Args:
        dtype: "fp32", "bf16" or "fp16": weights and activations.
        zero_stage: 0 or 1; by default what pipeplan's own DeepSpeed config uses: 1 for bf16, else 0.
        num_replicas: Data-parallel replicas, which share master weights and moments where they are sharded.

    Raises:
        ProfileError: The dtype, optimizer or ZeRO stage is not one that a plan can run with.
    """
    if dtype not in _WEIGHT_BYTES_BY_DTYPE:
        raise ProfileError(
            f"unknown dtype {dtype!r}{nearest(dtype, _WEIGHT_BYTES_BY_DTYPE)}; "
            f"use one of {', '.join(_WEIGHT_BYTES_BY_DTYPE)}"
        )
    if optimizer not in _MOMENTS_BY_OPTIMIZER:
        raise ProfileError(
            f"unknown optimizer {optimizer!r}{nearest(optimizer, OPTIMIZERS)}; use the one of "
            f"{', '.join(OPTIMIZERS)} that keeps as much"
        )
    stage = usual_zero_stage(dtype) if zero_stage is None else zero_stage
    if stage not in (0, 1):
        raise ProfileError(
            f"ZeRO stage {stage} shards gradients that a pipeline keeps accumulating over its micro-batches; use 1 or 0"
        )
    if num_replicas < 1:
        raise ProfileError(f"data parallelism needs at least 1 replica, got {num_replicas}")
    weight_bytes = _WEIGHT_BYTES_BY_DTYPE[dtype]
    # ZeRO-1 accumulates bf16 gradients in fp32 (BF16_Optimizer); otherwise they have the dtype of the weights.
    gradient_bytes = _FP32_BYTES if dtype == "bf16" and stage == 1 else weight_bytes
    # ZeRO-1 keeps fp32 copies of its shard even of fp32 weights.
    master_bytes = 0 if dtype == "fp32" and stage == 0 else _FP32_BYTES
    # BF16_Optimizer shards over the replicas at either stage.
    num_shards = num_replicas if stage == 1 or dtype == "bf16" else 1
    return StateBytes(
        weights=weight_bytes,
        gradients=gradient_bytes,
        master_weights=master_bytes / num_shards,
        moments=_MOMENTS_BY_OPTIMIZER[optimizer] * _FP32_BYTES / num_shards,
    )


def usual_zero_stage(dtype: str) -> int:
    """Return the ZeRO stage of the DeepSpeed config that pipeplan writes."""
    return _USUAL_ZERO_STAGE_BY_DTYPE[dtype]


def with_states(profile: Profile, *, optimizer: str, zero_stage: int | None, num_replicas: int) -> Profile:
    """Return the profile with states for an optimizer, and a note of what they are for; raises as ``state_bytes``."""
    states = state_bytes(profile.dtype, optimizer=optimizer, zero_stage=zero_stage, num_replicas=num_replicas)
    note = {
        "optimizer": optimizer,
        "zero_stage": usual_zero_stage(profile.dtype) if zero_stage is None else zero_stage,
        "data_parallel": num_replicas,
    }
    return replace(profile, state_bytes_per_parameter=states.per_parameter, extra={**profile.extra, "states": note})


def states_of_other_replicas(profile: Profile, num_replicas: int) -> str | None:
    """Return why the profile's bytes of state are not those of ``num_replicas``, and what to do; ``None`` if they are.

    A profile that doesn't say what its states are for is taken at its word.
    """
    note = profile.extra.get("states")
    if note is None or note["data_parallel"] == num_replicas:
        return None
    try:
        wanted = state_bytes(
            profile.dtype, optimizer=note["optimizer"], zero_stage=note["zero_stage"], num_replicas=num_replicas
        ).per_parameter
    except ProfileError:  # of something that pipeplan doesn't know, written by hand
        return None
    if wanted == profile.state_bytes_per_parameter:  # nothing is sharded
        return None
    update = " --update (nothing is measured again)" if profile.source == "measured" else ""
    return (
        f"the profile counts {profile.state_bytes_per_parameter:g} bytes of state a parameter, for data parallelism of "
        f"{note['data_parallel']}, but the cluster has {num_replicas}, which take {wanted:g}: the memory of every rank "
        f"is wrong by that much; profile again with --data-parallel {num_replicas}{update}"
    )
