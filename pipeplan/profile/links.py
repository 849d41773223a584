"""From measured transfers to links: a latency and a bandwidth for every pair of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np
from scipy.optimize import nnls

from pipeplan.cluster import Cluster, Link

_LARGEST_GB_PER_S = 1e6  # where larger messages took no longer: as good as free

Pair = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Transfer:
    """How long one message took, one way."""

    num_bytes: int
    duration_ns: float


@dataclass(frozen=True, slots=True)
class FittedLink:
    """A link and how well it explains what was measured.

    Attributes:
        relative_error: Root mean square of (predicted - measured) / measured.
    """

    link: Link
    relative_error: float


def fit_link(transfers: Sequence[Transfer]) -> FittedLink:
    """Return the latency and bandwidth that explain ``transfers`` best: latency + bytes / bandwidth.

    Least squares of the relative differences, so that small messages, which tell the latency, count as much as large
    ones; neither figure comes out negative.
    """
    sizes = np.array([transfer.num_bytes for transfer in transfers], dtype=np.float64)
    durations_ns = np.array([transfer.duration_ns for transfer in transfers], dtype=np.float64)
    rows = np.stack([1.0 / durations_ns, sizes / durations_ns], axis=1)
    scales = rows.max(axis=0)  # ns and ns a byte differ by many orders of magnitude
    solution, _ = nnls(rows / scales, np.ones(len(transfers)))
    latency_ns, ns_per_byte = solution / scales
    differences = rows @ np.array([latency_ns, ns_per_byte]) - 1.0
    bandwidth = 1.0 / max(ns_per_byte, 1.0 / _LARGEST_GB_PER_S)
    return FittedLink(Link(round(latency_ns), float(f"{bandwidth:.4g}")), float(np.sqrt(np.mean(differences**2))))


def fit_links(transfers_by_direction: Mapping[Pair, Sequence[Transfer]]) -> dict[Pair, FittedLink]:
    """Return a link for every unordered pair (lower rank first), fitted to both of its directions."""
    by_pair: dict[Pair, list[Transfer]] = {}
    for (source, target), transfers in transfers_by_direction.items():
        by_pair.setdefault((min(source, target), max(source, target)), []).extend(transfers)
    return {pair: fit_link(transfers) for pair, transfers in sorted(by_pair.items())}


def directions_that_differ(
    transfers_by_direction: Mapping[Pair, Sequence[Transfer]], factor: float = 1.25
) -> list[tuple[Pair, Link, Link]]:
    """Return the pairs whose directions differ by more than ``factor`` in bandwidth, with the link of each direction.

    A cluster file holds one link a pair, so a plan made with it expects the mean of the two.
    """
    found = []
    for (source, target), transfers in sorted(transfers_by_direction.items()):
        if source < target and (target, source) in transfers_by_direction:
            there = fit_link(transfers).link
            back = fit_link(transfers_by_direction[target, source]).link
            if not 1 / factor <= there.gb_per_s / back.gb_per_s <= factor:
                found.append(((source, target), there, back))
    return found


def with_links(cluster: Cluster, links: Mapping[Pair, Link]) -> Cluster:
    """Return the cluster with measured links for its pairs, and their medians within and between nodes."""

    def typical(*, is_within: bool, otherwise: Link | None) -> Link | None:
        chosen = [
            link
            for (source, target), link in links.items()
            if (cluster.ranks[source].node == cluster.ranks[target].node) == is_within
        ]
        if not chosen:
            return otherwise
        return Link(
            round(median(link.latency_ns for link in chosen)), float(f"{median(link.gb_per_s for link in chosen):.4g}")
        )

    return replace(
        cluster,
        within_node=typical(is_within=True, otherwise=cluster.within_node),
        between_nodes=typical(is_within=False, otherwise=cluster.between_nodes),
        link_by_pair=dict(links),
    )
