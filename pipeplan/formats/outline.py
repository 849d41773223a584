"""What another tool's file says of a plan, and the plan that it becomes with a profile."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pipeplan.cluster import Cluster
from pipeplan.errors import PlanError
from pipeplan.plan.layout import Partition, Placement
from pipeplan.plan.ops import OpKind, Order
from pipeplan.plan.types import Plan, QueueModel
from pipeplan.profile.file import profile_digest
from pipeplan.profile.types import Profile
from pipeplan.search.partition import split_by_time
from pipeplan.simulate.costs import CostTable

LEADING_KINDS = ("embedding",)
TRAILING_KINDS = ("norm", "head", "loss")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """A placement and an order, with a partition and what else decides how a batch runs if the file has it."""

    placement: Placement
    order: Order
    partition: Partition | None = None
    num_micro_batches: int | None = None
    recomputed_stages: tuple[int, ...] = ()
    queue_model: QueueModel = QueueModel.ORDERED_PAIR

    @classmethod
    def of(cls, plan: Plan) -> Outline:
        """Return all that a plan says beyond its costs."""
        return cls(
            placement=plan.placement,
            order=plan.order,
            partition=plan.partition,
            num_micro_batches=plan.num_micro_batches,
            recomputed_stages=plan.recomputed_stages,
            queue_model=plan.queue_model,
        )


@dataclass(frozen=True, slots=True)
class Ends:
    """Layers that other tools don't count: the embedding, and the norm and head behind the decoder."""

    num_leading: int
    num_trailing: int

    @classmethod
    def of(cls, profile: Profile) -> Ends:
        """Return the ends of a profile, by the kinds of its layers; a model without them has none."""
        kinds = [layer.kind for layer in profile.layers]
        leading = next((index for index, kind in enumerate(kinds) if kind not in LEADING_KINDS), 0)
        trailing = next((index for index, kind in enumerate(reversed(kinds)) if kind not in TRAILING_KINDS), 0)
        return cls(leading, trailing)


def complete_plan(outline: Outline, profile: Profile, cluster: Cluster, partition: Partition | None = None) -> Plan:
    """Return the plan of an outline.

    Args:
        partition: Used where the outline has none; without either, stages are balanced by time.

    Raises:
        PlanError: Both give a partition, or there are fewer layers than stages.
    """
    if outline.partition is not None and partition is not None:
        raise PlanError(f"the file has the partition {outline.partition}; leave the other one, {partition}, out")
    counted = 1 + max((op.micro_batch for ops in outline.order for op in ops), default=0)
    return Plan(
        model=profile.model,
        num_micro_batches=counted if outline.num_micro_batches is None else outline.num_micro_batches,
        partition=outline.partition or partition or _balanced(profile, cluster, outline.placement.num_stages),
        placement=outline.placement,
        order=outline.order,
        recomputed_stages=outline.recomputed_stages,
        queue_model=outline.queue_model,
        profile_digest=profile_digest(profile),
    )


def _balanced(profile: Profile, cluster: Cluster, num_stages: int) -> Partition:
    """Return the split with the smallest largest stage, by F + B on the first rank's device."""
    sums = CostTable(profile, cluster).device_sums(cluster.ranks[0].device)
    layer_ns = np.diff(sums[:, OpKind.F] + sums[:, OpKind.B])
    return split_by_time(profile.layers, layer_ns.tolist(), num_stages)
