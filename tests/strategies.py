"""Hypothesis strategies shared by all tests: small random profiles, clusters, layouts and valid orders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from random import Random

from hypothesis import strategies as st

from pipeplan.cluster import Cluster, Link, Rank
from pipeplan.plan.layout import Partition, Placement
from pipeplan.plan.ops import Op, OpKind, Order
from pipeplan.plan.types import Plan, QueueModel
from pipeplan.profile.file import profile_digest
from pipeplan.profile.types import LayerProfile, LayerTimes, Profile, Recomputation

DEVICES = ("gpu-a", "gpu-b")
KINDS = ("mamba", "attention", "mlp", "moe")

_times_ns = st.integers(0, 50).map(lambda ticks: ticks * 10_000)
_bytes = st.integers(0, 40).map(lambda blocks: blocks * 1_000_000)


def _counts(largest: int, *, usual: int) -> st.SearchStrategy[int]:
    """Counts from 1 to ``largest`` that shrink to ``usual``; Hypothesis also draws that more often."""
    return st.sampled_from(sorted(range(1, largest + 1), key=lambda count: (abs(count - usual), count)))


@st.composite
def layer_times(draw: st.DrawFn, *, splittable: bool = True) -> LayerTimes:
    """Times of one layer in ticks of 0.01 ms; zero times occur, since embeddings have no W worth measuring."""
    return LayerTimes(
        forward_ns=draw(_times_ns),
        backward_ns=draw(_times_ns),
        input_gradient_ns=draw(_times_ns) if splittable else None,
        weight_gradient_ns=draw(_times_ns) if splittable else None,
    )


@st.composite
def layer_profiles(
    draw: st.DrawFn, *, name: str = "layers.0", devices: Sequence[str] = DEVICES[:1], recomputable: bool = False
) -> LayerProfile:
    """One layer; about one in five can't defer its weight gradients."""
    splittable = draw(st.integers(0, 4)) > 0
    activation_bytes = draw(_bytes)
    recomputation = None
    if recomputable:
        recomputation = Recomputation(
            {device: draw(layer_times(splittable=splittable)) for device in devices},
            draw(st.integers(0, activation_bytes)),
        )
    return LayerProfile(
        name=name,
        kind=draw(st.sampled_from(KINDS)),
        num_parameters=draw(st.integers(0, 20)) * 100_000,
        output_bytes=draw(_bytes),
        activation_bytes=activation_bytes,
        held_for_w_bytes=draw(_bytes),
        workspace_bytes=draw(_bytes),
        untrained_bytes=draw(st.just(0) | _bytes),
        is_splittable=splittable,
        times_by_device={device: draw(layer_times(splittable=splittable)) for device in devices},
        recomputation=recomputation,
    )


@st.composite
def profiles(
    draw: st.DrawFn,
    *,
    min_layers: int = 1,
    max_layers: int = 8,
    devices: Sequence[str] = DEVICES[:1],
    recomputable: bool = False,
    tied: bool = False,
) -> Profile:
    """A profile whose layers may differ in everything.

    Args:
        recomputable: Give every layer figures with recomputation.
        tied: Let the first and the last layer share a weight.
    """
    num_layers = draw(st.integers(min_layers, max_layers))
    layers = [
        draw(layer_profiles(name=f"layers.{index}", devices=devices, recomputable=recomputable))
        for index in range(num_layers)
    ]
    if tied and num_layers > 1:
        shared = draw(st.integers(1, 20)) * 100_000
        for index in (0, num_layers - 1):
            layers[index] = replace(layers[index], tied="embedding", num_parameters=shared)
    return Profile(
        model="random",
        source="estimated",
        micro_batch_size=draw(st.integers(1, 4)),
        sequence_length=draw(st.sampled_from((16, 128, 8192))),
        dtype=draw(st.sampled_from(("bf16", "fp32"))),
        state_bytes_per_parameter=draw(st.sampled_from((0.0, 16.0, 18.0))),
        count_boundary_buffers=draw(st.booleans()),
        layers=tuple(layers),
    )


@st.composite
def clusters(draw: st.DrawFn, *, num_ranks: int, devices: Sequence[str] = DEVICES[:1], capped: bool = False) -> Cluster:
    """A cluster of ``num_ranks``, from equal ranks with free links to mixed ones over two nodes.

    Args:
        capped: Give every rank a memory cap; otherwise none has one, and every plan fits.
    """
    memory_bytes = draw(st.integers(1, 100)) * 1_000_000_000 if capped else None
    ranks = tuple(
        Rank(
            device=draw(st.sampled_from(devices)),
            memory_bytes=memory_bytes,
            node=draw(st.integers(0, 1)),
            slowdown=draw(st.sampled_from((1.0, 1.0, 1.5))),
        )
        for _ in range(num_ranks)
    )
    link = st.builds(Link, st.integers(0, 100).map(lambda us: us * 1_000), st.sampled_from((5.0, 25.0, 200.0)))
    overheads = {key: draw(st.integers(0, 20)) * 1_000 for key in ("F", "B", "I", "W", "send", "wait", "step")}
    return Cluster(
        ranks=ranks,
        within_node=draw(st.none() | link),
        between_nodes=draw(st.none() | link),
        host_overhead_ns=draw(st.sampled_from(({}, overheads))),
    )


