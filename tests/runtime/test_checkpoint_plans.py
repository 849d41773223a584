"""Checkpoints move between plans, numbers of ranks and replicas, and one process, through the real launcher."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import launching
import pytest
import torch
import toy
from cases import BF16, NO_CLIPPING, ZERO_1
from launching import random_order, write_folder
from torch import nn

from pipeplan.plan.layout import Placement
from pipeplan.plan.orders import (
    folded_placement,
    interleaved_one_f_one_b,
    looped_placement,
    one_f_one_b,
    zb_h1,
    zb_v,
)
from pipeplan.runtime.checkpoint import (
    Checkpoint,
    Progress,
    capture_checkpoint,
    read_checkpoint,
    restore_checkpoint,
    write_checkpoint,
)

pytestmark = pytest.mark.launcher

MODEL = "tied"
NUM_MICRO_BATCHES = 4
SCHEDULER = {"type": "WarmupLR", "params": {"warmup_min_lr": 0.001, "warmup_max_lr": 0.01, "warmup_num_steps": 4}}
ADAMW = {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1, "torch_adam": True}}
MOVES = ("sgd", "adamw", "bf16", "zero")

Make = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]


def sgd(weights: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """Return what the worker trains with if the config names nothing."""
    return torch.optim.SGD(weights, lr=toy.LEARNING_RATE, momentum=toy.MOMENTUM)


def adamw(weights: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimizer that ``ADAMW`` describes."""
    return torch.optim.AdamW(weights, lr=0.01, weight_decay=0.1)


@dataclass
class Single:
    """A model trained in one process."""

    make: Make
    num_replicas: int = 1

    def __post_init__(self) -> None:
        self.layers = toy.build_all(MODEL)
        weights = {id(weight): weight for layer in self.layers for weight in layer.parameters()}
        self.optimizer = self.make(list(weights.values()))

    def train(self, first_step: int, num_steps: int, num_replicas: int = 1) -> None:
        """Train the global batches from ``first_step`` on."""
        for step in range(first_step, first_step + num_steps):
            for replica in range(num_replicas):
                for number in range(NUM_MICRO_BATCHES):
                    inputs, labels = toy.micro_batch(step * NUM_MICRO_BATCHES + number, replica)
                    loss = toy.loss_function(toy.run(self.layers, inputs), labels)
                    (loss / (NUM_MICRO_BATCHES * num_replicas)).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def checkpoint(self, num_steps: int) -> Checkpoint:
        """Return the state."""
        names = [layer.name for layer in toy.layers_of(MODEL)]
        return capture_checkpoint(
            self.layers,
            self.optimizer,
            model=MODEL,
            layer_names=names,
            progress=Progress(steps=num_steps, micro_batches=num_steps * NUM_MICRO_BATCHES),
            client_state={"from": "one process"},
        )


@dataclass(frozen=True)
class Launches:
    """What the launches left behind: one that saves, one that loads under other plans, one that loads back."""

    folder: Path

    def read(self, name: str, tag: str | None = None) -> Checkpoint:
        """Return what a case saved."""
        return read_checkpoint(self.folder / name, tag)

    def results(self, name: str, num_processes: int) -> list[dict[str, Any]]:
        """Return what every rank returned for a case."""
        return launching.result_of(self.folder, name, num_processes)


