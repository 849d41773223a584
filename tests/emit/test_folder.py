"""The plan folder: complete or not there, right together, and readable by what uses it."""

from __future__ import annotations

import ast
import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from pipeplan.cluster import Cluster
from pipeplan.emit import folder as folder_module
from pipeplan.emit.folder import EMITTED_FILES, HOSTFILE, check_replaceable, emit_plan_folder, launch_line
from pipeplan.errors import FileFormatError, LaunchError
from pipeplan.plan.folder import load_plan
from pipeplan.plan.types import Plan
from pipeplan.profile.types import Profile
from pipeplan.program.file import read_program
from pipeplan.program.verify import VerifiedProgram, verify_plan


def test_folder_holds_everything(
    tmp_path: Path, verified: VerifiedProgram, plan: Plan, profile: Profile, cluster: Cluster
) -> None:
    """Every emitted file is there, and plan, profile, cluster and program read back as they went in."""
    folder = tmp_path / "deep" / "plan"
    emit_plan_folder(folder, verified, profile, cluster)
    assert {entry.name for entry in folder.iterdir()} == set(EMITTED_FILES) - {HOSTFILE}
    loaded = load_plan(folder)
    assert (loaded.plan.digest, loaded.profile.layers, loaded.cluster) == (plan.digest, profile.layers, cluster)
    assert read_program(folder / "program.yaml") == verified.program
    assert json.loads((folder / "ds_config.json").read_text())["pipeplan"]["digest"] == plan.digest
    assert [entry.name for entry in tmp_path.iterdir()] == ["deep"]
    assert [entry.name for entry in folder.parent.iterdir()] == ["plan"]


def test_same_plan_same_bytes(tmp_path: Path, verified: VerifiedProgram, profile: Profile, cluster: Cluster) -> None:
    """Emitting twice gives the same bytes in every file but for the folder's own name in the report."""
    for name in ("a", "b"):
        emit_plan_folder(tmp_path / name, verified, profile, cluster)
    for entry in (tmp_path / "a").iterdir():
        other = (tmp_path / "b" / entry.name).read_text().replace(str(tmp_path / "b"), str(tmp_path / "a"))
        assert entry.read_text() == other, entry.name


def test_emitted_scripts_compile_and_name_their_folder(
    tmp_path: Path, verified: VerifiedProgram, profile: Profile, cluster: Cluster
) -> None:
    """schedule.py and train.py are Python that finds the plan beside it; launch.sh is valid shell and may run."""
    emit_plan_folder(tmp_path / "plan", verified, profile, cluster)
    for name in ("schedule.py", "train.py"):
        source = (tmp_path / "plan" / name).read_text()
        ast.parse(source)
        assert "Path(__file__).resolve().parent" in source
        assert str(tmp_path) not in source
    script = tmp_path / "plan" / "launch.sh"
    assert os.access(script, os.X_OK)
    subprocess.run(["sh", "-n", str(script)], check=True)


def test_a_model_name_can_not_break_out(tmp_path: Path, plan: Plan, profile: Profile, cluster: Cluster) -> None:
    """A model's name with quotes and line breaks stays text in scripts, shell and report."""
    name = 'evil"""\nimport os\n<script>$(touch x)`touch x`'
    profile = replace(profile, model=name)
    verified = verify_plan(replace(plan, model=name), profile, cluster)
    emit_plan_folder(tmp_path / "plan", verified, profile, cluster)
    for script in ("schedule.py", "train.py"):
        tree = ast.parse((tmp_path / "plan" / script).read_text())
        names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
        assert "os" not in names
    lines = (tmp_path / "plan" / "launch.sh").read_text().splitlines()
    assert all(line.startswith("#") for line in lines if "touch" in line)
    assert "<script>" not in (tmp_path / "plan" / "report.html").read_text()


