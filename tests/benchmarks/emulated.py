"""Prediction against reality, through the real launcher: ``python tests/benchmarks/emulated.py``.

The layers of published-size models sleep for their profiled time (scaled to 10 to 40 ms an op), compute a little and
allocate what they keep, so that 8 ranks run on few cores as they would on devices; every table of theirs says
"emulated compute". One plan calibrates the simulator and is then left out. One more case, of 2 ranks, computes for
real. Targets:

- step time, predicted against measured: mean error at most 3 %, worst at most 6 %
- peak of live tensor bytes of each rank: within 5 %
- speed-up over stock DeepSpeed: at least 0.95 of the predicted one
- our engine against stock DeepSpeed on the same 1F1B plan: at most 1.02 of its time, also with 1 MB messages
- host overhead of an op, ranks no more than cores: median at most 0.8 ms
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from emulated_layers import DEVICE, emulated_profile, set_priority
from rich.console import Console
from rich.table import Table

from pipeplan.adapt.calibrate import Calibration, calibrate, profiled_ns
from pipeplan.adapt.observations import observe_messages, observe_ops
from pipeplan.cluster import Cluster, Link, equal_ranks
from pipeplan.plan.folder import write_plan_folder
from pipeplan.plan.layout import Partition
from pipeplan.plan.ops import Op, OpKind, Order
from pipeplan.plan.orders import looped_placement, one_f_one_b, zb_h1
from pipeplan.plan.types import Plan
from pipeplan.profile.file import profile_digest, read_profile
from pipeplan.profile.types import Profile
from pipeplan.program.file import write_program
from pipeplan.program.trace import Trace, read_trace
from pipeplan.program.verify import verify_plan
from pipeplan.search.optimize import optimize
from pipeplan.search.result import SearchResult
from pipeplan.simulate import Timeline, simulate

HERE = Path(__file__).parent
MODELS = ("nemotron-h-8b", "gemma-2-9b", "jamba-1.5-large")
SPEEDUP_MODELS = ("nemotron-h-8b", "gemma-2-9b")
NAMED_PLANS = (
    ("1F1B", "uniform"),
    ("1F1B", "time-balanced"),
    ("interleaved 1F1B v2", "time-balanced"),
    ("ZB-V", "time-balanced"),
    ("ZB-H1", "time-balanced"),
)
STAGE_FORWARD_MS = 20.0  # F of a stage, one stage a rank; B is about twice that, halves and halved stages less
ACTIVATION_BYTES = 12e6  # of one micro-batch in the whole emulated model
LARGE_MESSAGE_BYTES = 1_000_000
WORK_LIMIT = 400_000
CALIBRATION = "calibration"
CAPPED, FREE = "co-optimised, memory of stock", "co-optimised, any memory"
# What a search on this machine would know from an earlier calibration; predictions use the one of their own run.
_USUAL_OVERHEADS_NS = {"F": 250_000, "B": 450_000, "I": 550_000, "W": 500_000, "send": 220_000, "wait": 110_000}
_USUAL_LINK = Link(300_000, 1000.0)

console = Console(width=140)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One timed run and what it left."""

    name: str
    label: str
    folder: Path
    plan: Plan
    profile: Profile
    options: dict[str, Any]

    @cached_property
    def result(self) -> dict[str, Any]:
        """What rank 0 wrote."""
        content: dict[str, Any] = json.loads((self.folder.parent / f"{self.name}.json").read_text())
        return content

    @property
    def step_ms(self) -> float:
        """Median measured time of a batch."""
        return statistics.median(self.result["step_ms"])

    @property
    def traces(self) -> list[Trace]:
        """The measured batches."""
        return [read_trace(path) for path in sorted(self.folder.parent.glob(f"{self.name}-*.trace.yaml"))]


