"""Seeded small instances with a fixed layout, which an exact solver can often prove."""

from __future__ import annotations

import random
from dataclasses import dataclass

from pipeplan.cluster import Cluster, Link, Rank
from pipeplan.plan.layout import Partition, Placement
from pipeplan.profile.types import LayerProfile, LayerTimes, Profile

DEVICE = "bench"


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallInstance:
    """A problem of 2-4 ranks and 2-6 micro-batches with at most 150 ops, W split everywhere it can be."""

    name: str
    profile: Profile
    cluster: Cluster
    num_micro_batches: int
    partition: Partition
    placement: Placement


def small_instance(seed: int) -> SmallInstance:
    """Return the instance of that seed: layers of several kinds, links with latency, caps that bind on most."""
    rng = random.Random(seed)
    while True:
        num_ranks, per_rank, num_micro_batches = rng.randint(2, 4), rng.choice((1, 1, 2, 2, 3)), rng.randint(2, 6)
        num_stages = num_ranks * per_rank
        if 3 * num_stages * num_micro_batches <= 150:
            break
    kinds = {
        kind: LayerTimes(
            forward_ns=(forward := rng.randrange(100_000, 400_000, 1_000)),
            backward_ns=round(0.97 * (input_ns := int(forward * rng.uniform(0.9, 1.8)))) + (
                weight_ns := int(forward * rng.uniform(0.3, 1.1))
            ),
            input_gradient_ns=input_ns,
            weight_gradient_ns=weight_ns,
        )
        for kind in ("attention", "mamba", "mlp")
    }  # fmt: skip
    num_layers = num_stages * rng.randint(2, 4)
    layers = []
    for index in range(num_layers):
        kind = rng.choice(sorted(kinds))
        activation_bytes = rng.randint(80, 160) * 10**6
        layers.append(
            LayerProfile(
                name=f"{index}.{kind}",
                kind=kind,
                num_parameters=10**6,
                output_bytes=rng.choice((1, 2, 4)) * 10**6,
                activation_bytes=activation_bytes,
                held_for_w_bytes=int(activation_bytes * rng.uniform(0.5, 1.0)),
                times_by_device={DEVICE: kinds[kind]},
                is_splittable=rng.random() < 0.9,
            )
        )
    profile = Profile(
        model=f"small-{seed}",
        source="estimated",
        micro_batch_size=1,
        sequence_length=1,
        dtype="bf16",
        state_bytes_per_parameter=18,
        layers=tuple(layers),
        count_boundary_buffers=False,
    )
    cuts = sorted(rng.sample(range(1, num_layers), num_stages - 1))
    sizes = tuple(after - before for before, after in zip([0, *cuts], [*cuts, num_layers], strict=True))
    laps = [list(range(num_ranks)) for _ in range(per_rank)]
    if rng.random() < 0.4:
        for lap in laps[1::2]:
            lap.reverse()
    ranks = tuple(rank for lap in laps for rank in lap)
    bounds = Partition(sizes).bounds
    share = rng.choice((0.5, 0.7, 1.0, None))
    memory = []
    for rank in range(num_ranks):
        stages = [stage for stage in range(num_stages) if ranks[stage] == rank]
        of_stage = [sum(layer.activation_bytes for layer in layers[bounds[s] : bounds[s + 1]]) for s in stages]
        in_flight = sum(of_stage) * max(
            1.0, min(num_ranks - rank * (per_rank == 1), num_micro_batches) * (share or 1.0)
        )
        states = sum(18 * layer.num_parameters for s in stages for layer in layers[bounds[s] : bounds[s + 1]])
        memory.append(None if share is None else int(states + in_flight + max(of_stage) * 0.3))
    link = Link(rng.choice((0, 10_000, 30_000)), rng.choice((10.0, 40.0, 200.0)))
    cluster = Cluster(ranks=tuple(Rank(DEVICE, cap) for cap in memory), within_node=link, between_nodes=link)
    return SmallInstance(
        name=f"seed {seed}: {num_ranks} ranks, {num_stages} stages, {num_micro_batches} micro-batches"
        + (", no cap" if share is None else f", cap {share:.0%}"),
        profile=profile,
        cluster=cluster,
        num_micro_batches=num_micro_batches,
        partition=Partition(sizes),
        placement=Placement(ranks),
    )
