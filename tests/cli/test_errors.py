"""Bad input: each gives one clear message on stderr and status 1, and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.cli.conftest import GOLDEN_PROFILE, Run


def assert_refused(run: Run, words: list[str], *arguments: object, folder: Path | None = None) -> None:
    """Check that a command fails with one message that holds the words, without a traceback or a folder."""
    outcome = run(*arguments)
    assert outcome.status == 1, outcome
    assert outcome.out == ""
    assert "Traceback" not in outcome.err
    assert outcome.err.startswith("error: ")
    for word in words:
        assert word in outcome.err
    if folder is not None:
        assert not folder.exists()
        assert not list(folder.parent.glob(".*"))


def changed_profile(tmp_path: Path, change: dict[str, object]) -> Path:
    """Return the golden profile with some top-level keys changed."""
    content = yaml.safe_load(GOLDEN_PROFILE.read_text()) | change
    path = tmp_path / "profile.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


def test_missing_profile(run: Run, tmp_path: Path) -> None:
    """A profile that isn't there is named."""
    out = tmp_path / "plan"
    assert_refused(
        run, ["none.yaml", "does not exist"], "optimize", tmp_path / "none.yaml", "--ranks", 2, "-o", out, folder=out
    )


def test_truncated_profile(run: Run, tmp_path: Path) -> None:
    """A profile cut off in the middle is an error that says where, at whatever byte it ends."""
    whole = GOLDEN_PROFILE.read_bytes()
    for share in (0.0, 0.1, 0.5, 0.9):
        path = tmp_path / "cut.yaml"
        path.write_bytes(whole[: int(len(whole) * share)])
        out = tmp_path / "plan"
        outcome = run("optimize", path, "--ranks", 4, "-o", out)
        if outcome.status == 0:  # cut between two layers: a whole profile of a smaller model
            continue
        assert outcome.status == 1
        assert "cut.yaml" in outcome.err
        assert "Traceback" not in outcome.err
        assert not out.exists()


def test_unknown_key_names_the_nearest(run: Run, tmp_path: Path) -> None:
    """A misspelt key is named with the known one next to it."""
    path = changed_profile(tmp_path, {"sequence_lenght": 4096})
    assert_refused(
        run,
        ["sequence_lenght", "did you mean 'sequence_length'"],
        "optimize", path, "--ranks", 4, "-o", tmp_path / "plan",
    )  # fmt: skip


def test_newer_format(run: Run, tmp_path: Path) -> None:
    """A file of a newer format version says so."""
    path = changed_profile(tmp_path, {"format": "pipeplan-profile/9"})
    assert_refused(run, ["newer", "upgrade pipeplan"], "optimize", path, "--ranks", 4, "-o", tmp_path / "plan")


def test_fewer_layers_than_ranks(run: Run, tmp_path: Path) -> None:
    """More ranks than layers is refused with both numbers."""
    out = tmp_path / "plan"
    assert_refused(run, ["58", "64"], "optimize", GOLDEN_PROFILE, "--ranks", 64, "-o", out, folder=out)


def test_memory_cap_that_no_plan_meets(run: Run, tmp_path: Path) -> None:
    """A cap below what any plan needs names a rank and how much is missing."""
    out = tmp_path / "plan"
    assert_refused(
        run,
        ["rank", "GB"],
        "optimize", GOLDEN_PROFILE, "--ranks", 4, "--micro-batches", 8, "--memory-gb", 2,
        "--work-limit", 50_000, "-o", out,
        folder=out,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], ["--cluster", "--ranks"]),
        (["--ranks", 0], ["at least 1 rank"]),
        (["--ranks", 4, "--device", "h800"], ["h800", "did you mean 'h800-sxm'"]),
        (["--ranks", 4, "--memory-gb", -1], ["positive"]),
        (["--ranks", 4, "--link-latency-us", 5], ["--link-gb-per-s"]),
        (["--ranks", 4, "--partition", "1,2,x"], ["partition", "1,2,x"]),
        (["--ranks", 4, "--partition", "1,2,3,4"], ["10 layers", "58"]),
        (["--ranks", 4, "--placement", "0,1,1"], ["rank"]),
        (["--cluster", "none.yaml"], ["none.yaml", "does not exist"]),
        (["--ranks", 4, "--ds-config", "none.json"], ["none.json", "does not exist"]),
    ],
)
def test_contradicting_options(run: Run, tmp_path: Path, options: list[object], words: list[str]) -> None:
    """Each option that can't be is refused with what is wrong and what would do."""
    out = tmp_path / "plan"
    assert_refused(run, words, "optimize", GOLDEN_PROFILE, *options, "-o", out, folder=out)


def test_cluster_and_shorthand(run: Run, tmp_path: Path) -> None:
    """A cluster file and the shorthand together contradict each other."""
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text("format: pipeplan-cluster/1\nranks: [{device: h800-sxm}]\n")
    assert_refused(
        run, ["--ranks"], "optimize", GOLDEN_PROFILE, "--cluster", cluster, "--ranks", 4, "-o", tmp_path / "plan"
    )


def test_output_of_something_else(run: Run, tmp_path: Path) -> None:
    """A folder that holds no plan is refused before the search starts."""
    (tmp_path / "notes.txt").write_text("mine")
    assert_refused(run, ["not a plan folder"], "optimize", GOLDEN_PROFILE, "--ranks", 4, "-o", tmp_path)


def test_plan_of_another_profile(run: Run, tmp_path: Path, golden_plan: Path) -> None:
    """A plan shown with the profile of another model is refused."""
    content = yaml.safe_load(GOLDEN_PROFILE.read_text())
    content["layers"] = content["layers"][:-1]
    path = tmp_path / "other.yaml"
    path.write_text(yaml.safe_dump(content))
    assert_refused(run, ["58 layers", "57"], "show", golden_plan, "--profile", path)


def test_folder_without_a_plan(run: Run, tmp_path: Path) -> None:
    """A folder without plan.yaml, and a plan file without a profile, say what is missing."""
    assert_refused(run, ["plan.yaml"], "show", tmp_path)


def test_hand_edited_order_that_hangs(run: Run, golden_plan: Path) -> None:
    """An order edited into a deadlock is refused by show and simulate, not by a hang."""
    path = golden_plan / "plan.yaml"
    content = yaml.safe_load(path.read_text())
    words = content["order"][0].split()
    content["order"][0] = " ".join(reversed(words))
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    for command in ("show", "simulate", "verify"):
        outcome = run(command, golden_plan)
        assert outcome.status == 1
        assert "rank 0" in outcome.err
        assert "Traceback" not in outcome.err


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, ["config.json", "does not exist"]),
        ("", ["config.json"]),
        ('{"model_type": "llama", "hidden_', ["config.json", "line 1"]),
        ("[1, 2]", ["config.json"]),
        ('{"hidden_size": 8}', ["model_type"]),
        ('{"model_type": "lama", "hidden_size": 8}', ["lama", "llama"]),
    ],
    ids=["missing", "empty", "truncated", "no-object", "no-type", "unknown-type"],
)
def test_bad_model_config(run: Run, tmp_path: Path, content: str | None, words: list[str]) -> None:
    """A missing, malformed or truncated config, and an unknown model type with its nearest name, leave no profile."""
    config = tmp_path / "config.json"
    if content is not None:
        config.write_text(content)
    out = tmp_path / "profile.yaml"
    assert_refused(run, words, "profile", config, "-o", out)
    assert not out.exists()
