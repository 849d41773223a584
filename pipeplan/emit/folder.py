"""The plan folder: everything that trains with a plan and explains it, written whole or not at all."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipeplan.cluster import Cluster
from pipeplan.emit.comparison import Comparison
from pipeplan.emit.ds_config import build_ds_config
from pipeplan.emit.launch import render_hostfile, render_launch_script
from pipeplan.emit.report import render_report
from pipeplan.emit.templates import one_line, render
from pipeplan.errors import FileFormatError
from pipeplan.files import write_text
from pipeplan.plan.folder import CLUSTER_FILE, PLAN_FILE, PROFILE_FILE, PROGRAM_FILE, write_plan_folder
from pipeplan.plan.types import Plan
from pipeplan.profile.types import Profile
from pipeplan.program.file import write_program
from pipeplan.program.verify import VerifiedProgram
from pipeplan.simulate import simulate

DS_CONFIG_FILE = "ds_config.json"
SCHEDULE_FILE = "schedule.py"
TRAIN_FILE = "train.py"
LAUNCH_FILE = "launch.sh"
HOSTFILE = "hostfile"
REPORT_FILE = "report.html"

EMITTED_FILES = (
    PLAN_FILE,
    PROFILE_FILE,
    CLUSTER_FILE,
    PROGRAM_FILE,
    DS_CONFIG_FILE,
    SCHEDULE_FILE,
    TRAIN_FILE,
    LAUNCH_FILE,
    HOSTFILE,
    REPORT_FILE,
)


def emit_plan_folder(
    folder: Path,
    verified: VerifiedProgram,
    profile: Profile,
    cluster: Cluster,
    *,
    base_ds_config: Mapping[str, Any] | None = None,
    comparison: Comparison | None = None,
) -> None:
    """Write the plan folder.

    An earlier plan in ``folder`` is replaced once the new one is complete; files that pipeplan did not write, such as
    checkpoints and losses, stay.

    Raises:
        FileFormatError: ``folder`` holds something else than a plan, or can't be written to.
        LaunchError: ``base_ds_config`` contradicts the plan or asks for something unsupported.
        ClusterError: The launch files can't be right: nodes with too few slots, or ranks in no launch order.
    """
    plan = verified.plan
    check_replaceable(folder)
    texts = {
        DS_CONFIG_FILE: json.dumps(build_ds_config(plan, profile, cluster, base_ds_config), indent=2) + "\n",
        SCHEDULE_FILE: render("schedule.py.j2", **_script_values(plan)),
        TRAIN_FILE: render("train.py.j2", **_script_values(plan)),
        LAUNCH_FILE: render_launch_script(plan.model, cluster),
        REPORT_FILE: render_report(
            plan, profile, cluster, simulate(plan, profile, cluster), comparison, launch_line(folder, cluster)
        ),
    }
    hostfile = render_hostfile(cluster)
    if hostfile is not None:
        texts[HOSTFILE] = hostfile
    with _replacing(folder) as fresh:
        write_plan_folder(plan, profile, cluster, fresh)
        write_program(verified, fresh / PROGRAM_FILE)
        for name, text in texts.items():
            write_text(fresh / name, text)
        launch_script = fresh / LAUNCH_FILE
        launch_script.chmod(launch_script.stat().st_mode | 0o111)


def launch_line(folder: Path, cluster: Cluster) -> str:
    """Return the command that trains with the plan in ``folder``."""
    if len({rank.node for rank in cluster.ranks}) > 1:
        return shlex.join(["sh", str(folder / LAUNCH_FILE)])
    num_processes = cluster.num_ranks * cluster.num_replicas
    script, config = str(folder / TRAIN_FILE), str(folder / DS_CONFIG_FILE)
    return shlex.join(["deepspeed", "--num_gpus", str(num_processes), script, "--deepspeed_config", config])


def check_replaceable(folder: Path) -> None:
    """Check that ``folder`` is free, empty, or holds a plan, and that one can be written beside it.

    Raises:
        FileFormatError: It is a file, a folder of something else, or where nothing can be written.
    """
    target = Path(os.path.realpath(folder))
    there = next(parent for parent in target.parents if os.path.lexists(parent))
    try:
        with tempfile.TemporaryDirectory(dir=there, prefix=f".{target.name}."):
            pass
    except OSError as error:
        raise FileFormatError(f"{folder} can't be written: {error.strerror} in {there}") from None
    if not os.path.lexists(folder):
        return
    if not folder.is_dir():
        raise FileFormatError(f"{folder} is a file; name a folder for the plan")
    if any(folder.iterdir()) and not (folder / PLAN_FILE).is_file():
        raise FileFormatError(
            f"{folder} holds files but no {PLAN_FILE}, so it is not a plan folder and stays as it is; name another one"
        )


def _script_values(plan: Plan) -> dict[str, Any]:
    return {
        "model": one_line(plan.model),
        "num_ranks": plan.num_ranks,
        "num_stages": plan.num_stages,
        "num_micro_batches": plan.num_micro_batches,
        "digest": plan.digest,
    }


@contextmanager
def _replacing(folder: Path) -> Iterator[Path]:
    """Yield an empty sibling of ``folder`` that takes its place if the block ends well, and vanishes if not."""
    target = Path(os.path.realpath(folder))  # a link to a plan folder keeps pointing at it
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}."))
    except OSError as error:
        raise FileFormatError(f"{folder} can't be written: {error}") from None
    try:
        yield fresh
        fresh.chmod(0o755)
        if target.is_dir():
            _swap(fresh, target)
        else:
            fresh.rename(target)
    except OSError as error:
        raise FileFormatError(f"{folder} can't be written: {error}") from None
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _swap(fresh: Path, target: Path) -> None:
    """Put ``fresh`` in the place of ``target``, with the files of ``target`` that pipeplan did not write."""
    retired = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}.old."))
    kept: list[str] = []
    target.rename(retired)
    try:
        for entry in sorted(retired.iterdir()):
            if entry.name not in EMITTED_FILES and entry.name != "__pycache__":
                entry.rename(fresh / entry.name)
                kept.append(entry.name)
        fresh.rename(target)
    except BaseException:
        for name in kept:
            (fresh / name).rename(retired / name)
        retired.rename(target)
        raise
    shutil.rmtree(retired, ignore_errors=True)
