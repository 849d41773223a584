"""The way itself: profile, optimize, train with DeepSpeed, train with stock DeepSpeed, train in one process."""

from __future__ import annotations

import json
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeplan.emit.comparison import compare_with_baselines
from pipeplan.emit.folder import DS_CONFIG_FILE, TRAIN_FILE, check_replaceable
from pipeplan.errors import PipeplanError
from pipeplan.plan.folder import PROFILE_FILE, load_plan
from pipeplan.quickstart.machine import LoggedCommand, check_compiler, cpu_environment, find_script, free_port
from pipeplan.resources import template_path
from pipeplan.simulate import simulate
from pipeplan.units import ms_from_ns

MODEL = "tiny-nemotron-h"
NUM_RANKS = 2
NUM_MICRO_BATCHES = 8
MICRO_BATCH_SIZE = 2
SEQUENCE_LENGTH = 64
SEED = 0
PROFILE_TIME_LIMIT_S = 20
SEARCH_WORK_LIMIT = 500_000

_NUM_WARM_UP_STEPS = 2  # DeepSpeed's first steps allocate and warm caches
_WORK_FOLDER = "quickstart"  # inside the plan folder: weights, losses and logs of this comparison
_LIMIT_S = 900.0  # of one step; generous, since slow and busy machines compile for minutes

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedRun:
    """How one of the runs went.

    Attributes:
        predicted_ms: Time a step by the simulator; ``None`` where it makes no statement.
        measured_ms: Median time a step after warm-up.
    """

    name: str
    predicted_ms: float | None
    measured_ms: float | None
    losses: tuple[float, ...]

    def largest_difference(self, truth: TrainedRun) -> float:
        """Return the largest relative difference of a step's loss from another run's."""
        pairs = zip(self.losses, truth.losses, strict=True)
        return max(abs(mine - theirs) / abs(theirs) for mine, theirs in pairs)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuickstartResult:
    """What the quickstart shows: the plan, stock DeepSpeed, and one process, which both must agree with."""

    folder: Path
    planned: TrainedRun
    stock: TrainedRun
    one_process: TrainedRun

    @property
    def launch_line(self) -> str:
        """The command that trains with the plan again."""
        return (
            f"DS_ACCELERATOR=cpu deepspeed --num_gpus {NUM_RANKS} {self.folder / TRAIN_FILE} "
            f"--deepspeed_config {self.folder / DS_CONFIG_FILE} --steps {len(self.planned.losses)}"
        )


def run_quickstart(folder: Path, num_steps: int, say: Say) -> QuickstartResult:
    """Go the whole way once on this machine's CPU, leaving a plan folder that DeepSpeed trains with again.

    Args:
        say: Called with what happens next.

    Raises:
        PipeplanError: There is no C++ compiler, or a step failed; names its log.
    """
    check_compiler()
    check_replaceable(folder)
    scratch = Path(tempfile.mkdtemp(prefix="pipeplan-quickstart-"))  # stays on failure: it holds the logs
    profile = scratch / PROFILE_FILE
    say(f"profiling {MODEL} on this machine's CPU")
    _pipeplan(
        ["profile", MODEL, "--device", "cpu", "-o", profile,
         "--micro-batch-size", MICRO_BATCH_SIZE, "--sequence-length", SEQUENCE_LENGTH,
         "--time-limit", PROFILE_TIME_LIMIT_S],
        "profiling", scratch / "profile.log",
    )  # fmt: skip
    say(f"optimizing for {NUM_RANKS} ranks and {NUM_MICRO_BATCHES} micro-batches")
    _pipeplan(
        ["optimize", profile, "-o", folder, "--ranks", NUM_RANKS, "--micro-batches", NUM_MICRO_BATCHES,
         "--work-limit", SEARCH_WORK_LIMIT, "--ds-config", template_path("quickstart/ds_base.json")],
        "optimizing", scratch / "optimize.log",
    )  # fmt: skip
    shutil.rmtree(scratch)
    comparison = _Comparison(folder, num_steps)
    say("training in one process, plain torch, for the true loss")
    one_process = comparison.train_in_one_process()
    say(f"training with the plan on {NUM_RANKS} ranks (the first time, DeepSpeed compiles for about a minute)")
    planned = comparison.train_with_plan()
    say("training with stock DeepSpeed: partition by parameters, 1F1B")
    stock = comparison.train_with_stock()
    return QuickstartResult(folder=folder, planned=planned, stock=stock, one_process=one_process)


