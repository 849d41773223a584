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
WITH_ADAMW = {"optimizer": ADAMW}
BF16_ADAMW = {**BF16, **WITH_ADAMW, "scheduler": SCHEDULER}
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


@dataclass(frozen=True)
class Setting:
    """Where the launches work, the plans that they run, and the configs."""

    folder: Path

    def plan(self, name: str, *described: Any, **options: Any) -> Path:
        """Return the folder of a plan, written on first use."""
        folder = self.folder / f"plan-{name}"
        return folder if folder.is_dir() else write_folder(folder, MODEL, *described, **options)

    @property
    def interleaved(self) -> Path:
        """2 ranks, 4 stages in a loop."""
        order = interleaved_one_f_one_b(2, 2, NUM_MICRO_BATCHES)
        return self.plan("interleaved", looped_placement(2, 2), order)

    @property
    def halves(self) -> Path:
        """2 ranks, with deferred weight gradients."""
        return self.plan("halves", looped_placement(2, 1), zb_h1(2, NUM_MICRO_BATCHES))

    @property
    def scattered(self) -> Path:
        """2 ranks, 5 stages anywhere, in any order."""
        placement = Placement.parse("1,0,1,0,0")
        return self.plan("scattered", placement, random_order(placement, NUM_MICRO_BATCHES, seed=8))

    @property
    def v_on_4(self) -> Path:
        """4 ranks, 8 stages in a V, with deferred weight gradients."""
        return self.plan("v", folded_placement(4, 2), zb_v(4, NUM_MICRO_BATCHES))

    @property
    def replicated(self) -> Path:
        """2 replicas of 2 ranks."""
        return self.plan("replicated", looped_placement(2, 1), one_f_one_b(2, NUM_MICRO_BATCHES), num_replicas=2)

    def case(self, name: str, plan: Path, config: Mapping[str, Any], num_steps: int, load: str | None = None) -> Any:
        """Return a case that loads, trains and saves."""
        return {
            **self.common(plan, config),
            "kind": "resume",
            "name": name,
            "num_steps": num_steps,
            "save": str(self.folder / name),
            **({} if load is None else {"load": str(self.folder / load)}),
        }

    def common(self, plan: Path, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return what every case has."""
        return {
            "model": MODEL,
            "folder": str(plan),
            "num_micro_batches": NUM_MICRO_BATCHES,
            "max_norm": NO_CLIPPING,
            "config": dict(config),
        }

    def refused(self, name: str, load: str, kind: str = "refuse", **options: Any) -> dict[str, Any]:
        """Return a case that must not load, or only weights."""
        path = str(self.folder / load)
        common = self.common(self.v_on_4, WITH_ADAMW)
        return {**common, "kind": kind, "name": name, "load": path, "save": path, "options": options}

    def launch(self, num_processes: int, cases: Sequence[dict[str, Any]]) -> Launches:
        """Run the cases."""
        launching.launch(num_processes, cases, self.folder, script="checkpoint_worker.py")
        return Launches(self.folder)


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    """One folder for all launches."""
    return Setting(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="module")
def saved(setting: Setting) -> Launches:
    """Save on 2 ranks, and go on there from one process."""
    single = Single(adamw)
    single.train(0, 3)
    write_checkpoint(single.checkpoint(3), setting.folder / "single")
    return setting.launch(
        2,
        [
            setting.case("sgd", setting.interleaved, {}, 3),
            setting.case("adamw", setting.halves, WITH_ADAMW, 3),
            setting.case("bf16", setting.interleaved, BF16_ADAMW, 3),
            setting.case("zero", setting.scattered, {**ZERO_1, **WITH_ADAMW}, 3),
            setting.case("single-on-2", setting.interleaved, WITH_ADAMW, 2, "single"),
            {
                **setting.common(setting.interleaved, {}),
                "kind": "read-with-deepspeed",
                "name": "stock",
                "num_stages": 2,
                "load": str(setting.folder / "sgd"),
                "save": str(setting.folder / "stock"),
            },
        ],
    )


@pytest.fixture(scope="module")
def moved(setting: Setting, saved: Launches) -> Launches:
    """Load on 4 ranks what 2 ranks saved, and go on; try to load what doesn't fit."""
    for name in ("truncated", "incomplete"):
        shutil.copytree(setting.folder / "adamw", setting.folder / name)
    damaged = setting.folder / "truncated" / "global_step3" / "layer_04-optimizer_states.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-10])
    (setting.folder / "incomplete" / "global_step3" / "layer_07-model_states.pt").unlink()
    (setting.folder / "full").write_text("")  # no folder can be made in a file
    return setting.launch(
        4,
        [
            setting.case("sgd-on-4", setting.v_on_4, {}, 2, "sgd"),
            setting.case("adamw-on-4", setting.replicated, {**ZERO_1, **WITH_ADAMW}, 2, "adamw"),
            setting.case("bf16-on-4", setting.replicated, BF16_ADAMW, 0, "bf16"),
            setting.case("zero-on-4", setting.v_on_4, WITH_ADAMW, 2, "zero"),
            *(setting.refused(f"refused-{name}", name) for name in ("sgd", "truncated", "incomplete", "missing")),
            setting.refused("weights-of-deepspeed", "stock", tag="stock", load_module_only=True),
            setting.refused("weights-of-sgd", "sgd", load_module_only=True),
            setting.refused("disk", "full", "fail-to-save"),
        ],
    )


@pytest.fixture(scope="module")
def returned(setting: Setting, moved: Launches) -> Launches:
    """Load on 2 ranks what 4 ranks, 2 of them replicas, saved."""
    return setting.launch(
        2,
        [
            setting.case("bf16-on-2", setting.halves, BF16_ADAMW, 0, "bf16-on-4"),
            setting.case("adamw-on-2", setting.scattered, WITH_ADAMW, 0, "adamw-on-4"),
        ],
    )


def assert_equal(found: Checkpoint, expected: Checkpoint, tolerance: float = 0.0) -> None:
    """Check weights, moments, masters, step counts and progress, layer by layer and name by name."""
    assert found.outline.optimizer == expected.outline.optimizer
    assert found.outline.owner_by_tied == expected.outline.owner_by_tied
    assert found.outline.progress.steps == expected.outline.progress.steps
    assert found.outline.progress.micro_batches == expected.outline.progress.micro_batches
    for index, (layer, wanted) in enumerate(zip(found.layers, expected.layers, strict=True)):
        assert layer.weights.keys() == wanted.weights.keys()
        assert layer.optimizer.keys() == wanted.optimizer.keys()
        for name, value in wanted.weights.items():
            _assert_close(layer.weights[name], value, tolerance, f"{index}.{name}")
        for name, state in wanted.optimizer.items():
            entry = layer.optimizer[name]
            assert entry.numbers == state.numbers
            assert entry.tensors.keys() == state.tensors.keys()
            assert entry.tensors
            for key, value in state.tensors.items():
                _assert_close(entry.tensors[key], value, 2 * tolerance, f"{key} of {index}.{name}")
            assert (entry.master is None) == (state.master is None)
            if state.master is not None:
                _assert_close(entry.master, state.master, tolerance, f"master of {index}.{name}")


def _assert_close(found: Any, expected: torch.Tensor, tolerance: float, what: str) -> None:
    assert found.dtype == expected.dtype, what
    if tolerance == 0.0:
        assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8)), what  # -0.0 isn't 0.0
    else:
        assert float((found - expected).norm() / expected.norm().clamp_min(1e-12)) <= tolerance, what


