"""optimize, show and simulate on the published profile."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import pipeplan.emit.folder
import pipeplan.search
from pipeplan.cluster import read_cluster
from pipeplan.plan.folder import load_plan
from pipeplan.profile import read_profile, write_profile
from pipeplan.profile.states import with_states
from pipeplan.program.trace import RankTrace, TimedInstruction, Trace, write_trace
from pipeplan.program.types import Compute
from pipeplan.search import SearchResult
from pipeplan.simulate import simulate
from tests.cli.conftest import GOLDEN_PROFILE, Outcome, Run

OPTIONS = ("--ranks", 4, "--micro-batches", 8, "--strategy", "baselines")


def test_optimize_prints_the_comparison(run: Run, tmp_path: Path) -> None:
    """The table with baselines, bound and plan is the result (stdout); where it went and how to train, messages."""
    outcome = run("optimize", GOLDEN_PROFILE, *OPTIONS, "-o", tmp_path / "plan")
    assert outcome.status == 0
    for word in ("1F1B", "GPipe", "ZB-H1", "this plan", "lower bound", "peak memory"):
        assert word in outcome.out
    assert f"wrote {tmp_path / 'plan'}" in outcome.err
    assert "deepspeed --num_gpus 4" in outcome.err


def test_quiet_prints_only_results(run: Run, tmp_path: Path) -> None:
    """--quiet leaves the result and nothing on stderr."""
    outcome = run("optimize", GOLDEN_PROFILE, *OPTIONS, "--quiet", "-o", tmp_path / "plan")
    assert (outcome.status, outcome.err) == (0, "")
    assert "this plan" in outcome.out


def test_small_gain_is_said(run: Run, tmp_path: Path) -> None:
    """A plan that is the best baseline says that it gains under 2 %."""
    outcome = run("optimize", GOLDEN_PROFILE, *OPTIONS, "-o", tmp_path / "plan")
    assert "under 2%" in " ".join(outcome.out.split())


def test_json_matches_the_folder(run: Run, tmp_path: Path) -> None:
    """--json gives one document whose figures are those of the plan written."""
    folder = tmp_path / "plan"
    outcome = run("optimize", GOLDEN_PROFILE, *OPTIONS, "--json", "-q", "-o", folder)
    result = json.loads(outcome.out)
    plan = load_plan(folder).plan
    assert plan.prediction is not None
    assert result["digest"] == plan.digest
    assert result["makespan_ms"] == pytest.approx(plan.prediction.makespan_ns / 1e6)
    assert result["comparison"]["lower_bound_ms"] <= result["makespan_ms"]
    assert len(result["ranks"]) == 4


def test_same_inputs_same_bytes(run: Run, tmp_path: Path) -> None:
    """The same inputs, seed and work limit give the same plan, byte for byte."""
    for name in ("a", "b"):
        outcome = run(
            "optimize", GOLDEN_PROFILE, "--ranks", 2, "--micro-batches", 4, "--seed", 3, "--work-limit", 20_000,
            "-o", tmp_path / name,
        )  # fmt: skip
        assert outcome.status == 0, outcome.err
    for name in ("plan.yaml", "program.yaml", "ds_config.json", "profile.yaml", "cluster.yaml"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_interrupted_optimize_keeps_the_best_plan(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C during the search ends it; the best plan so far is written, and the message says that it was cut short."""
    whole = pipeplan.search.optimize

    def interrupted(*arguments: object, **options: object) -> SearchResult:
        calls = 0

        def interrupt(progress: object) -> None:
            nonlocal calls
            calls += 1
            raise KeyboardInterrupt

        options = {**options, "on_progress": interrupt, "strategy": "default"}
        return whole(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(pipeplan.search, "optimize", interrupted)
    outcome = run("optimize", GOLDEN_PROFILE, *OPTIONS, "-o", tmp_path / "plan")
    assert outcome.status == 0
    assert "interrupted" in outcome.err
    assert run("verify", tmp_path / "plan").status == 0


def test_interrupted_while_writing(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C once the search is over lets the plan be written, and says so; once more leaves without a plan."""
    emit = pipeplan.emit.folder.emit_plan_folder

    def interrupted(times: int) -> Outcome:
        def pressed(*arguments: Any, **options: Any) -> None:
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)
            emit(*arguments, **options)

        monkeypatch.setattr(pipeplan.emit.folder, "emit_plan_folder", pressed)
        return run("optimize", GOLDEN_PROFILE, *OPTIONS, "-o", tmp_path / str(times))

    before = signal.getsignal(signal.SIGINT)
    once = interrupted(1)
    assert once.status == 0
    assert "writing the plan" in once.err
    assert run("verify", tmp_path / "1").status == 0
    assert interrupted(2).status == 130
    assert not list(tmp_path.glob("*2*"))
    assert signal.getsignal(signal.SIGINT) == before


def test_cluster_file_and_memory_cap(run: Run, tmp_path: Path) -> None:
    """A cluster file is taken as it is, and --memory-gb overrides its caps."""
    source = tmp_path / "cluster.yaml"
    source.write_text(
        "format: pipeplan-cluster/1\n"
        "ranks: [{device: h800-sxm, memory_gb: 90}, {device: h800-sxm, slowdown: 1.5}]\n"
        "links: {within_node: {latency_us: 5, gb_per_s: 100}}\n"
    )
    options = ("--cluster", source, "--micro-batches", 4, "--strategy", "baselines", "-q")
    assert run("optimize", GOLDEN_PROFILE, *options, "-o", tmp_path / "a").status == 0
    assert read_cluster(tmp_path / "a" / "cluster.yaml") == read_cluster(source)
    assert run("optimize", GOLDEN_PROFILE, *options, "--memory-gb", 200, "-o", tmp_path / "b").status == 0
    capped = read_cluster(tmp_path / "b" / "cluster.yaml")
    assert [rank.memory_bytes for rank in capped.ranks] == [200_000_000_000] * 2
    assert capped.ranks[1].slowdown == 1.5


@pytest.mark.parametrize(
    ("recorded", "launched", "words"),
    [
        # bf16 with ZeRO-1 and AdamW: 2 + 4 + (4 + 8) / replicas
        (1, 2, ("warning:", "18 bytes", "which take 12", "--data-parallel 2 --update")),
        (4, 1, ("warning:", "9 bytes", "which take 18", "--data-parallel 1 --update")),
        (2, 2, ()),
        (None, 2, ()),
    ],
)
def test_states_for_other_replicas_are_warned_of(
    run: Run, tmp_path: Path, recorded: int | None, launched: int, words: tuple[str, ...]
) -> None:
    """Where the profile shares states among another number of replicas than the cluster has, optimize says so."""
    costs = replace(read_profile(GOLDEN_PROFILE), dtype="bf16", source="measured")
    if recorded is not None:
        costs = with_states(costs, optimizer="adamw", zero_stage=1, num_replicas=recorded)
    write_profile(costs, tmp_path / "profile.yaml")
    options = (*OPTIONS, "--data-parallel", launched)
    outcome = run("optimize", tmp_path / "profile.yaml", *options, "-o", tmp_path / "plan")
    assert outcome.status == 0, outcome.err
    assert all(word in outcome.err for word in words), outcome.err
    assert ("bytes of state" in outcome.err) == bool(words)


def test_fixed_partition_and_placement(run: Run, tmp_path: Path) -> None:
    """--partition and --placement come back in the plan unchanged."""
    options = ("--partition", "15,15,15,13", "--placement", "0,1,2,3")
    assert run("optimize", GOLDEN_PROFILE, *OPTIONS, *options, "-q", "-o", tmp_path / "plan").status == 0
    plan = load_plan(tmp_path / "plan").plan
    assert (str(plan.partition), str(plan.placement)) == ("15,15,15,13", "0,1,2,3")


def test_show_draws_the_timeline(run: Run, tmp_path: Path, golden_plan: Path) -> None:
    """Show prints a row a rank, the baselines, bubbles and memory, and writes a well-formed SVG."""
    figure = tmp_path / "timeline.svg"
    outcome = run("show", golden_plan, "--svg", figure)
    assert outcome.status == 0, outcome.err
    lines = outcome.out.splitlines()
    for rank in range(4):
        row = next(line for line in lines if line.startswith(f"rank {rank} "))
        assert set(row.removeprefix(f"rank {rank} ").strip()) <= set("FBIW·")
    for word in ("ramp-up", "ramp-down", "held for W", "1F1B", "lower bound"):
        assert word in outcome.out
    ElementTree.fromstring(figure.read_text())


def test_simulate_under_other_costs(run: Run, tmp_path: Path, golden_plan: Path) -> None:
    """A cluster twice as slow takes twice as long, and simulate says how that compares with the recorded time."""
    recorded = json.loads(run("simulate", golden_plan, "--json").out)["makespan_ms"]
    slow = tmp_path / "slow.yaml"
    slow.write_text("format: pipeplan-cluster/1\nranks:\n" + "- {device: h800-sxm, slowdown: 2.0}\n" * 4)
    assert json.loads(run("simulate", golden_plan, "--cluster", slow, "--json").out)["makespan_ms"] == 2 * recorded
    assert "+100.0%" in run("simulate", golden_plan, "--cluster", slow).err


def test_simulate_under_noise(run: Run, golden_plan: Path) -> None:
    """--noise adds what the batch takes with noise, byte for byte the same for the same seed; it alone takes a seed."""
    options = ("simulate", golden_plan, "--noise", 0.1, "--samples", 200)
    first = run(*options, "--seed", 7, "--json")
    assert first.status == 0, first.err
    assert run(*options, "--seed", 7, "--json").out == first.out != run(*options, "--json").out
    result = json.loads(first.out)
    noise = result["noise"]
    assert (noise["spread"], noise["samples"], noise["seed"]) == (0.1, 200, 7)
    assert result["makespan_ms"] < noise["mean_ms"] < noise["p95_ms"] < noise["worst_ms"]
    assert noise["waiting_ms"] == pytest.approx(noise["mean_ms"] - result["makespan_ms"])
    shown = " ".join(run(*options, "--seed", 7).out.split())
    for words in ("Under 10.0% noise", f"mean {noise['mean_ms']:,.1f} +", "95th percentile", "worst of 200"):
        assert words in shown
    refused = run("simulate", golden_plan, "--noise", 10)
    assert (refused.status, refused.out) == (1, "")
    assert "0.1 for 10 %" in refused.err
    assert run("simulate", golden_plan, "--seed", 7).status == 2


def test_show_puts_a_measured_trace_beside_the_plan(run: Run, tmp_path: Path, golden_plan: Path) -> None:
    """--measured shows both times of every rank and the error of the batch; another plan's trace is refused."""
    loaded = load_plan(golden_plan)
    timeline = simulate(loaded.plan, loaded.profile, loaded.cluster)
    trace = Trace(
        model=loaded.plan.model,
        plan_digest=loaded.plan.digest,
        num_micro_batches=loaded.plan.num_micro_batches,
        partition=loaded.plan.partition,
        placement=loaded.plan.placement,
        ranks=tuple(
            RankTrace(
                steps=tuple(TimedInstruction(Compute(op.op), 2 * op.start_ns, 2 * op.end_ns) for op in ops),
                finish_ns=2 * timeline.makespan_ns,
            )
            for ops in timeline.ops_by_rank
        ),
    )
    path = tmp_path / "trace.yaml"
    write_trace(trace, path)
    figure = tmp_path / "both.svg"
    outcome = run("show", golden_plan, "--measured", path, "--svg", figure)
    assert outcome.status == 0, outcome.err
    assert "measured (-50.0%)" in " ".join(outcome.out.split()).replace("ms measured", "measured")
    assert "measured" in figure.read_text()
    measured = json.loads(run("show", golden_plan, "--measured", path, "--json").out)["measured"]
    assert measured["makespan_ms"] == pytest.approx(2 * timeline.makespan_ns / 1e6)
    write_trace(replace(trace, plan_digest="sha256:0"), path)
    refused = run("show", golden_plan, "--measured", path)
    assert refused.status == 1
    assert "another plan" in refused.err