def test_interrupted_emission_leaves_nothing(
    tmp_path: Path,
    verified: VerifiedProgram,
    profile: Profile,
    cluster: Cluster,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ctrl-C while the files are written leaves no folder and no leftovers."""
    written: list[str] = []

    def interrupted(path: Path, text: str) -> None:
        written.append(path.name)
        if len(written) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(folder_module, "write_text", interrupted)
    with pytest.raises(KeyboardInterrupt):
        emit_plan_folder(tmp_path / "plan", verified, profile, cluster)
    assert len(written) == 3
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("moment", ["writing", "swapping"])
def test_an_earlier_plan_survives_an_interruption(
    tmp_path: Path,
    verified: VerifiedProgram,
    profile: Profile,
    cluster: Cluster,
    monkeypatch: pytest.MonkeyPatch,
    moment: str,
) -> None:
    """An earlier plan, with the user's files beside it, is whole again after an interrupted replacement."""
    folder = tmp_path / "plan"
    emit_plan_folder(folder, verified, profile, cluster)
    (folder / "losses.json").write_text("[]")
    (folder / "checkpoints").mkdir()
    before = {entry.name: entry.is_dir() or entry.read_bytes() for entry in folder.iterdir()}

    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    rename = Path.rename

    def rename_but_not_into_place(self: Path, target: Path) -> Path:
        if target == folder and ".old." not in self.name:
            raise KeyboardInterrupt
        return rename(self, target)

    if moment == "writing":
        monkeypatch.setattr(folder_module, "write_text", interrupt)
    else:
        monkeypatch.setattr(Path, "rename", rename_but_not_into_place)
    with pytest.raises(KeyboardInterrupt):
        emit_plan_folder(folder, verified, profile, cluster)
    assert {entry.name: entry.is_dir() or entry.read_bytes() for entry in folder.iterdir()} == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["plan"]


def test_replacing_keeps_the_users_files(
    tmp_path: Path, verified: VerifiedProgram, profile: Profile, cluster: Cluster
) -> None:
    """A new plan in an old folder replaces the emitted files, stale ones included, and keeps everything else."""
    folder = tmp_path / "plan"
    emit_plan_folder(folder, verified, profile, cluster)
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "latest").write_text("global_step4")
    (folder / HOSTFILE).write_text("gone slots=8\n")
    (folder / "train.py").write_text("old")
    emit_plan_folder(folder, verified, profile, cluster)
    assert (folder / "checkpoints" / "latest").read_text() == "global_step4"
    assert not (folder / HOSTFILE).exists()
    assert (folder / "train.py").read_text() != "old"


def test_a_folder_of_something_else_is_left_alone(
    tmp_path: Path, verified: VerifiedProgram, profile: Profile, cluster: Cluster
) -> None:
    """A folder that holds no plan, or a file, is refused by name and not touched; an empty folder is taken."""
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(FileFormatError, match="not a plan folder"):
        emit_plan_folder(tmp_path, verified, profile, cluster)
    with pytest.raises(FileFormatError, match="is a file"):
        emit_plan_folder(tmp_path / "thesis.tex", verified, profile, cluster)
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.tex"]
    with pytest.raises(FileFormatError, match=r"can't be written: Not a directory in .*thesis\.tex"):
        check_replaceable(tmp_path / "thesis.tex" / "plans" / "mine")  # before a search, not after
    (tmp_path / "empty").mkdir()
    emit_plan_folder(tmp_path / "empty", verified, profile, cluster)
    assert (tmp_path / "empty" / "plan.yaml").is_file()


def test_a_refused_config_writes_nothing(
    tmp_path: Path, verified: VerifiedProgram, profile: Profile, cluster: Cluster
) -> None:
    """A base config that contradicts the plan is refused before anything is written."""
    with pytest.raises(LaunchError):
        emit_plan_folder(tmp_path / "plan", verified, profile, cluster, base_ds_config={"train_batch_size": 1})
    assert list(tmp_path.iterdir()) == []


def test_launch_line_counts_replicas(tmp_path: Path, cluster: Cluster) -> None:
    """The printed line starts one process for every pipeline rank and replica."""
    line = launch_line(Path("plans/x"), replace(cluster, num_replicas=3))
    assert line == "deepspeed --num_gpus 6 plans/x/train.py --deepspeed_config plans/x/ds_config.json"
