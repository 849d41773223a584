"""The exact plan: the best order of a fixed layout, or the best of all small layouts of a tiny problem."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from pipeplan.cluster import Cluster
from pipeplan.errors import InfeasibleError, PlanError
from pipeplan.plan.layout import Partition, Placement
from pipeplan.plan.types import Plan
from pipeplan.profile.types import Profile
from pipeplan.search.exact.layers import NEVER
from pipeplan.search.exact.solve import Outcome, search_order
from pipeplan.search.partition import atom_bounds, check_enough_layers
from pipeplan.search.problem import Candidate, Constraints, Problem
from pipeplan.simulate import StageCosts, encode_order

MOST_LAYERS = 8  # without a fixed layout
MOST_RANKS = 3
MOST_OPS = 400  # F, I and W; far beyond what can be proved, but quick to refuse
MOST_LAYOUTS = 5_000
MOST_STAGES_PER_RANK = 2  # of what is not fixed


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactPlan:
    """The best plan found among the layouts in question, and how good any of them could be.

    Attributes:
        lower_bound_ns: No plan of these layouts that fits is faster.
        num_layouts: Layouts in question.
        num_nodes: Partial orders looked at.
        was_interrupted: Whether Ctrl-C ended it; plan and bound hold all the same.
    """

    plan: Plan
    makespan_ns: int
    lower_bound_ns: int
    num_layouts: int
    num_nodes: int
    was_interrupted: bool = False

    @property
    def is_proved(self) -> bool:
        """Whether no plan of these layouts is faster."""
        return self.lower_bound_ns >= self.makespan_ns


@dataclass(frozen=True, slots=True, eq=False)
class _Layout:
    partition: Partition
    placement: Placement
    costs: StageCosts
    can_split: tuple[bool, ...]
    tail_ns: tuple[int, ...]


def exact_plan(
    profile: Profile,
    cluster: Cluster,
    num_micro_batches: int,
    *,
    partition: Partition | None = None,
    placement: Placement | None = None,
    recomputed_stages: Sequence[int] = (),
    colocate_tied: bool = False,
    incumbent: Plan | None = None,
    max_stages_per_rank: int = MOST_STAGES_PER_RANK,
    work_limit: int = 3_000_000,
    time_limit_s: float | None = None,
) -> ExactPlan:
    """Return the best plan of a small problem, with a proof where the limits allow it; Ctrl-C ends it early.

    With partition and placement fixed, the order is optimised; of what is not fixed, all layouts with up to
    ``max_stages_per_rank`` stages a rank are gone through, neighbouring stages on different ranks.

    Args:
        recomputed_stages: Only with a fixed partition.
        incumbent: A plan to beat; where the layouts don't contain its layout, it only shortens the search if it is
            slower than the best of them, so it is used only with its own layout.
        work_limit: Partial orders to look at; the same limit gives the same result on any machine.

    Raises:
        PlanError: The problem is too large for an exact answer; says what to fix.
        InfeasibleError: No plan of these layouts fits the memory caps, or none was found within the limits.
    """
    check_enough_layers(profile.layers, cluster.num_ranks)
    constraints = Constraints(partition=partition, placement=placement, colocate_tied=colocate_tied)
    problem = Problem(profile, cluster, num_micro_batches, constraints)
    if recomputed_stages and partition is None:
        raise PlanError("stages that recompute need a fixed partition: add --partition")
    layouts = [
        _layout(problem, stages, ranks, recomputed_stages)
        for stages, ranks in _layouts(problem, max_stages_per_rank)
        if problem.respects_ties(stages, ranks)
    ]
    if not layouts:
        raise InfeasibleError("no layout keeps the layers that share a weight on one rank; drop --colocate-tied")
    bounds = [_least_ns(problem, layout, num_micro_batches) for layout in layouts]
    deadline = None if time_limit_s is None else time.monotonic() + time_limit_s
    best: Outcome | None = None
    best_layout: _Layout | None = None
    best_ns, num_nodes = NEVER, 0
    was_interrupted = False
    for index in sorted(range(len(layouts)), key=bounds.__getitem__):
        left_s = None if deadline is None else deadline - time.monotonic()
        if bounds[index] >= best_ns or (best is not None and (num_nodes >= work_limit or (left_s or 1.0) <= 0.0)):
            continue
        layout = layouts[index]
        is_own = (
            incumbent is not None
            and incumbent.partition == layout.partition
            and incumbent.placement == layout.placement
            and incumbent.num_micro_batches == num_micro_batches
        )
        outcome = search_order(
            layout.costs, num_micro_batches, problem.usable_bytes, layout.can_split, layout.tail_ns,
            count_boundaries=profile.count_boundary_buffers,
            incumbent=incumbent.order if incumbent is not None and is_own else None,
            below_ns=best_ns,
            work_limit=max(1, work_limit - num_nodes),
            time_limit_s=None if left_s is None else max(left_s, 0.0),
        )  # fmt: skip
        num_nodes += outcome.num_nodes
        bounds[index] = max(bounds[index], outcome.lower_bound_ns)
        if outcome.order is not None:
            best, best_layout, best_ns = outcome, layout, outcome.makespan_ns
        if outcome.was_interrupted:
            if best is None:
                raise KeyboardInterrupt
            was_interrupted = True
            break
    if best is None or best_layout is None or best.order is None:
        raise InfeasibleError(_explain(len(layouts), is_proved=min(bounds) >= NEVER))
    candidate = Candidate(
        partition=best_layout.partition,
        placement=best_layout.placement,
        order=encode_order(best.order),
        recomputed_stages=tuple(sorted(recomputed_stages)),
    )
    evaluation = problem.evaluate(candidate)
    assert evaluation is not None
    step_ns = cluster.host_overhead_ns.get("step", 0)
    return ExactPlan(
        plan=problem.plan(candidate, evaluation),
        makespan_ns=evaluation.makespan_ns,
        lower_bound_ns=min(min(bounds) + step_ns, evaluation.makespan_ns),
        num_layouts=len(layouts),
        num_nodes=num_nodes,
        was_interrupted=was_interrupted,
    )


def _explain(num_layouts: int, *, is_proved: bool) -> str:
    these = "this partition and placement" if num_layouts == 1 else f"any of the {num_layouts} layouts gone through"
    if is_proved:
        return f"no order of {these} fits the memory of every rank; give more memory, or recompute"
    return f"found no order of {these} that fits the memory of every rank within the limit; raise the limit"


def _layout(problem: Problem, partition: Partition, placement: Placement, recomputed_stages: Sequence[int]) -> _Layout:
    bounds, ranks = partition.bounds, placement.rank_by_stage
    return _Layout(
        partition,
        placement,
        problem.table.stage_costs(partition, placement, recomputed_stages),
        tuple(problem.table.can_split(first, last) for first, last in itertools.pairwise(bounds)),
        _tails(problem, bounds, ranks),
    )


def _tails(problem: Problem, bounds: Sequence[int], ranks: Sequence[int]) -> tuple[int, ...]:
    """Return what follows each rank's last op: the end of the batch is the latest of end + tail (without the step)."""
    late = 1 << 50
    step_ns = problem.cluster.host_overhead_ns.get("step", 0)
    ends = np.zeros(problem.num_ranks, dtype=np.int64)
    tails = []
    for rank in range(problem.num_ranks):
        ends[:] = -late
        ends[rank] = late
        tails.append(problem.table.tail_ns(bounds, ranks, ends) - late - step_ns)
    return tuple(tails)


