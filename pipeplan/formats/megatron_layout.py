"""Megatron-LM's ``--pipeline-model-parallel-layout``: the partition alone, such as ``Et*3|(tt|)*29,m|L``.

Stages are split by ``|``; E is the embedding, t a decoder layer, m a multi-token prediction layer, L the loss with norm
and head. ``x*3`` and ``(...)*3`` repeat, commas only please the eye. Stage s sits on rank s mod (number of ranks).
"""

from __future__ import annotations

import re

from pipeplan.errors import PlanError
from pipeplan.formats.outline import Ends, Outline
from pipeplan.plan.layout import Partition, Placement
from pipeplan.plan.orders import interleaved_one_f_one_b, looped_placement, one_f_one_b
from pipeplan.plan.types import Plan
from pipeplan.profile.types import Profile

_GROUP = re.compile(r"\(([^()]*)\)\*(\d+)")
_ONE = re.compile(r"([EtmL|])\*(\d+)")
_MAX_LENGTH = 100_000  # of the written-out string; a slip of the finger must not fill the memory


def write_layout(plan: Plan, profile: Profile) -> str:
    """Return the layout string of a plan; the order has no place in it.

    Raises:
        PlanError: The placement is no loop over the ranks, or embedding or head are spread over stages.
    """
    looped = tuple(stage % plan.num_ranks for stage in range(plan.num_stages))
    if plan.placement.rank_by_stage != looped or plan.num_stages % plan.num_ranks:
        raise PlanError(
            f"placement {plan.placement} is no loop over the ranks, and Megatron's layout can't say another; "
            "optimize with --placement " + ",".join(str(rank) for rank in looped)
        )
    ends = Ends.of(profile)
    first_trailing = profile.num_layers - ends.num_trailing
    parts: list[str] = []
    for stage in range(plan.num_stages):
        layers = plan.partition.layers(stage)
        num_leading = sum(layer < ends.num_leading for layer in layers)
        num_trailing = sum(layer >= first_trailing for layer in layers)
        if num_leading not in (0, ends.num_leading) or num_trailing not in (0, ends.num_trailing):
            what = "embedding" if num_leading not in (0, ends.num_leading) else "norm and head"
            raise PlanError(f"stage {stage} holds only a part of {what}, which Megatron's layout keeps in one stage")
        num_body = len(layers) - num_leading - num_trailing
        body = "t" * num_body if num_body <= 2 else f"t*{num_body}"
        parts.append(("E" if num_leading else "") + body + ("L" if num_trailing else ""))
    return "|".join(parts)


def read_layout(text: str, profile: Profile, num_ranks: int, num_micro_batches: int) -> Outline:
    """Return the partition of a layout with the order that Megatron runs it in: 1F1B, interleaved with several stages.

    Raises:
        PlanError: The string is malformed, a stage is empty, it has multi-token prediction, its layers are not the
            profile's, or its stages don't divide over the ranks.
    """
    ends = Ends.of(profile)
    sizes: list[int] = []
    for stage, part in enumerate(_write_out(text).split("|")):
        unknown = part.strip("EtL")
        if "m" in part:
            raise PlanError(
                f"stage {stage} of layout {text!r} has a multi-token prediction layer (m), unsupported here"
            )
        if unknown or re.fullmatch(r"E?t*L?", part) is None:
            raise PlanError(f"stage {stage} of layout {text!r} reads {part!r}; expected E, t and L in this order")
        if not part:
            raise PlanError(f"stage {stage} of layout {text!r} is empty; here, every stage holds at least one layer")
        sizes.append(ends.num_leading * part.count("E") + part.count("t") + ends.num_trailing * part.count("L"))
    if sum(sizes) != profile.num_layers:
        num_body = profile.num_layers - ends.num_leading - ends.num_trailing
        raise PlanError(
            f"layout {text!r} makes {sum(sizes)} layers, {profile.model} has {profile.num_layers}: "
            f"expected {num_body} t between E and L"
        )
    num_stages_per_rank, left_over = divmod(len(sizes), num_ranks)
    if left_over:
        raise PlanError(f"the {len(sizes)} stages of layout {text!r} don't divide over {num_ranks} ranks")
    order = (
        one_f_one_b(num_ranks, num_micro_batches)
        if num_stages_per_rank == 1
        else interleaved_one_f_one_b(num_ranks, num_stages_per_rank, num_micro_batches)
    )
    placement: Placement = looped_placement(num_ranks, num_stages_per_rank)
    return Outline(partition=Partition(tuple(sizes)), placement=placement, order=order)


def _write_out(text: str) -> str:
    """Return the layout without commas, spaces and multiplications."""
    written = re.sub(r"[\s,'\"]", "", text)
    for pattern in (_GROUP, _ONE):
        while (match := pattern.search(written)) is not None:
            repeated = match[1] * min(int(match[2]), _MAX_LENGTH)
            written = written[: match.start()] + repeated + written[match.end() :]
            if len(written) > _MAX_LENGTH:
                raise PlanError(f"layout {text[:60]!r} has more than {_MAX_LENGTH} stages and layers")
    return written
