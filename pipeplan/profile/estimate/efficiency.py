"""How much of a GPU's peak each category of op reaches: the file that users edit, and times from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from pipeplan.files import Document, Flow, check_format, dump_yaml, parse_document, read_yaml, write_text
from pipeplan.profile.estimate.gpus import Gpu
from pipeplan.profile.estimate.kernels import Category, Kernels, LayerCost
from pipeplan.profile.types import LayerTimes
from pipeplan.resources import template_path
from pipeplan.units import NS_PER_US

FORMAT = "pipeplan-efficiency/1"


class _SharesEntry(Document):
    gemm: float = Field(gt=0, le=1)
    grouped_gemm: float = Field(gt=0, le=1)
    attention_forward: float = Field(gt=0, le=1)
    attention_backward: float = Field(gt=0, le=1)
    scan_forward: float = Field(gt=0, le=1)
    scan_backward: float = Field(gt=0, le=1)
    cross_entropy: float = Field(gt=0, le=1)
    memory: float = Field(gt=0, le=1)


class _ResidualEntry(Document):
    profile: str
    kind: str
    op: Literal["F", "B"]
    expected_ms: float = Field(ge=0)
    estimated_ms: float = Field(ge=0)


class _EfficiencyDocument(Document):
    format: Literal["pipeplan-efficiency/1"]
    share_of_peak: _SharesEntry
    launch_us: float = Field(ge=0)
    fitted: list[str] = Field(default_factory=list)
    fitted_on: str | None = None
    residuals: list[_ResidualEntry] = Field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Residual:
    """How well the table does on one kind of layer of a profile: what the profile says, and what it estimates."""

    profile: str
    kind: str
    op: str
    expected_ms: float
    estimated_ms: float

    @property
    def relative_error(self) -> float:
        """Estimate over expectation, less one."""
        return self.estimated_ms / self.expected_ms - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """Share of the peak by category, and what each kernel costs besides.

    Attributes:
        launch_ns: Per kernel, whatever it does.
        fitted: The categories (and "launch") that measured times decided; the others are typical values.
        fitted_on: Which profiles and figures those were.
        residuals: How well the table did on what it was fitted to and compared with.
    """

    share_by_category: Mapping[Category, float]
    launch_ns: float
    fitted: tuple[str, ...] = ()
    fitted_on: str | None = None
    residuals: tuple[Residual, ...] = ()

    def time_ns(self, kernels: Kernels, gpu: Gpu, dtype: str) -> int:
        """Return how long the kernels take one after the other, in nanoseconds."""
        total = sum(kernel.peak_ns(gpu, dtype) / self.share_by_category[kernel.category] for kernel in kernels)
        return round(total + self.launch_ns * len(kernels))

    def times(self, cost: LayerCost, gpu: Gpu, dtype: str, *, recompute: bool = False) -> LayerTimes:
        """Return the times of a layer; with ``recompute`` B and I repeat the forward first."""
        repeated = cost.repeated_forward if recompute else ()
        return LayerTimes(
            forward_ns=self.time_ns(cost.forward, gpu, dtype),
            backward_ns=self.time_ns((*repeated, *cost.backward), gpu, dtype),
            input_gradient_ns=(
                self.time_ns((*repeated, *cost.input_gradient), gpu, dtype) if cost.is_splittable else None
            ),
            weight_gradient_ns=self.time_ns(cost.weight_gradient, gpu, dtype) if cost.is_splittable else None,
        )

    @property
    def record(self) -> str:
        """How well the table has done, in a sentence."""
        if all(residual.kind == "embedding" for residual in self.residuals):
            return "the efficiency table has not been compared with measured times"
        pairs: dict[tuple[str, str], list[Residual]] = {}
        for residual in self.residuals:
            if residual.kind != "embedding":  # not predicted: the host decides
                pairs.setdefault((residual.profile, residual.kind), []).append(residual)
        totals = [
            sum(one.estimated_ms for one in pair) / sum(one.expected_ms for one in pair) - 1 for pair in pairs.values()
        ]
        errors = [residual.relative_error for pair in pairs.values() for residual in pair]
        return (
            f"the efficiency table was fitted on {self.fitted_on or 'unnamed profiles'}; compared with "
            f"{', '.join(dict.fromkeys(profile for profile, _ in pairs))}, layer totals are off by "
            f"{min(totals):+.0%} to {max(totals):+.0%}, single phases by {min(errors):+.0%} to {max(errors):+.0%}; on "
            "other models allow 25 % for layer totals, 40 % for single phases, and don't trust embeddings"
        )


def read_efficiency(path: Path | None = None) -> Efficiency:
    """Return the efficiencies that a file holds; the ones that come with pipeplan if no path is given.

    Raises:
        FileFormatError: The file is missing or malformed, or a share lies outside (0, 1]; names the key.
    """
    path = template_path("efficiency.yaml") if path is None else path
    content = read_yaml(path, "efficiency")
    check_format(content, FORMAT, path)
    document = parse_document(content, _EfficiencyDocument, path)
    shares = document.share_of_peak.model_dump()
    return Efficiency(
        share_by_category={category: shares[category.value] for category in Category},
        launch_ns=document.launch_us * NS_PER_US,
        fitted=tuple(document.fitted),
        fitted_on=document.fitted_on,
        residuals=tuple(Residual(**entry.model_dump()) for entry in document.residuals),
    )


_HEADING = """\
# Share of a GPU's peak that each category of op reaches (arithmetic for gemm and attention, bandwidth for the others),
# and what launching a kernel costs. Estimated profiles divide by these; edit them, or refit them with
# `pipeplan fit-efficiency`. `fitted` names what known times decided; all else is a typical value of public benchmarks,
# but for scan_backward, which follows scan_forward. `residuals`: what the table gives for the layers of the
# profiles it has been compared with.
"""


def efficiency_document(efficiency: Efficiency) -> dict[str, Any]:
    """Return what the efficiency file holds."""
    content: dict[str, Any] = {
        "format": FORMAT,
        "share_of_peak": {
            category.value: float(f"{efficiency.share_by_category[category]:.4g}") for category in Category
        },
        "launch_us": round(efficiency.launch_ns / NS_PER_US, 3),
        "fitted": list(efficiency.fitted),
    }
    if efficiency.fitted_on is not None:
        content["fitted_on"] = efficiency.fitted_on
    content["residuals"] = [
        Flow(
            profile=residual.profile,
            kind=residual.kind,
            op=residual.op,
            expected_ms=round(residual.expected_ms, 4),
            estimated_ms=round(residual.estimated_ms, 4),
        )
        for residual in efficiency.residuals
    ]
    return content


def write_efficiency(efficiency: Efficiency, path: Path) -> None:
    """Write the efficiency file whole or not at all."""
    write_text(path, _HEADING + dump_yaml(efficiency_document(efficiency)))
