"""What the planner says when nothing fits: every remedy that it names works when it is followed."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from random import Random

import pytest

from pipeplan.cluster import Cluster, Link, Rank
from pipeplan.errors import InfeasibleError
from pipeplan.plan.layout import Partition, Placement
from pipeplan.plan.ops import Op, OpKind, Order
from pipeplan.plan.types import Plan
from pipeplan.profile.types import LayerProfile, LayerTimes, Profile, Recomputation
from pipeplan.search import optimize
from pipeplan.simulate import simulate
from pipeplan.units import bytes_from_gb

MB = 1_000_000
TIMES = {"gpu": LayerTimes(forward_ns=1_000, backward_ns=2_000, input_gradient_ns=1_000, weight_gradient_ns=1_000)}
NEARLY = 0.97  # of a cap that is said to be the nearest


def random_profile(random: Random, num_layers: int) -> Profile:
    """Layers that differ in what they keep and hand on, which decides where memory is short."""
    layers = []
    for index in range(num_layers):
        activation = random.choice((5, 20, 60)) * MB
        layers.append(
            LayerProfile(
                name=f"layers.{index}", kind="mlp", num_parameters=random.choice((0, 1, 2)) * MB,
                output_bytes=random.choice((1, 8, 30)) * MB, activation_bytes=activation,
                held_for_w_bytes=activation // 2, workspace_bytes=random.choice((0, 4)) * MB, times_by_device=TIMES,
                recomputation=Recomputation(TIMES, activation // 4) if random.random() < 0.3 else None,
            )
        )  # fmt: skip
    return Profile(
        model="m", source="measured", micro_batch_size=4, sequence_length=1, dtype="bf16",
        state_bytes_per_parameter=16, layers=tuple(layers), count_boundary_buffers=random.random() < 0.8,
    )  # fmt: skip


def random_cluster(random: Random, num_ranks: int) -> Cluster:
    """Ranks with caps that differ, some without; with a reserve now and then."""
    sizes = [random.choice((60, 60, 30, 90)) * MB for _ in range(num_ranks)]
    caps = sizes if random.random() < 0.6 else [size if index == 0 else None for index, size in enumerate(sizes)]
    if random.random() < 0.4:
        caps = [60 * MB] * num_ranks
    return Cluster(
        ranks=tuple(Rank("gpu", cap) for cap in caps),
        within_node=Link(2_000, 10.0),
        memory_reserve_bytes=random.choice((0, 5 * MB)),
    )


def size_bytes(text: str) -> int:
    """Return what "0.06 GB" or "512 bytes" says."""
    value, unit = text.split()
    return bytes_from_gb(float(value)) if unit == "GB" else int(value)


def smaller(profile: Profile, size: int) -> Profile:
    """Return the profile of a smaller micro-batch: all bytes but the states' shrink with it."""
    factor = size / profile.micro_batch_size
    layers = tuple(
        replace(
            layer,
            output_bytes=int(layer.output_bytes * factor),
            activation_bytes=int(layer.activation_bytes * factor),
            held_for_w_bytes=int(layer.held_for_w_bytes * factor),
            workspace_bytes=int(layer.workspace_bytes * factor),
            recomputation=layer.recomputation
            and Recomputation(TIMES, int(layer.recomputation.activation_bytes * factor)),
        )
        for layer in profile.layers
    )
    return replace(profile, micro_batch_size=size, layers=layers)


def recomputing(profile: Profile) -> Profile:
    """Return the profile with figures for all layers: what can't recompute yet keeps its input only."""
    inputs = (0, *(layer.output_bytes for layer in profile.layers))
    layers = tuple(
        layer
        if layer.recomputation is not None
        else replace(layer, recomputation=Recomputation(TIMES, min(inputs[index], layer.activation_bytes)))
        for index, layer in enumerate(profile.layers)
    )
    return replace(profile, layers=layers)


def one_at_a_time_peaks(profile: Profile, cluster: Cluster, partition: Partition, placement: Placement) -> list[int]:
    """Return the peaks of one micro-batch after the other, recomputing where every layer of a stage can."""
    stages = range(partition.num_stages)
    saves = [
        all(profile.layers[index].recomputation is not None for index in partition.layers(stage)) for stage in stages
    ]
    order = Order.of(
        [
            [
                Op(stage, kind, micro_batch)
                for micro_batch in range(3)
                for kind, each in ((OpKind.F, placement.stages(rank)), (OpKind.B, placement.stages(rank)[::-1]))
                for stage in each
            ]
            for rank in range(cluster.num_ranks)
        ]
    )
    plan = Plan(
        model="m", num_micro_batches=3, partition=partition, placement=placement, order=order,
        recomputed_stages=tuple(stage for stage in stages if saves[stage]),
    )  # fmt: skip
    return [peak.total for peak in simulate(plan, profile, cluster).memory_by_rank]


def least_equal_cap(profile: Profile, cluster: Cluster) -> int:
    """Return the smallest cap under which some layout runs one micro-batch at a time."""
    num_layers, num_ranks = profile.num_layers, cluster.num_ranks
    least = []
    for num_stages in range(num_ranks, num_layers + 1):
        for cuts in itertools.combinations(range(1, num_layers), num_stages - 1):
            sizes = tuple(after - before for before, after in itertools.pairwise((0, *cuts, num_layers)))
            for ranks in itertools.product(range(num_ranks), repeat=num_stages):
                if len(set(ranks)) == num_ranks:
                    peaks = one_at_a_time_peaks(profile, cluster, Partition(sizes), Placement(ranks))
                    least.append(max(peaks))
    return min(least) + cluster.memory_reserve_bytes