def test_state_of_one_process_is_bit_equal_under_a_plan(saved: Launches) -> None:
    """A plan loads what one process wrote bit for bit, and goes on as that process does."""
    single = Single(adamw)
    restore_checkpoint(saved.read("single"), single.layers, single.optimizer)
    assert_equal(saved.read("single-on-2", "loaded"), single.checkpoint(3))
    single.train(3, 2)
    assert_equal(saved.read("single-on-2"), single.checkpoint(5), tolerance=1e-6)


@pytest.mark.parametrize(("name", "make"), [("sgd", sgd), ("adamw", adamw), ("zero", adamw)])
def test_one_process_takes_over_from_a_plan(saved: Launches, name: str, make: Make) -> None:
    """One process that loads a plan's checkpoint holds it bit for bit."""
    single = Single(make)
    checkpoint = saved.read(name)
    restore_checkpoint(checkpoint, single.layers, single.optimizer)
    assert_equal(single.checkpoint(3), checkpoint)


def test_deepspeed_reads_the_layer_files(saved: Launches) -> None:
    """A stock ``PipelineModule``, cut otherwise, loads the weights through DeepSpeed's own ``load_checkpoint``."""
    expected = saved.read("sgd")
    seen: dict[str, torch.Tensor] = {}
    for result in saved.results("stock", 2):
        seen |= result["weights"]
    wanted = {
        f"{index}.{name}": value for index, layer in enumerate(expected.layers) for name, value in layer.weights.items()
    }
    assert seen.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(seen[name], value), name


