"""The portfolio that every plan is compared with: each named order with each of the usual splits."""

from __future__ import annotations

from dataclasses import dataclass

from pipeplan.errors import PlanError
from pipeplan.plan.layout import Partition, Placement
from pipeplan.plan.orders import NAMED_ORDERS, NamedOrder
from pipeplan.search.partition import atom_bounds, split_by_parameters, split_by_time, split_uniform
from pipeplan.search.problem import Candidate, Evaluation, Problem
from pipeplan.search.result import BaselineResult
from pipeplan.simulate import EncodedOrder, encode_order


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Baseline:
    """A named order with a named split, evaluated.

    Attributes:
        unfused: The order as published, before stages that can't split got B for I and W.
    """

    name: str
    split: str
    candidate: Candidate
    evaluation: Evaluation
    unfused: EncodedOrder


def baselines(problem: Problem) -> list[Baseline]:
    """Return every named order with every split that the problem allows, fastest first, those that fit before others.

    Positions of the pipeline are ranks in their order; what the user fixed is kept.
    """
    found: list[Baseline] = []
    splits: dict[int, dict[str, Partition]] = {}
    for named in NAMED_ORDERS:
        placement = named.placement(problem.num_ranks)
        if not _allows(problem, placement):
            continue
        if placement.num_stages not in splits:
            splits[placement.num_stages] = named_splits(problem, placement.num_stages)
        found.extend(_evaluate(problem, named, placement, splits[placement.num_stages]))
    return sorted(
        found, key=lambda each: (not each.evaluation.fits, each.evaluation.makespan_ns, each.name, each.split)
    )


def named_splits(problem: Problem, num_stages: int) -> dict[str, Partition]:
    """Return the usual splits into ``num_stages``, by name; only the given one where it is fixed."""
    if problem.constraints.partition is not None:
        return {"given": problem.constraints.partition}
    layers = problem.profile.layers
    return {
        "uniform": split_uniform(layers, num_stages),
        "parameters": split_by_parameters(layers, num_stages),
        "time-balanced": split_by_time(layers, problem.layer_ns, num_stages),
    }


def baseline_result(problem: Problem, baseline: Baseline) -> BaselineResult:
    """Return what the user sees of a baseline."""
    return BaselineResult(
        name=baseline.name,
        split=baseline.split,
        makespan_ns=baseline.evaluation.makespan_ns,
        peak_memory_bytes_by_rank=tuple(int(peak) for peak in baseline.evaluation.peak_bytes_by_rank),
        bubble_fraction=baseline.evaluation.bubble_fraction,
        fits=baseline.evaluation.fits,
        make_plan=lambda: problem.plan(baseline.candidate, baseline.evaluation),
    )


def _allows(problem: Problem, placement: Placement) -> bool:
    fixed = problem.constraints
    if fixed.placement is not None and fixed.placement != placement:
        return False
    if fixed.partition is not None and fixed.partition.num_stages != placement.num_stages:
        return False
    return placement.num_stages <= len(atom_bounds(problem.profile.layers)) - 1


def _evaluate(
    problem: Problem, named: NamedOrder, placement: Placement, splits: dict[str, Partition]
) -> list[Baseline]:
    order = encode_order(named.build(problem.num_ranks, problem.num_micro_batches))
    found: list[Baseline] = []
    for split, partition in splits.items():
        if not problem.respects_ties(partition, placement):
            continue
        candidate = Candidate(
            partition=partition, placement=placement, order=problem.fuse_unsplittable(order, partition)
        )
        evaluation = problem.evaluate(candidate)
        if evaluation is None:
            raise PlanError(f"{named.name} deadlocks for {problem.num_ranks} ranks; this is a bug in pipeplan")
        found.append(Baseline(name=named.name, split=split, candidate=candidate, evaluation=evaluation, unfused=order))
    return found
