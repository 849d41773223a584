"""Plan folders for toy models, and the real launcher over a list of cases."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import toy

from pipeplan.cluster import equal_ranks
from pipeplan.model.splitting import splittable_layers
from pipeplan.plan.folder import write_plan_folder
from pipeplan.plan.layout import Partition, Placement
from pipeplan.plan.ops import Op, OpKind, Order
from pipeplan.plan.types import Plan
from pipeplan.profile.file import profile_digest
from pipeplan.profile.types import LayerProfile, LayerTimes, Profile, Recomputation
from pipeplan.program.file import write_program
from pipeplan.program.verify import verify_plan

DEVICE = "cpu"
_FORWARD_NS_BY_KIND = {"embedding": 100_000, "attention": 2_000_000, "experts": 5_000_000, "head": 4_000_000}


def profile_of(model: str) -> Profile:
    """Return a made-up profile of a toy model; only its names, its shape and what can be split matter here."""
    layers = toy.layers_of(model)
    return Profile(
        model=model,
        source="measured",
        micro_batch_size=toy.SAMPLES,
        sequence_length=toy.LENGTH,
        dtype="fp32",
        state_bytes_per_parameter=16.0,
        layers=tuple(
            LayerProfile(
                name=layer.name,
                kind=layer.kind,
                num_parameters=100,
                output_bytes=1000,
                activation_bytes=1000,
                held_for_w_bytes=1000,
                is_splittable=is_splittable,
                tied=layer.tied,
                times_by_device={DEVICE: _times(layer.kind)},
                recomputation=Recomputation({DEVICE: _times(layer.kind)}, 500),
            )
            for layer, is_splittable in zip(layers, splittable_layers(layers), strict=True)
        ),
    )


def _times(kind: str) -> LayerTimes:
    forward_ns = _FORWARD_NS_BY_KIND.get(kind, 1_000_000)
    return LayerTimes(
        forward_ns=forward_ns,
        backward_ns=2 * forward_ns,
        input_gradient_ns=forward_ns,
        weight_gradient_ns=forward_ns,
    )


def split_evenly(num_layers: int, num_stages: int) -> Partition:
    """Return a partition whose stages differ by one layer at most, the longer ones first."""
    base, longer = divmod(num_layers, num_stages)
    return Partition(tuple(base + (stage < longer) for stage in range(num_stages)))


def random_order(placement: Placement, num_micro_batches: int, seed: int) -> Order:
    """Return a random order that finishes: ops are drawn one by one among those whose inputs exist."""
    rng = random.Random(seed)
    num_stages = placement.num_stages
    splits = {stage for stage in range(num_stages) if rng.random() < 0.5}
    ready = [Op(0, OpKind.F, micro_batch) for micro_batch in range(num_micro_batches)]
    lines: list[list[Op]] = [[] for _ in range(placement.num_ranks)]
    while ready:
        op = ready.pop(rng.randrange(len(ready)))
        lines[placement.rank_by_stage[op.stage]].append(op)
        if op.kind is OpKind.F and op.stage + 1 < num_stages:
            ready.append(Op(op.stage + 1, OpKind.F, op.micro_batch))
        elif op.kind is OpKind.F or (op.kind.is_backward_input and op.stage > 0):
            stage = op.stage if op.kind is OpKind.F else op.stage - 1
            ready.append(Op(stage, OpKind.I if stage in splits else OpKind.B, op.micro_batch))
        if op.kind is OpKind.I:
            ready.append(Op(op.stage, OpKind.W, op.micro_batch))
    return Order.of(lines)


def num_micro_batches_of(order: Order) -> int:
    """Return how many micro-batches an order runs."""
    return 1 + max(op.micro_batch for line in order for op in line)


def write_folder(
    folder: Path,
    model: str,
    placement: Placement,
    order: Order,
    partition: Partition | None = None,
    *,
    num_replicas: int = 1,
    recomputed_stages: tuple[int, ...] = (),
) -> Path:
    """Write the plan folder of a toy model; returns it."""
    profile = profile_of(model)
    plan = Plan(
        model=model,
        num_micro_batches=num_micro_batches_of(order),
        partition=partition or split_evenly(profile.num_layers, placement.num_stages),
        placement=placement,
        order=order,
        recomputed_stages=recomputed_stages,
        profile_digest=profile_digest(profile),
    )
    return write_plan(folder, plan, num_replicas)


def write_plan(folder: Path, plan: Plan, num_replicas: int = 1) -> Path:
    """Write a plan of a toy model with everything that a launch needs; returns the folder."""
    profile = profile_of(plan.model)
    cluster = equal_ranks(plan.num_ranks, DEVICE, num_replicas=num_replicas)
    write_plan_folder(plan, profile, cluster, folder)
    write_program(verify_plan(plan, profile, cluster), folder / "program.yaml")
    return folder


def launch(
    num_processes: int,
    cases: Sequence[dict[str, Any]],
    folder: Path,
    timeout_s: int = 540,
    script: str = "worker.py",
) -> None:
    """Run the cases under the real ``deepspeed`` launcher; their results lie in ``folder`` afterwards."""
    listing = folder / "cases.json"
    listing.write_text(json.dumps(list(cases)))
    launcher = Path(sys.executable).with_name("deepspeed")
    port = free_port()
    command = [
        str(launcher),
        "--num_gpus",
        str(num_processes),
        "--master_port",
        str(port),
        str(Path(__file__).with_name(script)),
        "--cases",
        str(listing),
    ]
    log = folder / "launch.log"
    with log.open("w") as stream:
        # A session of its own, so that a hang can be ended with everything that the launcher started.
        process = subprocess.Popen(
            command, env=cpu_environment(), stdout=stream, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status: int | None = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            status = None
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert status == 0, f"exit status {status} (None: still running after {timeout_s} s)\n" + log.read_text()[-12000:]
    left_over = list(Path("/dev/shm").glob(f"deepspeed_*_{port}_*"))
    assert not left_over, "shared memory outlives the launch"


def cpu_environment() -> dict[str, str]:
    """Return the environment of a launch on CPUs: this Python, these helpers and this checkout, one thread."""
    return {
        **os.environ,
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(str(path) for path in (Path(__file__).parent, Path(__file__).parents[2])),
    }


def result_of(folder: Path, name: str, num_processes: int, ranks: Sequence[int] | None = None) -> list[dict[str, Any]]:
    """Return what every rank saved for a case, or the given ranks."""
    chosen = range(num_processes) if ranks is None else ranks
    return [torch.load(folder / f"{name}-{rank}.pt", weights_only=False) for rank in chosen]


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
