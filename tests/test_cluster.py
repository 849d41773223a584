"""The cluster file: what it means, and one clear message for everything that can be wrong in it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeplan.cluster import (
    Cluster,
    Link,
    Node,
    Rank,
    cluster_document,
    cluster_from_document,
    equal_ranks,
    read_cluster,
    write_cluster,
)
from pipeplan.errors import ClusterError, FileFormatError, PipeplanError

TEXT = """\
format: pipeplan-cluster/1
ranks:
- {device: h100-sxm, memory_gb: 80, node: 0}
- {device: a100-80gb, memory_gb: 80, node: 0, slowdown: 1.5}
- {device: a100-80gb, node: 1}
links:
  within_node: {latency_us: 10, gb_per_s: 200}
  between_nodes: {latency_us: 15, gb_per_s: 25}
  pairs:
  - {ranks: [1, 0], latency_us: 1, gb_per_s: 2}
data_parallel: 2
memory_reserve_gb: 2
host_overheads_us: {F: 500, send: 20}
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "cluster.yaml"
    path.write_text(text)
    return path


def test_reads_every_key(tmp_path: Path) -> None:
    """Every key of the file reaches the cluster, in nanoseconds and bytes."""
    cluster = read_cluster(write(tmp_path, TEXT))
    assert cluster.ranks[1] == Rank("a100-80gb", 80 * 10**9, 0, 1.5)
    assert cluster.link(0, 1) == Link(1000, 2.0)
    assert cluster.link(1, 0) == cluster.link(0, 1)
    assert cluster.link(0, 2) == Link(15_000, 25.0)
    assert cluster.transfer_ns(2, 0, 25_000) == 15_000 + 1000
    assert cluster.transfer_ns(1, 1, 25_000) == 0
    assert cluster.usable_bytes(0) == 78 * 10**9
    assert cluster.usable_bytes(2) is None
    assert cluster.num_replicas == 2
    assert cluster.host_overhead_ns == {"F": 500_000, "send": 20_000}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            ("memory_gb: 80, node: 0}", "memory: 80, node: 0}"),
            "unknown key 'ranks[0].memory' (did you mean 'memory_gb'?)",
        ),
        (("data_parallel: 2", "data_paralel: 2"), "unknown key 'data_paralel' (did you mean 'data_parallel'?)"),
        (("latency_us: 15", "latency: 15"), "unknown key 'links.between_nodes.latency' (did you mean 'latency_us'?)"),
        (("send: 20", "sent: 20"), "unknown key 'host_overheads_us.sent' (did you mean 'send'?)"),
        (("cluster/1", "cluster/2"), "newer than this pipeplan reads"),
        (("cluster/1", "profile/1"), "expected 'pipeplan-cluster/1'"),
        (("ranks: [1, 0]", "ranks: [1, 3]"), "links.pairs[0] names ranks [1, 3]"),
        (("device: h100-sxm", "device: 7"), "ranks[0].device"),
        (("gb_per_s: 25", "gb_per_s: 0"), "links.between_nodes.gb_per_s"),
        (("slowdown: 1.5", "slowdown: -1"), "ranks[1].slowdown"),
        (("data_parallel: 2", "nodes: {0: {host: a, slots: 8}}"), "ranks[2] sits on node 1"),
        (("gb_per_s: 2}", "gb_per_s: 2"), "is it truncated?"),
    ],
)
def test_faults_are_named(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    """Every fault gives one message that names the file and the key."""
    assert change[0] in TEXT
    path = write(tmp_path, TEXT.replace(*change, 1))
    with pytest.raises(PipeplanError) as caught:
        read_cluster(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


def test_missing_and_empty_files(tmp_path: Path) -> None:
    """A file that isn't there, is empty or is a folder is named as such."""
    for path, message in (
        (tmp_path / "none.yaml", "does not exist"),
        (write(tmp_path, ""), "holds no keys"),
        (tmp_path, "is a folder"),
    ):
        with pytest.raises(FileFormatError, match=message):
            read_cluster(path)


links = st.builds(Link, st.integers(0, 10**6), st.sampled_from([0.5, 12.5, 40.0, 450.0]))


@given(
    st.builds(
        Cluster,
        ranks=st.lists(
            st.builds(
                Rank,
                st.sampled_from(["h100-sxm", "cpu"]),
                st.none() | st.integers(1, 10**12),
                st.integers(0, 1),
                st.sampled_from([1.0, 1.7]),
            ),
            min_size=2,
            max_size=5,
        ).map(tuple),
        within_node=st.none() | links,
        between_nodes=st.none() | links,
        link_by_pair=st.dictionaries(st.just((0, 1)), links),
        nodes=st.just({}) | st.just({0: Node("a", 8), 1: Node("b", 4)}),
        num_replicas=st.integers(1, 8),
        memory_reserve_bytes=st.integers(0, 10**10),
        host_overhead_ns=st.dictionaries(st.sampled_from(["F", "W", "step"]), st.integers(0, 10**7)),
    )
)
def test_document_gives_the_cluster_back(cluster: Cluster) -> None:
    """Writing and reading loses nothing."""
    assert cluster_from_document(cluster_document(cluster), "cluster.yaml") == cluster


def test_written_file_reads_back(tmp_path: Path) -> None:
    """The file on disk is the document, and nothing else is left in the folder."""
    cluster = equal_ranks(3, "x", memory_gb=80, link_latency_us=10, link_gb_per_s=40)
    write_cluster(cluster, tmp_path / "c.yaml")
    assert read_cluster(tmp_path / "c.yaml") == cluster
    assert [path.name for path in tmp_path.iterdir()] == ["c.yaml"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_ranks": 0}, "at least 1 rank"),
        ({"memory_gb": 0.0}, "memory per rank must be positive"),
        ({"link_latency_us": 5.0}, "needs a bandwidth"),
        ({"link_gb_per_s": 0.0}, "bandwidth must be positive"),
        ({"link_gb_per_s": 1.0, "link_latency_us": -1.0}, "latency must not be negative"),
        ({"num_replicas": 0}, "at least 1 replica"),
    ],
)
def test_shorthand_refuses_nonsense(arguments: dict[str, float], message: str) -> None:
    """Impossible figures on the command line are refused with the figure."""
    with pytest.raises(ClusterError, match=message):
        equal_ranks(**{"num_ranks": 2, "device": "x", **arguments})  # type: ignore[arg-type]
