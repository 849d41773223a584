"""The exact solver against plain enumeration, the clock and the memory formula."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeplan.cluster import equal_ranks
from pipeplan.errors import InfeasibleError, PlanError
from pipeplan.plan.check import check_plan
from pipeplan.plan.layout import Partition, Placement
from pipeplan.plan.ops import Op, OpKind, Order
from pipeplan.profile import read_profile
from pipeplan.profile.types import LayerProfile, LayerTimes, Profile
from pipeplan.search import Progress, optimize
from pipeplan.search.exact import ExactResult, exact_plan, solve, solve_order
from pipeplan.search.exact.plan import arrangements
from pipeplan.simulate import EncodedOrder, StageCosts, encode_order, peak_bytes_by_rank, run_clock, simulate
from tests.strategies import clusters, profiles

GOLDEN = Path(__file__).parent.parent / "golden" / "nemotron-nano-9b-v2.yaml"
F, B, I, W = OpKind  # noqa: E741  the field's own letters


def random_costs(rng: random.Random, ranks: Sequence[int], *, transfer_ns: int, overhead_ns: int = 0) -> StageCosts:
    """Costs of small numbers, so that ties are frequent; held bytes may exceed the activations."""
    num_stages = len(ranks)
    duration = np.array([[rng.randint(1, 9) for _ in range(4)] for _ in range(num_stages)], dtype=np.int64)
    forward, backward = np.zeros((2, num_stages), dtype=np.int64)
    for stage in range(num_stages - 1):
        if ranks[stage] != ranks[stage + 1]:
            forward[stage], backward[stage + 1] = rng.randint(0, transfer_ns), rng.randint(0, transfer_ns)
    boundary = np.array([rng.randint(0, 2) for _ in range(num_stages)], dtype=np.int64)
    boundary[-1] = 0
    return StageCosts(
        duration_ns=duration,
        activation_bytes=np.array([rng.randint(1, 4) for _ in range(num_stages)], dtype=np.int64),
        held_bytes=np.array([rng.randint(0, 5) for _ in range(num_stages)], dtype=np.int64),
        workspace_bytes=np.array([rng.randint(0, 2) for _ in range(num_stages)], dtype=np.int64),
        boundary_bytes=boundary,
        rank_by_stage=np.array(ranks, dtype=np.int64),
        forward_transfer_ns=forward,
        backward_transfer_ns=backward,
        state_bytes=np.array([rng.randint(0, 3) for _ in range(max(ranks) + 1)], dtype=np.int64),
        send_ns=rng.randint(0, overhead_ns),
        wait_ns=rng.randint(0, overhead_ns),
    )


def interleavings(chains: tuple[tuple[Op, ...], ...]) -> Iterator[tuple[Op, ...]]:
    """Every sequence that keeps each chain in its own order."""
    if not any(chains):
        yield ()
    for index, chain in enumerate(chains):
        if chain:
            rest = (*chains[:index], chain[1:], *chains[index + 1 :])
            for sequence in interleavings(rest):
                yield (chain[0], *sequence)


def all_orders(ranks: Sequence[int], num_micro_batches: int, can_split: Sequence[bool]) -> Iterator[Order]:
    """Every order of the layout, whatever its micro-batches' sequence, with B or I + W for each backward."""
    by_rank = []
    for rank in range(max(ranks) + 1):
        choices = []
        for stage, micro_batch in itertools.product(range(len(ranks)), range(num_micro_batches)):
            if ranks[stage] == rank:
                fused = (Op(stage, F, micro_batch), Op(stage, B, micro_batch))
                split = (Op(stage, F, micro_batch), Op(stage, I, micro_batch), Op(stage, W, micro_batch))
                choices.append((fused, split) if can_split[stage] else (fused,))
        by_rank.append([ops for chains in itertools.product(*choices) for ops in interleavings(chains)])
    for ops_by_rank in itertools.product(*by_rank):
        yield Order.of(ops_by_rank)


@lru_cache(maxsize=1)
def all_encoded(
    ranks: tuple[int, ...], num_micro_batches: int, can_split: tuple[bool, ...]
) -> tuple[EncodedOrder, ...]:
    """The same, as arrays, kept for the next costs."""
    return tuple(encode_order(order) for order in all_orders(ranks, num_micro_batches, can_split))


