"""The DeepSpeed config of a plan: batch sizes and precision from the plan, everything else from the user."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeplan.cluster import Cluster
from pipeplan.deepspeed_config import DIGEST_KEY, precision, refuse_unsupported, zero_stage
from pipeplan.errors import FileFormatError, LaunchError
from pipeplan.plan.types import Plan
from pipeplan.profile.types import Profile

_AUTO = "auto"  # what Hugging Face configs write where another tool fills in the number

# Plain torch AdamW: DeepSpeed's own fused one compiles a CUDA or C++ extension first.
_DEFAULT_OPTIMIZER = {
    "type": "AdamW",
    "params": {"lr": 3e-4, "betas": [0.9, 0.95], "weight_decay": 0.1, "torch_adam": True},
}


def read_base_config(path: Path) -> dict[str, Any]:
    """Read the DeepSpeed config that the user brings.

    Raises:
        FileFormatError: The file is missing, not JSON, or not an object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileFormatError(f"DeepSpeed config {path} does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise FileFormatError(f"DeepSpeed config {path} can't be read: {error}") from None
    except json.JSONDecodeError as error:
        raise FileFormatError(f"DeepSpeed config {path}, line {error.lineno}: {error.msg}; is it truncated?") from None
    if not isinstance(content, dict):
        raise FileFormatError(f"DeepSpeed config {path} holds no object; expected {{…}}")
    return content


def build_ds_config(
    plan: Plan, profile: Profile, cluster: Cluster, base: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the DeepSpeed config that trains ``plan``.

    Keeps what ``base`` says of optimizer, scheduler, ZeRO, monitoring and everything else; sets batch sizes and
    precision where it leaves them out. The plan's digest stands in its own key, which the runtime compares.

    Raises:
        LaunchError: ``base`` contradicts the plan's batch or the profile's precision, or asks for something that
            pipelines don't support.
    """
    base = {} if base is None else dict(base)
    refuse_unsupported(base)
    config = _batch_sizes(plan, profile, cluster, base)
    rest = {key: value for key, value in base.items() if key not in config and key != DIGEST_KEY}
    config.setdefault("steps_per_print", rest.pop("steps_per_print", 10))
    config |= _precision_settings(profile, rest)
    config["optimizer"] = rest.pop("optimizer", _DEFAULT_OPTIMIZER)
    # DeepSpeed's own default is 1.0 too; written down because it changes results.
    config["gradient_clipping"] = rest.pop("gradient_clipping", 1.0)
    config |= {key: value for key, value in rest.items() if key not in config}
    config[DIGEST_KEY] = {**base.get(DIGEST_KEY, {}), "digest": plan.digest}
    refuse_unsupported(config)
    return config


def _batch_sizes(plan: Plan, profile: Profile, cluster: Cluster, base: Mapping[str, Any]) -> dict[str, Any]:
    micro_batch_size, count, replicas = profile.micro_batch_size, plan.num_micro_batches, cluster.num_replicas
    expected = {
        "train_batch_size": micro_batch_size * count * replicas,
        "train_micro_batch_size_per_gpu": micro_batch_size,
        "gradient_accumulation_steps": count,
    }
    remedy_by_key = {
        "train_batch_size": f"plan with another --micro-batches, or set it to {expected['train_batch_size']}",
        "train_micro_batch_size_per_gpu": "profile with another --micro-batch-size, or delete the key",
        "gradient_accumulation_steps": "plan with another --micro-batches, or delete the key",
    }
    for key, value in expected.items():
        found = base.get(key, _AUTO)
        if found not in (_AUTO, value):
            raise LaunchError(
                f"the DeepSpeed config sets {key} to {found!r}; the plan runs {count} micro-batches of "
                f"{micro_batch_size} on {replicas} replica{'s' if replicas > 1 else ''}, so it must be {value}: "
                f"{remedy_by_key[key]}"
            )
    return expected


def _precision_settings(profile: Profile, base: dict[str, Any]) -> dict[str, Any]:
    """Return dtype and ZeRO settings; takes those it uses out of ``base``."""
    asked = precision(base)
    if asked is not None and asked != profile.dtype:
        raise LaunchError(
            f"the DeepSpeed config trains in {asked}, the profile was made in {profile.dtype}; "
            f"profile again with --dtype {asked}, or change the config"
        )
    settings: dict[str, Any] = {}
    if profile.dtype == "bf16":
        # immediate_grad_update spares a walk over all parameters after every backward.
        section = base.pop("bf16", base.pop("bfloat16", {}))
        settings["bf16"] = {"immediate_grad_update": True} | section | {"enabled": True}
        settings["zero_optimization"] = base.pop("zero_optimization", {"stage": 1})
        if zero_stage(settings) == 1:
            settings["data_types"] = {"grad_accum_dtype": "fp32"} | base.pop("data_types", {})
    elif profile.dtype == "fp16":
        settings["fp16"] = base.pop("fp16", {}) | {"enabled": True}
    elif profile.dtype != "fp32":
        raise LaunchError(f"DeepSpeed trains in fp32, bf16 or fp16; the profile was made in {profile.dtype!r}")
    return settings
