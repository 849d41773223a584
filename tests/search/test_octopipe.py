"""The published three-phase tuner: its rule, its promises, and the published case."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeplan.cluster import equal_ranks
from pipeplan.errors import InfeasibleError
from pipeplan.plan.check import check_plan
from pipeplan.plan.layout import Partition, Placement
from pipeplan.plan.orders import one_f_one_b
from pipeplan.plan.types import Plan
from pipeplan.profile import read_profile
from pipeplan.search.octopipe import Phase, choose_phase, tune_octopipe
from pipeplan.search.octopipe_moves import Moves, State
from pipeplan.search.partition import split_uniform
from pipeplan.simulate import Bubble, simulate
from tests.strategies import clusters, profiles

GOLDEN = read_profile(Path(__file__).parents[1] / "golden" / "nemotron-nano-9b-v2.yaml")
NS_PER_TICK = 10_000
WORK_LIMIT = 400_000


@pytest.mark.parametrize(
    ("bubbles", "can_balance", "phase"),
    [
        ([(0, 0, 0), (5, 3, 3)], True, Phase.PARTITION),  # 11 apart
        ([(0, 0, 0), (5, 3, 3)], False, Phase.PLACEMENT),  # the same, but as even as it can be
        ([(0, 4, 6), (4, 6, 0)], True, Phase.SCHEDULE),  # as much at the ends as inside
        ([(0, 4, 7), (4, 6, 0)], True, Phase.PLACEMENT),
        ([(0, 10, 0), (0, 0, 0)], True, Phase.SCHEDULE),  # 10 apart is not more than 10
    ],
)
def test_rule_that_chooses_the_phase(bubbles: list[tuple[int, int, int]], can_balance: bool, phase: Phase) -> None:
    """Uneven bubbles ask for a partition, idle ends for a placement, and gaps between ops for a schedule."""
    assert choose_phase([Bubble(*bubble) for bubble in bubbles], 10, can_balance=can_balance) is phase


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_plans_are_valid_and_not_worse_than_the_start(data: st.DataObject) -> None:
    """On any input: a whole plan, as fast as it says, within every cap, never slower than 1F1B where that fits."""
    num_ranks = data.draw(st.integers(1, 4), label="ranks")
    profile = data.draw(profiles(min_layers=num_ranks, max_layers=8, tied=num_ranks > 1))
    cluster = data.draw(clusters(num_ranks=num_ranks))
    cap_bytes = data.draw(st.none() | st.integers(20, 600).map(lambda size: size * 10**6), label="cap")
    cluster = replace(cluster, ranks=tuple(replace(rank, memory_bytes=cap_bytes) for rank in cluster.ranks))
    num_micro_batches = data.draw(st.integers(1, 6), label="micro-batches")
    try_all_phases = data.draw(st.booleans(), label="try all phases")
    try:
        result = tune_octopipe(
            profile, cluster, num_micro_batches=num_micro_batches, try_all_phases=try_all_phases, work_limit=WORK_LIMIT
        )
    except InfeasibleError:
        return
    check_plan(result.plan, profile)
    timeline = simulate(result.plan, profile, cluster)
    assert timeline.prediction == result.plan.prediction
    assert result.makespan_ns <= result.start_ns
    start = Plan(
        model="start",
        num_micro_batches=num_micro_batches,
        partition=split_uniform(profile.layers, num_ranks),
        placement=Placement(tuple(range(num_ranks))),
        order=one_f_one_b(num_ranks, num_micro_batches),
    )
    before = simulate(start, profile, cluster)
    caps = [cluster.usable_bytes(rank) for rank in range(num_ranks)]
    if all(cap is None or peak.total <= cap for peak, cap in zip(before.memory_by_rank, caps, strict=True)):
        assert result.start_ns == before.makespan_ns
    for peak, cap in zip(timeline.memory_by_rank, caps, strict=True):
        assert cap is None or peak.total <= cap
    makespans = [result.start_ns, *(iteration.makespan_ns for iteration in result.iterations)]
    assert makespans == sorted(makespans, reverse=True)


def test_same_arguments_same_plan() -> None:
    """A work limit, on any machine, ends the tuning at the same plan; less work never gives a better one."""
    cluster = equal_ranks(4, "h800-sxm", memory_gb=70)
    plans = [tune_octopipe(GOLDEN, cluster, num_micro_batches=8, work_limit=10**6, seed=3) for _ in range(2)]
    assert plans[0].plan.digest == plans[1].plan.digest
    assert plans[0].iterations == plans[1].iterations
    brief = tune_octopipe(GOLDEN, cluster, num_micro_batches=8, work_limit=10**4, seed=3)
    assert brief.makespan_ns >= plans[0].makespan_ns


def test_published_case() -> None:
    """The rule as published comes within 1 % of the published 89,870 ticks from 1F1B, and mending it helps."""
    cluster = equal_ranks(4, "h800-sxm", memory_gb=92)  # what the published plan keeps
    plain = tune_octopipe(GOLDEN, cluster, num_micro_batches=8)
    mended = tune_octopipe(GOLDEN, cluster, num_micro_batches=8, try_all_phases=True, work_limit=6_000_000)
    assert plain.start_ns == 129_306 * NS_PER_TICK
    assert plain.makespan_ns <= 1.01 * 89_870 * NS_PER_TICK
    assert mended.makespan_ns < plain.makespan_ns


def test_published_layout() -> None:
    """On the published partition and placement, fine-tuning reaches the published time within its memory."""
    sizes = [2, 2, 2, 2, 2, 2, 2, 3, 2, 3, 2, 3, 2, 3, 3, 2, 3, 3, 2, 2, 2, 3, 3, 1]
    sizes[0] += 1  # the embedding and the head, which the published counts leave out
    sizes[-1] += 1
    ranks = (0, 1, 2, 3) * 4 + (0, 1, 2, 0, 0, 1, 2, 3)
    result = tune_octopipe(
        GOLDEN,
        equal_ranks(4, "h800-sxm", memory_gb=92),
        num_micro_batches=8,
        partition=Partition(tuple(sizes)),
        placement=Placement(ranks),
        try_all_phases=True,
    )
    assert result.plan.partition.num_layers_by_stage == tuple(sizes)
    assert result.plan.placement.rank_by_stage == ranks
    assert result.makespan_ns <= 89_870 * NS_PER_TICK


def test_interruption_keeps_the_best_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C ends the tuning at the best plan so far, and the result says so."""

    def interrupt(self: Moves, state: State) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Moves, "rearrange", interrupt)
    result = tune_octopipe(GOLDEN, equal_ranks(4, "h800-sxm"), num_micro_batches=8)
    assert result.was_interrupted
    assert not result.is_deterministic
    assert result.makespan_ns < result.start_ns