@pytest.mark.parametrize("name", MOVES)
def test_state_is_bit_equal_after_moving(moved: Launches, name: str) -> None:
    """What another plan, on other ranks and replicas, loads is bit for bit what was saved: it saves it again."""
    assert_equal(moved.read(f"{name}-on-4", "loaded"), moved.read(name))


@pytest.mark.parametrize(("name", "make", "num_replicas"), [("sgd", sgd, 1), ("adamw", adamw, 2), ("zero", adamw, 1)])
def test_training_goes_on_as_in_one_process(moved: Launches, name: str, make: Make, num_replicas: int) -> None:
    """Three steps under one plan and two under another are five steps of one process: weights and moments."""
    single = Single(make)
    single.train(0, 3)
    single.train(3, 2, num_replicas)
    assert_equal(moved.read(f"{name}-on-4"), single.checkpoint(5), tolerance=1e-6)


def test_progress_and_the_scripts_own_state_come_back(moved: Launches) -> None:
    """Every rank continues at the saved step with the script's own state, and the scheduler where it was."""
    for name in MOVES:
        for result in moved.results(f"{name}-on-4", 4):
            assert result["steps"] == 3
            assert result["client_state"] == {"from": name}
    scheduled = moved.read("bf16-on-4", "loaded")
    assert scheduled.lr_scheduler == moved.read("bf16").lr_scheduler
    assert scheduled.lr_scheduler is not None
    assert scheduled.outline.groups == moved.read("bf16").outline.groups
    assert scheduled.outline.groups[0]["lr"] != ADAMW["params"]["lr"]  # the scheduler has moved it


@pytest.mark.parametrize("name", ["deepspeed", "sgd"])
def test_weights_alone_load_under_a_plan(moved: Launches, name: str) -> None:
    """A folder that DeepSpeed wrote, or another optimizer trained, gives its weights when they alone are asked for."""
    expected = moved.read("sgd")
    for result in moved.results(f"weights-of-{name}", 4):
        assert result["message"] == ""
        assert result["steps"] == 0
        for weight, value in result["weights"].items():
            index, _, local = weight.partition(".")
            assert torch.equal(value, expected.layers[int(index)].weights[local]), weight


def test_what_one_rank_cannot_write_fails_on_all(moved: Launches) -> None:
    """When the folder can't be made, every rank says so, instead of waiting for one that has raised."""
    found = moved.results("disk", 4)
    for result in found:
        assert result["message"] == found[0]["message"]
        assert "can't be made" in result["message"]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("sgd", ("trained with SGD", "the optimizer here is AdamW", "load_optimizer_states=False")),
        ("truncated", ("layer_04-optimizer_states.safetensors", "truncated")),
        ("incomplete", ("layer_07-model_states.pt is missing",)),
    ],
)
def test_what_does_not_fit_is_refused_on_every_rank(moved: Launches, name: str, says: tuple[str, ...]) -> None:
    """Every rank raises the same error, even if one alone reads the faulty file, and nothing is loaded."""
    found = moved.results(f"refused-{name}", 4)
    for result in found:
        assert result["message"] == found[0]["message"]
        assert result["message"].startswith("CheckpointError: ")
        assert result["is_unchanged"]
        for part in says:
            assert part in result["message"]


def test_a_folder_without_checkpoints_loads_nothing(moved: Launches) -> None:
    """As in DeepSpeed: no tag given and no file ``latest`` is no error, so that a script may always ask."""
    for result in moved.results("refused-missing", 4):
        assert result["message"] == ""
        assert result["is_unchanged"]


def test_nothing_but_checkpoints_is_left(moved: Launches) -> None:
    """Neither partial nor replaced folders stay behind, and ``latest`` names the newest."""
    folder = moved.folder / "sgd-on-4"
    assert sorted(path.name for path in folder.iterdir()) == ["global_step5", "latest", "loaded"]
    assert (folder / "latest").read_text() == "global_step5"


@pytest.mark.parametrize("name", ["bf16", "adamw"])
def test_state_is_bit_equal_on_the_way_back(returned: Launches, name: str) -> None:
    """What 2 replicas sharded with ZeRO-1 loads unsharded on other ranks, bit for bit."""
    assert_equal(returned.read(f"{name}-on-2", "loaded"), returned.read(f"{name}-on-4"))
