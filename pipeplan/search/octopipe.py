"""The published three-phase tuner of OctoPipe (SC'26; first version AdaPtis, arXiv 2509.23722), as a named baseline.

It starts from 1F1B and repeats: look at the bubbles, choose one of three phases, take that phase's best move.

- *partition*: layers move from the most to the least loaded rank until the ranks are balanced;
- *placement*: ranks exchange or take over stages, or all ranks get more or fewer stages, to trim the idle time at both
  ends of the batch;
- *schedule*: the order is fine-tuned: B is split into I and W, W fills gaps, and what is urgent changes.

Published are the rule that chooses the phase and what each phase does, not how moves are found. Here, each phase takes
the best of its neighbours (``octopipe_moves``), and orders come from pipeplan's list scheduler. Roughly::

    while a phase gains: phase = choose_phase(bubbles); plan = best move of phase

As published, the tuner stops when the chosen phase finds nothing, though another might; ``try_all_phases`` mends that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from pipeplan.cluster import Cluster
from pipeplan.errors import InfeasibleError
from pipeplan.plan.layout import Partition, Placement
from pipeplan.plan.types import Plan
from pipeplan.profile.types import Profile
from pipeplan.search.budget import Budget
from pipeplan.search.infeasible import explain_infeasible
from pipeplan.search.octopipe_moves import Moves, State
from pipeplan.search.partition import check_enough_layers
from pipeplan.search.problem import Constraints, Problem
from pipeplan.simulate import Bubble, simulate


class Phase(StrEnum):
    """What an iteration changes."""

    PARTITION = "partition"
    PLACEMENT = "placement"
    SCHEDULE = "schedule"


@dataclass(frozen=True, slots=True, kw_only=True)
class Iteration:
    """One turn of the tuner.

    Attributes:
        makespan_ns: After it; as before where nothing was gained.
    """

    phase: Phase
    makespan_ns: int
    num_stages: int
    has_gained: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class OctoPipeResult:
    """The tuned plan and how it came about.

    Attributes:
        start_ns: Makespan of the 1F1B that the tuner started from.
        is_deterministic: Whether neither a clock nor Ctrl-C ended the tuning.
        was_interrupted: Whether Ctrl-C ended it; the plan is the best until then.
        num_ops_tried: Ops simulated and scheduled: the unit of the work limit.
    """

    plan: Plan
    start_ns: int
    iterations: tuple[Iteration, ...]
    is_deterministic: bool
    was_interrupted: bool
    num_ops_tried: int

    @property
    def makespan_ns(self) -> int:
        """Predicted time of a batch under the plan."""
        assert self.plan.prediction is not None
        return self.plan.prediction.makespan_ns


def choose_phase(bubble_by_rank: Sequence[Bubble], smallest_layer_ns: int, *, can_balance: bool = True) -> Phase:
    """Return the phase that the published rule picks.

    If the ranks' bubbles differ by more than the smallest layer takes in a batch, some rank can give a layer away:
    partition. Else what is larger decides: idle time at the ends of the batch (placement) or between ops (schedule).

    Args:
        smallest_layer_ns: For all micro-batches: that is how much a layer's move changes bubbles, and only so is the
            published plan of the golden case balanced.
        can_balance: Whether any layer's move makes the ranks' work more even; if not, they are as balanced as can be.
    """
    bubbles_ns = [bubble.total_ns for bubble in bubble_by_rank]
    if can_balance and max(bubbles_ns) - min(bubbles_ns) > smallest_layer_ns:
        return Phase.PARTITION
    boundary_ns = sum(bubble.ramp_up_ns + bubble.ramp_down_ns for bubble in bubble_by_rank)
    residual_ns = sum(bubble.inner_ns for bubble in bubble_by_rank)
    return Phase.PLACEMENT if boundary_ns > residual_ns else Phase.SCHEDULE


def tune_octopipe(
    profile: Profile,
    cluster: Cluster,
    *,
    num_micro_batches: int,
    partition: Partition | None = None,
    placement: Placement | None = None,
    colocate_tied: bool = False,
    seed: int = 0,
    work_limit: int | None = None,
    time_limit_s: float | None = None,
    try_all_phases: bool = False,
) -> OctoPipeResult:
    """Return the plan that the three phases lead to; never slower than the 1F1B they start from.

    Args:
        seed: Decides which placements are tried where there are too many for all of them.
        work_limit: Ops to simulate and schedule, which does not depend on the machine; without any limit, a default.
        try_all_phases: Where the chosen phase finds nothing, try the other two before stopping.

    Raises:
        InfeasibleError: Neither 1F1B nor a list schedule of its layout fits the memory caps.
        PlanError: Something fixed contradicts the profile or the cluster, or there are fewer layers than ranks.
        ProfileError: The cluster has a device type that a layer has no times for.
    """
    check_enough_layers(profile.layers, cluster.num_ranks)
    constraints = Constraints(partition=partition, placement=placement, colocate_tied=colocate_tied)
    problem = Problem(profile, cluster, num_micro_batches, constraints)
    budget = Budget(time_limit_s, work_limit)
    moves = Moves(problem, budget, seed)
    state = moves.start()
    if state is None:
        raise InfeasibleError(
            explain_infeasible(
                problem, *moves.first_layout(), failure="the layout that the tuner starts from does not fit"
            )
        )
    start_ns = state.makespan_ns
    smallest_layer_ns = min(problem.layer_ns) * num_micro_batches
    iterations: list[Iteration] = []
    was_interrupted = False
    try:
        while budget.fraction < 1.0:
            plan = problem.plan(state.candidate, state.evaluation)
            bubbles = simulate(plan, profile, cluster).bubble_by_rank
            chosen = choose_phase(bubbles, smallest_layer_ns, can_balance=moves.can_balance(state))
            phases = [chosen, *(phase for phase in Phase if phase is not chosen)] if try_all_phases else [chosen]
            better: State | None = None
            for phase in phases:
                better = _best_move(moves, phase, state)
                state = better or state
                iterations.append(
                    Iteration(
                        phase=phase,
                        makespan_ns=state.makespan_ns,
                        num_stages=state.candidate.partition.num_stages,
                        has_gained=better is not None,
                    )
                )
                if better is not None:
                    break
            if better is None:
                break
    except KeyboardInterrupt:
        was_interrupted = True
    return OctoPipeResult(
        plan=problem.plan(state.candidate, state.evaluation),
        start_ns=start_ns,
        iterations=tuple(iterations),
        is_deterministic=not (budget.ended_by_clock or was_interrupted),
        was_interrupted=was_interrupted,
        num_ops_tried=int(budget.work),
    )


def _best_move(moves: Moves, phase: Phase, state: State) -> State | None:
    match phase:
        case Phase.PARTITION:
            return moves.balance(state)
        case Phase.PLACEMENT:
            return moves.rearrange(state)
        case Phase.SCHEDULE:
            return moves.fine_tune(state)