@pytest.fixture(scope="module")
def launches(tmp_path_factory: pytest.TempPathFactory) -> Launches:
    """Save on 2 ranks; load on 4 and train on; load on 2 what 4 ranks saved."""
    folder = tmp_path_factory.mktemp("checkpoints")
    single = Single(adamw)
    single.train(0, 3)
    write_checkpoint(single.checkpoint(3), folder / "single")

    interleaved = write_folder(
        folder / "plan-interleaved", MODEL, looped_placement(2, 2), interleaved_one_f_one_b(2, 2, NUM_MICRO_BATCHES)
    )
    halves = write_folder(folder / "plan-zb-h1", MODEL, looped_placement(2, 1), zb_h1(2, NUM_MICRO_BATCHES))
    placement = Placement.parse("1,0,1,0,0")
    scattered = write_folder(
        folder / "plan-scattered", MODEL, placement, random_order(placement, NUM_MICRO_BATCHES, seed=8)
    )
    v_on_4 = write_folder(folder / "plan-v", MODEL, folded_placement(4, 2), zb_v(4, NUM_MICRO_BATCHES))
    replicated = write_folder(
        folder / "plan-replicated", MODEL, looped_placement(2, 1), one_f_one_b(2, NUM_MICRO_BATCHES), num_replicas=2
    )

    def case(name: str, plan: Path, config: Mapping[str, Any], num_steps: int, load: str | None = None) -> Any:
        loads = {} if load is None else {"load": str(folder / load)}
        return {
            "kind": "resume",
            "name": name,
            "model": MODEL,
            "folder": str(plan),
            "num_micro_batches": NUM_MICRO_BATCHES,
            "max_norm": NO_CLIPPING,
            "config": dict(config),
            "num_steps": num_steps,
            "save": str(folder / name),
            **loads,
        }

    with_adamw = {"optimizer": ADAMW}
    bf16 = {**BF16, "optimizer": ADAMW, "scheduler": SCHEDULER}
    launching.launch(
        2,
        [
            case("sgd", interleaved, {}, 3),
            case("adamw", halves, with_adamw, 3),
            case("bf16", interleaved, bf16, 3),
            case("zero", scattered, {**ZERO_1, **with_adamw}, 3),
            case("single-on-2", interleaved, with_adamw, 2, "single"),
            {
                "kind": "read-with-deepspeed",
                "name": "stock",
                "model": MODEL,
                "num_stages": 2,
                "num_micro_batches": NUM_MICRO_BATCHES,
                "load": str(folder / "sgd"),
                "save": str(folder / "stock"),
            },
        ],
        folder,
        script="checkpoint_worker.py",
    )
    for name in ("truncated", "incomplete"):
        shutil.copytree(folder / "adamw", folder / name)
    damaged = folder / "truncated" / "global_step3" / "layer_04-optimizer_states.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-10])
    (folder / "incomplete" / "global_step3" / "layer_07-model_states.pt").unlink()
    refused = {"kind": "refuse", "config": with_adamw, "num_micro_batches": NUM_MICRO_BATCHES}
    launching.launch(
        4,
        [
            case("sgd-on-4", v_on_4, {}, 2, "sgd"),
            case("adamw-on-4", replicated, {**ZERO_1, **with_adamw}, 2, "adamw"),
            case("bf16-on-4", replicated, bf16, 0, "bf16"),
            case("zero-on-4", v_on_4, with_adamw, 2, "zero"),
            *(
                {
                    **refused,
                    "name": f"refused-{name}",
                    "model": MODEL,
                    "folder": str(v_on_4),
                    "load": str(folder / name),
                }
                for name in ("sgd", "truncated", "incomplete", "missing")
            ),
            {
                **refused,
                "name": "weights-of-deepspeed",
                "model": MODEL,
                "folder": str(v_on_4),
                "load": str(folder / "stock"),
                "options": {"tag": "stock", "load_module_only": True},
            },
        ],
        folder,
        script="checkpoint_worker.py",
    )
    launching.launch(
        2,
        [
            case("bf16-back-on-2", halves, bf16, 0, "bf16-on-4"),
            case("adamw-back-on-2", scattered, with_adamw, 0, "adamw-on-4"),
        ],
        folder,
        script="checkpoint_worker.py",
    )
    return Launches(folder)


def assert_equal(found: Checkpoint, expected: Checkpoint, tolerance: float = 0.0) -> None:
    """Check weights, moments, masters, step counts, groups and progress, layer by layer and name by name."""
    assert found.outline.optimizer == expected.outline.optimizer
    assert found.outline.owner_by_tied == expected.outline.owner_by_tied
    assert found.outline.progress.steps == expected.outline.progress.steps
    assert found.outline.progress.micro_batches == expected.outline.progress.micro_batches
    for index, (layer, wanted) in enumerate(zip(found.layers, expected.layers, strict=True)):
        close = lambda one, other, what: _close(one, other, tolerance, f"{what} of layer {index}")  # noqa: B023, E731
        assert layer.weights.keys() == wanted.weights.keys()
        assert layer.optimizer.keys() == wanted.optimizer.keys()
        for name, value in wanted.weights.items():
            close(layer.weights[name], value, name)
        for name, state in wanted.optimizer.items():
            entry = layer.optimizer[name]
            assert entry.numbers == state.numbers
            assert entry.tensors.keys() == state.tensors.keys()
            assert entry.tensors
            for key, value in state.tensors.items():
                close(entry.tensors[key], value, f"{key} of {name}")
            assert (entry.master is None) == (state.master is None)
            if state.master is not None:
                close(entry.master, state.master, f"master of {name}")


def _close(found: Any, expected: torch.Tensor, tolerance: float, what: str) -> None:
    assert found.dtype == expected.dtype, what
    if tolerance == 0.0:
        assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8)), what  # -0.0 isn't 0.0
    else:
        assert float((found - expected).norm() / expected.norm().clamp_min(1e-12)) <= tolerance, what


@pytest.mark.parametrize("name", MOVES)
def test_state_is_bit_equal_after_moving(launches: Launches, name: str) -> None:
    """What another plan, on other ranks and replicas, loads is bit for bit what was saved: it saves it again."""
    assert_equal(launches.read(f"{name}-on-4", "loaded"), launches.read(name))


