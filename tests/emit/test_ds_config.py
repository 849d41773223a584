"""The DeepSpeed config: accepted by DeepSpeed, keeps what the user set, refuses what can't work."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeplan.cluster import Cluster
from pipeplan.emit.ds_config import build_ds_config, read_base_config
from pipeplan.errors import FileFormatError, LaunchError
from pipeplan.plan.types import Plan
from pipeplan.profile.types import Profile

BASES: list[dict[str, Any] | None] = [
    None,
    {},
    {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}, "gradient_clipping": 0.0},
    {"train_batch_size": "auto", "fp16": {"enabled": "auto"}, "zero_optimization": {"stage": 1}},
]


def deepspeed_config(content: dict[str, Any], num_replicas: int, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return DeepSpeed's own reading of a config, as if ``num_replicas`` processes shared each pipeline rank."""
    from deepspeed.runtime import config

    monkeypatch.setattr(config.dist, "get_rank", lambda: 0)
    topology = SimpleNamespace(get_data_parallel_world_size=lambda: num_replicas)
    return config.DeepSpeedConfig(content, mpu=topology)


@pytest.mark.parametrize("base", BASES, ids=["none", "empty", "sgd", "hugging-face"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_deepspeed_accepts_every_config(
    plan: Plan,
    profile: Profile,
    cluster: Cluster,
    base: dict[str, Any] | None,
    dtype: str,
    num_replicas: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """DeepSpeed itself reads every emitted config and finds the plan's batch, precision and the ZeRO stage we mean."""
    content = build_ds_config(plan, replace(profile, dtype=dtype), replace(cluster, num_replicas=num_replicas), base)
    read = deepspeed_config(content, num_replicas, monkeypatch)
    assert read.train_batch_size == 3 * 4 * num_replicas
    assert read.train_micro_batch_size_per_gpu == 3
    assert read.gradient_accumulation_steps == 4
    assert read.bfloat16_config.enabled == (dtype == "bf16")
    assert read.float16_config.enabled == (dtype == "fp16")
    if dtype == "bf16":
        assert read.bfloat16_config.immediate_grad_update
        assert (read.zero_optimization_stage, read.grad_accum_dtype) == (1, "fp32")
    assert content["pipeplan"] == {"digest": plan.digest}


def test_base_settings_are_kept(plan: Plan, profile: Profile, cluster: Cluster) -> None:
    """Optimizer, scheduler, ZeRO, clipping, monitoring and unknown keys of the user's config reach the emitted one."""
    base = {
        "train_micro_batch_size_per_gpu": 3,
        "optimizer": {"type": "Lamb", "params": {"lr": 0.01}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
        "zero_optimization": {"stage": 1, "reduce_bucket_size": 1000},
        "gradient_clipping": 0.25,
        "steps_per_print": 7,
        "tensorboard": {"enabled": False},
        "wall_clock_breakdown": True,
        "bf16": {"enabled": True, "immediate_grad_update": False},
    }
    emitted = build_ds_config(plan, replace(profile, dtype="bf16"), cluster, base)
    assert {key: emitted[key] for key in base} == base


def test_own_settings_are_kept(plan: Plan, profile: Profile, cluster: Cluster) -> None:
    """The limit for messages goes through; the digest is always this plan's."""
    base = {"pipeplan": {"message_timeout_s": 30, "digest": "sha256:0"}}
    emitted = build_ds_config(plan, profile, cluster, base)
    assert emitted["pipeplan"] == {"message_timeout_s": 30, "digest": plan.digest}


def test_default_optimizer_only_without_a_base_optimizer(plan: Plan, profile: Profile, cluster: Cluster) -> None:
    """A config without an optimizer gets AdamW of plain torch, which needs no compiler."""
    optimizer = build_ds_config(plan, profile, cluster)["optimizer"]
    assert optimizer["type"] == "AdamW"
    assert optimizer["params"]["torch_adam"] is True


@pytest.mark.parametrize(
    ("base", "words"),
    [
        ({"train_batch_size": 13}, ["train_batch_size", "13", "must be 12", "--micro-batches"]),
        ({"train_micro_batch_size_per_gpu": 2}, ["train_micro_batch_size_per_gpu", "must be 3", "--micro-batch-size"]),
        ({"gradient_accumulation_steps": 8}, ["gradient_accumulation_steps", "must be 4"]),
        ({"zero_optimization": {"stage": 2}}, ["ZeRO stage 2", "stage 1"]),
        ({"zero_optimization": {"stage": 3}}, ["ZeRO stage 3", "stage 1"]),
        ({"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}, ["offload_optimizer", "delete"]),
        ({"zero_optimization": {"stage": 1, "cpu_offload": True}}, ["cpu_offload", "delete"]),
        ({"bf16": {"enabled": True}}, ["bf16", "fp32", "--dtype bf16"]),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, ["bf16 and fp16"]),
        ({"tensor_parallel": {"autotp_size": 2}}, ["tensor_parallel", "data_parallel"]),
        ({"sequence_parallel_size": 2}, ["sequence_parallel_size"]),
        ({"hybrid_engine": {"enabled": True}}, ["hybrid_engine"]),
        ({"compile": {"deepcompile": True}}, ["deepcompile"]),
        ({"elasticity": {}}, ["elasticity", "removed"]),
        ({"zero_optimization": 1}, ["zero_optimization", "object"]),
    ],
)
def test_conflicts_are_refused(
    plan: Plan, profile: Profile, cluster: Cluster, base: dict[str, Any], words: list[str]
) -> None:
    """Each conflict or unsupported setting is refused with the key, the reason and what to do."""
    with pytest.raises(LaunchError) as caught:
        build_ds_config(plan, profile, cluster, base)
    for word in words:
        assert word in str(caught.value)


def test_offload_to_none_is_no_offload(plan: Plan, profile: Profile, cluster: Cluster) -> None:
    """``offload_optimizer: {device: none}`` is DeepSpeed's way of saying no, and passes."""
    zero = {"stage": 1, "offload_optimizer": {"device": "none"}}
    assert build_ds_config(plan, profile, cluster, {"zero_optimization": zero})["zero_optimization"] == zero


def test_bf16_sums_in_fp32_need_zero(plan: Plan, profile: Profile, cluster: Cluster) -> None:
    """bf16 with fp32 sums but without ZeRO-1, which DeepSpeed can't do, is refused here rather than at launch."""
    base = {"zero_optimization": {"stage": 0}, "data_types": {"grad_accum_dtype": "fp32"}}
    with pytest.raises(LaunchError, match="ZeRO-1"):
        build_ds_config(plan, replace(profile, dtype="bf16"), cluster, base)


@pytest.mark.parametrize(
    ("content", "words"), [("{", "line 1"), ("[1]", "no object"), ("", "truncated"), (None, "does not exist")]
)
def test_bad_base_files_are_named(tmp_path: Path, content: str | None, words: str) -> None:
    """A missing, truncated or foreign base config is one clear message that names the file."""
    path = tmp_path / "base.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(FileFormatError, match=words) as caught:
        read_base_config(path)
    assert str(path) in str(caught.value)