def _least_ns(problem: Problem, layout: _Layout, num_micro_batches: int) -> int:
    """Return the work of the busiest rank: a quick bound that puts promising layouts first."""
    costs = layout.costs
    whole = costs.duration_ns[:, 1]
    split = costs.duration_ns[:, 2] + costs.duration_ns[:, 3]
    backward = np.where(layout.can_split, np.minimum(whole, split), whole)
    work = np.bincount(
        costs.rank_by_stage, weights=costs.duration_ns[:, 0] + backward, minlength=problem.num_ranks
    ).astype(np.int64)
    return int((work * num_micro_batches + np.array(layout.tail_ns)).max())


def check_size(problem: Problem, max_stages_per_rank: int = MOST_STAGES_PER_RANK) -> None:
    """Check that an exact search is within reach, before anything is searched.

    Raises:
        PlanError: The problem is too large for an exact answer; says what to fix.
    """
    _layouts(problem, max_stages_per_rank)


def _layouts(problem: Problem, max_stages_per_rank: int) -> Iterator[tuple[Partition, Placement]]:
    """Yield the layouts in question, of ranks that are alike only one arrangement.

    Raises:
        PlanError: There are too many, or too many ops for any of them.
    """
    constraints, num_ranks = problem.constraints, problem.num_ranks
    fixed_partition, fixed_placement = constraints.partition, constraints.placement
    if fixed_partition is not None and fixed_placement is not None:
        _check_ops(problem, fixed_partition.num_stages)
        return iter([(fixed_partition, fixed_placement)])
    num_atoms = len(atom_bounds(problem.profile.layers)) - 1
    free_layers = num_atoms > MOST_LAYERS and fixed_partition is None
    if free_layers or num_ranks > MOST_RANKS:
        raise PlanError(
            f"{num_atoms} layers on {num_ranks} ranks have too many layouts for an exact search (at most {MOST_LAYERS} "
            f"layers and {MOST_RANKS} ranks); fix --partition and --placement, and --exact finds their best order"
        )
    if fixed_partition is not None:
        counts: Sequence[int] = (fixed_partition.num_stages,)
    elif fixed_placement is not None:
        counts = (fixed_placement.num_stages,)
    else:
        counts = range(num_ranks, min(num_atoms, num_ranks * max_stages_per_rank) + 1)
    _check_ops(problem, max(counts))
    found = list(
        itertools.islice(
            (
                (partition, placement)
                for num_stages in counts
                for partition in _partitions(problem, num_stages)
                for placement in _placements(problem, num_stages, max_stages_per_rank)
            ),
            MOST_LAYOUTS + 1,
        )
    )
    if len(found) > MOST_LAYOUTS:
        raise PlanError(f"more than {MOST_LAYOUTS} layouts to go through; fix --partition or --placement")
    return iter(found)


