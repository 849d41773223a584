"""The exact search as part of the strategies: first on small problems, last where a proof is asked for."""

from __future__ import annotations

import dataclasses
import time

from pipeplan.errors import InfeasibleError, PlanError
from pipeplan.search.budget import Budget
from pipeplan.search.exact import MOST_STAGES_PER_RANK, ExactPlan, exact_plan
from pipeplan.search.partition import atom_bounds
from pipeplan.search.problem import Problem
from pipeplan.search.result import SearchResult
from pipeplan.units import ms_from_ns

MOST_OPS_TO_TRY = 150  # F, I and W; most problems of that size are proved within the share below
MOST_NODES_TO_TRY = 300_000
TRIED_SHARE = 0.5  # of the limits
OPS_PER_NODE = 75.0  # a partial order takes about as long to look at as scheduling so many ops


def solve_if_small(problem: Problem, budget: Budget) -> ExactPlan | None:
    """Return the best plan found for a small problem, of one layout often with a proof; else ``None``.

    Uses up to half of the limits. ``None`` also where it finds nothing that fits, and where equal ranks without caps
    leave little for it to find: compiling takes seconds on first use.
    """
    fixed = problem.constraints
    is_free = fixed.partition is None or fixed.placement is None
    if is_free and problem.are_ranks_alike and problem.usable_bytes[0] is None:
        return None
    num_stages = min(len(atom_bounds(problem.profile.layers)) - 1, MOST_STAGES_PER_RANK * problem.num_ranks)
    if fixed.partition is not None:
        num_stages = fixed.partition.num_stages
    elif fixed.placement is not None:
        num_stages = fixed.placement.num_stages
    if problem.table.can_recompute or 3 * num_stages * problem.num_micro_batches > MOST_OPS_TO_TRY:
        return None
    nodes = float(MOST_NODES_TO_TRY)
    if budget.work_limit is not None:
        nodes = min(nodes, TRIED_SHARE * budget.work_limit / OPS_PER_NODE)
    time_limit_s = None if budget.time_limit_s is None else TRIED_SHARE * budget.time_limit_s
    started = time.monotonic()
    try:
        found = exact_plan(
            problem.profile,
            problem.cluster,
            problem.num_micro_batches,
            partition=fixed.partition,
            placement=fixed.placement,
            colocate_tied=fixed.colocate_tied,
            work_limit=max(1, int(nodes)),
            time_limit_s=time_limit_s,
        )
    except InfeasibleError:
        budget.spend(nodes * OPS_PER_NODE)
        return None
    except PlanError:  # too many layouts
        return None
    budget.spend(found.num_nodes * OPS_PER_NODE)
    if not found.is_proved and time_limit_s is not None and time.monotonic() - started >= time_limit_s:
        budget.ended_by_clock = True
    return found


def is_whole_question(problem: Problem) -> bool:
    """Return whether the best order of one layout is the best plan: all else is fixed."""
    fixed = problem.constraints
    return fixed.partition is not None and fixed.placement is not None and not problem.table.can_recompute


def with_small_proof(problem: Problem, result: SearchResult, exact: ExactPlan) -> SearchResult:
    """Return the result with what the exact search knows of every plan."""
    if not is_whole_question(problem):
        return result
    bound = max(result.lower_bound_ns, min(exact.lower_bound_ns, result.makespan_ns))
    return dataclasses.replace(
        result,
        lower_bound_ns=bound,
        is_optimal=result.makespan_ns == bound,
        is_bound_of_layout=bound > result.lower_bound_ns,
    )


def with_proof(
    problem: Problem, found: SearchResult, time_limit_s: float | None, work_limit: int | None
) -> SearchResult:
    """Return ``found`` or the plan of an exact search that starts from it, with what is proved.

    Raises:
        PlanError: The problem is too large for an exact answer; says what to fix.
    """
    fixed = problem.constraints
    limits = {} if work_limit is None else {"work_limit": work_limit}
    try:
        exact = exact_plan(
            problem.profile,
            problem.cluster,
            problem.num_micro_batches,
            partition=fixed.partition,
            placement=fixed.placement,
            recomputed_stages=found.plan.recomputed_stages if fixed.partition is not None else (),
            colocate_tied=fixed.colocate_tied,
            incumbent=found.plan,
            time_limit_s=time_limit_s,
            **limits,
        )
    except InfeasibleError as error:  # such as where only layouts that it does not go through, or recomputation, fit
        return dataclasses.replace(
            found, proof_notes=(f"not proved: the exact search has no plan of its own: {error}",)
        )
    better = exact.plan if exact.makespan_ns < found.makespan_ns else found.plan
    assert better.prediction is not None
    layouts = "this layout"
    if exact.num_layouts > 1:
        of = f"with up to {MOST_STAGES_PER_RANK} stages a rank"
        if fixed.partition is not None:
            of = "of this partition"
        elif fixed.placement is not None:
            of = "of this placement"
        layouts = f"the {exact.num_layouts} layouts {of}"
    least = min(exact.lower_bound_ns, better.prediction.makespan_ns)
    if exact.is_proved:
        note = f"proved: no plan for {layouts} takes less than {ms_from_ns(exact.makespan_ns):.3f} ms"
    else:
        note = f"not proved: plans for {layouts} may still take as little as {ms_from_ns(least):.3f} ms"
    if problem.table.can_recompute:
        note += ", with the stages that recompute as they are here"
    is_whole = is_whole_question(problem)
    bound = max(found.lower_bound_ns, least) if is_whole else found.lower_bound_ns
    return dataclasses.replace(
        found,
        plan=better,
        proof_notes=(note,),
        lower_bound_ns=bound,
        is_bound_of_layout=found.is_bound_of_layout or bound > found.lower_bound_ns,
        is_optimal=better.prediction.makespan_ns == found.lower_bound_ns or (is_whole and exact.is_proved),
        is_deterministic=found.is_deterministic and time_limit_s is None and not exact.was_interrupted,
        was_interrupted=exact.was_interrupted,
    )
