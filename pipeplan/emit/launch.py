"""Launch files of a plan: the line that starts DeepSpeed and, for several nodes, its hostfile."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from pipeplan.cluster import Cluster
from pipeplan.emit.templates import one_line, render
from pipeplan.errors import ClusterError

CPU = "cpu"


@dataclass(frozen=True, slots=True)
class Host:
    """One line of a hostfile.

    Attributes:
        num_used: Processes that run there; DeepSpeed fills every slot that the file names.
    """

    name: str
    num_used: int


def hosts_of(cluster: Cluster) -> tuple[Host, ...]:
    """Return the hosts in launch order, each with the processes it runs; empty where the cluster names no hosts.

    DeepSpeed numbers processes host by host, so the ranks of one node must follow each other.

    Raises:
        ClusterError: The ranks of a node are not consecutive, a node has too few slots, or two nodes share a host.
    """
    runs = [(node, len(list(group))) for node, group in groupby(rank.node for rank in cluster.ranks)]
    seen: set[int] = set()
    for node, _ in runs:
        if node in seen:
            raise ClusterError(
                f"the ranks of node {node} are not consecutive in the cluster; DeepSpeed numbers processes node by "
                "node, so list the ranks of a node one after the other"
            )
        seen.add(node)
    if not cluster.nodes:
        return ()
    hosts: list[Host] = []
    node_by_host: dict[str, int] = {}
    for node, num_ranks in runs:
        num_used = num_ranks * cluster.num_replicas
        entry = cluster.nodes[node]
        other = node_by_host.setdefault(entry.host, node)
        if other != node:
            raise ClusterError(f"nodes {other} and {node} are both host {entry.host!r}; make them one node")
        if entry.slots < num_used:
            raise ClusterError(
                f"node {node} ({entry.host}) has {entry.slots} slots; its {num_ranks} ranks x {cluster.num_replicas} "
                f"replicas need {num_used}"
            )
        hosts.append(Host(entry.host, num_used))
    return tuple(hosts)


def render_hostfile(cluster: Cluster) -> str | None:
    """Return the hostfile, or ``None`` where one node or no named host is used; raises as ``hosts_of`` does."""
    hosts = hosts_of(cluster)
    return render("hostfile.j2", hosts=hosts) if len(hosts) > 1 else None


def render_launch_script(model: str, cluster: Cluster) -> str:
    """Return ``launch.sh``; raises as ``hosts_of`` does."""
    hosts = hosts_of(cluster)
    num_nodes = len({rank.node for rank in cluster.ranks})
    if num_nodes == 1:
        where = f"--num_gpus {cluster.num_ranks * cluster.num_replicas}"
    elif hosts:
        where = '--hostfile "$here/hostfile"'
    else:
        slots = [len(list(group)) * cluster.num_replicas for _, group in groupby(rank.node for rank in cluster.ranks)]
        needed = ", ".join(str(count) for count in slots)
        where = f'--hostfile "${{HOSTFILE:?set it to a hostfile whose slots are, in this order: {needed}}}"'
    return render(
        "launch.sh.j2",
        model=one_line(model),
        num_ranks=cluster.num_ranks,
        num_replicas=cluster.num_replicas,
        num_nodes=num_nodes,
        is_cpu=all(rank.device == CPU for rank in cluster.ranks),
        where=where,
    )
