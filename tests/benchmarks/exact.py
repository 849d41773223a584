"""How often the exact solver proves its answer, and how near the default search comes: 50 seeded small instances.

Run from the project's folder::

    python -m tests.benchmarks.exact                 # proofs
    python -m tests.benchmarks.exact --referee       # beside CP-SAT, which knows nothing of pipeplan's solver
    python -m tests.benchmarks.exact --search        # gap of the default search: mean <= 0.3 %, worst <= 1 %

The referee needs OR-tools, which pipeplan itself does not: ``pip install ortools``.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import statistics
import sys
import time

from pipeplan.errors import InfeasibleError
from pipeplan.plan.types import Plan
from pipeplan.search.exact import ExactResult, solve_order
from pipeplan.simulate import CostTable, StageCosts
from tests.benchmarks.exact_instances import SmallInstance, small_instance

NUM_INSTANCES = 50
TARGET_MEAN, TARGET_WORST = 0.003, 0.01


def main() -> int:
    """Print a line an instance and the totals; return 1 if the search misses its target or the referee disagrees."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, default=NUM_INSTANCES)
    parser.add_argument("--time-limit", type=float, default=20.0, help="seconds an instance for the exact solver")
    parser.add_argument("--referee", action="store_true", help="solve with CP-SAT too (needs ortools)")
    parser.add_argument("--referee-time-limit", type=float, default=10.0)
    parser.add_argument("--search", action="store_true", help="compare pipeplan's default search with the optimum")
    parser.add_argument("--search-time-limit", type=float, default=5.0)
    arguments = parser.parse_args()
    if arguments.referee and importlib.util.find_spec("ortools") is None:
        print("the referee needs OR-tools, which is not installed: pip install ortools", file=sys.stderr)
        return 2

    num_proved, num_referee_proved, num_disagreeing = 0, 0, 0
    gaps: list[float] = []
    for seed in range(arguments.instances):
        instance = small_instance(seed)
        table = CostTable(instance.profile, instance.cluster)
        costs = table.stage_costs(instance.partition, instance.placement)
        bounds = itertools.pairwise(instance.partition.bounds)
        can_split = [table.can_split(first, last) for first, last in bounds]
        found = _search(instance, arguments.search_time_limit) if arguments.search else None
        started = time.monotonic()
        exact = _solve(instance, costs, can_split, arguments.time_limit, found)
        line = f"{instance.name:<62}"
        if exact is None:
            line += "nothing fits"
        else:
            state = "proved" if exact.is_proved else f"not proved, gap {exact.gap:.2%}"
            line += f"{exact.makespan_ns / 1e6:9.3f} ms  {state:<24}{time.monotonic() - started:5.1f} s"
            num_proved += exact.is_proved
        if exact is not None and found is not None and found.prediction is not None:
            gap = found.prediction.makespan_ns / exact.makespan_ns - 1.0
            if exact.is_proved:
                gaps.append(gap)
            line += f"  search {gap:+.3%}"
        if arguments.referee:
            from tests.benchmarks.referee import solve_with_cp_sat

            usable = [instance.cluster.usable_bytes(rank) for rank in range(instance.cluster.num_ranks)]
            theirs, least = solve_with_cp_sat(
                costs, instance.num_micro_batches, usable, can_split, time_limit_s=arguments.referee_time_limit
            )
            num_referee_proved += theirs == least
            if exact is not None and (
                least > exact.makespan_ns or (theirs or exact.makespan_ns) < exact.lower_bound_ns
            ):
                num_disagreeing += 1
                line += "  CP-SAT DISAGREES"
            line += f"  CP-SAT {'none' if theirs is None else f'{theirs / 1e6:.3f}'} >= {least / 1e6:.3f}"
        print(line, flush=True)

    print(f"\nproved: {num_proved} of {arguments.instances}")
    if arguments.referee:
        print(f"CP-SAT proved {num_referee_proved} and disagrees on {num_disagreeing}")
    if not arguments.search:
        return 1 if num_disagreeing else 0
    mean, worst = statistics.fmean(gaps), max(gaps)
    print(f"search against the {len(gaps)} proved optima: mean gap {mean:.3%} (target {TARGET_MEAN:.1%}), "
          f"worst {worst:.3%} (target {TARGET_WORST:.0%}); {arguments.instances - num_proved} not proved")  # fmt: skip
    return 1 if num_disagreeing or mean > TARGET_MEAN or worst > TARGET_WORST else 0


def _solve(
    instance: SmallInstance, costs: StageCosts, can_split: list[bool], time_limit_s: float, found: Plan | None
) -> ExactResult | None:
    try:
        return solve_order(
            costs,
            instance.num_micro_batches,
            [instance.cluster.usable_bytes(rank) for rank in range(instance.cluster.num_ranks)],
            can_split_by_stage=can_split,
            incumbent=None if found is None else found.order,
            work_limit=10**12,
            time_limit_s=time_limit_s,
        )
    except InfeasibleError:
        return None


def _search(instance: SmallInstance, time_limit_s: float) -> Plan | None:
    """Return what the default search makes of the same layout."""
    from pipeplan.search.optimize import optimize

    try:
        return optimize(
            instance.profile,
            instance.cluster,
            num_micro_batches=instance.num_micro_batches,
            partition=instance.partition,
            placement=instance.placement,
            time_limit_s=time_limit_s,
        ).plan
    except InfeasibleError:
        return None


if __name__ == "__main__":
    sys.exit(main())