@pytest.mark.parametrize("name", ["bf16", "adamw"])
def test_state_is_bit_equal_on_the_way_back(launches: Launches, name: str) -> None:
    """What 2 replicas sharded with ZeRO-1 loads unsharded on other ranks, bit for bit."""
    assert_equal(launches.read(f"{name}-back-on-2", "loaded"), launches.read(f"{name}-on-4"))


def test_state_of_one_process_is_bit_equal_under_a_plan(launches: Launches) -> None:
    """A plan loads what one process wrote bit for bit, and goes on as that process does."""
    single = Single(adamw)
    restore_checkpoint(launches.read("single"), single.layers, single.optimizer)
    assert_equal(launches.read("single-on-2", "loaded"), single.checkpoint(3))
    single.train(3, 2)
    assert_equal(launches.read("single-on-2"), single.checkpoint(5), tolerance=1e-6)


@pytest.mark.parametrize(("name", "make"), [("sgd", sgd), ("adamw", adamw), ("zero", adamw)])
def test_one_process_takes_over_from_a_plan(launches: Launches, name: str, make: Make) -> None:
    """One process that loads a plan's checkpoint holds it bit for bit."""
    single = Single(make)
    checkpoint = launches.read(name)
    restore_checkpoint(checkpoint, single.layers, single.optimizer)
    assert_equal(single.checkpoint(3), checkpoint)


@pytest.mark.parametrize(("name", "make", "num_replicas"), [("sgd", sgd, 1), ("adamw", adamw, 2), ("zero", adamw, 1)])
def test_training_goes_on_as_in_one_process(launches: Launches, name: str, make: Make, num_replicas: int) -> None:
    """Three steps under one plan and two under another are five steps of one process: weights and moments."""
    single = Single(make)
    single.train(0, 3)
    single.train(3, 2, num_replicas)
    assert_equal(launches.read(f"{name}-on-4"), single.checkpoint(5), tolerance=2e-6)


def test_progress_and_the_scripts_own_state_come_back(launches: Launches) -> None:
    """Every rank continues at the saved step with the script's own state, and the scheduler where it was."""
    for name in MOVES:
        for result in launches.results(f"{name}-on-4", 4):
            assert result["steps"] == 3
            assert result["client_state"] == {"from": name}
    scheduled = launches.read("bf16-on-4", "loaded")
    assert scheduled.lr_scheduler == launches.read("bf16").lr_scheduler
    assert scheduled.lr_scheduler is not None
    assert scheduled.outline.groups == launches.read("bf16").outline.groups
    assert scheduled.outline.groups[0]["lr"] != ADAMW["params"]["lr"]  # the scheduler has moved it


def test_deepspeed_reads_the_layer_files(launches: Launches) -> None:
    """A stock ``PipelineModule``, cut otherwise, loads the weights through DeepSpeed's own ``load_checkpoint``."""
    expected = launches.read("sgd")
    seen: dict[str, torch.Tensor] = {}
    for result in launches.results("stock", 2):
        seen |= result["weights"]
    wanted = {
        f"{index}.{name}": value for index, layer in enumerate(expected.layers) for name, value in layer.weights.items()
    }
    assert seen.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(seen[name], value), name


def test_weights_of_deepspeeds_own_checkpoint_load_under_a_plan(launches: Launches) -> None:
    """A folder that DeepSpeed wrote gives its weights when only they are asked for."""
    for result in launches.results("weights-of-deepspeed", 4):
        assert result["message"] == ""
        assert not result["is_unchanged"]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("sgd", ("trained with SGD", "the optimizer here is AdamW", "load_optimizer_states=False")),
        ("truncated", ("layer_04-optimizer_states.safetensors", "truncated")),
        ("incomplete", ("layer_07-model_states.pt is missing",)),
    ],
)
def test_what_does_not_fit_is_refused_on_every_rank(launches: Launches, name: str, says: tuple[str, ...]) -> None:
    """Every rank raises the same error, even if one alone reads the faulty file, and nothing is loaded."""
    found = launches.results(f"refused-{name}", 4)
    for result in found:
        assert result["message"] == found[0]["message"]
        assert result["message"].startswith("CheckpointError: ")
        assert result["is_unchanged"]
        for part in says:
            assert part in result["message"]


def test_a_folder_without_checkpoints_loads_nothing(launches: Launches) -> None:
    """As in DeepSpeed: no tag given and no file ``latest`` is no error, so that a script may always ask."""
    for result in launches.results("refused-missing", 4):
        assert result == {"message": "", "is_unchanged": True}


def test_nothing_but_checkpoints_is_left(launches: Launches) -> None:
    """Neither partial nor replaced folders stay behind, and ``latest`` names the newest."""
    folder = launches.folder / "sgd-on-4"
    assert sorted(path.name for path in folder.iterdir()) == ["global_step5", "latest", "loaded"]
    assert (folder / "latest").read_text() == "global_step5"