def makespan_if_fits(
    costs: StageCosts,
    encoded: EncodedOrder,
    num_micro_batches: int,
    caps: Sequence[int | None],
    tails: Sequence[int],
    *,
    count_boundaries: bool,
) -> int | None:
    """What clock and memory formula say of an order; None where it deadlocks or does not fit."""
    clocked = run_clock(costs, encoded, num_micro_batches)
    if clocked.num_done < encoded.num_ops:
        return None
    peaks = peak_bytes_by_rank(costs, encoded, clocked, count_boundaries=count_boundaries)
    if any(cap is not None and peak > cap for peak, cap in zip(peaks, caps, strict=True)):
        return None
    return int((clocked.end_ns[encoded.offsets[1:] - 1] + np.array(tails)).max())


def check_result(
    result: ExactResult, costs: StageCosts, num_micro_batches: int, caps: Sequence[int | None], tails: Sequence[int],
    *, count_boundaries: bool,
) -> None:  # fmt: skip
    """The order is what the result says it is."""
    encoded = encode_order(result.order)
    found = makespan_if_fits(costs, encoded, num_micro_batches, caps, tails, count_boundaries=count_boundaries)
    assert found == result.makespan_ns
    assert result.lower_bound_ns <= result.makespan_ns


LAYOUTS = [
    ((0, 1), 2, (True, True)),
    ((0, 1), 3, (False, False)),
    ((0, 1, 0), 1, (True, True, True)),
    ((0, 1, 1, 0), 1, (True, False, True, True)),
    ((0, 1, 0), 2, (False, False, False)),
    ((0, 1, 2), 2, (False, True, False)),
]


@pytest.mark.parametrize(("ranks", "num_micro_batches", "can_split"), LAYOUTS)
@pytest.mark.parametrize("transfer_ns", [0, 2, 20], ids=["free", "quick", "slow"])
@pytest.mark.parametrize("count_boundaries", [False, True])
def test_equals_plain_enumeration(
    ranks: tuple[int, ...],
    num_micro_batches: int,
    can_split: tuple[bool, ...],
    transfer_ns: int,
    count_boundaries: bool,
) -> None:
    """With and without caps, overheads and tails, a proved result is the best of all orders that fit."""
    for seed in range(3):
        rng = random.Random(hash((ranks, transfer_ns, seed)))
        costs = random_costs(rng, ranks, transfer_ns=transfer_ns, overhead_ns=seed)
        num_ranks = costs.num_ranks
        tails = [rng.randint(0, 6) * (seed > 0) for _ in range(num_ranks)]
        caps: list[int | None] = [None if seed == 0 else rng.randint(8, 16) for _ in range(num_ranks)]
        makespans = [
            makespan
            for order in all_encoded(ranks, num_micro_batches, can_split)
            if (
                makespan := makespan_if_fits(
                    costs, order, num_micro_batches, caps, tails, count_boundaries=count_boundaries
                )
            )
            is not None
        ]
        try:
            result = solve_order(
                costs,
                num_micro_batches,
                caps,
                can_split_by_stage=can_split,
                tail_ns_by_rank=tails,
                count_boundaries=count_boundaries,
            )
        except InfeasibleError as error:
            # Boundaries in flight depend on exact times; where they decide, the solver may give up, and says so.
            gave_up = count_boundaries and str(error).startswith("found no order")
            assert gave_up or not makespans
            continue
        assert makespans
        check_result(result, costs, num_micro_batches, caps, tails, count_boundaries=count_boundaries)
        assert result.lower_bound_ns <= min(makespans) <= result.makespan_ns
        if not count_boundaries:
            assert result.is_proved


def test_widening_proves_what_a_narrow_pass_cannot() -> None:
    """A larger instance is proved, its cap is kept, and less work gives a worse bound but an honest one."""
    costs = random_costs(random.Random(2), (0, 1, 2, 0, 1, 2), transfer_ns=1)
    can_split = [True] * 6
    caps = [int(state) + 30 for state in costs.state_bytes]
    whole = solve_order(costs, 4, caps, can_split_by_stage=can_split)
    assert whole.is_proved
    check_result(whole, costs, 4, caps, [0, 0, 0], count_boundaries=False)
    brief = solve_order(costs, 4, caps, can_split_by_stage=can_split, work_limit=1)
    check_result(brief, costs, 4, caps, [0, 0, 0], count_boundaries=False)
    assert brief.lower_bound_ns <= whole.makespan_ns <= brief.makespan_ns
    assert not brief.is_proved
    assert brief == solve_order(costs, 4, caps, can_split_by_stage=can_split, work_limit=1)