class Run:
    """The cases of one world size: written, launched together, read."""

    def __init__(self, output: Path, num_ranks: int, num_steps: int) -> None:
        self.num_ranks = num_ranks
        self.num_micro_batches = 2 * num_ranks
        self._output = output / f"ranks-{num_ranks}"
        self._output.mkdir(parents=True, exist_ok=True)
        self._num_steps = num_steps
        self.cases: list[Case] = []

    def add(self, name: str, label: str, plan: Plan, profile: Profile, cluster: Cluster, **options: Any) -> Case:
        """Write a case."""
        folder = self._output / name
        write_plan_folder(plan, profile, cluster, folder)
        write_program(verify_plan(plan, profile, cluster), folder / "program.yaml")
        case = Case(name=name, label=label, folder=folder, plan=plan, profile=profile, options=options)
        self.cases.append(case)
        return case

    def launch(self, timeout_s: int) -> None:
        """Run everything under the real launcher."""
        listing = [
            {
                "engine": "planned",
                "name": case.name,
                "folder": str(case.folder),
                "output": str(self._output),
                "num_micro_batches": case.plan.num_micro_batches,
                "num_steps": self._num_steps,
                **case.options,
            }
            for case in self.cases
        ]
        (self._output / "cases.json").write_text(json.dumps(listing))
        launch(self.num_ranks, self._output / "cases.json", self._output / "launch.log", timeout_s)


def launch(num_ranks: int, cases: Path, log: Path, timeout_s: int) -> None:
    """Run the worker under the real ``deepspeed`` launcher."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    scripts = Path(sys.executable).parent
    environment = {
        **os.environ,
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(map(str, (HERE, HERE.parents[1]))),
    }
    command = [scripts / "deepspeed", "--num_gpus", num_ranks, "--master_port", port]
    command += [HERE / "emulated_worker.py", "--cases", cases]
    with log.open("w") as stream:
        process = subprocess.Popen(
            list(map(str, command)), env=environment, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status: int | None = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            status = None
    if status != 0:
        sys.exit(f"the launch ended with status {status}; the end of {log}:\n{log.read_text()[-4000:]}")


# Plans.


def mixed_order(num_ranks: int, num_micro_batches: int) -> Order:
    """Return ZB-H1 with whole backwards for every other micro-batch, so that one trace holds all kinds of op."""
    return Order.of(
        [
            Op(op.stage, OpKind.B if op.kind is OpKind.I and op.micro_batch % 2 else op.kind, op.micro_batch)
            for op in ops
            if not (op.kind is OpKind.W and op.micro_batch % 2)
        ]
        for ops in zb_h1(num_ranks, num_micro_batches)
    )


def plain_plan(profile: Profile, order: Order, partition: Partition, num_micro_batches: int) -> Plan:
    """Return the plan of one stage a rank."""
    return Plan(
        model=profile.model,
        num_micro_batches=num_micro_batches,
        partition=partition,
        placement=looped_placement(order.num_ranks, 1),
        order=order,
        profile_digest=profile_digest(profile),
    )


def named_plan(found: SearchResult, name: str, split: str) -> Plan:
    """Return a baseline's plan."""
    return next(row for row in found.baselines if (row.name, row.split) == (name, split)).make_plan()


def scaled_profile(folder: Path, model: str, num_ranks: int, boundary_bytes: int | None = None) -> Profile:
    """Return the emulated profile of a model."""
    profile = read_profile(folder / f"{model}.yaml")
    factor = ACTIVATION_BYTES / sum(layer.activation_bytes for layer in profile.layers)
    if boundary_bytes is not None:
        profile = replace(
            profile,
            layers=tuple(replace(layer, output_bytes=round(boundary_bytes / factor)) for layer in profile.layers),
        )
    return emulated_profile(profile, num_stages=num_ranks, stage_forward_ms=STAGE_FORWARD_MS, num_bytes=factor)


def usual_cluster(num_ranks: int) -> Cluster:
    """Return the cluster that plans are searched for."""
    cluster = equal_ranks(num_ranks, DEVICE)
    return replace(cluster, within_node=_USUAL_LINK, between_nodes=_USUAL_LINK, host_overhead_ns=_USUAL_OVERHEADS_NS)


