"""Traces made by the simulator under known costs: what a perfect measurement of such a machine would say."""

from __future__ import annotations

from pipeplan.cluster import Cluster
from pipeplan.plan.ops import OpKind
from pipeplan.plan.types import Plan
from pipeplan.profile.types import LayerProfile, LayerTimes, Profile
from pipeplan.program.lower import lower
from pipeplan.program.trace import RankTrace, TimedInstruction, Trace
from pipeplan.program.types import Compute, Receive, Send, WaitReceive
from pipeplan.simulate import simulate

DEVICE = "gpu"


def profile_of(forward_ms: list[float], *, source: str = "measured", output_bytes: int = 1_000_000) -> Profile:
    """Return a profile whose layers take F, 2 F in B, and 1.1 F in each half."""
    return Profile(
        model="synthetic",
        source=source,
        micro_batch_size=1,
        sequence_length=128,
        dtype="bf16",
        state_bytes_per_parameter=0.0,
        layers=tuple(
            LayerProfile(
                name=f"layers.{index}",
                kind="mlp",
                num_parameters=1,
                output_bytes=output_bytes,
                activation_bytes=1,
                held_for_w_bytes=1,
                times_by_device={
                    DEVICE: LayerTimes(
                        forward_ns=round(value * 1e6),
                        backward_ns=round(2 * value * 1e6),
                        input_gradient_ns=round(1.1 * value * 1e6),
                        weight_gradient_ns=round(1.1 * value * 1e6),
                    )
                },
            )
            for index, value in enumerate(forward_ms)
        ),
    )


def trace_of(plan: Plan, profile: Profile, cluster: Cluster, *, tells_layers: bool = False) -> Trace:
    """Return the trace of a machine that behaves exactly as the simulator says for these costs.

    Args:
        tells_layers: Whether it was recorded what the layers of an op take without the host's overhead.

    A rank waits for a message from the moment it is free until the consumer starts; posting receives and letting go of
    sends take no time here.
    """
    timeline = simulate(plan, profile, cluster)
    times_by_op = {timed.op: (timed.start_ns, timed.end_ns) for ops in timeline.ops_by_rank for timed in ops}
    send_ns = cluster.host_overhead_ns.get("send", 0)
    ranks = []
    for instructions in lower(plan, profile, cluster).instructions_by_rank:
        steps: list[TimedInstruction] = []
        now_ns = 0
        following = [step.op for step in instructions if isinstance(step, Compute)]
        for instruction in instructions:
            start_ns = end_ns = now_ns
            layers_ns = None
            if isinstance(instruction, Compute):
                start_ns, end_ns = times_by_op[following.pop(0)]
                if tells_layers:
                    layers_ns = end_ns - start_ns - cluster.host_overhead_ns.get(instruction.op.kind.name, 0)
            elif isinstance(instruction, Send):
                end_ns = start_ns + send_ns
            elif isinstance(instruction, WaitReceive):
                end_ns = times_by_op[following[0]][0]
            elif not isinstance(instruction, Receive) and not following:
                end_ns = max(start_ns, timeline.last_op_ns)
            steps.append(TimedInstruction(instruction, start_ns, end_ns, layers_ns))
            now_ns = end_ns
        ranks.append(RankTrace(steps=tuple(steps), finish_ns=timeline.makespan_ns))
    return Trace(
        model=plan.model,
        plan_digest=plan.digest,
        num_micro_batches=plan.num_micro_batches,
        partition=plan.partition,
        placement=plan.placement,
        ranks=tuple(ranks),
        recomputed_stages=plan.recomputed_stages,
    )


def kinds_in(trace: Trace) -> set[OpKind]:
    """Return the kinds of op that a trace holds."""
    return {timed.op.kind for rank in trace.ranks for timed in rank.ops}
