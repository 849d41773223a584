"""The plan file: YAML in milliseconds and gigabytes outside, ``Plan`` in nanoseconds and bytes inside."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from pipeplan.errors import PlanError
from pipeplan.files import Document, Flow, FlowList, check_format, dump_yaml, parse_document, read_yaml, write_text
from pipeplan.plan.layout import Partition, Placement
from pipeplan.plan.ops import Order
from pipeplan.plan.types import Plan, Prediction, QueueModel
from pipeplan.units import bytes_from_gb, gb_from_bytes, ms_from_ns, ns_from_ms

FORMAT = "pipeplan-plan/1"


class _PredictionEntry(Document):
    makespan_ms: float = Field(ge=0)
    peak_memory_gb: list[float]
    bubble_fraction: float


class _PlanDocument(Document):
    format: Literal["pipeplan-plan/1"]
    model: str
    profile_digest: str | None = None
    num_micro_batches: int = Field(ge=1)
    partition: list[int] = Field(min_length=1)
    placement: list[int] = Field(min_length=1)
    order: list[str] = Field(min_length=1)
    recompute: list[int] = Field(default_factory=list)
    queue_model: Literal["ordered-pair", "pair", "single"] = "ordered-pair"
    predicted: _PredictionEntry | None = None
    notes: dict[str, Any] | None = None


def read_plan(path: Path) -> Plan:
    """Read a plan file; whether the order is sound is for ``check_plan`` and ``verify``.

    Raises:
        FileFormatError: The file is missing, malformed, truncated or of another format.
        PlanError: The partition has an empty stage, or a word of the order is no op.
    """
    content = read_yaml(path, "plan")
    check_format(content, FORMAT, path)
    return plan_from_document(content, path)


def plan_from_document(content: Mapping[str, Any], path: Path | str) -> Plan:
    """Check the content of a plan file and return the plan; raises as ``read_plan`` does."""
    document = parse_document(content, _PlanDocument, path)
    predicted = document.predicted
    try:
        return Plan(
            model=document.model,
            num_micro_batches=document.num_micro_batches,
            partition=Partition(tuple(document.partition)),
            placement=Placement(tuple(document.placement)),
            order=Order.parse(document.order),
            recomputed_stages=tuple(document.recompute),
            queue_model=QueueModel(document.queue_model),
            profile_digest=document.profile_digest,
            prediction=None
            if predicted is None
            else Prediction(
                makespan_ns=ns_from_ms(predicted.makespan_ms),
                peak_memory_bytes_by_rank=tuple(bytes_from_gb(value) for value in predicted.peak_memory_gb),
                bubble_fraction=predicted.bubble_fraction,
            ),
            extra=document.notes,
        )
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from None


def plan_document(plan: Plan) -> dict[str, Any]:
    """Return what the plan file holds; ``plan_from_document`` gives the same plan back."""
    content: dict[str, Any] = {"format": FORMAT, "model": plan.model}
    if plan.profile_digest is not None:
        content["profile_digest"] = plan.profile_digest
    content["num_micro_batches"] = plan.num_micro_batches
    content["partition"] = FlowList(plan.partition.num_layers_by_stage)
    content["placement"] = FlowList(plan.placement.rank_by_stage)
    content["order"] = plan.order.lines()
    content["recompute"] = FlowList(plan.recomputed_stages)
    content["queue_model"] = plan.queue_model.value
    prediction = plan.prediction
    if prediction is not None:
        content["predicted"] = Flow(
            makespan_ms=ms_from_ns(prediction.makespan_ns),
            peak_memory_gb=[gb_from_bytes(value) for value in prediction.peak_memory_bytes_by_rank],
            bubble_fraction=prediction.bubble_fraction,
        )
    if plan.extra:
        content["notes"] = dict(plan.extra)
    return content


def write_plan(plan: Plan, path: Path) -> None:
    """Write the plan file whole or not at all."""
    write_text(path, dump_yaml(plan_document(plan)))