@dataclass(frozen=True, kw_only=True)
class ModelCases:
    """The cases of one model on one world size."""

    model: str
    calibration: Case
    planned: list[Case]
    stock: dict[str, Case]

    @cached_property
    def calibrated(self) -> Calibration:
        """The costs that the calibration plan's traces gave."""
        case = self.calibration
        return calibrate(case.traces, case.profile, equal_ranks(case.plan.num_ranks, DEVICE))

    def predict(self, case: Case) -> Timeline:
        """Return the prediction of a case with the calibrated costs."""
        return simulate(case.plan, self.calibrated.profile, self.calibrated.cluster)


def add_model(run: Run, profiles: Path, model: str, *, with_stock: bool) -> ModelCases:
    """Write the cases of a model."""
    profile = scaled_profile(profiles, model, run.num_ranks)
    cluster = usual_cluster(run.num_ranks)
    found = optimize(profile, cluster, num_micro_batches=run.num_micro_batches, work_limit=WORK_LIMIT)

    def add(label: str, plan: Plan, **options: Any) -> Case:
        name = f"{model}-{label}".replace(" ", "-").replace(",", "").lower()
        return run.add(name, label, plan, profile, cluster, **options)

    balanced = named_plan(found, "1F1B", "time-balanced").partition
    mixed = mixed_order(run.num_ranks, run.num_micro_batches)
    planned = [add(f"{name}, {split}", named_plan(found, name, split), memory=True) for name, split in NAMED_PLANS]
    planned.append(add(CAPPED, within_memory_of_stock(found, profile, cluster), memory=True))
    planned.append(add(FREE, found.plan, memory=True))
    stock = {}
    if with_stock:
        for split in ("uniform", "parameters"):
            plan = named_plan(found, "1F1B", split)
            stock[split] = add(f"stock {split}", plan, engine="stock", partition_method=split)
    return ModelCases(
        model=model,
        calibration=add(CALIBRATION, plain_plan(profile, mixed, balanced, run.num_micro_batches)),
        planned=planned,
        stock=stock,
    )


def within_memory_of_stock(found: SearchResult, profile: Profile, cluster: Cluster) -> Plan:
    """Return the co-optimised plan that keeps every rank below the heaviest one of stock DeepSpeed."""
    stock = next(row for row in found.baselines if (row.name, row.split) == ("1F1B", "uniform"))
    cap = max(stock.peak_memory_bytes_by_rank)
    capped = replace(cluster, ranks=tuple(replace(rank, memory_bytes=cap) for rank in cluster.ranks))
    count = found.plan.num_micro_batches
    return optimize(profile, capped, num_micro_batches=count, work_limit=WORK_LIMIT).plan


def add_engines(run: Run, profiles: Path) -> list[tuple[str, Case, Case]]:
    """Write the cases that compare the engines on one 1F1B plan."""
    found = []
    for label, boundary_bytes in (("small messages", None), ("1 MB messages", LARGE_MESSAGE_BYTES)):
        profile = scaled_profile(profiles, MODELS[0], run.num_ranks, boundary_bytes)
        cluster = usual_cluster(run.num_ranks)
        result = optimize(profile, cluster, num_micro_batches=run.num_micro_batches, strategy="baselines")
        plan = named_plan(result, "1F1B", "time-balanced")
        name = f"engines-{label}".replace(" ", "-").lower()
        ours = run.add(f"{name}-ours", label, plan, profile, cluster)
        bounds = list(plan.partition.bounds)
        stock = run.add(f"{name}-stock", label, plan, profile, cluster, engine="stock", bounds=bounds)
        found.append((label, ours, stock))
    return found


# Tables.


def verdict(value: float, limit: float, *, at_least: bool = False) -> str:
    """Return the value's verdict."""
    return "met" if (value >= limit if at_least else value <= limit) else "MISSED"


