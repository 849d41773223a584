"""Drafting a cluster from a hostfile and the tables of GPUs and networks, before anything is measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from pipeplan.cluster import Cluster, Link, Node, Rank
from pipeplan.errors import ClusterError, nearest
from pipeplan.files import Document, check_format, parse_document, read_yaml
from pipeplan.profile.estimate.gpus import Gpu
from pipeplan.resources import template_path
from pipeplan.units import bytes_from_gb, ns_from_us, us_from_ns

NETWORKS_FORMAT = "pipeplan-networks/1"
RULE_OF_THUMB = "rule of thumb"
DEFAULT_RESERVE_GB = 4.0  # CUDA context, communicators, fragmentation


class _NetworkEntry(Document):
    oneway_gb_per_s: float = Field(gt=0)
    latency_us: float = Field(ge=0)


class _NetworksDocument(Document):
    format: Literal["pipeplan-networks/1"]
    within_node_latency_us: float = Field(ge=0)
    networks: dict[str, _NetworkEntry] = Field(min_length=1)


@dataclass(frozen=True, slots=True)
class Networks:
    """Links as they usually are."""

    within_node_latency_ns: int
    link_by_name: Mapping[str, Link]


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of a draft and how far to trust it."""

    name: str
    value: str
    status: str


@dataclass(frozen=True, slots=True)
class Draft:
    """A cluster that nobody has measured, and where its figures come from."""

    cluster: Cluster
    figures: tuple[Figure, ...]


def read_networks() -> Networks:
    """Return the table that comes with pipeplan."""
    path = template_path("networks.yaml")
    content = read_yaml(path, "network table")
    check_format(content, NETWORKS_FORMAT, path)
    document = parse_document(content, _NetworksDocument, path)
    return Networks(
        ns_from_us(document.within_node_latency_us),
        {name: Link(ns_from_us(entry.latency_us), entry.oneway_gb_per_s) for name, entry in document.networks.items()},
    )


def find_network(name: str, networks: Networks) -> Link:
    """Return one network of a table.

    Raises:
        ClusterError: It is not in there; names the nearest one.
    """
    links = networks.link_by_name
    if name not in links:
        raise ClusterError(f"no network {name!r} in the table{nearest(name, links)}; known: {', '.join(links)}")
    return links[name]


def draft_cluster(
    nodes: Sequence[Node],
    gpu: Gpu,
    network_name: str,
    *,
    gpus_per_rank: int = 1,
    num_replicas: int = 1,
    reserve_gb: float = DEFAULT_RESERVE_GB,
) -> Draft:
    """Return the cluster of one GPU type on the hosts of a hostfile.

    Args:
        gpus_per_rank: GPUs that share the layers of a pipeline rank (tensor parallelism); a profile for it counts the
            bytes of one of them, so the cap is that of one GPU.
        num_replicas: Data-parallel replicas.

    Raises:
        ClusterError: A host's slots can't be divided into whole ranks, or the network is unknown.
    """
    networks = read_networks()
    between = find_network(network_name, networks)
    num_gpus = gpus_per_rank * num_replicas
    for node in nodes:
        if node.slots % num_gpus:
            raise ClusterError(
                f"host {node.host!r} has {node.slots} slots, which {gpus_per_rank} GPUs a rank x {num_replicas} "
                f"replicas = {num_gpus} don't divide; change --gpus-per-rank, --data-parallel or the hostfile"
            )
    within = Link(networks.within_node_latency_ns, gpu.p2p_oneway_gb_per_s)
    has_several_nodes = len(nodes) > 1
    cluster = Cluster(
        ranks=tuple(
            Rank(gpu.name, bytes_from_gb(gpu.memory_gb), number)
            for number, node in enumerate(nodes)
            for _ in range(node.slots // num_gpus)
        ),
        within_node=within,
        between_nodes=between if has_several_nodes else None,
        nodes={number: Node(node.host, node.slots // gpus_per_rank) for number, node in enumerate(nodes)},
        num_replicas=num_replicas,
        memory_reserve_bytes=bytes_from_gb(reserve_gb),
    )
    note = "" if gpu.note is None else f"; {gpu.note}"
    figures = [
        Figure("memory", f"{gpu.memory_gb:g} GB", f"data sheet, {gpu.status}"),
        Figure("bandwidth within a node", f"{within.gb_per_s:g} GB/s", f"data sheet, {gpu.status}{note}"),
        Figure("latency within a node", f"{us_from_ns(within.latency_ns):g} us", RULE_OF_THUMB),
    ]
    if has_several_nodes:
        figures += [
            Figure("bandwidth between nodes", f"{between.gb_per_s:g} GB/s", f"{RULE_OF_THUMB} for {network_name}"),
            Figure(
                "latency between nodes", f"{us_from_ns(between.latency_ns):g} us", f"{RULE_OF_THUMB} for {network_name}"
            ),
        ]
    figures.append(Figure("memory reserve", f"{reserve_gb:g} GB", RULE_OF_THUMB))
    return Draft(cluster, tuple(figures))


def draft_comment(draft: Draft) -> str:
    """Return the figures with their status as lines of a comment, for the head of the cluster file."""
    lines = [f"#   {figure.name}: {figure.value} ({figure.status})" for figure in draft.figures]
    return "\n".join(["# Drafted, not measured. Where each figure comes from:", *lines]) + "\n"
