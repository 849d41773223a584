"""The compiled cost formula equals the simulator's."""

from __future__ import annotations

import numpy as np
import pytest

from pipeplan.cluster import Cluster, Link, Rank
from pipeplan.plan.layout import Partition, Placement
from pipeplan.profile.types import LayerProfile, LayerTimes, Profile, Recomputation
from pipeplan.search.instance import allocate_costs, as_stage_costs, build_instance, fill_costs
from pipeplan.search.problem import Problem


def random_profile(rng: np.random.Generator, num_layers: int) -> Profile:
    """Return a profile with odd figures: kept-together, tied, unsplittable and recomputable layers."""

    def times() -> dict[str, LayerTimes]:
        return {
            device: LayerTimes(
                forward_ns=int(rng.integers(0, 9000)),
                backward_ns=int(rng.integers(1, 9000)),
                input_gradient_ns=int(rng.integers(1, 9000)),
                weight_gradient_ns=int(rng.integers(0, 9000)),
            )
            for device in ("fast", "slow")
        }

    layers = [
        LayerProfile(
            name=f"layer{index}",
            kind="any",
            num_parameters=int(rng.integers(0, 10**6)) if index not in (0, num_layers - 1) else 777_777,
            output_bytes=int(rng.integers(1, 10**6)),
            activation_bytes=int(rng.integers(0, 10**6)),
            held_for_w_bytes=int(rng.integers(0, 10**6)),
            workspace_bytes=int(rng.integers(0, 10**5)),
            times_by_device=times(),
            is_splittable=bool(rng.random() < 0.8),
            tied="embedding" if index in (0, num_layers - 1) else None,
            keep_with_previous=index > 0 and bool(rng.random() < 0.2),
            recomputation=Recomputation(times(), int(rng.integers(0, 1000))),
        )
        for index in range(num_layers)
    ]
    return Profile(
        model="random",
        source="measured",
        micro_batch_size=1,
        sequence_length=1,
        dtype="fp32",
        state_bytes_per_parameter=7.5,
        layers=tuple(layers),
    )


@pytest.mark.parametrize("seed", range(10))
def test_equals_the_simulators_costs(seed: int) -> None:
    """For any stages, ranks and recomputation, durations, bytes, transfers, states and tails are the simulator's."""
    rng = np.random.default_rng(seed)
    profile = random_profile(rng, 16)
    cluster = Cluster(
        ranks=(Rank("fast", 10**7), Rank("slow", None, node=1, slowdown=1.37), Rank("fast", 10**7, slowdown=0.9)),
        within_node=Link(1000, 2.5),
        between_nodes=Link(7000, 0.7),
        link_by_pair={(0, 2): Link(3, 0.1)},
        num_replicas=int(rng.integers(1, 4)),
        memory_reserve_bytes=1234,
        host_overhead_ns={"F": 11, "B": 12, "I": 13, "W": 14, "send": 15, "wait": 16},
    )
    problem = Problem(profile, cluster, 3)
    instance = build_instance(problem)
    num_atoms = len(instance.num_layers) - 1
    num_stages = int(rng.integers(3, min(7, num_atoms) + 1))
    cuts = np.sort(rng.choice(np.arange(1, num_atoms), num_stages - 1, replace=False))
    atom_bounds = np.concatenate(([0], cuts, [num_atoms]))
    ranks = rng.permutation(np.concatenate((np.arange(3), rng.integers(0, 3, num_stages - 3))))
    recomputed = rng.random(num_stages) < 0.3
    costs = allocate_costs(num_stages, 3, instance)
    margin = np.array([5, 6, 7])
    assert fill_costs(instance, np.diff(atom_bounds), ranks, recomputed, margin, costs)

    partition = Partition(tuple(int(size) for size in np.diff(instance.num_layers[atom_bounds])))
    partition.check(profile.layers)
    placement = Placement(tuple(int(rank) for rank in ranks))
    expected = problem.table.stage_costs(partition, placement, tuple(np.flatnonzero(recomputed).tolist()))
    found = as_stage_costs(costs)
    for name in expected.__slots__:
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), err_msg=name)
    workspace = np.array([max(expected.workspace_bytes[ranks == rank]) for rank in range(3)])
    usable = np.array([10**7 - 1234, 1 << 60, 10**7 - 1234])
    np.testing.assert_array_equal(costs.capacity_bytes, usable - expected.state_bytes - workspace - margin)
    ends = rng.integers(0, 10**7, 3)
    simulated = problem.table.tail_ns(partition.bounds, placement.rank_by_stage, ends)
    # With one shared weight, waiting for the slowest holder shows as the latest end plus tail, where tails are equal.
    if cluster.num_replicas == 1:
        assert int((ends + costs.tail_ns).max()) == simulated