def print_predictions(runs: Sequence[tuple[Run, list[ModelCases]]]) -> None:
    """Print predicted against measured step times."""
    table = Table(
        "model",
        "ranks",
        "plan",
        "predicted ms",
        "measured ms",
        "error",
        "busy cores",
        title="Step time, emulated compute",
    )
    errors = []
    for run, models in runs:
        for cases in models:
            for case in cases.planned:
                predicted_ms = cases.predict(case).makespan_ns / 1e6
                errors.append(predicted_ms / case.step_ms - 1.0)
                table.add_row(
                    cases.model, str(run.num_ranks), case.label, f"{predicted_ms:.1f}", f"{case.step_ms:.1f}",
                    f"{errors[-1]:+.2%}", f"{case.result['busy_cores']:.2f}",
                )  # fmt: skip
    console.print(table)
    mean, worst = statistics.mean(map(abs, errors)), max(map(abs, errors))
    console.print("busy cores: what the emulation itself computes; near the number of cores, ranks wait for each other")
    console.print(f"mean error {mean:.2%} (target 3 %: {verdict(mean, 0.03)}), ", end="")
    console.print(f"worst {worst:.2%} (target 6 %: {verdict(worst, 0.06)})")


def print_memory(runs: Sequence[tuple[Run, list[ModelCases]]]) -> None:
    """Print predicted against measured peaks of live tensor bytes."""
    table = Table(
        "model", "ranks", "plan", "heaviest rank MB", "predicted / measured by rank",
        title="Peak of live tensor bytes, emulated compute",
    )  # fmt: skip
    ratios: list[float] = []
    for run, models in runs:
        for cases in models:
            for case in cases.planned:
                measured = case.result["peak_bytes_by_rank"]
                peaks = cases.predict(case).memory_by_rank
                found = [peak.total / real for peak, real in zip(peaks, measured, strict=True)]
                ratios += found
                table.add_row(
                    cases.model, str(run.num_ranks), case.label, f"{max(measured) / 1e6:.1f}",
                    " ".join(f"{ratio:.3f}" for ratio in found),
                )  # fmt: skip
    console.print(table)
    worst = max(abs(ratio - 1.0) for ratio in ratios)
    console.print(f"worst error {worst:.2%} (target 5 %: {verdict(worst, 0.05)})")


def print_speedups(runs: Sequence[tuple[Run, list[ModelCases]]]) -> None:
    """Print the speed-up of the co-optimised plan over stock DeepSpeed."""
    table = Table(
        "model", "ranks", "stock split", "our plan", "stock ms", "ours ms", "speed-up", "predicted", "share",
        title="Co-optimised plan against stock DeepSpeed 1F1B, emulated compute",
    )  # fmt: skip
    shares = []
    for run, models in runs:
        for cases in models:
            for split, stock in cases.stock.items():
                if stock.result["bounds"] != list(stock.plan.partition.bounds):
                    console.print(
                        f"{cases.model}: DeepSpeed cut at {stock.result['bounds']}, we predict {split} at "
                        f"{list(stock.plan.partition.bounds)}"
                    )
                for ours in (case for case in cases.planned if case.label in (CAPPED, FREE)):
                    measured = stock.step_ms / ours.step_ms
                    predicted = cases.predict(stock).makespan_ns / cases.predict(ours).makespan_ns
                    shares.append(measured / predicted)
                    table.add_row(
                        cases.model, str(run.num_ranks), split, ours.label, f"{stock.step_ms:.1f}",
                        f"{ours.step_ms:.1f}", f"{measured:.3f}", f"{predicted:.3f}", f"{shares[-1]:.3f}",
                    )  # fmt: skip
    if shares:
        console.print(table)
        console.print(f"least share {min(shares):.3f} (target 0.95: {verdict(min(shares), 0.95, at_least=True)})")


