"""``pipeplan profile MODEL --ranks``: among threads, and through the real ``deepspeed`` launcher."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import launching
import parallel_model
import pytest
from torch.distributed import HashStore

from pipeplan.cluster import Cluster, Rank, write_cluster
from pipeplan.errors import ClusterError, LaunchError
from pipeplan.model.factory import layers_from_factory
from pipeplan.model.types import ModelLayers
from pipeplan.profile import LayerProfile, Profile, read_profile, write_profile
from pipeplan.profile.measure import measure_profile
from pipeplan.profile.resume import Settings, partial_path, partial_paths
from pipeplan.profile.sampling import SamplingBudget
from pipeplan.runtime.board import Board, OtherRankError, leaving_together
from pipeplan.runtime.profiling import Task, device_types_of, profile_on_board

LIMIT_S = 120
ONCE = SamplingBudget(num_warm_up=0, min_rounds=1, max_rounds=1)
SETTINGS = Settings(device="cpu", micro_batch_size=2, sequence_length=1, dtype="fp32", budget=ONCE)


def the_model() -> ModelLayers:
    return layers_from_factory("parallel_model:factory", Path(parallel_model.__file__).parent)


def alone() -> Profile:
    return measure_profile(the_model(), micro_batch_size=2, sequence_length=1, budget=ONCE)


def without_times(profile: Profile) -> list[LayerProfile]:
    return [replace(layer, times_by_device={}, recomputation=None) for layer in profile.layers]


def on_threads(tasks: Sequence[Task]) -> tuple[list[Profile | LaunchError | None], list[str], list[str]]:
    """Do a task on each of several ranks; returns what each of them got, what was said, and who failed."""
    store = HashStore()
    messages: list[str] = []
    failures: list[str] = []

    def rank(number: int) -> Profile | LaunchError | None:
        board = Board(store, number, len(tasks))
        try:
            with leaving_together(board, failures.append):
                return profile_on_board(board, tasks[number], on_message=messages.append)
        except LaunchError as error:
            return error

    with ThreadPoolExecutor(len(tasks)) as pool:
        return list(pool.map(rank, range(len(tasks)), timeout=LIMIT_S)), messages, failures


def task(output: Path, open_model: Callable[[], ModelLayers] = the_model, **others: object) -> Task:
    return Task(
        output=output,
        settings=SETTINGS,
        open_model=open_model,
        finish=lambda profile: replace(profile, state_bytes_per_parameter=5.0),
        **others,  # type: ignore[arg-type]
    )


def test_device_types_side_by_side(tmp_path: Path) -> None:
    """Three ranks of two types: one finished profile with both, on rank 0 and in the file, and nothing beside it."""
    output = tmp_path / "profile.yaml"
    tasks = [task(output, device_names=("fast", "slow", "fast"))] * 3
    [found, *others], _, failures = on_threads(tasks)
    assert isinstance(found, Profile) and failures == []
    assert others == [None, None]
    assert found.devices == ("fast", "slow")
    assert without_times(found) == without_times(alone())
    assert read_profile(output) == found
    assert found.state_bytes_per_parameter == 5.0
    assert list(tmp_path.iterdir()) == [output]


def test_only_rank_0_needs_the_cluster_and_the_profile_to_update(tmp_path: Path) -> None:
    """Nodes need no common disk: rank 1 sees neither file, and its type is measured and the third one kept."""
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    cluster = here / "cluster.yaml"
    write_cluster(Cluster(ranks=(Rank("fast"), Rank("slow"))), cluster)
    existing = measure_profile(the_model(), micro_batch_size=2, sequence_length=1, budget=ONCE, device_name="third")
    write_profile(existing, here / "profile.yaml")
    tasks = [
        task(here / "profile.yaml", cluster_file=cluster, is_update=True),
        task(there / "profile.yaml", cluster_file=there / "cluster.yaml", is_update=True),
    ]
    [found, _], _, failures = on_threads(tasks)
    assert isinstance(found, Profile), failures
    assert found.devices == ("fast", "slow", "third")
    assert [layer.times("third") for layer in found.layers] == [layer.times("third") for layer in existing.layers]
    assert not list(there.iterdir())


def test_another_model_on_one_rank_is_named(tmp_path: Path) -> None:
    """The rank, the first difference and what to do; no rank measures, and no file is left."""

    def other_model() -> ModelLayers:
        whole = the_model()
        return replace(whole, layers=(whole.layers[1], *whole.layers[1:]))

    results, _, failures = on_threads([task(tmp_path / "a.yaml"), task(tmp_path / "a.yaml", other_model)])
    assert all(isinstance(result, LaunchError) for result in results)
    [sentence] = failures
    assert sentence.startswith("rank 1: layer 0 is linear.1 (linear) here, but embedding.0 (embedding) on rank 0; ")
    assert not list(tmp_path.iterdir())


def test_other_shapes_on_one_rank_are_named(tmp_path: Path) -> None:
    """So is a micro-batch size that differs."""
    other = replace(task(tmp_path / "a.yaml"), settings=replace(SETTINGS, micro_batch_size=4))
    [first, second], _, [sentence] = on_threads([task(tmp_path / "a.yaml"), other])
    assert sentence.startswith("rank 1: micro-batch size is 4 here, but 2 on rank 0")
    assert isinstance(first, OtherRankError) and str(first) == str(second) == sentence


def test_names_for_another_number_of_ranks(tmp_path: Path) -> None:
    """Three names for two ranks are refused with both numbers."""
    _, _, [sentence] = on_threads([task(tmp_path / "a.yaml", device_names=("a", "b", "c"))] * 2)
    assert "names 3 device types, but 2 processes were launched" in sentence


def test_the_cluster_says_which_rank_measures_what() -> None:
    """Replicas of a rank measure its type; a slowed rank rests, since the cluster slows it once more."""
    ranks = (Rank("a"), Rank("b", slowdown=2.0), Rank("b"))
    assert device_types_of(Cluster(ranks=ranks, num_replicas=2), 6, "c.yaml") == ["a", "a", None, None, "b", "b"]
    with pytest.raises(LaunchError, match="3 ranks x 2 replicas = 6 processes, but 3 were launched"):
        device_types_of(Cluster(ranks=ranks, num_replicas=2), 3, "c.yaml")
    with pytest.raises(ClusterError, match="every rank with device 'b' has a slowdown"):
        device_types_of(Cluster(ranks=ranks[:2]), 2, "c.yaml")


def launched(output: Path, num_ranks: int, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``pipeplan profile --ranks`` as its help says."""
    launcher = Path(sys.executable).with_name("deepspeed")
    command = [
        str(launcher), "--no_local_rank", "--num_gpus", str(num_ranks), "--master_port", str(launching.free_port()),
        "--module", "pipeplan", "profile", "parallel_model:factory", "--ranks", "-o", str(output),
        "--micro-batch-size", "2", "--time-limit", "0", *arguments,
    ]  # fmt: skip
    return subprocess.run(
        command,
        env=launching.cpu_environment() | environment,
        cwd=Path(parallel_model.__file__).parent,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.launcher
def test_a_launch_that_fails_is_gone_on_from(tmp_path: Path) -> None:
    """Two ranks: one runs out of memory, both end, and what both measured is used by three ranks of two types.

    The result equals one process's profile in all but times.
    """
    output = tmp_path / "profile.yaml"
    failed = launched(output, 2, CROWDED="1")
    assert failed.returncode == 1, failed.stdout + failed.stderr
    errors = [line for line in failed.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert errors[0].startswith(("error: rank 0: layer 'crowded.2'", "error: rank 1: layer 'crowded.2'"))
    assert "does not fit in the memory of cpu" in errors[0]
    assert "the same command goes on from there" in failed.stderr
    assert not output.exists()
    parts = {path: read_profile(path) for path in partial_paths(output)}
    assert set(parts) <= {partial_path(output, f"cpu-{rank}") for rank in range(2)}
    kept = {layer.name: layer for part in parts.values() for layer in part.layers}
    assert kept.keys() == {"embedding.0", "linear.1"}

    done = launched(output, 3, "--device-name", "cpu,cpu,other")
    assert done.returncode == 0, done.stdout + done.stderr
    assert ("warning: 3 ranks with --threads 1" in done.stderr) == (len(os.sched_getaffinity(0)) < 3)
    assert "measured layer" in done.stderr and "on cpu; what is equal isn't measured again" in done.stderr
    found = read_profile(output)
    assert found.devices == ("cpu", "other")
    assert [layer.times("cpu") for layer in found.layers[:2]] == [
        kept[name].times("cpu") for name in ("embedding.0", "linear.1")
    ]
    assert without_times(found) == without_times(alone())
    assert [entry.name for entry in tmp_path.iterdir()] == ["profile.yaml"]
    assert "on cpu: measured" in done.stdout and "on other: measured" in done.stdout
