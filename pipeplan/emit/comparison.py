"""A plan beside its baselines and its bound: the figures that tables and reports show."""

from __future__ import annotations

from dataclasses import dataclass

SMALL_GAIN = 0.02  # below this the plan is hardly worth its complexity, and we say so


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedPlan:
    """One row of the comparison.

    Attributes:
        peak_memory_bytes: Of the heaviest rank.
        fits: Whether every rank stays within its cap.
    """

    name: str
    makespan_ns: int
    bubble_fraction: float
    peak_memory_bytes: int
    fits: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A plan, what it is measured against, and the time that no plan can beat."""

    plan: ComparedPlan
    baselines: tuple[ComparedPlan, ...]
    lower_bound_ns: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def best_baseline(self) -> ComparedPlan | None:
        """The fastest baseline that fits, if any."""
        fitting = [row for row in self.baselines if row.fits]
        return min(fitting, key=lambda row: row.makespan_ns, default=None)

    @property
    def gain(self) -> float | None:
        """Share of the best baseline's time that the plan saves; ``None`` where no baseline fits."""
        best = self.best_baseline
        return None if best is None else 1.0 - self.plan.makespan_ns / best.makespan_ns

    @property
    def verdict(self) -> str:
        """One sentence on what the plan gains, honest where that is little."""
        best, gain = self.best_baseline, self.gain
        if best is None or gain is None:
            return "No baseline fits into the memory; the plan does."
        if gain < SMALL_GAIN:
            return (
                f"The plan gains {max(gain, 0.0):.1%} over {best.name}: under {SMALL_GAIN:.0%}, "
                f"so {best.name} serves as well."
            )
        return f"The plan takes {gain:.1%} less time than the best baseline that fits, {best.name}."

    @property
    def gap(self) -> float | None:
        """How far the plan lies above the bound, as a share of the bound."""
        if not self.lower_bound_ns:
            return None
        return self.plan.makespan_ns / self.lower_bound_ns - 1.0
