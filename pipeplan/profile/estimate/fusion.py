"""Grouping recorded ops into the kernels that a GPU would run."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from pipeplan.profile.estimate.kernels import Category, Kernel
from pipeplan.profile.estimate.recorder import Record, Recording

FusedAway = dict[int, frozenset[int]]
"""A storage that no kernel writes → the storages from which whoever needs it computes it again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fusion:
    """Kernels, and what they leave out.

    Attributes:
        fused_away: Intermediate results inside fused chains that eager ops would write for the backward.
    """

    kernels: tuple[Kernel, ...]
    fused_away: FusedAway


def fuse(
    recording: Recording,
    *,
    num_bytes_by_storage: Mapping[int, int],
    whole_sizes: Collection[int],
    fused_away: FusedAway | None = None,
    memory: Category = Category.MEMORY,
) -> Fusion:
    """Group the ops of a recording into kernels.

    Ops with a category are kernels of their own. Between two of them, pointwise ops, reductions and copies that feed
    each other are one kernel: it reads what the chain gets from outside, each tensor once, and writes what an op
    outside the chain or the caller needs. What a chain computes for the backward of its own ops alone it doesn't
    write: the backward computes it again from what the chain read.

    Args:
        whole_sizes: Sizes of tensors that tensor parallelism doesn't divide.
        fused_away: What earlier kernels didn't write.
        memory: Category of the kernels that only move bytes.
    """
    groups = _groups(recording.records)
    known = dict(fused_away or {})
    consumers: dict[int, set[int]] = {}
    for index, group in enumerate(groups):
        for record in group:
            for key in record.reads:
                consumers.setdefault(key, set()).add(index)
    kernels = []
    for index, group in enumerate(groups):
        reads: dict[int, int] = {}
        written: dict[int, int] = {}
        for record in group:
            for key, num_bytes in record.reads.items():
                if key in written:
                    continue
                for source in known.get(key, (key,)):
                    size = num_bytes if source == key else num_bytes_by_storage[source]
                    reads[source] = max(reads.get(source, 0), size)
            for key, num_bytes in record.writes.items():
                written[key] = max(written.get(key, 0), num_bytes)
                known.pop(key, None)
        category = group[0].category
        if category is None:
            needed = {
                key for key in written if key in recording.kept or any(one != index for one in consumers.get(key, ()))
            }
            sources = frozenset(reads)
            known.update({key: sources for key in written if key not in needed})
            written = {key: num_bytes for key, num_bytes in written.items() if key in needed}
            if not written:
                continue  # nobody needs it, such as the gradient of a constant
        traffic = [(key, num_bytes) for part in (reads, written) for key, num_bytes in part.items()]
        whole = sum(num_bytes for key, num_bytes in traffic if num_bytes_by_storage[key] in whole_sizes)
        kernels.append(
            Kernel(
                category=memory if category is None or category is Category.MEMORY else category,
                flops=sum(record.flops for record in group),
                whole_bytes=whole,
                split_bytes=sum(num_bytes for _, num_bytes in traffic) - whole,
            )
        )
    return Fusion(kernels=tuple(kernels), fused_away=known)


def held_bytes(
    saved: Iterable[int], fusion: Fusion, num_bytes_by_storage: Mapping[int, int], *, without: Collection[int]
) -> int:
    """Return the bytes that stay where fused chains keep what they read instead of what they compute on the way.

    Args:
        saved: Storages that autograd keeps.
        without: Storages that don't count: the weights.
    """
    held = {source for key in saved for source in fusion.fused_away.get(key, (key,))}.difference(without)
    return sum(num_bytes_by_storage[key] for key in held)


def _groups(records: Sequence[Record]) -> list[list[Record]]:
    """Return the ops of each kernel, kernels in the order of their last op."""
    groups: list[list[Record]] = []
    segment: list[Record] = []
    for record in records:
        if record.category is None:
            segment.append(record)
            continue
        groups.extend(_chains(segment))
        segment = []
        groups.append([record])
    groups.extend(_chains(segment))
    return groups


def _chains(segment: Sequence[Record]) -> list[list[Record]]:
    """Return the connected chains of ops, each fed by the one before it."""
    chain_by_storage: dict[int, list[Record]] = {}
    chains: list[list[Record]] = []
    for record in segment:
        fed_by: list[list[Record]] = []
        for key in record.reads:
            chain = chain_by_storage.get(key)
            if chain is not None and not any(chain is other for other in fed_by):
                fed_by.append(chain)
        joined = [one for chain in fed_by for one in chain] + [record]
        chains = [chain for chain in chains if not any(chain is other for other in fed_by)]
        chains.append(joined)
        for one in joined:
            for key in one.writes:
                chain_by_storage[key] = joined
    return chains
