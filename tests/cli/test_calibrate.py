"""``pipeplan calibrate``: files in, files out."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pipeplan.cluster import Link, read_cluster
from pipeplan.plan.folder import load_plan
from pipeplan.profile.file import read_profile
from pipeplan.program.trace import write_trace
from pipeplan.simulate import simulate
from tests.adapt.synthetic import trace_of
from tests.cli.conftest import Run

OVERHEADS_NS = {
    "F": 200_000,
    "B": 400_000,
    "I": 400_000,
    "W": 300_000,
    "send": 100_000,
    "wait": 50_000,
    "step": 900_000,
}


@pytest.fixture
def trace(golden_plan: Path) -> Path:
    """The trace, in the plan's folder, of a machine with overheads and slow links."""
    loaded = load_plan(golden_plan)
    link = Link(200_000, 50.0)
    machine = replace(loaded.cluster, host_overhead_ns=OVERHEADS_NS, within_node=link, between_nodes=link)
    path = golden_plan / "trace.yaml"
    write_trace(trace_of(loaded.plan, loaded.profile, machine), path)
    return path


def test_the_files_written_predict_what_was_measured(run: Run, tmp_path: Path, golden_plan: Path, trace: Path) -> None:
    """The plan, simulated with the new profile and cluster, takes what it took; --json says so as well."""
    outcome = run("calibrate", trace, "-o", tmp_path / "new", "--json")
    assert outcome.status == 0, outcome.err
    summary = json.loads(outcome.out)
    plan = load_plan(golden_plan).plan
    profile, cluster = read_profile(tmp_path / "new" / "profile.yaml"), read_cluster(tmp_path / "new" / "cluster.yaml")
    assert simulate(plan, profile, cluster).makespan_ns / 1e6 == pytest.approx(summary["measured_ms"], rel=0.005)
    assert summary["predicted_after_ms"] == pytest.approx(summary["measured_ms"], rel=0.005)
    assert cluster.host_overhead_ns["send"] == OVERHEADS_NS["send"]


def test_table_and_notes(run: Run, tmp_path: Path, trace: Path) -> None:
    """The result is a table with before and after; what the trace can't tell and where the files went, messages."""
    outcome = run("calibrate", trace, "-o", tmp_path / "new")
    assert "overhead of send" in outcome.out
    assert "100 us" in outcome.out
    assert f"wrote {tmp_path / 'new' / 'profile.yaml'}" in outcome.err
    quiet = run("calibrate", trace, "-o", tmp_path / "new", "--quiet")
    assert (quiet.status, quiet.err) == (0, "")


def test_the_plan_of_a_trace_elsewhere_must_be_named(run: Run, tmp_path: Path, golden_plan: Path, trace: Path) -> None:
    """Away from its plan folder, a trace needs --plan; without, one sentence says so and nothing is written."""
    moved = trace.rename(tmp_path / "trace.yaml")
    outcome = run("calibrate", moved, "-o", tmp_path / "new")
    assert outcome.status == 1
    assert "--plan" in outcome.err
    assert not (tmp_path / "new").exists()
    assert run("calibrate", moved, "--plan", golden_plan, "-o", tmp_path / "new").status == 0


def test_a_broken_trace_writes_nothing(run: Run, tmp_path: Path, trace: Path) -> None:
    """A truncated trace is one sentence with status 1."""
    trace.write_text(trace.read_text()[:500])
    outcome = run("calibrate", trace, "-o", tmp_path / "new")
    assert outcome.status == 1
    assert len(outcome.err.splitlines()) == 1
    assert not (tmp_path / "new").exists()


def test_a_plan_keeps_its_costs(run: Run, golden_plan: Path, trace: Path) -> None:
    """Writing into the plan's folder, whose profile the plan names by digest, is refused and changes nothing."""
    before = (golden_plan / "profile.yaml").read_text()
    outcome = run("calibrate", trace, "-o", golden_plan)
    assert outcome.status == 1
    assert "name another folder" in outcome.err
    assert (golden_plan / "profile.yaml").read_text() == before


def test_another_model_is_refused(run: Run, tmp_path: Path, trace: Path, golden_plan: Path) -> None:
    """A trace whose layers are not the profile's is refused with both counts."""
    other = tmp_path / "plan.yaml"
    text = trace.read_text()
    partition = load_plan(golden_plan).plan.partition.num_layers_by_stage
    changed = [partition[0] + 1, *partition[1:]]
    other.write_text(text.replace(f"partition: {list(partition)}", f"partition: {changed}"))
    outcome = run("calibrate", other, "--plan", golden_plan, "-o", tmp_path / "new")
    assert outcome.status == 1
    assert f"{sum(changed)} layers" in outcome.err
