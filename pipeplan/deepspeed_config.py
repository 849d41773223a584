"""What a DeepSpeed config may ask for under a plan: one rule, for emission and for the launch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeplan.errors import LaunchError, nearest

DIGEST_KEY = "pipeplan"  # ours; DeepSpeed reads only the keys it knows
DEFAULT_MESSAGE_TIMEOUT_S = 600.0

_OWN_KEYS = ("digest", "message_timeout_s")

_OFFLOAD_KEYS = ("offload_optimizer", "offload_param", "cpu_offload", "cpu_offload_param", "zenflow")
_SECTIONS = ("bf16", "bfloat16", "fp16", "data_types", "optimizer", "scheduler", "zero_optimization")
_PRECISION_BY_KEY = {"bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16"}
_REMOVED_KEYS = (
    "amp",
    "compression_training",
    "curriculum_learning",
    "eigenvalue",
    "elasticity",
    "graph_harvesting",
    "nebula",
    "progressive_layer_drop",
    "quantize_training",
    "sparse_attention",
    "sparse_gradients",
)


def zero_stage(config: Mapping[str, Any]) -> int:
    """Return the ZeRO stage that a DeepSpeed config asks for; 0 without one."""
    zero = config.get("zero_optimization")
    stage = zero.get("stage", 0) if isinstance(zero, Mapping) else 0
    return stage if isinstance(stage, int) else 0


def precision(config: Mapping[str, Any]) -> str | None:
    """Return ``bf16``, ``fp16`` or ``fp32`` as a DeepSpeed config asks, ``None`` where it doesn't say.

    Raises:
        LaunchError: It enables two at once.
    """
    enabled = {name for key, name in _PRECISION_BY_KEY.items() if _is_enabled(config.get(key))}
    if len(enabled) > 1:
        raise LaunchError("the DeepSpeed config enables bf16 and fp16; enable one of them")
    if enabled:
        return enabled.pop()
    is_switched_off = any(
        isinstance(section := config.get(key), Mapping) and section.get("enabled") is False for key in _PRECISION_BY_KEY
    )
    return "fp32" if is_switched_off else None


def message_timeout_s(config: Mapping[str, Any]) -> float:
    """Return how long a rank waits for one message: ``pipeplan.message_timeout_s``, ten minutes if it isn't given.

    Raises:
        LaunchError: The section holds something else, or no positive number.
    """
    section = config.get(DIGEST_KEY, {})
    if not isinstance(section, Mapping):
        raise LaunchError(f"the DeepSpeed config sets {DIGEST_KEY!r} to {section!r}; an object is expected there")
    for key in section:
        if key not in _OWN_KEYS:
            raise LaunchError(
                f"the DeepSpeed config sets {DIGEST_KEY}.{key}, which does not exist{nearest(key, _OWN_KEYS)}"
            )
    timeout_s = section.get("message_timeout_s", DEFAULT_MESSAGE_TIMEOUT_S)
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not timeout_s > 0:
        raise LaunchError(
            f"the DeepSpeed config sets {DIGEST_KEY}.message_timeout_s to {timeout_s!r}; give a positive number of "
            "seconds"
        )
    return float(timeout_s)


def refuse_unsupported(config: Mapping[str, Any]) -> None:
    """Check that a pipeline plan can run under a DeepSpeed config.

    Raises:
        LaunchError: Names the setting, the reason, and what to use instead.
    """
    for key in _SECTIONS:
        if key in config and not isinstance(config[key], Mapping):
            raise LaunchError(
                f"the DeepSpeed config sets {key!r} to {config[key]!r}; DeepSpeed expects an object there"
            )
    for key in _REMOVED_KEYS:
        if key in config:
            raise LaunchError(f"the DeepSpeed config sets {key!r}, which DeepSpeed 0.19 has removed; delete the key")
    message_timeout_s(config)
    zero = config.get("zero_optimization")
    if isinstance(zero, Mapping):
        stage = zero_stage(config)
        if stage >= 2:
            raise LaunchError(
                f"the DeepSpeed config asks for ZeRO stage {stage}, which shards gradients that a pipeline keeps "
                "accumulating over its micro-batches; use zero_optimization.stage 1 (or 0)"
            )
        for key in _OFFLOAD_KEYS:
            if _asks_for_offload(zero.get(key)):
                raise LaunchError(
                    f"the DeepSpeed config sets zero_optimization.{key}, which a pipeline can't use; delete it, and "
                    "save memory with zero_optimization.stage 1, more ranks or recomputation"
                )
    if precision(config) == "bf16" and zero_stage(config) == 0 and _gradient_dtype(config) == "fp32":
        raise LaunchError(
            "the DeepSpeed config accumulates bf16 gradients in fp32, which DeepSpeed does only with ZeRO-1; "
            "set zero_optimization.stage to 1, or data_types.grad_accum_dtype to bf16"
        )
    if _size(config.get("sequence_parallel_size")) > 1:
        raise LaunchError(_parallelism_message("sequence_parallel_size"))
    for key, size_key in (("tensor_parallel", "autotp_size"), ("expert_parallel", "autoep_size")):
        section = config.get(key)
        if isinstance(section, Mapping) and (_size(section.get(size_key)) > 1 or section.get("enabled") is True):
            raise LaunchError(_parallelism_message(key))
    if _is_enabled(config.get("hybrid_engine")):
        raise LaunchError("the DeepSpeed config enables hybrid_engine, which has no pipelines; delete the section")
    compile_section = config.get("compile")
    if isinstance(compile_section, Mapping) and compile_section.get("deepcompile") is True:
        raise LaunchError(
            "the DeepSpeed config enables compile.deepcompile, which rewrites whole models and has no pipelines; "
            "delete it"
        )


def _parallelism_message(key: str) -> str:
    return (
        f"the DeepSpeed config sets {key!r}; a plan runs with pipeline and data parallelism only; "
        "delete the key and use data_parallel in the cluster file"
    )


def _is_enabled(section: Any) -> bool:
    return isinstance(section, Mapping) and section.get("enabled") is True


def _asks_for_offload(value: Any) -> bool:
    if isinstance(value, Mapping):
        return value.get("device", "cpu") not in (None, "none")
    return bool(value)


def _size(value: Any) -> int:
    return value if isinstance(value, int) else 1


def _gradient_dtype(config: Mapping[str, Any]) -> str | None:
    data_types = config.get("data_types")
    return data_types.get("grad_accum_dtype") if isinstance(data_types, Mapping) else None