def _check_ops(problem: Problem, num_stages: int) -> None:
    num_ops = 3 * num_stages * problem.num_micro_batches
    if num_ops > MOST_OPS:
        raise PlanError(
            f"{num_stages} stages and {problem.num_micro_batches} micro-batches make {num_ops} ops; an exact search is "
            f"out of reach above {MOST_OPS}: use fewer micro-batches or stages, or leave --exact out"
        )


def _partitions(problem: Problem, num_stages: int) -> Iterator[Partition]:
    if problem.constraints.partition is not None:
        yield problem.constraints.partition
        return
    bounds = atom_bounds(problem.profile.layers)
    for cuts in itertools.combinations(bounds[1:-1], num_stages - 1):
        edges = (0, *cuts, bounds[-1])
        yield Partition(tuple(after - before for before, after in itertools.pairwise(edges)))


def _placements(problem: Problem, num_stages: int, max_stages_per_rank: int) -> Iterator[Placement]:
    if problem.constraints.placement is not None:
        yield problem.constraints.placement
        return
    num_ranks = problem.num_ranks
    at_most = max(max_stages_per_rank, -(-num_stages // num_ranks))
    for ranks in arrangements((), num_stages, num_ranks, at_most, are_alike=problem.are_ranks_alike):
        yield Placement(ranks)


def arrangements(
    first: tuple[int, ...], num_stages: int, num_ranks: int, at_most: int, *, are_alike: bool
) -> Iterator[tuple[int, ...]]:
    """Yield the ranks of all stages that begin with ``first``: every rank in use, neighbours on different ones."""
    num_left = num_stages - len(first)
    used = set(first)
    if num_left < num_ranks - len(used):
        return
    if num_left == 0:
        yield first
        return
    room = [at_most - first.count(rank) for rank in range(num_ranks)]
    if num_ranks > 1:  # what the other ranks can't take must not have to sit side by side on one
        for rank in range(num_ranks):
            most = (num_left + (first[-1:] != (rank,))) // 2
            if num_left - (sum(room) - room[rank]) > most:
                return
    for rank in range(min(len(used) + 1, num_ranks) if are_alike else num_ranks):
        if room[rank] and (num_ranks == 1 or first[-1:] != (rank,)):
            yield from arrangements((*first, rank), num_stages, num_ranks, at_most, are_alike=are_alike)
