"""``deepspeed.initialize`` for planned pipelines: the same signature and result."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.tensor_parallel.init_utils import load_ds_config

from pipeplan.deepspeed_config import DIGEST_KEY, precision, refuse_unsupported
from pipeplan.errors import LaunchError
from pipeplan.host_memory import keep_freed_memory
from pipeplan.runtime.engine import PlannedPipelineEngine
from pipeplan.runtime.module import PlannedPipelineModule


def initialize(
    args: Any = None,
    model: Any = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable | None = None,
    config: str | Path | dict[str, Any] | None = None,
    mesh_param: Any = None,
    config_params: str | Path | dict[str, Any] | None = None,
) -> tuple[Any, Any, Any, Any]:
    """Build the engine of a planned pipeline, the way ``deepspeed.initialize`` builds its own.

    A model that isn't a ``PlannedPipelineModule`` goes to ``deepspeed.initialize`` unchanged. Where the config runs
    another number of micro-batches than planned, the plan's order is carried over to it, verified, and said.

    ``pipeplan.message_timeout_s`` in the config (600 if not given) limits how long a rank waits for one message or for
    the other ranks of a reduction; then it ends with an error that names op and peer.

    Returns:
        Engine, optimizer, training data loader and learning-rate scheduler, as ``deepspeed.initialize``.

    DeepSpeed adds up and averages over the replicas in the dtype of the weights unless the config says otherwise: in
    bf16, set ``communication_data_type`` to ``fp32`` for results that don't depend on the number of replicas.

    Raises:
        LaunchError: The config asks for something that a plan can't run with, or contradicts the plan.
    """
    if not isinstance(model, PlannedPipelineModule):
        return deepspeed.initialize(
            args=args,
            model=model,
            optimizer=optimizer,
            model_parameters=model_parameters,
            training_data=training_data,
            lr_scheduler=lr_scheduler,
            distributed_port=distributed_port,
            mpu=mpu,
            dist_init_required=dist_init_required,
            collate_fn=collate_fn,
            config=config,
            mesh_param=mesh_param,
            config_params=config_params,
        )
    if mpu is not None or mesh_param is not None:
        raise LaunchError("a planned pipeline brings its own grid of ranks; delete the mpu and mesh_param arguments")
    deepspeed.init_distributed(
        dist_backend=get_accelerator().communication_backend_name(),
        distributed_port=distributed_port,
        dist_init_required=dist_init_required,
    )
    if get_accelerator().device_name() == "cpu":
        keep_freed_memory()
    content = _load_config(args, config if config is not None else config_params)
    refuse_unsupported(content)
    refuse_missing_arithmetic(content, get_accelerator())
    _check_against_plan(content, model)
    config_class = DeepSpeedConfig(content, model.mpu())
    deepspeed.set_optimizer_flags(config_class, model)
    engine = PlannedPipelineEngine(
        args=args,
        model=model,
        optimizer=optimizer,
        model_parameters=model_parameters,
        training_data=training_data,
        lr_scheduler=lr_scheduler,
        mpu=model.mpu(),
        dist_init_required=dist_init_required,
        collate_fn=collate_fn,
        config=content,
        config_class=config_class,
    )
    engine._configure_python_gc()
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def _load_config(args: Any, config: str | Path | dict[str, Any] | None) -> dict[str, Any]:
    from_arguments = getattr(args, "deepspeed_config", None)
    if from_arguments is not None and config is not None:
        raise LaunchError("the DeepSpeed config was given twice, as --deepspeed_config and as an argument; give one")
    chosen = from_arguments if config is None else config
    if chosen is None:
        raise LaunchError("no DeepSpeed config was given; pass --deepspeed_config FILE")
    if isinstance(chosen, dict):
        return chosen
    if not Path(chosen).is_file():
        raise LaunchError(f"DeepSpeed config {chosen} does not exist")
    content: dict[str, Any] = load_ds_config(str(chosen))
    return content


def _check_against_plan(config: dict[str, Any], model: PlannedPipelineModule) -> None:
    section = config.get(DIGEST_KEY)
    digest = section.get("digest") if isinstance(section, dict) else None
    if digest is not None and digest != model.runnable.plan.digest:
        raise LaunchError(
            f"the DeepSpeed config belongs to another plan ({digest[:19]}) than the one that runs "
            f"({model.runnable.plan.digest[:19]}); use the ds_config.json of the plan's own folder"
        )
    pipeline = config.get("pipeline", {})
    if isinstance(pipeline, dict) and pipeline.get("activation_checkpoint_interval"):
        raise LaunchError(
            "the DeepSpeed config sets pipeline.activation_checkpoint_interval, but the plan says which stages "
            "recompute; delete it and list the stages under 'recompute' in the plan"
        )


def refuse_missing_arithmetic(config: dict[str, Any], accelerator: Any) -> None:
    """Check that the device computes in the precision that the config asks for.

    Raises:
        LaunchError: It doesn't; DeepSpeed would say so only after the model is built.
    """
    asked = precision(config)
    is_there = {"fp16": accelerator.is_fp16_supported, "bf16": accelerator.is_bf16_supported}
    if asked in is_there and not is_there[asked]():
        other = "bf16" if asked == "fp16" and accelerator.is_bf16_supported() else "fp32"
        raise LaunchError(
            f"the DeepSpeed config trains in {asked}, which DeepSpeed can't do on this device "
            f"({accelerator.device_name()}: no {asked} arithmetic); train on a GPU that has it, or in {other} (profile "
            f"again with --dtype {other})"
        )
