"""``pipeplan verify``, ``export`` and ``import`` from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from pipeplan.plan.file import read_plan, write_plan
from pipeplan.plan.folder import load_plan, write_plan_folder
from pipeplan.profile import write_profile
from pipeplan.program.file import read_program
from pipeplan.simulate import simulate
from tests.cli.conftest import Run
from tests.formats.test_megatron_layout import with_kinds
from tests.program.examples import PAIR_PROFILE, V_PLAN, V_PROFILE, devices, plan_of


@pytest.fixture
def v_folder(tmp_path: Path) -> Path:
    """A plan folder without a program: two ranks, four stages in a V."""
    folder = tmp_path / "v"
    write_plan_folder(V_PLAN, V_PROFILE, devices(2), folder)
    return folder


@pytest.mark.parametrize("queue_model", ["ordered-pair", "pair", "single"])
def test_verify_says_what_was_shown(run: Run, v_folder: Path, queue_model: str) -> None:
    """Status 0 and one line; nothing with --quiet; figures and digests with --json."""
    outcome = run("verify", v_folder, "--queue-model", queue_model)
    assert outcome.status == 0
    assert outcome.out.split() == (
        f"verified: 30 ops and 12 messages of 3 micro-batches on 2 ranks finish with {queue_model} queues".split()
    )
    assert run("verify", v_folder, "--quiet").out == ""
    report = json.loads(run("verify", v_folder, "--json").out)
    assert report["verified"] is True
    assert report["plan_digest"] == V_PLAN.digest
    assert report["num_messages"] == 12


def test_verify_shows_the_cycle_on_the_grid(run: Run, tmp_path: Path) -> None:
    """Status 1; the message on stderr, or the findings as JSON on stdout."""
    plan = plan_of(["0F0 0B0 0F1 0B1", "1F0 1F1 1B1 1B0"], "0,1", 2)
    write_plan(plan, tmp_path / "mine.yaml")
    write_profile(PAIR_PROFILE, tmp_path / "profile.yaml")
    arguments = ("verify", tmp_path / "mine.yaml", "--profile", tmp_path / "profile.yaml")
    outcome = run(*arguments)
    assert (outcome.status, outcome.out) == (1, "")
    assert outcome.err.startswith("error: rank 0, position 1, 0B0: deadlock, a circle of 2 waits")
    assert "* rank  0 from step  0: 0F0   >0B0< 0F1   0B1" in outcome.err
    report = run(*arguments, "--json")
    assert report.status == 1
    (finding,) = json.loads(report.out)["findings"]
    assert finding["kind"] == "deadlock"
    assert finding["cycle"] == [{"rank": 0, "position": 1}, {"rank": 1, "position": 1}]


def test_torch_csv_goes_out_and_comes_back(run: Run, v_folder: Path, tmp_path: Path) -> None:
    """The order survives; the partition is given; the imported folder is verified and trains."""
    exported = run("export", v_folder, "--to", "torch-csv")
    assert exported.out.splitlines() == [line.replace(" ", ",") for line in V_PLAN.order.lines()]
    path = tmp_path / "schedule.csv"
    assert run("export", v_folder, "--to", "torch-csv", "-o", path).err == f"wrote {path}\n"
    folder = tmp_path / "imported"
    outcome = run(
        "import", path, "--from", "torch-csv", "--profile", v_folder / "profile.yaml", "--partition", "1,1,1,1",
        "--link-latency-us", 10, "--link-gb-per-s", 10, "-o", folder, "--json",
    )  # fmt: skip
    assert outcome.status == 0, outcome.err
    loaded = load_plan(folder)
    assert loaded.plan.digest == V_PLAN.digest
    assert loaded.plan.prediction == simulate(V_PLAN, V_PROFILE, devices(2)).prediction
    assert read_program(folder / "program.yaml").plan_digest == V_PLAN.digest
    assert json.loads(outcome.out)["digest"] == V_PLAN.digest
    assert run("verify", folder).status == 0
    assert (folder / "train.py").is_file()


def test_octopipe_goes_out_and_comes_back(run: Run, v_folder: Path, tmp_path: Path) -> None:
    """The file has partition, placement and order: nothing else has to be said."""
    path = tmp_path / "octopipe.yaml"
    assert run("export", v_folder, "--to", "octopipe", "-o", path, "--quiet").err == ""
    assert yaml.safe_load(path.read_text())["placement"] == [[0, 3], [1, 2]]
    folder = tmp_path / "imported"
    profile = v_folder / "profile.yaml"
    outcome = run("import", path, "--from", "octopipe", "--profile", profile, "-o", folder)
    assert outcome.status == 0, outcome.err
    assert "train with it:" in outcome.err
    assert read_plan(folder / "plan.yaml").digest == V_PLAN.digest
    refused = run("import", path, "--from", "octopipe", "--profile", profile, "--partition", "1,1,1,1", "-o", folder)
    assert refused.status == 1
    assert "leave the other one" in refused.err


def test_megatron_layout_needs_ranks_and_micro_batches(run: Run, tmp_path: Path) -> None:
    """The layout says neither; with both it becomes 1F1B."""
    write_profile(with_kinds(4), tmp_path / "profile.yaml")
    path = tmp_path / "layout.txt"
    path.write_text("Ettt|tL\n")
    arguments = ("import", path, "--from", "megatron-layout", "--profile", tmp_path / "profile.yaml", "-o")
    folder = tmp_path / "imported"
    assert "add --ranks or --cluster" in run(*arguments, folder).err
    assert "add --micro-batches" in run(*arguments, folder, "--ranks", 2).err
    assert not folder.exists()
    assert run(*arguments, folder, "--ranks", 2, "--micro-batches", 3).status == 0
    assert read_plan(folder / "plan.yaml").order.lines()[0] == "0F0 0F1 0B0 0F2 0B1 0B2"
    assert run("export", folder, "--to", "megatron-layout").out == "Et*3|tL\n"


def test_what_a_format_cannot_say_is_refused(run: Run, v_folder: Path) -> None:
    """A V placement has no layout string."""
    outcome = run("export", v_folder, "--to", "megatron-layout")
    assert (outcome.status, outcome.out) == (1, "")
    assert "is no loop over the ranks" in outcome.err


def test_a_file_for_other_ranks_is_refused(run: Run, v_folder: Path, tmp_path: Path) -> None:
    """The cluster's ranks are compared with the file's."""
    path = tmp_path / "schedule.csv"
    run("export", v_folder, "--to", "torch-csv", "-o", path)
    profile = v_folder / "profile.yaml"
    outcome = run("import", path, "--from", "torch-csv", "--profile", profile, "--ranks", 4, "-o", tmp_path / "x")
    assert outcome.status == 1
    assert f"{path} is for 2 ranks, not for 4" in outcome.err
    missing = run("import", tmp_path / "no.csv", "--from", "torch-csv", "--profile", profile, "-o", tmp_path / "x")
    assert (missing.status, missing.err) == (1, f"error: {tmp_path / 'no.csv'} does not exist\n")


def test_a_plan_written_by_hand_becomes_a_folder_that_trains(run: Run, tmp_path: Path) -> None:
    """``--from pipeplan`` keeps everything that the file decides, and refuses what verify refuses."""
    by_hand = tmp_path / "mine.yaml"
    write_plan(V_PLAN, by_hand)
    write_profile(V_PROFILE, tmp_path / "profile.yaml")
    arguments = ("import", by_hand, "--from", "pipeplan", "--profile", tmp_path / "profile.yaml")
    outcome = run(*arguments, "-o", tmp_path / "out")
    assert outcome.status == 0, outcome.err
    loaded = load_plan(tmp_path / "out")
    assert loaded.plan.digest == V_PLAN.digest
    assert read_program(tmp_path / "out" / "program.yaml").plan_digest == V_PLAN.digest
    exported = run("export", tmp_path / "out", "--to", "pipeplan")
    assert yaml.safe_load(exported.out) == yaml.safe_load((tmp_path / "out" / "plan.yaml").read_text())

    by_hand.write_text(by_hand.read_text().replace("1B0", "1F0", 1))
    refused = run(*arguments, "-o", tmp_path / "bad")
    assert refused.status == 1
    assert not (tmp_path / "bad").exists()
