"""What a search returns: the plan, what it was compared with, and how far from the best possible it can be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from pipeplan.plan.types import Plan

SMALL_GAIN = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineResult:
    """A named order with a named split, as the simulator sees it.

    Attributes:
        name: Of the order, such as "1F1B" or "interleaved zero-bubble v2".
        split: Of the partition: "uniform", "parameters", "time-balanced", or "given".
        fits: Whether every rank stays within its cap.
        make_plan: Makes the plan; on large problems that takes a while and much memory, so not before it is asked for.
    """

    name: str
    split: str
    makespan_ns: int
    peak_memory_bytes_by_rank: tuple[int, ...]
    bubble_fraction: float
    fits: bool
    make_plan: Callable[[], Plan] = field(repr=False, compare=False)

    @property
    def plan(self) -> Plan:
        """The plan, made anew."""
        return self.make_plan()


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a search is; what ``on_progress`` is called with.

    Attributes:
        fraction: Of the budget that is used, 0 to 1.
        phase: What is going on, in a few words.
        best_makespan_ns: Of the best plan that fits, if there is one yet.
    """

    fraction: float
    phase: str
    best_makespan_ns: int | None
    lower_bound_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The best plan found.

    Attributes:
        plan: With its prediction and the digest of the profile.
        baselines: Every named order with every split, fastest first; those that don't fit are marked.
        lower_bound_ns: No plan can be faster; or no plan of the given layout, where ``is_bound_of_layout``.
        proof_notes: Sentences for the user on what was proved.
        is_deterministic: Whether the same call returns the same plan on any machine (a clock did not end it).
        was_interrupted: Whether Ctrl-C ended it.
        is_optimal: Whether the plan is proved to be the best possible for the question asked.
        is_bound_of_layout: Whether bound and proof hold for the partition and placement given only.
        num_ops_tried: Ops simulated and scheduled: the unit of the work limit.
    """

    plan: Plan
    baselines: tuple[BaselineResult, ...]
    lower_bound_ns: int
    strategy: str
    is_deterministic: bool
    proof_notes: tuple[str, ...] = ()
    was_interrupted: bool = False
    is_optimal: bool = False
    is_bound_of_layout: bool = False
    num_ops_tried: int = 0

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences for the user: what was proved, and how the search ended; what it gained, the comparison says."""
        if self.was_interrupted:
            return *self.proof_notes, "the search was interrupted; this is the best plan found until then"
        if self.is_deterministic:
            return self.proof_notes
        ending = (
            "the time limit ended the search: a slower machine may stop at another plan; a work limit "
            f"(this search: {self.num_ops_tried:,}) does not depend on the clock"
        )
        return *self.proof_notes, ending

    @property
    def makespan_ns(self) -> int:
        """Predicted time of a batch under the plan."""
        assert self.plan.prediction is not None
        return self.plan.prediction.makespan_ns

    @property
    def gap(self) -> float:
        """How much slower than the bound the plan is: 0.02 is 2 %."""
        return self.makespan_ns / self.lower_bound_ns - 1.0 if self.lower_bound_ns > 0 else 0.0

    @property
    def best_baseline(self) -> BaselineResult | None:
        """The fastest baseline that fits, or ``None`` if none does."""
        return next((baseline for baseline in self.baselines if baseline.fits), None)

    @property
    def gain(self) -> float | None:
        """Time that the plan saves over the best baseline that fits: 0.02 is 2 %; ``None`` without such a baseline."""
        best = self.best_baseline
        if best is None or best.makespan_ns == 0:
            return None
        return 1.0 - self.makespan_ns / best.makespan_ns