def print_engines(found: Sequence[tuple[Run, list[tuple[str, Case, Case]]]]) -> None:
    """Print our engine against stock DeepSpeed on the same plan."""
    table = Table(
        "ranks", "messages", "stock ms", "ours ms", "ours / stock", "busy cores, stock", "ours",
        title="The same 1F1B plan on both engines, emulated compute",
    )  # fmt: skip
    ratios = []
    for run, rows in found:
        for label, ours, stock in rows:
            ratios.append(ours.step_ms / stock.step_ms)
            table.add_row(
                str(run.num_ranks), label, f"{stock.step_ms:.1f}", f"{ours.step_ms:.1f}", f"{ratios[-1]:.3f}",
                f"{stock.result['busy_cores']:.2f}", f"{ours.result['busy_cores']:.2f}",
            )  # fmt: skip
    console.print(table)
    console.print(f"largest ratio {max(ratios):.3f} (target 1.02: {verdict(max(ratios), 1.02)})")


def print_overheads(run: Run, cases: Sequence[Case]) -> None:
    """Print what the engine adds to each op."""
    table = Table("plan", "op", "median ms", title=f"Host overhead on {run.num_ranks} ranks, emulated compute")
    all_ns: list[float] = []
    cluster = equal_ranks(run.num_ranks, DEVICE)
    for case in cases:
        traces = case.traces
        profiled = {
            (observed.first_layer, observed.kind): profiled_ns(observed, case.profile, cluster).sum()
            for observed in observe_ops(traces)
        }
        excess_ns: dict[OpKind, list[float]] = {}
        for trace in traces:
            bounds = trace.partition.bounds
            for timed in (timed for rank in trace.ranks for timed in rank.ops):
                expected = profiled[bounds[timed.op.stage], timed.op.kind]
                excess_ns.setdefault(timed.op.kind, []).append(timed.end_ns - timed.start_ns - expected)
        for kind, values in sorted(excess_ns.items()):
            all_ns += values
            table.add_row(case.label, kind.name, f"{statistics.median(values) / 1e6:.3f}")
        messages = observe_messages(traces)
        table.add_row(case.label, "send of a message", f"{(messages.send_ns or 0) / 1e6:.3f}")
        table.add_row(case.label, "receive of a message", f"{(messages.wait_ns or 0) / 1e6:.3f}")
    console.print(table)
    median_ms = statistics.median(all_ns) / 1e6
    console.print(f"median over all ops {median_ms:.3f} ms (target 0.8 ms: {verdict(median_ms, 0.8)})")


def print_real(run: Run, cases: Sequence[Case], calibration: Case, cluster: Cluster) -> None:
    """Print predicted against measured step times with real compute, calibrated on a plan of two equal stages."""
    table = Table(
        "plan", "measured ms", "predicted ms", "error", title=f"Step time, {run.num_ranks} ranks, real compute"
    )
    costs = calibrate(calibration.traces, calibration.profile, cluster)
    for case in cases:
        predicted_ms = simulate(case.plan, costs.profile, costs.cluster).makespan_ns / 1e6
        table.add_row(
            case.label, f"{case.step_ms:.1f}", f"{predicted_ms:.1f}", f"{predicted_ms / case.step_ms - 1.0:+.2%}"
        )
    console.print(table)
    for note in costs.notes:
        console.print(note)


# The parts.


def compare_on_ranks(arguments: argparse.Namespace) -> None:
    """Run what needs 4 and 8 ranks and print its tables."""
    runs: list[tuple[Run, list[ModelCases]]] = []
    engines: list[tuple[Run, list[tuple[str, Case, Case]]]] = []
    for num_ranks in arguments.ranks:
        run = Run(arguments.output, num_ranks, arguments.steps)
        models = []
        if "plans" in arguments.parts:
            models = [
                add_model(run, arguments.profiles, model, with_stock=model in SPEEDUP_MODELS)
                for model in arguments.models
            ]
            runs.append((run, models))
        if "engines" in arguments.parts:
            engines.append((run, add_engines(run, arguments.profiles)))
        report_load(f"{num_ranks} ranks, {len(run.cases)} cases")
        run.launch(arguments.timeout)
    if runs:
        print_predictions(runs)
        print_memory(runs)
        print_speedups(runs)
    if engines:
        print_engines(engines)