CAP, FEW, SIZE, RANKS, AGAIN, DEFAULT = (
    r"give every rank (\S+ GB)",
    r"give (rank \d+ .*?) of memory",
    r"use a micro-batch size of (\d+) instead of 4",
    r"use (\d+) (?:such ranks|ranks like rank 0)",
    r"profile with (recomputation)",
    r"use the (default) strategy",
)
REMEDIES = (CAP, FEW, SIZE, RANKS, AGAIN, DEFAULT)


@pytest.mark.parametrize(
    ("strategy", "seed", "expected"),
    [
        ("default", 0, {CAP, FEW, SIZE}),
        ("default", 6, {CAP, SIZE, RANKS, AGAIN}),
        ("default", 10, {CAP, RANKS}),
        ("default", 22, {CAP, FEW}),
        ("default", 27, {CAP, FEW, SIZE}),
        ("default", 34, {CAP, SIZE}),
        ("default", 51, {CAP, FEW}),
        ("octopipe", 1, {CAP, FEW, DEFAULT}),
        ("octopipe", 6, {CAP, SIZE, AGAIN}),
        ("octopipe", 26, {CAP, FEW, SIZE}),
    ],
)
def test_every_remedy_works(strategy: str, seed: int, expected: set[str]) -> None:
    """The layout named needs what the message says; each cap, count of ranks, micro-batch size, ... named then fits."""
    random = Random(seed)
    num_ranks = random.choice((1, 2, 2, 3))
    profile = random_profile(random, num_ranks + random.choice((0, 1, 3)))
    cluster = random_cluster(random, num_ranks)

    def search(profile: Profile, cluster: Cluster, strategy: str = strategy) -> None:
        optimize(profile, cluster, num_micro_batches=3, work_limit=30_000, strategy=strategy)

    def fits(profile: Profile, cluster: Cluster) -> bool:
        try:
            search(profile, cluster)
        except InfeasibleError:
            return False
        return True

    def with_caps(cap_by_rank: dict[int, int]) -> Cluster:
        ranks = enumerate(cluster.ranks)
        return replace(
            cluster,
            ranks=tuple(replace(rank, memory_bytes=cap_by_rank.get(index, rank.memory_bytes)) for index, rank in ranks),
        )

    with pytest.raises(InfeasibleError) as caught:
        search(profile, cluster)
    message = str(caught.value)
    closest = re.search(r"rank (\d+) needs at least (\S+ \S+) .*\(([\d,]+) layers on ranks ([\d,]+)\)", message)
    assert closest is not None
    peaks = one_at_a_time_peaks(profile, cluster, Partition.parse(closest[3]), Placement.parse(closest[4]))
    assert size_bytes(closest[2]) == pytest.approx(peaks[int(closest[1])], rel=0.01)

    found = {each: named for each in REMEDIES if (named := re.search(each, message)) is not None}
    assert found.keys() == expected, message
    cap = size_bytes(found[CAP][1])
    search(profile, with_caps(dict.fromkeys(range(num_ranks), cap)))
    assert not fits(profile, with_caps(dict.fromkeys(range(num_ranks), round(NEARLY * cap))))
    if FEW in found:
        search(
            profile,
            with_caps({int(r): size_bytes(size) for r, size in re.findall(r"rank (\d+) (\S+ GB)", found[FEW][1])}),
        )
    if SIZE in found:
        size = int(found[SIZE][1])
        search(smaller(profile, size), cluster)
        assert not fits(smaller(profile, 2 * size), cluster)
    if RANKS in found:
        search(profile, replace(cluster, ranks=cluster.ranks[:1] * int(found[RANKS][1])))
    if AGAIN in found:
        search(recomputing(profile), cluster)
    if DEFAULT in found:
        search(profile, cluster, "default")


@pytest.mark.parametrize("seed", [13, 16, 35, 39])
def test_the_cap_named_is_the_smallest(seed: int) -> None:
    """No layout of a small problem, gone through one by one, needs less memory than the cap that is named."""
    random = Random(seed)
    num_ranks = random.choice((1, 2, 2, 3))
    profile = random_profile(random, num_ranks + random.choice((0, 1, 3)))
    cluster = random_cluster(random, num_ranks)
    with pytest.raises(InfeasibleError) as caught:
        optimize(profile, cluster, num_micro_batches=3, work_limit=30_000)
    named = re.search(CAP, str(caught.value))
    assert named is not None
    least = least_equal_cap(profile, cluster)
    assert least <= size_bytes(named[1]) <= 1.01 * least


def test_recomputation_that_would_not_help_is_not_named() -> None:
    """Where states alone are too much, the message names neither recomputation nor a smaller micro-batch."""
    profile = random_profile(Random(0), 2)
    heavy = replace(profile, layers=tuple(replace(layer, num_parameters=10 * MB) for layer in profile.layers))
    with pytest.raises(InfeasibleError) as caught:
        optimize(heavy, Cluster(ranks=(Rank("gpu", 150 * MB),)), num_micro_batches=2, work_limit=30_000)
    assert not re.search(f"{AGAIN}|{SIZE}", str(caught.value))
