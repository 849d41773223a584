"""A plan beside its baselines and its bound: the figures that tables and reports show."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pipeplan.cluster import Cluster
from pipeplan.plan.types import Plan
from pipeplan.profile.types import Profile
from pipeplan.search.baselines import baseline_result, baselines
from pipeplan.search.bounds import lower_bound_ns
from pipeplan.search.problem import Problem
from pipeplan.search.result import SMALL_GAIN, BaselineResult, SearchResult
from pipeplan.simulate import Timeline

PLAN_NAME = "this plan"
LEAST_LOSS = 0.0005  # less prints as 0.0 %


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedPlan:
    """One row of the comparison.

    Attributes:
        name: Of the order.
        split: How the layers are divided, where that has a name.
        peak_memory_bytes: Of the heaviest rank.
        fits: Whether every rank stays within its cap.
    """

    name: str
    split: str | None = None
    makespan_ns: int
    bubble_fraction: float
    peak_memory_bytes: int
    fits: bool

    @property
    def title(self) -> str:
        """Order and split in one phrase."""
        return self.name if self.split is None else f"{self.name}, {self.split} split"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A plan, what it is measured against, and the time that no plan can beat.

    Attributes:
        baselines: Every named order with every split.
        is_optimal: Whether the plan is proved to be the best possible for the question asked.
        is_bound_of_layout: Whether bound and proof hold for the plan's own partition and placement only.
    """

    plan: ComparedPlan
    baselines: tuple[ComparedPlan, ...]
    lower_bound_ns: int | None = None
    notes: tuple[str, ...] = ()
    is_optimal: bool = False
    is_bound_of_layout: bool = False

    @property
    def best_baseline(self) -> ComparedPlan | None:
        """The fastest baseline that fits, if any."""
        fitting = [row for row in self.baselines if row.fits]
        return min(fitting, key=lambda row: row.makespan_ns, default=None)

    @property
    def best_by_order(self) -> tuple[ComparedPlan, ...]:
        """Each named order once, with its fastest split that fits, or its fastest; the slowest order first."""
        best: dict[str, ComparedPlan] = {}
        for row in sorted(self.baselines, key=lambda row: (not row.fits, row.makespan_ns)):
            best.setdefault(row.name, row)
        return tuple(sorted(best.values(), key=lambda row: -row.makespan_ns))

    @property
    def gain(self) -> float | None:
        """Share of the best baseline's time that the plan saves; ``None`` where no baseline fits."""
        best = self.best_baseline
        if best is None:
            return None
        return 1.0 - self.plan.makespan_ns / best.makespan_ns if best.makespan_ns else 0.0

    @property
    def verdict(self) -> str:
        """One sentence on what the plan gains, honest where that is little."""
        best, gain = self.best_baseline, self.gain
        if best is None or gain is None:
            return f"No baseline fits into the memory; the plan {'does' if self.plan.fits else 'does not either'}."
        if not self.plan.fits:
            return f"The plan does not fit into the memory; {best.title} does."
        if gain < -LEAST_LOSS:
            return f"The plan takes {-gain:.1%} more time than {best.title}, which fits."
        if gain < SMALL_GAIN:
            return (
                f"The plan gains {max(gain, 0.0):.1%} over {best.title}: under {SMALL_GAIN:.0%}, "
                f"so {best.title} serves as well."
            )
        return f"The plan takes {gain:.1%} less time than the best baseline that fits, {best.title}."

    @property
    def gap(self) -> float | None:
        """How far the plan lies above the bound, as a share of the bound."""
        if not self.lower_bound_ns:
            return None
        return self.plan.makespan_ns / self.lower_bound_ns - 1.0


def comparison_of_search(result: SearchResult) -> Comparison:
    """Return the comparison that a search made."""
    prediction = result.plan.prediction
    assert prediction is not None  # a search records what it predicts
    return Comparison(
        plan=ComparedPlan(
            name=PLAN_NAME,
            makespan_ns=prediction.makespan_ns,
            bubble_fraction=prediction.bubble_fraction,
            peak_memory_bytes=max(prediction.peak_memory_bytes_by_rank),
            fits=True,
        ),
        baselines=_rows(result.baselines),
        lower_bound_ns=result.lower_bound_ns,
        notes=result.notes,
        is_optimal=result.is_optimal,
        is_bound_of_layout=result.is_bound_of_layout,
    )


def compare_with_baselines(plan: Plan, timeline: Timeline, profile: Profile, cluster: Cluster) -> Comparison:
    """Return a plan beside the baselines for the same model, cluster and micro-batches."""
    problem = Problem(profile, cluster, plan.num_micro_batches)
    return Comparison(
        plan=ComparedPlan(
            name=PLAN_NAME,
            makespan_ns=timeline.makespan_ns,
            bubble_fraction=timeline.bubble_fraction,
            peak_memory_bytes=max(peak.total for peak in timeline.memory_by_rank),
            fits=all(
                (cap := cluster.usable_bytes(rank)) is None or peak.total <= cap
                for rank, peak in enumerate(timeline.memory_by_rank)
            ),
        ),
        baselines=_rows(baseline_result(problem, baseline) for baseline in baselines(problem)),
        lower_bound_ns=lower_bound_ns(problem),
    )


def _rows(results: Iterable[BaselineResult]) -> tuple[ComparedPlan, ...]:
    return tuple(
        ComparedPlan(
            name=result.name,
            split=result.split,
            makespan_ns=result.makespan_ns,
            bubble_fraction=result.bubble_fraction,
            peak_memory_bytes=max(result.peak_memory_bytes_by_rank),
            fits=result.fits,
        )
        for result in results
    )
