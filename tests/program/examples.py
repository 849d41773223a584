"""A small plan that tests mutate: four stages in a V on two ranks, or one stage a rank, three micro-batches."""

from __future__ import annotations

from collections.abc import Sequence

from pipeplan.cluster import Cluster, equal_ranks
from pipeplan.plan.layout import Partition, Placement
from pipeplan.plan.ops import Order
from pipeplan.plan.types import Plan, QueueModel
from pipeplan.profile.types import LayerProfile, LayerTimes, Profile
from pipeplan.program.types import Program, parse_instruction

MB = 1_000_000


def equal_layers(num_layers: int) -> Profile:
    """Return a profile of equal layers: F 1 ms, B 2 ms, I and W 1 ms each; 100 MB kept, 40 MB of it until W."""
    return Profile(
        model="equal",
        source="estimated",
        micro_batch_size=1,
        sequence_length=128,
        dtype="bf16",
        state_bytes_per_parameter=10.0,
        layers=tuple(
            LayerProfile(
                name=f"layers.{index}",
                kind="mlp",
                num_parameters=10 * MB,
                output_bytes=10 * MB,
                activation_bytes=100 * MB,
                held_for_w_bytes=40 * MB,
                times_by_device={
                    "gpu": LayerTimes(
                        forward_ns=1_000_000,
                        backward_ns=2_000_000,
                        input_gradient_ns=1_000_000,
                        weight_gradient_ns=1_000_000,
                    )
                },
            )
            for index in range(num_layers)
        ),
    )


def plan_of(lines: Sequence[str], placement: str, num_micro_batches: int) -> Plan:
    """Return the plan of an order in text form with one layer a stage."""
    stages = Placement.parse(placement)
    return Plan(
        model="equal",
        num_micro_batches=num_micro_batches,
        partition=Partition((1,) * stages.num_stages),
        placement=stages,
        order=Order.parse(lines),
    )


def program_of(lines: Sequence[str], plan: Plan, queue_model: QueueModel = QueueModel.ORDERED_PAIR) -> Program:
    """Return the program of the given instruction lines."""
    return Program(
        plan_digest=plan.digest,
        num_micro_batches=plan.num_micro_batches,
        rank_by_stage=plan.placement.rank_by_stage,
        queue_model=queue_model,
        instructions_by_rank=tuple(tuple(parse_instruction(word) for word in line.split()) for line in lines),
    )


def devices(num_ranks: int, **options: float) -> Cluster:
    """Return equal devices with links of 10 us and 10 GB/s."""
    return equal_ranks(num_ranks, "gpu", link_latency_us=10, link_gb_per_s=10, **options)  # type: ignore[arg-type]


V_PLAN = plan_of(
    [
        "0F0 0F1 3F0 3I0 0F2 3F1 3I1 3W0 0I0 3F2 3I2 0W0 0I1 3W1 0W1 0I2 3W2 0W2",
        "1F0 2F0 1F1 2F1 2B0 1B0 1F2 2F2 2B1 1B1 2B2 1B2",
    ],
    "0,1,1,0",
    3,
)
V_PROFILE = equal_layers(4)

PAIR_PLAN = plan_of(["0F0 0F1 0B0 0F2 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2"], "0,1", 3)
PAIR_PROFILE = equal_layers(2)
