"""OctoPipe's YAML: ``partition``, ``placement`` (stages by rank) and ``scheduling``, tuples of when what runs.

A tuple is ``(type, micro-batch, stage, rank, start, end)``; f is forward, b the backward (its input gradient alone
where a w follows), w the weight gradient. Its partitions leave out the embedding and the head, which sit on the first
and the last stage. Times have no stated unit; ours are microseconds.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from pydantic import Field

from pipeplan.errors import FileFormatError, PlanError
from pipeplan.files import Document, FlowList, dump_yaml, parse_document
from pipeplan.formats.outline import Ends, Outline
from pipeplan.plan.layout import Partition, Placement
from pipeplan.plan.ops import Op, OpKind, Order
from pipeplan.plan.types import Plan
from pipeplan.profile.types import Profile
from pipeplan.simulate import Timeline
from pipeplan.units import NS_PER_US

_LETTER = {OpKind.F: "f", OpKind.B: "b", OpKind.I: "b", OpKind.W: "w"}
_TUPLE = re.compile(r"\(\s*'?([fbw])'?\s*,([^()]*)\)")


class _OctopipeDocument(Document):
    partition: list[int] = Field(min_length=1)
    placement: list[list[int]] = Field(min_length=1)
    scheduling: list[Any] = Field(min_length=1)
    schedule: str | None = None


def write_octopipe(plan: Plan, profile: Profile, timeline: Timeline) -> str:
    """Return the YAML of a plan with the times of ``timeline``.

    Raises:
        PlanError: Embedding or head are not on the first and the last stage, or are all that a stage holds.
    """
    ends = Ends.of(profile)
    sizes = list(plan.partition.num_layers_by_stage)
    if sizes[0] < ends.num_leading or sizes[-1] < ends.num_trailing:
        raise PlanError("embedding or head are spread over stages; OctoPipe has them on the first and the last stage")
    sizes[0] -= ends.num_leading
    sizes[-1] -= ends.num_trailing
    for stage in (0, plan.num_stages - 1):
        if sizes[stage] < 1:
            raise PlanError(f"stage {stage} holds no decoder layer; OctoPipe's partition can't say that")
    entries = [
        f"({_LETTER[timed.op.kind]}, {timed.op.micro_batch}, {timed.op.stage}, {rank}, "
        f"{round(timed.start_ns / NS_PER_US)}, {round(timed.end_ns / NS_PER_US)})"
        for rank, ops in enumerate(timeline.ops_by_rank)
        for timed in ops
    ]
    return dump_yaml(
        {
            "schedule": "octopipe",
            "partition": FlowList(sizes),
            "placement": FlowList(list(plan.placement.stages(rank)) for rank in range(plan.num_ranks)),
            "scheduling": entries,
        }
    )


def read_octopipe(content: Mapping[str, Any], profile: Profile, name: str) -> Outline:
    """Return partition, placement and order of an OctoPipe file; each rank runs its entries by start, then as listed.

    Args:
        content: What the YAML holds.
        name: The file, for messages.

    Raises:
        FileFormatError: A key is missing or unknown, or an entry is no tuple of six; names the entry.
        PlanError: A stage is placed twice or never, or the layers are not the profile's.
    """
    document = parse_document(content, _OctopipeDocument, name)
    partition = _whole_partition(document.partition, profile, name)
    placement = _placement(document.placement, partition.num_stages, name)
    num_ranks = len(document.placement)
    entries = [_entry(item, f"{name}: scheduling[{number}]") for number, item in enumerate(document.scheduling)]
    split = {(stage, micro_batch) for kind, micro_batch, stage, _, _ in entries if kind == "w"}
    timed_by_rank: dict[int, list[tuple[float, Op]]] = defaultdict(list)
    for number, (letter, micro_batch, stage, rank, start) in enumerate(entries):
        if not 0 <= rank < num_ranks:
            raise PlanError(f"{name}: scheduling[{number}] runs on rank {rank}; 'placement' has {num_ranks} ranks")
        half = OpKind.I if (stage, micro_batch) in split else OpKind.B
        kind = {"f": OpKind.F, "b": half, "w": OpKind.W}[letter]
        timed_by_rank[rank].append((start, Op(stage, kind, micro_batch)))
    order = Order.of(
        [op for _, op in sorted(timed_by_rank[rank], key=lambda timed: timed[0])] for rank in range(num_ranks)
    )
    return Outline(partition=partition, placement=placement, order=order)


def _whole_partition(sizes: list[int], profile: Profile, name: str) -> Partition:
    """Return the partition with embedding and head counted; files that count them already are taken as they are."""
    ends = Ends.of(profile)
    whole = list(sizes)
    if sum(sizes) != profile.num_layers:
        whole[0] += ends.num_leading
        whole[-1] += ends.num_trailing
    if sum(whole) != profile.num_layers:
        num_body = profile.num_layers - ends.num_leading - ends.num_trailing
        raise PlanError(
            f"{name} partitions {sum(sizes)} layers; {profile.model} has {profile.num_layers}, "
            f"{num_body} without embedding and head"
        )
    return Partition(tuple(whole))


def _placement(stages_by_rank: list[list[int]], num_stages: int, name: str) -> Placement:
    rank_by_stage: dict[int, int] = {}
    for rank, stages in enumerate(stages_by_rank):
        for stage in stages:
            if stage in rank_by_stage:
                raise PlanError(f"{name}: 'placement' has stage {stage} on ranks {rank_by_stage[stage]} and {rank}")
            rank_by_stage[stage] = rank
    for stage in range(num_stages):
        if stage not in rank_by_stage:
            raise PlanError(f"{name}: 'placement' has no rank for stage {stage}")
    if len(rank_by_stage) > num_stages:
        raise PlanError(f"{name}: 'placement' has {len(rank_by_stage)} stages, 'partition' {num_stages}")
    return Placement(tuple(rank_by_stage[stage] for stage in range(num_stages)))


def _entry(item: Any, where: str) -> tuple[str, int, int, int, float]:
    """Return (type, micro-batch, stage, rank, start) of an entry, which YAML gives as a list or as one string."""
    expected = f"{where}: {str(item)[:60]!r} is not (f, b or w, micro-batch, stage, rank, start, end)"
    if isinstance(item, str):
        match = _TUPLE.fullmatch(item.strip())
        fields: list[Any] = [] if match is None else [match[1], *match[2].split(",")]
    else:
        fields = list(item) if isinstance(item, list) else []
    if len(fields) != 6 or fields[0] not in ("f", "b", "w"):
        raise FileFormatError(expected)
    try:
        micro_batch, stage, rank = (int(str(field)) for field in fields[1:4])
        start = float(fields[4])
    except (TypeError, ValueError):
        raise FileFormatError(expected) from None
    if micro_batch < 0 or stage < 0:
        raise FileFormatError(expected)
    return fields[0], micro_batch, stage, rank, start