@st.composite
def partitions(draw: st.DrawFn, *, num_layers: int, num_stages: int) -> Partition:
    """A partition of ``num_layers`` into ``num_stages`` stages, none empty."""
    cuts = draw(
        st.lists(st.integers(1, max(num_layers - 1, 1)), min_size=num_stages - 1, max_size=num_stages - 1, unique=True)
    )
    bounds = [0, *sorted(cuts), num_layers]
    return Partition(tuple(last - first for first, last in pairwise(bounds)))


@st.composite
def placements(draw: st.DrawFn, *, num_stages: int, num_ranks: int) -> Placement:
    """Any placement that gives every rank a stage: interleaved, V, neighbours on one rank, or none of these."""
    extra = draw(
        st.lists(st.integers(0, num_ranks - 1), min_size=num_stages - num_ranks, max_size=num_stages - num_ranks)
    )
    return Placement(tuple(draw(st.permutations([*range(num_ranks), *extra]))))


@st.composite
def orders(draw: st.DrawFn, *, placement: Placement, num_micro_batches: int, salt: str = "") -> Order:
    """A random valid order: a random topological sort of all ops, with B or I and W by stage and micro-batch.

    Half of the sorts put off W, half of them prefer micro-batches in turn, so that orders near those in use occur too.

    Args:
        salt: Changes the order; Hypothesis varies an example a few times in small ways, and salting with the rest of
            the example gives each variation an order of its own.
    """
    num_stages = placement.num_stages
    seed = draw(st.integers(0, 2**32 - 1))
    random = Random(f"{seed} {placement} {num_micro_batches} {salt}")
    split = draw(st.sampled_from(("never", "always", "mixed")))
    delays_w = draw(st.booleans())
    in_turn = draw(st.booleans())
    ready = [Op(0, OpKind.F, micro_batch) for micro_batch in range(num_micro_batches)]
    ops_by_rank: list[list[Op]] = [[] for _ in range(placement.num_ranks)]
    while ready:
        candidates = ready
        if delays_w and any(op.kind is not OpKind.W for op in ready) and random.random() < 0.8:
            candidates = [op for op in ready if op.kind is not OpKind.W]
        if in_turn:
            first = min(op.micro_batch for op in candidates)
            candidates = [op for op in candidates if op.micro_batch <= first + 1]
        op = random.choice(candidates)
        ready.remove(op)
        ops_by_rank[placement.rank_by_stage[op.stage]].append(op)
        ready.extend(_following(op, num_stages, split == "always" or (split == "mixed" and random.random() < 0.5)))
    return Order.of(ops_by_rank)


def _following(op: Op, num_stages: int, splits: bool) -> list[Op]:
    """Return the ops that ``op`` makes ready; written apart from the package's own rule on purpose."""
    backward = OpKind.I if splits else OpKind.B
    following: list[Op] = []
    if op.kind is OpKind.F:
        if op.stage + 1 < num_stages:
            following.append(Op(op.stage + 1, OpKind.F, op.micro_batch))
        else:
            following.append(Op(op.stage, backward, op.micro_batch))
    if op.kind in (OpKind.B, OpKind.I) and op.stage > 0:
        following.append(Op(op.stage - 1, backward, op.micro_batch))
    if op.kind is OpKind.I:
        following.append(Op(op.stage, OpKind.W, op.micro_batch))
    return following


@st.composite
def plans(
    draw: st.DrawFn,
    *,
    profile: Profile,
    num_ranks: int,
    max_micro_batches: int = 5,
    max_stages: int = 6,
    recomputed: bool = False,
) -> Plan:
    """A valid plan for ``profile``, which needs at least ``num_ranks`` layers."""
    num_stages = draw(st.integers(num_ranks, max(num_ranks, min(max_stages, profile.num_layers))))
    placement = draw(placements(num_stages=num_stages, num_ranks=num_ranks))
    num_micro_batches = draw(_counts(max_micro_batches, usual=3))
    stages = draw(st.sets(st.integers(0, num_stages - 1))) if recomputed else set()
    return Plan(
        model=profile.model,
        num_micro_batches=num_micro_batches,
        partition=draw(partitions(num_layers=profile.num_layers, num_stages=num_stages)),
        placement=placement,
        order=draw(orders(placement=placement, num_micro_batches=num_micro_batches, salt=profile_digest(profile))),
        recomputed_stages=tuple(sorted(stages)),
        queue_model=draw(st.sampled_from(QueueModel)),
        profile_digest=profile_digest(profile),
    )


@st.composite
def planned(
    draw: st.DrawFn, *, max_ranks: int = 4, max_micro_batches: int = 5, max_stages: int = 6, recomputed: bool = False
) -> tuple[Plan, Profile, Cluster]:
    """A profile, a cluster and a valid plan for them, without memory caps."""
    num_ranks = draw(_counts(max_ranks, usual=2))
    devices = draw(st.sampled_from((DEVICES[:1], DEVICES)))
    profile = draw(profiles(min_layers=num_ranks, max_layers=max_stages + 2, devices=devices, recomputable=recomputed))
    cluster = draw(clusters(num_ranks=num_ranks, devices=devices))
    plan = draw(
        plans(
            profile=profile,
            num_ranks=num_ranks,
            max_micro_batches=max_micro_batches,
            max_stages=max_stages,
            recomputed=recomputed,
        )
    )
    return plan, profile, cluster
