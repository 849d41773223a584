"""A small plan that the emission tests share."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipeplan.cluster import Cluster, equal_ranks
from pipeplan.plan.layout import Partition, Placement
from pipeplan.plan.orders.zero_bubble import zb_h1
from pipeplan.plan.types import Plan
from pipeplan.profile.types import LayerProfile, LayerTimes, Profile
from pipeplan.program.verify import VerifiedProgram, verify_plan
from pipeplan.simulate import simulate

NUM_RANKS = 2
NUM_MICRO_BATCHES = 4


@pytest.fixture
def profile() -> Profile:
    """Five equal layers on a CPU, fp32, micro-batches of 3 samples."""
    times = LayerTimes(
        forward_ns=1_000_000, backward_ns=2_000_000, input_gradient_ns=1_000_000, weight_gradient_ns=1_100_000
    )
    layers = tuple(
        LayerProfile(
            name=f"layers.{index}",
            kind="mlp",
            num_parameters=1_000,
            output_bytes=1_000_000,
            activation_bytes=5_000_000,
            held_for_w_bytes=2_000_000,
            times_by_device={"cpu": times},
        )
        for index in range(5)
    )
    return Profile(
        model="five-layers",
        source="measured",
        micro_batch_size=3,
        sequence_length=16,
        dtype="fp32",
        state_bytes_per_parameter=16,
        layers=layers,
    )


@pytest.fixture
def cluster() -> Cluster:
    """Two CPU ranks with a cap that the plan meets."""
    return equal_ranks(NUM_RANKS, "cpu", memory_gb=1, link_latency_us=10, link_gb_per_s=1)


@pytest.fixture
def plan(profile: Profile, cluster: Cluster) -> Plan:
    """ZB-H1 over the five layers."""
    bare = Plan(
        model=profile.model,
        num_micro_batches=NUM_MICRO_BATCHES,
        partition=Partition((3, 2)),
        placement=Placement((0, 1)),
        order=zb_h1(NUM_RANKS, NUM_MICRO_BATCHES),
    )
    return replace(bare, prediction=simulate(bare, profile, cluster).prediction)


@pytest.fixture
def verified(plan: Plan, profile: Profile, cluster: Cluster) -> VerifiedProgram:
    """The plan's verified program."""
    return verify_plan(plan, profile, cluster)