def measure_overheads(arguments: argparse.Namespace) -> None:
    """Run 2 ranks and print the engine's overhead."""
    run = Run(arguments.output, 2, arguments.steps)
    profile, cluster = scaled_profile(arguments.profiles, MODELS[0], 2), usual_cluster(2)
    found = optimize(profile, cluster, num_micro_batches=4, strategy="baselines")
    names = (("1F1B", "time-balanced"), ("ZB-H1", "time-balanced"), ("ZB-V", "time-balanced"))
    cases = [
        run.add(f"overhead-{name}".lower(), name, named_plan(found, name, split), profile, cluster)
        for name, split in names
    ]
    report_load("host overhead, 2 ranks")
    run.launch(arguments.timeout)
    print_overheads(run, cases)


def compare_real(arguments: argparse.Namespace) -> None:
    """Profile a small model, run it on 2 ranks and print predicted against measured times."""
    import real_model
    import torch

    from pipeplan.model.factory import layers_from_factory
    from pipeplan.profile.measure import measure_profile

    torch.set_num_threads(1)
    model = layers_from_factory("real_model:factory", HERE)
    set_priority(is_raised=True)  # as the ranks are timed
    profile = measure_profile(
        model, device="cpu", micro_batch_size=1, sequence_length=real_model.NUM_TOKENS, device_name="cpu"
    )
    set_priority(is_raised=False)
    cluster = equal_ranks(2, profile.devices[0])
    run = Run(arguments.output / "real", 2, arguments.steps)
    count = 8
    found = optimize(profile, cluster, num_micro_batches=count, work_limit=WORK_LIMIT)
    balanced = named_plan(found, "1F1B", "time-balanced").partition

    def add(name: str, plan: Plan) -> Case:
        return run.add(f"real-{name}".replace(" ", "-"), name, plan, profile, cluster, real=True)

    cases = [
        add("1F1B", plain_plan(profile, one_f_one_b(2, count), balanced, count)),
        add("ZB-H1", plain_plan(profile, zb_h1(2, count), balanced, count)),
        add("ZB-V", named_plan(found, "ZB-V", "time-balanced")),
        add("co-optimised", found.plan),
    ]
    calibration = add(CALIBRATION, plain_plan(profile, mixed_order(2, count), balanced, count))
    report_load("real compute, 2 ranks")
    run.launch(arguments.timeout)
    print_real(run, cases, calibration, cluster)


def report_load(what: str) -> None:
    """Say what starts and how busy the machine is."""
    load = os.getloadavg()[0]
    console.print(f"{what}: {os.cpu_count()} cores, load average before the start {load:.1f}")


PARTS: dict[str, Callable[[argparse.Namespace], None]] = {
    "plans": compare_on_ranks,
    "engines": compare_on_ranks,
    "overhead": measure_overheads,
    "real": compare_real,
}


def main() -> None:
    """Run the parts and print one table each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; default: all")
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--steps", type=int, default=5, help="timed batches of each case; the median counts")
    parser.add_argument("--profiles", type=Path, default=HERE / "profiles")
    parser.add_argument("--output", type=Path, help="folder for plans and traces; default: a temporary one")
    parser.add_argument("--timeout", type=int, default=1200, help="seconds for one launch")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.parts if name not in PARTS]
    if unknown:
        parser.error(f"unknown part {unknown[0]!r}; known: {', '.join(PARTS)}")
    arguments.parts = arguments.parts or list(PARTS)
    arguments.output = arguments.output or Path(tempfile.mkdtemp(prefix="pipeplan-emulated-"))
    for part in dict.fromkeys(PARTS[name] for name in arguments.parts):
        part(arguments)


if __name__ == "__main__":
    main()
