"""Devices, links and memory caps: the cluster and its file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from pipeplan.errors import ClusterError, nearest
from pipeplan.files import Document, Flow, check_format, dump_yaml, parse_document, read_yaml, write_text
from pipeplan.units import bytes_from_gb, gb_from_bytes, ns_from_us, us_from_ns

FORMAT = "pipeplan-cluster/1"
OVERHEAD_KEYS = ("F", "B", "I", "W", "send", "wait", "step")


@dataclass(frozen=True, slots=True)
class Rank:
    """One pipeline rank: a device and its limits.

    Attributes:
        memory_bytes: Cap of the device, or ``None`` for no cap.
        slowdown: Factor on every time of the device type; 2.0 is half as fast.
    """

    device: str
    memory_bytes: int | None = None
    node: int = 0
    slowdown: float = 1.0


@dataclass(frozen=True, slots=True)
class Link:
    """One direction between two ranks."""

    latency_ns: int
    gb_per_s: float

    def transfer_ns(self, num_bytes: int) -> int:
        """Return latency + bytes / bandwidth, in nanoseconds."""
        return self.latency_ns + round(num_bytes / self.gb_per_s)  # 1 GB/s is 1 byte/ns


@dataclass(frozen=True, slots=True)
class Node:
    """A host of the launch."""

    host: str
    slots: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """What a plan is made for.

    Attributes:
        link_by_pair: Exceptions, keyed by (lower rank, higher rank).
        num_replicas: Data-parallel replicas; global rank = pipeline rank * num_replicas + replica.
        memory_reserve_bytes: Taken from every cap: CUDA context, fragmentation, communicators.
        host_overhead_ns: By F, B, I, W, send, wait (per op or message) and step (per batch).
    """

    ranks: tuple[Rank, ...]
    within_node: Link | None = None
    between_nodes: Link | None = None
    link_by_pair: Mapping[tuple[int, int], Link] = field(default_factory=dict)
    nodes: Mapping[int, Node] = field(default_factory=dict)
    num_replicas: int = 1
    memory_reserve_bytes: int = 0
    host_overhead_ns: Mapping[str, int] = field(default_factory=dict)

    @property
    def num_ranks(self) -> int:
        """Number of pipeline ranks."""
        return len(self.ranks)

    def link(self, source: int, target: int) -> Link | None:
        """Return the link from one rank to another, or ``None`` where transfers are free."""
        pair = (min(source, target), max(source, target))
        if pair in self.link_by_pair:
            return self.link_by_pair[pair]
        same_node = self.ranks[source].node == self.ranks[target].node
        return self.within_node if same_node else self.between_nodes

    def transfer_ns(self, source: int, target: int, num_bytes: int) -> int:
        """Return how long ``num_bytes`` take from ``source`` to ``target``; 0 on one rank or without links."""
        if source == target:
            return 0
        link = self.link(source, target)
        return 0 if link is None else link.transfer_ns(num_bytes)

    def usable_bytes(self, rank: int) -> int | None:
        """Return the cap of ``rank`` less the reserve, or ``None`` without a cap."""
        cap = self.ranks[rank].memory_bytes
        return None if cap is None else cap - self.memory_reserve_bytes


def memory_bytes_of(memory_gb: float) -> int:
    """Return a memory cap in bytes.

    Raises:
        ClusterError: It is not positive, or no number.
    """
    if not 0 < memory_gb < math.inf:
        raise ClusterError(f"memory per rank must be positive, got {memory_gb} GB; without a cap, leave it out")
    return bytes_from_gb(memory_gb)


def equal_ranks(
    num_ranks: int,
    device: str,
    *,
    memory_gb: float | None = None,
    link_latency_us: float | None = None,
    link_gb_per_s: float | None = None,
    num_replicas: int = 1,
) -> Cluster:
    """Return a cluster of equal devices on one node; without a bandwidth, transfers are free.

    Raises:
        ClusterError: A count or figure is not positive, or a latency has no bandwidth.
    """
    if num_ranks < 1:
        raise ClusterError(f"a pipeline needs at least 1 rank, got {num_ranks}")
    if num_replicas < 1:
        raise ClusterError(f"data parallelism needs at least 1 replica, got {num_replicas}")
    memory_bytes = None if memory_gb is None else memory_bytes_of(memory_gb)
    if link_gb_per_s is None and link_latency_us:
        raise ClusterError("a link latency needs a bandwidth as well: add --link-gb-per-s")
    if link_gb_per_s is not None and not 0 < link_gb_per_s < math.inf:
        raise ClusterError(f"link bandwidth must be positive, got {link_gb_per_s} GB/s")
    if link_latency_us is not None and not 0 <= link_latency_us < math.inf:
        raise ClusterError(f"link latency must not be negative, got {link_latency_us} us")
    link = None if link_gb_per_s is None else Link(ns_from_us(link_latency_us or 0.0), link_gb_per_s)
    return Cluster(
        ranks=(Rank(device, memory_bytes),) * num_ranks,
        within_node=link,
        between_nodes=link,
        num_replicas=num_replicas,
    )


class _RankEntry(Document):
    device: str
    memory_gb: float | None = Field(default=None, gt=0)
    node: int = Field(default=0, ge=0)
    slowdown: float = Field(default=1.0, gt=0)


class _LinkEntry(Document):
    latency_us: float = Field(default=0.0, ge=0)
    gb_per_s: float = Field(gt=0)


class _PairEntry(_LinkEntry):
    ranks: list[int] = Field(min_length=2, max_length=2)


class _LinksEntry(Document):
    within_node: _LinkEntry | None = None
    between_nodes: _LinkEntry | None = None
    pairs: list[_PairEntry] = Field(default_factory=list)


class _NodeEntry(Document):
    host: str
    slots: int = Field(ge=1)


class _ClusterDocument(Document):
    format: Literal["pipeplan-cluster/1"]
    ranks: list[_RankEntry] = Field(min_length=1)
    links: _LinksEntry | None = None
    nodes: dict[int, _NodeEntry] | None = None
    data_parallel: int = Field(default=1, ge=1)
    memory_reserve_gb: float = Field(default=0.0, ge=0)
    host_overheads_us: dict[str, float] | None = None


def read_cluster(path: Path) -> Cluster:
    """Read a cluster file.

    Raises:
        FileFormatError: The file is missing, malformed or of another format.
        ClusterError: It contradicts itself: an unknown rank in a pair, an unknown overhead.
    """
    content = read_yaml(path, "cluster")
    check_format(content, FORMAT, path)
    return cluster_from_document(content, path)


def cluster_from_document(content: Mapping[str, Any], path: Path | str) -> Cluster:
    """Check the content of a cluster file and return the cluster; raises as ``read_cluster`` does."""
    document = parse_document(content, _ClusterDocument, path)
    num_ranks = len(document.ranks)
    links = document.links or _LinksEntry()
    link_by_pair: dict[tuple[int, int], Link] = {}
    for number, entry in enumerate(links.pairs):
        low, high = sorted(entry.ranks)
        if low == high or low < 0 or high >= num_ranks:
            raise ClusterError(
                f"{path}: links.pairs[{number}] names ranks {entry.ranks}; "
                f"expected two different ranks between 0 and {num_ranks - 1}"
            )
        if (low, high) in link_by_pair:
            raise ClusterError(f"{path}: links.pairs[{number}] names ranks {entry.ranks} a second time")
        link_by_pair[low, high] = _link(entry)
    overheads = document.host_overheads_us or {}
    for key, value in overheads.items():
        if key not in OVERHEAD_KEYS:
            raise ClusterError(
                f"{path}: unknown key 'host_overheads_us.{key}'{nearest(key, OVERHEAD_KEYS)}; "
                f"known: {', '.join(OVERHEAD_KEYS)}"
            )
        if value < 0:
            raise ClusterError(f"{path}: host_overheads_us.{key} is negative ({value})")
    nodes = {number: Node(entry.host, entry.slots) for number, entry in (document.nodes or {}).items()}
    if nodes:
        for number, entry_ in enumerate(document.ranks):
            if entry_.node not in nodes:
                raise ClusterError(f"{path}: ranks[{number}] sits on node {entry_.node}, which 'nodes' does not list")
    return Cluster(
        ranks=tuple(
            Rank(
                entry.device,
                None if entry.memory_gb is None else bytes_from_gb(entry.memory_gb),
                entry.node,
                entry.slowdown,
            )
            for entry in document.ranks
        ),
        within_node=_link(links.within_node),
        between_nodes=_link(links.between_nodes),
        link_by_pair=link_by_pair,
        nodes=nodes,
        num_replicas=document.data_parallel,
        memory_reserve_bytes=bytes_from_gb(document.memory_reserve_gb),
        host_overhead_ns={key: ns_from_us(value) for key, value in overheads.items()},
    )


def _link(entry: _LinkEntry | None) -> Any:
    return None if entry is None else Link(ns_from_us(entry.latency_us), entry.gb_per_s)


def _link_entry(link: Link) -> dict[str, float]:
    return {"latency_us": us_from_ns(link.latency_ns), "gb_per_s": link.gb_per_s}


def cluster_document(cluster: Cluster) -> dict[str, Any]:
    """Return what the cluster file holds; ``cluster_from_document`` gives the same cluster back."""
    ranks: list[dict[str, Any]] = []
    for rank in cluster.ranks:
        entry: dict[str, Any] = {"device": rank.device}
        if rank.memory_bytes is not None:
            entry["memory_gb"] = gb_from_bytes(rank.memory_bytes)
        entry["node"] = rank.node
        if rank.slowdown != 1.0:
            entry["slowdown"] = rank.slowdown
        ranks.append(Flow(entry))
    content: dict[str, Any] = {"format": FORMAT, "ranks": ranks}
    links: dict[str, Any] = {}
    if cluster.within_node is not None:
        links["within_node"] = Flow(_link_entry(cluster.within_node))
    if cluster.between_nodes is not None:
        links["between_nodes"] = Flow(_link_entry(cluster.between_nodes))
    if cluster.link_by_pair:
        links["pairs"] = [
            Flow({"ranks": list(pair), **_link_entry(link)}) for pair, link in sorted(cluster.link_by_pair.items())
        ]
    if links:
        content["links"] = links
    if cluster.nodes:
        content["nodes"] = {
            number: Flow({"host": node.host, "slots": node.slots}) for number, node in sorted(cluster.nodes.items())
        }
    content["data_parallel"] = cluster.num_replicas
    if cluster.memory_reserve_bytes:
        content["memory_reserve_gb"] = gb_from_bytes(cluster.memory_reserve_bytes)
    if cluster.host_overhead_ns:
        content["host_overheads_us"] = Flow(
            {key: us_from_ns(cluster.host_overhead_ns[key]) for key in OVERHEAD_KEYS if key in cluster.host_overhead_ns}
        )
    return content


def write_cluster(cluster: Cluster, path: Path) -> None:
    """Write the cluster file whole or not at all."""
    write_text(path, dump_yaml(cluster_document(cluster)))
