"""``pipeplan cluster``: a draft from a hostfile, with the status of every figure."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeplan.cluster import Link, Node, Rank, read_cluster
from pipeplan.hostfile import read_hostfile
from pipeplan.units import bytes_from_gb
from tests.cli.conftest import GOLDEN_PROFILE, Run


def hostfile(folder: Path, text: str) -> Path:
    path = folder / "hostfile"
    path.write_text(text)
    return path


def test_draft_of_two_hosts(run: Run, tmp_path: Path) -> None:
    """Ranks host by host as DeepSpeed numbers them, memory and links from the tables, statuses in the file."""
    path = hostfile(tmp_path, "# training hosts\nworker-1 slots=4\n\nworker-0   slots=2  # half of it\n")
    out = tmp_path / "cluster.yaml"
    outcome = run("cluster", "--hostfile", path, "--gpu", "h100-sxm", "--network", "ndr400-ib", "-o", out)
    assert outcome.status == 0, outcome.err
    cluster = read_cluster(out)
    h100 = bytes_from_gb(80)
    assert cluster.ranks == (Rank("h100-sxm", h100, 0),) * 4 + (Rank("h100-sxm", h100, 1),) * 2
    assert cluster.nodes == {0: Node("worker-1", 4), 1: Node("worker-0", 2)}
    assert cluster.within_node == Link(10_000, 450.0)
    assert cluster.between_nodes == Link(5_000, 50.0)
    head = out.read_text().split("format:")[0]
    for words in (
        "memory: 80 GB (data sheet, confirmed)",
        "bandwidth within a node: 450 GB/s (data sheet, confirmed)",
        "latency within a node: 10 us (rule of thumb)",
        "bandwidth between nodes: 50 GB/s (rule of thumb for ndr400-ib)",
    ):
        assert words in head
    assert "rule of thumb" in outcome.out
    assert outcome.err == f"wrote {out}\n"


def test_doubtful_figures_say_so(run: Run, tmp_path: Path) -> None:
    """What the table calls unconfirmed is called so in the draft."""
    out = tmp_path / "cluster.yaml"
    outcome = run("cluster", "--hostfile", hostfile(tmp_path, "a slots=8\n"), "--gpu", "h800-sxm", "-o", out, "-q")
    assert outcome.status == 0
    assert "memory: 80 GB (data sheet, unconfirmed)" in out.read_text()
    assert read_cluster(out).between_nodes is None


def test_slots_shared_by_tensor_parallelism_and_replicas(run: Run, tmp_path: Path) -> None:
    """Two GPUs a rank and two replicas leave a quarter of the slots as pipeline ranks."""
    path, out = hostfile(tmp_path, "a slots=8\nb slots=8\n"), tmp_path / "cluster.yaml"
    arguments = ("cluster", "--hostfile", path, "--gpu", "a100-80gb", "-o", out, "--gpus-per-rank", 2)
    assert run(*arguments, "--data-parallel", 2).status == 0
    cluster = read_cluster(out)
    assert [rank.node for rank in cluster.ranks] == [0, 0, 1, 1]
    assert cluster.num_replicas == 2
    refused = run(*arguments, "--data-parallel", 3)
    assert refused.status == 1
    assert "host 'a' has 8 slots, which 2 GPUs a rank x 3 replicas = 6 don't divide" in refused.err


def test_a_draft_can_be_planned_for(run: Run, tmp_path: Path) -> None:
    """The golden profile's device type, drafted, goes through optimize."""
    path, out = hostfile(tmp_path, "a slots=2\nb slots=2\n"), tmp_path / "cluster.yaml"
    assert run("cluster", "--hostfile", path, "--gpu", "h800-sxm", "-o", out, "-q").status == 0
    plan = tmp_path / "plan"
    outcome = run(
        "optimize", GOLDEN_PROFILE, "--cluster", out, "--micro-batches", 4, "--strategy", "baselines", "-o", plan
    )
    assert outcome.status == 0, outcome.err
    assert (plan / "hostfile").is_file()


def test_a_hostfile_from_windows(tmp_path: Path) -> None:
    """Neither the mark that editors there put at the start, nor their line ends, become part of a host's name."""
    path = tmp_path / "hostfile"
    path.write_bytes(b"\xef\xbb\xbfworker-0 slots=2\r\nworker-1 slots=2\r\n")
    assert [node.host for node in read_hostfile(path)] == ["worker-0", "worker-1"]


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        ("a slots=2\nb 4\n", (), "line 2: expected 'HOST slots=N', got 'b 4'"),
        ("a slots=2\nb slots=x\n", (), "line 2: expected 'HOST slots=N'"),
        ("a slots=0\n", (), "line 1: host 'a' has no slots"),
        ("a slots=2\n\na slots=2\n", (), "line 3: host 'a' stands in line 1 already"),
        ("# none\n", (), "names no host"),
        ("a slots=2\n", ("--gpu", "h100-smx"), "no GPU 'h100-smx' in the table (did you mean 'h100-sxm'?)"),
        ("a slots=2\n", ("--network", "ndr40-ib"), "no network 'ndr40-ib' in the table (did you mean 'ndr400-ib'?)"),
    ],
)
def test_faults_are_named(run: Run, tmp_path: Path, text: str, arguments: tuple[str, ...], message: str) -> None:
    """A malformed hostfile names its line, an unknown GPU or network the nearest one; nothing is written."""
    out = tmp_path / "cluster.yaml"
    outcome = run("cluster", "--hostfile", hostfile(tmp_path, text), "--gpu", "h100-sxm", "-o", out, *arguments)
    assert outcome.status == 1
    assert message in outcome.err
    assert not out.exists()


def test_missing_hostfile(run: Run, tmp_path: Path) -> None:
    """A hostfile that isn't there is named."""
    outcome = run("cluster", "--hostfile", tmp_path / "none", "--gpu", "h100-sxm", "-o", tmp_path / "cluster.yaml")
    assert (outcome.status, "none does not exist" in outcome.err) == (1, True)
