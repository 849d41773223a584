"""The figures of a plan as plain data, for scripts."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from pipeplan.emit.comparison import ComparedPlan, Comparison
from pipeplan.plan.types import Plan
from pipeplan.simulate import NoisyMakespans, Timeline
from pipeplan.units import gb_from_bytes, ms_from_ns


def timeline_summary(plan: Plan, timeline: Timeline) -> dict[str, Any]:
    """Return the prediction of a plan: times in ms, memory in GB."""
    ranks = []
    for rank in range(timeline.num_ranks):
        bubble, peak = timeline.bubble_by_rank[rank], timeline.memory_by_rank[rank]
        ranks.append(
            {
                "stages": list(plan.placement.stages(rank)),
                "busy_ms": ms_from_ns(timeline.busy_ns_by_rank[rank]),
                "ramp_up_ms": ms_from_ns(bubble.ramp_up_ns),
                "inner_ms": ms_from_ns(bubble.inner_ns),
                "ramp_down_ms": ms_from_ns(bubble.ramp_down_ns),
                "peak_memory_gb": gb_from_bytes(peak.total),
                "peak_memory_parts_gb": {name: gb_from_bytes(value) for name, value in asdict(peak).items()},
            }
        )
    return {
        "model": plan.model,
        "digest": plan.digest,
        "makespan_ms": ms_from_ns(timeline.makespan_ns),
        "bubble_fraction": timeline.bubble_fraction,
        "ranks": ranks,
    }


def noise_summary(noisy: NoisyMakespans) -> dict[str, Any]:
    """Return what a batch takes under noise, in ms."""
    return {
        "spread": noisy.spread,
        "samples": noisy.num_samples,
        "seed": noisy.seed,
        "mean_ms": ms_from_ns(noisy.mean_ns),
        "standard_error_ms": ms_from_ns(noisy.standard_error_ns),
        "median_ms": ms_from_ns(noisy.quantile_ns(0.5)),
        "p95_ms": ms_from_ns(noisy.quantile_ns(0.95)),
        "worst_ms": ms_from_ns(noisy.worst_ns),
        "waiting_ms": ms_from_ns(noisy.waiting_ns),
    }


def comparison_summary(comparison: Comparison) -> dict[str, Any]:
    """Return the plan, its baselines and the bound: times in ms, memory in GB."""
    bound_ns = comparison.lower_bound_ns
    return {
        "plan": _compared(comparison.plan),
        "baselines": [_compared(row) for row in comparison.baselines],
        "lower_bound_ms": None if bound_ns is None else ms_from_ns(bound_ns),
        "gain_over_best_baseline": comparison.gain,
        "gap_to_lower_bound": comparison.gap,
        "is_optimal": comparison.is_optimal,
        "is_bound_of_layout": comparison.is_bound_of_layout,
        "notes": list(comparison.notes),
    }


def _compared(row: ComparedPlan) -> dict[str, Any]:
    return {
        "name": row.name,
        "split": row.split,
        "makespan_ms": ms_from_ns(row.makespan_ns),
        "bubble_fraction": row.bubble_fraction,
        "peak_memory_gb": gb_from_bytes(row.peak_memory_bytes),
        "fits": row.fits,
    }
