"""Launch files: hostfile, slots and numbering agree with the cluster."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from pipeplan.cluster import Cluster, Node, Rank
from pipeplan.emit.launch import render_hostfile, render_launch_script
from pipeplan.errors import ClusterError


def cluster_on(nodes_by_rank: Sequence[int], slots: int | None = 8, num_replicas: int = 1) -> Cluster:
    """Return a cluster whose ranks sit on the given nodes; without slots, the nodes have no names."""
    nodes = {} if slots is None else {node: Node(f"worker-{node}", slots) for node in set(nodes_by_rank)}
    ranks = tuple(Rank("h100-sxm", None, node) for node in nodes_by_rank)
    return Cluster(ranks=ranks, nodes=nodes, num_replicas=num_replicas)


def test_one_node_needs_no_hostfile() -> None:
    """Ranks on one node launch by their number."""
    cluster = cluster_on([0, 0, 0], num_replicas=2)
    assert render_hostfile(cluster) is None
    assert "--num_gpus 6 " in render_launch_script("m", cluster)


def test_hostfile_gives_each_pipeline_rank_its_node() -> None:
    """DeepSpeed numbers processes down the hostfile; process rank x replicas + replica lands on the rank's node."""
    nodes_by_rank, num_replicas = [1, 1, 1, 0, 2, 2], 2
    text = render_hostfile(cluster_on(nodes_by_rank, num_replicas=num_replicas))
    assert text is not None
    hosts: list[str] = []
    for line in text.splitlines():
        host, slots = line.split(" slots=")
        hosts.extend([host] * int(slots))
    expected = [f"worker-{node}" for node in nodes_by_rank for _ in range(num_replicas)]
    assert hosts == expected


def test_deepspeed_reads_the_hostfile(tmp_path: pytest.TempPathFactory) -> None:
    """DeepSpeed's own parser finds the hosts and slots."""
    from deepspeed.launcher.runner import _parse_hostfile

    text = render_hostfile(cluster_on([0, 0, 1], num_replicas=2))
    assert text is not None
    assert dict(_parse_hostfile(text.splitlines())) == {"worker-0": 4, "worker-1": 2}


def test_scattered_ranks_are_refused() -> None:
    """Ranks of one node that don't follow each other have no launch order, and the message says so."""
    with pytest.raises(ClusterError, match="ranks of node 0 are not consecutive"):
        render_hostfile(cluster_on([0, 1, 0]))


def test_too_few_slots_are_refused() -> None:
    """A node with fewer slots than processes is named with both numbers."""
    with pytest.raises(ClusterError, match=r"node 0 \(worker-0\) has 3 slots; its 2 ranks x 2 replicas need 4"):
        render_launch_script("m", cluster_on([0, 0, 1], slots=3, num_replicas=2))


def test_two_nodes_of_one_host_are_refused() -> None:
    """A host that two nodes share would stand in the hostfile twice, which DeepSpeed refuses; so do we, by name."""
    cluster = Cluster(
        ranks=(Rank("h100-sxm", None, 0), Rank("h100-sxm", None, 1)), nodes={0: Node("a", 1), 1: Node("a", 1)}
    )
    with pytest.raises(ClusterError, match="nodes 0 and 1 are both host 'a'"):
        render_hostfile(cluster)


def test_unnamed_nodes_ask_for_a_hostfile() -> None:
    """Without host names the script asks for a hostfile and says which slots it needs."""
    script = render_launch_script("m", cluster_on([0, 0, 1], slots=None, num_replicas=2))
    assert "HOSTFILE:?" in script
    assert "4, 2" in script


def test_cpu_ranks_choose_deepspeeds_cpu_accelerator() -> None:
    """CPU plans set DS_ACCELERATOR themselves; GPU plans leave it alone."""
    assert "DS_ACCELERATOR=cpu" in render_launch_script("m", Cluster(ranks=(Rank("cpu"),) * 2))
    assert "DS_ACCELERATOR" not in render_launch_script("m", cluster_on([0, 0]))