def test_starts_from_an_incumbent() -> None:
    """The optimum as incumbent comes back as it is, proved; one that does not fit is ignored."""
    costs = random_costs(random.Random(5), (0, 1, 0), transfer_ns=2)
    first = solve_order(costs, 3, [None, None], can_split_by_stage=[True] * 3)
    again = solve_order(costs, 3, [None, None], can_split_by_stage=[True] * 3, incumbent=first.order)
    assert (again.order, again.is_proved) == (first.order, True)
    assert again.num_nodes <= first.num_nodes
    peaks = peak_bytes_by_rank(
        costs, encode_order(first.order), run_clock(costs, encode_order(first.order), 3), count_boundaries=False
    )
    tight: list[int | None] = [int(peak) - 1 for peak in peaks]
    capped = solve_order(costs, 3, tight, can_split_by_stage=[True] * 3, incumbent=first.order)
    check_result(capped, costs, 3, tight, [0, 0], count_boundaries=False)


def test_interruption_keeps_order_and_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in a wide pass leaves the order of the passes before, with a bound that still holds."""
    costs = random_costs(random.Random(2), (0, 1, 2, 0, 1, 2), transfer_ns=1)
    caps: list[int | None] = [int(state) + 30 for state in costs.state_bytes]
    whole = solve_order(costs, 4, caps, can_split_by_stage=[True] * 6)
    narrow = solve._beam

    def interrupt_wide(*arguments: Any) -> Any:
        if arguments[1] > solve.FIRST_WIDTH:
            raise KeyboardInterrupt
        return narrow(*arguments)

    monkeypatch.setattr(solve, "_beam", interrupt_wide)
    result = solve_order(costs, 4, caps, can_split_by_stage=[True] * 6)
    check_result(result, costs, 4, caps, [0, 0, 0], count_boundaries=False)
    assert result.lower_bound_ns <= whole.makespan_ns
    assert not result.is_proved


def test_exact_plan_is_the_best_of_all_layouts() -> None:
    """Without a fixed layout, the plan equals the best of all layouts solved one by one, tied weights included."""
    layers = tuple(
        replace(layer, tied="shared" if index in (0, 3) else None)
        for index, layer in enumerate(tiny_profile((3, 5, 2, 7)).layers)
    )
    profile = replace(tiny_profile((3, 5, 2, 7)), layers=layers)
    cluster = equal_ranks(2, "gpu", link_latency_us=1.0, link_gb_per_s=1.0)
    result = exact_plan(profile, cluster, 2)
    assert result.is_proved
    assert simulate(result.plan, profile, cluster).makespan_ns == result.makespan_ns
    fixed = [
        exact_plan(profile, cluster, 2, partition=Partition(sizes), placement=Placement(ranks)).makespan_ns
        for sizes in [(1, 3), (2, 2), (3, 1), (1, 1, 2), (1, 2, 1), (2, 1, 1), (1, 1, 1, 1)]
        for ranks in itertools.product((0, 1), repeat=len(sizes))
        if len(set(ranks)) == 2 and all(here != there for here, there in itertools.pairwise(ranks))
    ]
    assert result.makespan_ns == min(fixed)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_exact_plans_are_valid(data: st.DataObject) -> None:
    """On any small input: a whole plan, as fast as it says, within every cap, not below its own bound or the work."""
    num_ranks = data.draw(st.integers(1, 3), label="ranks")
    profile = data.draw(profiles(min_layers=num_ranks, max_layers=4, tied=num_ranks > 1))
    cluster = data.draw(clusters(num_ranks=num_ranks))
    cap_bytes = data.draw(st.none() | st.integers(20, 400).map(lambda size: size * 10**6), label="cap")
    cluster = replace(cluster, ranks=tuple(replace(rank, memory_bytes=cap_bytes) for rank in cluster.ranks))
    num_micro_batches = data.draw(st.integers(1, 3), label="micro-batches")
    try:
        result = exact_plan(profile, cluster, num_micro_batches, work_limit=20_000)
    except InfeasibleError:
        return
    check_plan(result.plan, profile)
    timeline = simulate(result.plan, profile, cluster)
    assert timeline.prediction == result.plan.prediction
    assert result.lower_bound_ns <= result.makespan_ns == timeline.makespan_ns
    assert max(timeline.busy_ns_by_rank) <= result.makespan_ns
    for rank, peak in enumerate(timeline.memory_by_rank):
        usable = cluster.usable_bytes(rank)
        assert usable is None or peak.total <= usable
    incumbent = exact_plan(profile, cluster, num_micro_batches, work_limit=20_000, incumbent=result.plan)
    assert incumbent.makespan_ns <= result.makespan_ns


def test_exact_plan_refuses_what_is_too_large() -> None:
    """Too many layouts are refused with what to fix; a fixed layout that no memory fits is said to be infeasible."""
    profile = tiny_profile((1,) * 9)
    with pytest.raises(PlanError, match="fix --partition and --placement"):
        exact_plan(profile, equal_ranks(3, "gpu"), 2)
    with pytest.raises(PlanError, match="out of reach"):
        exact_plan(profile, equal_ranks(3, "gpu"), 200, partition=Partition((3, 3, 3)), placement=Placement((0, 1, 2)))
    small = equal_ranks(2, "gpu", memory_gb=1e-9)
    with pytest.raises(InfeasibleError, match="fits the memory"):
        exact_plan(profile, small, 1, partition=Partition((4, 5)), placement=Placement((0, 1)))


def tiny_profile(ticks: Sequence[int]) -> Profile:
    """Layers whose forward takes that many microseconds."""
    return Profile(
        model="tiny",
        source="measured",
        micro_batch_size=1,
        sequence_length=1,
        dtype="fp32",
        state_bytes_per_parameter=1,
        layers=tuple(
            LayerProfile(
                name=f"{index}",
                kind="mlp",
                num_parameters=2_000,
                output_bytes=100,
                activation_bytes=1_000,
                held_for_w_bytes=500,
                times_by_device={
                    "gpu": LayerTimes(
                        forward_ns=1_000 * tick,
                        backward_ns=2_000 * tick,
                        input_gradient_ns=1_100 * tick,
                        weight_gradient_ns=1_000 * tick,
                    )
                },
            )
            for index, tick in enumerate(ticks)
        ),
    )


def test_says_that_it_is_too_large_before_it_searches() -> None:
    """A problem that an exact search can't take on is refused without a search, also where only one part is free."""
    profile = read_profile(GOLDEN)
    seen: list[Progress] = []
    cases: list[tuple[int, int, dict[str, Any], str]] = [
        (4, 8, {}, "58 layers on 4 ranks have too many layouts"),
        (2, 2, {"placement": Placement((0, 1))}, "58 layers on 2 ranks have too many layouts"),
        (2, 3, {"partition": Partition((1,) * 58)}, "58 stages and 3 micro-batches make 522 ops"),
        (3, 2, {"partition": Partition((1,) * 58)}, "more than 5000 layouts"),
    ]
    for num_ranks, num_micro_batches, fixed, reason in cases:
        with pytest.raises(PlanError, match=reason):
            optimize(
                profile, equal_ranks(num_ranks, "h800-sxm"), num_micro_batches=num_micro_batches, strategy="exact",
                on_progress=seen.append, **fixed,
            )  # fmt: skip
    assert not seen


@pytest.mark.parametrize(
    ("num_stages", "num_ranks", "at_most"), [(4, 1, 4), (6, 2, 3), (5, 2, 4), (6, 3, 2), (7, 3, 3)]
)
@pytest.mark.parametrize("are_alike", [False, True])
def test_arrangements(num_stages: int, num_ranks: int, at_most: int, are_alike: bool) -> None:
    """All ways to put stages on ranks, neighbours apart, without a look at most of those that don't count."""
    expected = [
        ranks
        for ranks in itertools.product(range(num_ranks), repeat=num_stages)
        if len(set(ranks)) == num_ranks
        and max(map(ranks.count, ranks)) <= at_most
        and (num_ranks == 1 or all(here != there for here, there in itertools.pairwise(ranks)))
        and not (are_alike and list(dict.fromkeys(ranks)) != sorted(set(ranks)))
    ]
    assert list(arrangements((), num_stages, num_ranks, at_most, are_alike=are_alike)) == expected


def test_arrangements_of_many_stages() -> None:
    """Two ranks leave two ways to alternate, found at once among 2^60."""
    ways = list(arrangements((), 60, 2, 30, are_alike=False))
    assert ways == [(0, 1) * 30, (1, 0) * 30]