class _Comparison:
    """The three runs on the same weights and data, and their files."""

    def __init__(self, folder: Path, num_steps: int) -> None:
        self._folder = folder
        self._num_steps = num_steps
        self._work = folder / _WORK_FOLDER
        self._work.mkdir(exist_ok=True)
        self._loaded = load_plan(folder)
        self._data = template_path("data/text.txt")
        self._init = self._work / "init"

    def train_in_one_process(self) -> TrainedRun:
        source = self._loaded.profile.model_source or {}
        config = self._work / "config.json"
        config.write_text(json.dumps(source["huggingface"]), encoding="utf-8")
        arguments = [
            sys.executable, template_path("quickstart/one_process.py"), "--config", config,
            "--ds-config", self._folder / DS_CONFIG_FILE, "--data", self._data,
            "--sequence-length", SEQUENCE_LENGTH, "--steps", self._num_steps, "--seed", SEED, "--init", self._init,
        ]  # fmt: skip
        result = self._train(arguments, "one-process", "training in one process")
        return TrainedRun(name="one process", predicted_ms=None, measured_ms=None, losses=tuple(result["losses"]))

    def train_with_plan(self) -> TrainedRun:
        arguments = [
            self._folder / TRAIN_FILE, "--deepspeed_config", self._folder / DS_CONFIG_FILE,
            "--steps", self._num_steps, "--seed", SEED, "--init", self._init,
        ]  # fmt: skip
        result = self._train([*self._launcher(), *arguments], "planned", "training with the plan")
        timeline = simulate(self._loaded.plan, self._loaded.profile, self._loaded.cluster)
        return _run("pipeplan", ms_from_ns(timeline.makespan_ns), result)

    def train_with_stock(self) -> TrainedRun:
        arguments = [
            template_path("quickstart/stock.py"), "--deepspeed_config", self._folder / DS_CONFIG_FILE,
            "--profile", self._folder / PROFILE_FILE, "--num-ranks", NUM_RANKS, "--data", self._data,
            "--steps", self._num_steps, "--init", self._init,
        ]  # fmt: skip
        result = self._train([*self._launcher(), *arguments], "stock", "training with stock DeepSpeed")
        return _run("stock DeepSpeed", self._predicted_stock_ms(), result)

    def _predicted_stock_ms(self) -> float:
        loaded = self._loaded
        timeline = simulate(loaded.plan, loaded.profile, loaded.cluster)
        rows = compare_with_baselines(loaded.plan, timeline, loaded.profile, loaded.cluster).baselines
        [stock] = [row for row in rows if (row.name, row.split) == ("1F1B", "parameters")]
        return ms_from_ns(stock.makespan_ns)

    def _launcher(self) -> list[object]:
        return [find_script("deepspeed"), "--num_gpus", NUM_RANKS, "--master_port", free_port()]

    def _train(self, arguments: list[Any], name: str, what: str) -> dict[str, Any]:
        losses = self._work / f"{name}.json"
        losses.unlink(missing_ok=True)
        command = LoggedCommand(
            what=what,
            arguments=[str(part) for part in [*arguments, "--losses", losses]],
            log=self._work / f"{name}.log",
            environment=cpu_environment(),
            timeout_s=_LIMIT_S,
        )
        command.run()
        if not losses.is_file():
            raise PipeplanError(f"{what} ended without writing {losses}; its output is in {command.log}")
        result: dict[str, Any] = json.loads(losses.read_text(encoding="utf-8"))
        return result


def _run(name: str, predicted_ms: float, result: dict[str, Any]) -> TrainedRun:
    steady = result["step_ms"][_NUM_WARM_UP_STEPS:] or result["step_ms"]
    return TrainedRun(
        name=name,
        predicted_ms=predicted_ms,
        measured_ms=statistics.median(steady),
        losses=tuple(result["losses"]),
    )


def _pipeplan(arguments: list[Any], what: str, log: Path) -> None:
    """Run a pipeplan command in a process of its own, as a user would."""
    LoggedCommand(
        what=what,
        arguments=[sys.executable, "-m", "pipeplan", *map(str, arguments)],
        log=log,
        environment=cpu_environment(),
        timeout_s=_LIMIT_S,
    ).run()
