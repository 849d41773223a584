"""The entry: from a profile and a cluster to the best plan found."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pipeplan.cluster import Cluster
from pipeplan.errors import InfeasibleError, PlanError, nearest
from pipeplan.plan.layout import Partition, Placement
from pipeplan.profile.types import Profile
from pipeplan.search.baselines import Baseline, baseline_result, baselines
from pipeplan.search.bounds import lower_bound_ns
from pipeplan.search.budget import Budget
from pipeplan.search.exact import ExactPlan, check_size
from pipeplan.search.infeasible import explain_infeasible, explain_no_named_order
from pipeplan.search.octopipe import tune_octopipe
from pipeplan.search.partition import check_enough_layers
from pipeplan.search.problem import Constraints, Problem
from pipeplan.search.proof import is_whole_question, solve_if_small, with_proof, with_small_proof
from pipeplan.search.result import Progress, SearchResult
from pipeplan.search.tuner import Tuner

STRATEGIES = ("default", "baselines", "octopipe", "exact")


def optimize(
    profile: Profile,
    cluster: Cluster,
    *,
    num_micro_batches: int,
    time_limit_s: float | None = None,
    work_limit: int | None = None,
    seed: int = 0,
    partition: Partition | None = None,
    placement: Placement | None = None,
    colocate_tied: bool = False,
    strategy: str = "default",
    try_all_phases: bool = False,
    on_progress: Callable[[Progress], None] | None = None,
) -> SearchResult:
    """Return the best plan found within the limits; never worse than the best baseline that fits.

    The same arguments give the same plan, byte for byte, unless ``time_limit_s`` ends the search. Ctrl-C ends it early
    and returns the best plan so far.

    Args:
        time_limit_s: Seconds after which the search stops.
        work_limit: Ops to simulate and schedule, which does not depend on the machine; without any limit, a default.
        partition, placement: Fix either; ``placement`` names a rank for each stage.
        colocate_tied: Keep layers that share a weight on one rank.
        strategy: One of ``STRATEGIES``: the co-optimiser, only the named orders, the published three-phase tuner, or
            for small problems the co-optimiser and then an exact search, with a proof where the limits allow it.
        try_all_phases: Mend the three-phase tuner, which stops as soon as the phase that its rule picks finds nothing:
            try the other phases before.

    Raises:
        InfeasibleError: No plan within the memory caps was found; the message says what would help.
        PlanError: Something fixed contradicts the profile or the cluster, there are fewer layers than ranks, an exact
            search is out of reach, or ``try_all_phases`` came with another strategy than ``octopipe``.
        ProfileError: The cluster has a device type that a layer has no times for.
    """
    if strategy not in STRATEGIES:
        raise PlanError(f"unknown strategy {strategy!r}{nearest(strategy, STRATEGIES)}; known: {', '.join(STRATEGIES)}")
    if try_all_phases and strategy != "octopipe":
        raise PlanError(f"only the strategy octopipe has phases to try, not {strategy!r}; leave --try-all-phases out")
    check_enough_layers(profile.layers, cluster.num_ranks)
    budget = Budget(time_limit_s, work_limit)
    problem = Problem(
        profile,
        cluster,
        num_micro_batches,
        Constraints(partition=partition, placement=placement, colocate_tied=colocate_tied),
    )
    if strategy == "exact":
        check_size(problem)
    bound = lower_bound_ns(problem)
    known = baselines(problem)

    def report(phase: str, best_makespan_ns: int | None) -> None:
        if on_progress is not None:
            fraction = min(1.0, budget.fraction)
            on_progress(
                Progress(fraction=fraction, phase=phase, best_makespan_ns=best_makespan_ns, lower_bound_ns=bound)
            )

    tuner = Tuner(problem, known, budget, seed, report, bound)
    was_interrupted = False
    small: ExactPlan | None = None
    try:
        if strategy == "octopipe":
            return _octopipe(problem, known, bound, seed, time_limit_s, work_limit, try_all_phases)
        if strategy in ("default", "exact"):
            small = solve_if_small(problem, budget)
            if small is not None:
                tuner.start_from(small.plan)
                if small.was_interrupted:
                    raise KeyboardInterrupt
            if small is None or not (small.is_proved and is_whole_question(problem)):
                tuner.run()
    except KeyboardInterrupt:
        was_interrupted = True
    if tuner.incumbent is None:
        if was_interrupted:
            raise KeyboardInterrupt
        if strategy == "baselines":
            why = explain_no_named_order(problem, known)
            raise InfeasibleError(why) if known else PlanError(why)
        closest, roomiest = tuner.closest_layouts
        raise InfeasibleError(explain_infeasible(problem, *closest, roomiest=roomiest))
    incumbent = tuner.incumbent

    def result(was_interrupted: bool) -> SearchResult:
        found = SearchResult(
            plan=problem.plan(*incumbent),
            baselines=tuple(baseline_result(problem, baseline) for baseline in known),
            lower_bound_ns=bound,
            strategy=strategy,
            is_deterministic=not (budget.ended_by_clock or was_interrupted),
            was_interrupted=was_interrupted,
            num_ops_tried=int(budget.work),
        )
        if small is not None:
            found = with_small_proof(problem, found, small)
        if strategy == "exact" and not was_interrupted:
            found = with_proof(problem, found, time_limit_s, work_limit)
        return found

    try:
        return result(was_interrupted)
    except KeyboardInterrupt:  # what was found is not lost, though nothing more is proved
        return result(was_interrupted=True)


def _octopipe(
    problem: Problem,
    known: Sequence[Baseline],
    bound: int,
    seed: int,
    time_limit_s: float | None,
    work_limit: int | None,
    try_all_phases: bool,
) -> SearchResult:
    fixed = problem.constraints
    tuned = tune_octopipe(
        problem.profile,
        problem.cluster,
        num_micro_batches=problem.num_micro_batches,
        partition=fixed.partition,
        placement=fixed.placement,
        colocate_tied=fixed.colocate_tied,
        seed=seed,
        work_limit=work_limit,
        time_limit_s=time_limit_s,
        try_all_phases=try_all_phases,
    )
    return SearchResult(
        plan=tuned.plan,
        baselines=tuple(baseline_result(problem, baseline) for baseline in known),
        lower_bound_ns=bound,
        strategy="octopipe",
        is_deterministic=tuned.is_deterministic,
        was_interrupted=tuned.was_interrupted,
        num_ops_tried=tuned.num_ops_tried,
    )
