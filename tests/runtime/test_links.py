"""``pipeplan profile --links`` through the real ``deepspeed`` launcher."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import launching
import pytest

from pipeplan.cluster import equal_ranks, read_cluster, write_cluster
from pipeplan.runtime.shared_memory import SHARED_MEMORY


def launched(folder: Path, port: int, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run ``pipeplan profile --links`` on two processes, as the command's help says."""
    launcher = Path(sys.executable).with_name("deepspeed")
    command = [
        str(launcher), "--no_local_rank", "--num_gpus", "2", "--master_port", str(port),
        "--module", "pipeplan", "profile", "--links", "-o", str(folder / "measured.yaml"), *map(str, arguments),
    ]  # fmt: skip
    return subprocess.run(
        command, env=launching.cpu_environment(), capture_output=True, text=True, timeout=400, check=False
    )


@pytest.mark.launcher
def test_links_of_a_cluster_file_are_measured(tmp_path: Path) -> None:
    """The pair and its node get plausible measured figures; devices, memory and reserve stay as they were."""
    cluster = equal_ranks(2, "cpu", memory_gb=3, link_latency_us=1, link_gb_per_s=1)
    write_cluster(cluster, tmp_path / "draft.yaml")
    port = launching.free_port()
    done = launched(tmp_path, port, "--cluster", tmp_path / "draft.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    found = read_cluster(tmp_path / "measured.yaml")
    assert found.ranks == cluster.ranks
    [(pair, link)] = found.link_by_pair.items()
    assert pair == (0, 1)
    assert found.within_node == link
    assert 0 <= link.latency_ns < 1e9
    assert 1e-3 < link.gb_per_s < 1e3
    assert found.between_nodes == cluster.between_nodes, "no pair lies between nodes, so that figure stays"
    assert "0 - 1" in done.stdout
    assert not list(SHARED_MEMORY.glob(f"deepspeed_allreduce_buffer_*_{port}_*")), "66 MiB a rank would stay for good"
