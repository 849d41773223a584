"""Several searches at once: the best of what each of them finds alone."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeplan.cluster import Cluster, equal_ranks
from pipeplan.errors import InfeasibleError, PlanError
from pipeplan.plan.folder import load_plan
from pipeplan.profile import Profile, read_profile
from pipeplan.search import optimize, optimize_in_parallel, parallel

GOLDEN = Path(__file__).parents[1] / "golden" / "nemotron-nano-9b-v2.yaml"
WORK_LIMIT = 1_000_000


def golden() -> tuple[Profile, Cluster]:
    """Return the published profile, on 4 ranks."""
    profile = read_profile(GOLDEN)
    return profile, equal_ranks(4, profile.devices[0])


def test_the_best_of_several_seeds_is_kept() -> None:
    """The plan is the fastest of those that the seeds give one by one; also where it isn't the first one's."""
    profile, cluster = golden()
    options = {"num_micro_batches": 8, "work_limit": WORK_LIMIT}
    alone = [optimize(profile, cluster, seed=seed, **options) for seed in range(3)]  # type: ignore[arg-type]
    first = max(range(2), key=lambda seed: alone[seed].makespan_ns)
    wanted = min(alone[first:], key=lambda one: one.makespan_ns)
    found = optimize_in_parallel(profile, cluster, num_jobs=3 - first, seed=first, **options)
    assert found.plan == wanted.plan
    assert found.is_deterministic
    assert found.num_ops_tried == sum(one.num_ops_tried for one in alone[first:])


def test_what_has_no_seeds_and_what_has_no_plan() -> None:
    """Other strategies are refused by name; caps without a plan give the sentence that one search gives."""
    profile, cluster = golden()
    with pytest.raises(PlanError, match="'baselines'; leave --jobs out"):
        optimize_in_parallel(profile, cluster, num_jobs=2, num_micro_batches=8, strategy="baselines")
    tight = equal_ranks(4, profile.devices[0], memory_gb=1e-3)
    with pytest.raises(InfeasibleError) as alone:
        optimize(profile, tight, num_micro_batches=8, work_limit=WORK_LIMIT)
    with pytest.raises(InfeasibleError) as together:
        optimize_in_parallel(profile, tight, num_jobs=2, num_micro_batches=8, work_limit=WORK_LIMIT)
    assert str(together.value) == str(alone.value)


def test_a_search_that_dies_is_named() -> None:
    """A process that the system killed, as for want of memory, is no answer."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=os._exit, args=(9,))
    process.start()
    theirs.close()
    with pytest.raises(PlanError, match=r"seed 6 ended without an answer \(exit status 9\)"):
        parallel._gather([parallel._Running(process, ours)], 5, is_over=False)


def test_interruption_ends_every_search_and_keeps_the_best(tmp_path: Path) -> None:
    """Ctrl-C after a few seconds of an endless search of two writes a whole plan, and no process stays behind."""
    folder = tmp_path / "plan"
    command = ["-m", "pipeplan", "optimize", str(GOLDEN), "--ranks", "4", "--jobs", "2", "--time-limit", "500"]
    process = subprocess.Popen(
        [sys.executable, *command, "-o", str(folder)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        end_s = time.monotonic() + 100
        while len(others := children.read_text().split()) < 2 and time.monotonic() < end_s:  # one tracks resources
            time.sleep(0.2)
        time.sleep(5)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0, errors
    assert "the search was interrupted" in errors
    assert load_plan(folder).plan.prediction is not None
    assert others
    end_s = time.monotonic() + 20
    while any(_is_alive(other) for other in others) and time.monotonic() < end_s:
        time.sleep(0.1)
    assert not any(_is_alive(other) for other in others)


def _is_alive(process: str) -> bool:
    """Return whether a process runs; one that has ended may still wait for its parent to ask."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
