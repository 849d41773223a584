"""A problem as arrays, for the compiled searches: prefix sums over atoms for every rank, and the links.

``fill_costs`` is the cost formula of ``simulate.costs`` in a form that a compiled loop can call millions of times; a
test holds the two equal.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from pipeplan.search.partition import atom_bounds
from pipeplan.search.problem import Problem
from pipeplan.simulate import StageCosts
from pipeplan.simulate.costs import GRADIENT_BYTES

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]

NO_CAP = np.int64(1) << np.int64(60)


class Instance(NamedTuple):
    """What the compiled searches know of a problem; stages are ranges of atoms.

    Attributes:
        num_micro_batches: That the searches schedule.
        num_more_micro_batches: That a batch has beyond those; each adds the work of the busiest rank to a score.
        time_sums: [2, num_ranks, num_atoms + 1, 4], without and with recomputation; F, B, I, W, before slowdown.
        slowdown: [num_ranks].
        overhead_ns: [4], host overhead of an op.
        activation_sums: [2, num_atoms + 1], without and with recomputation.
        held_sums: [num_atoms + 1].
        parameter_sums: [num_atoms + 1].
        untrained_sums: [num_atoms + 1], bytes of frozen weights and buffers.
        workspace_bytes: [2, num_atoms], the largest of the atom's layers, without and with recomputation.
        output_bytes: [num_atoms], what the atom's last layer hands on.
        latency_ns, gb_per_s: [num_ranks, num_ranks], infinite bandwidth where transfers are free.
        can_split: [num_atoms + 1], prefix count of layers whose W can be deferred.
        can_recompute: [num_atoms + 1], prefix count of layers that can recompute on every device type.
        num_layers: [num_atoms + 1], prefix count of layers.
        usable_bytes: [num_ranks], the cap less the reserve, or ``NO_CAP``.
        tied_atoms, tied_offsets, tied_parameters: For each shared weight, the atoms that use it and its size.
        must_colocate: Whether atoms of a shared weight must sit on one rank.
        num_replicas, replica_latency_ns, replica_gb_per_s: Data parallelism and its link; 1 replica where it is free.
    """

    num_micro_batches: int
    num_more_micro_batches: int
    time_sums: IntArray
    slowdown: FloatArray
    overhead_ns: IntArray
    activation_sums: IntArray
    held_sums: IntArray
    parameter_sums: IntArray
    untrained_sums: IntArray
    workspace_bytes: IntArray
    output_bytes: IntArray
    latency_ns: IntArray
    gb_per_s: FloatArray
    can_split: IntArray
    can_recompute: IntArray
    num_layers: IntArray
    usable_bytes: IntArray
    state_bytes_per_parameter: float
    tied_atoms: IntArray
    tied_offsets: IntArray
    tied_parameters: IntArray
    must_colocate: bool
    num_replicas: int
    replica_latency_ns: int
    replica_gb_per_s: float
    send_ns: int
    wait_ns: int


class Costs(NamedTuple):
    """``StageCosts`` as a tuple of arrays that compiled code fills in place; same names, same meaning.

    Attributes:
        capacity_bytes: [num_ranks], what activations may take: the cap less states and the largest workspace.
        tail_ns: [num_ranks], reductions after a rank's last op; the latest end plus tail is the makespan less the step.
    """

    duration_ns: IntArray
    activation_bytes: IntArray
    held_bytes: IntArray
    workspace_bytes: IntArray
    boundary_bytes: IntArray
    rank_by_stage: IntArray
    forward_transfer_ns: IntArray
    backward_transfer_ns: IntArray
    state_bytes: IntArray
    capacity_bytes: IntArray
    tail_ns: IntArray
    send_ns: int
    wait_ns: int


def build_instance(problem: Problem) -> Instance:
    """Return the arrays of a problem."""
    table, cluster = problem.table, problem.cluster
    bounds = np.array(atom_bounds(problem.profile.layers), dtype=np.int64)
    layers = problem.profile.layers
    num_ranks = cluster.num_ranks
    link = [[cluster.link(a, b) for b in range(num_ranks)] for a in range(num_ranks)]
    atom_by_layer = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))
    tied = list(table.tied_layers.values())
    atoms = [[int(atom_by_layer[layer]) for layer in members] for _, members in tied]
    return Instance(
        num_micro_batches=problem.num_micro_batches,
        num_more_micro_batches=0,
        time_sums=np.ascontiguousarray(
            [
                [sums(rank.device)[bounds] for rank in cluster.ranks]
                for sums in (table.device_sums, table.recomputed_device_sums)
            ]
        ),
        slowdown=np.array([rank.slowdown for rank in cluster.ranks], dtype=np.float64),
        overhead_ns=table.overhead_ns.copy(),
        activation_sums=np.ascontiguousarray(
            [table.activation_sums[bounds], table.recomputed_activation_sums[bounds]], dtype=np.int64
        ),
        held_sums=table.held_sums[bounds].copy(),
        parameter_sums=table.parameters[bounds].copy(),
        untrained_sums=table.untrained_sums[bounds].copy(),
        workspace_bytes=np.maximum.reduceat(
            np.array(
                [
                    [table.workspace_bytes(layer, recompute=recompute) for layer in range(len(layers))]
                    for recompute in (False, True)
                ],
                dtype=np.int64,
            ),
            bounds[:-1],
            axis=1,
        ),
        output_bytes=table.output_bytes[bounds[1:] - 1].copy(),
        latency_ns=np.array([[0 if each is None else each.latency_ns for each in row] for row in link], dtype=np.int64),
        gb_per_s=np.array([[np.inf if each is None else each.gb_per_s for each in row] for row in link]),
        can_split=_counts([layer.is_splittable for layer in layers], bounds),
        can_recompute=_counts([table.is_recomputable(index) for index in range(len(layers))], bounds),
        num_layers=bounds.copy(),
        usable_bytes=np.array([NO_CAP if cap is None else cap for cap in problem.usable_bytes], dtype=np.int64),
        state_bytes_per_parameter=float(problem.profile.state_bytes_per_parameter),
        tied_atoms=np.array([atom for members in atoms for atom in members], dtype=np.int64),
        tied_offsets=np.cumsum([0, *(len(members) for members in atoms)]).astype(np.int64),
        tied_parameters=np.array([shared for shared, _ in tied], dtype=np.int64),
        must_colocate=problem.constraints.colocate_tied,
        num_replicas=1 if cluster.within_node is None else cluster.num_replicas,
        replica_latency_ns=0 if cluster.within_node is None else cluster.within_node.latency_ns,
        replica_gb_per_s=np.inf if cluster.within_node is None else cluster.within_node.gb_per_s,
        send_ns=cluster.host_overhead_ns.get("send", 0),
        wait_ns=cluster.host_overhead_ns.get("wait", 0),
    )


def _counts(flags: list[bool], bounds: IntArray) -> IntArray:
    return np.concatenate(([0], np.cumsum(flags))).astype(np.int64)[bounds]


def allocate_costs(num_stages: int, num_ranks: int, instance: Instance) -> Costs:
    """Return costs for ``fill_costs`` to fill."""

    def zeros(count: int) -> IntArray:
        return np.zeros(count, dtype=np.int64)

    return Costs(
        duration_ns=np.zeros((num_stages, 4), dtype=np.int64),
        activation_bytes=zeros(num_stages),
        held_bytes=zeros(num_stages),
        workspace_bytes=zeros(num_stages),
        boundary_bytes=zeros(num_stages),
        rank_by_stage=zeros(num_stages),
        forward_transfer_ns=zeros(num_stages),
        backward_transfer_ns=zeros(num_stages),
        state_bytes=zeros(num_ranks),
        capacity_bytes=zeros(num_ranks),
        tail_ns=zeros(num_ranks),
        send_ns=instance.send_ns,
        wait_ns=instance.wait_ns,
    )


def as_stage_costs(costs: Costs) -> StageCosts:
    """Return the costs in the form that the simulator takes."""
    fields: dict[str, Any] = {
        name: value for name, value in costs._asdict().items() if name not in ("capacity_bytes", "tail_ns")
    }
    return StageCosts(**fields)


@njit(cache=True)
def fill_costs(instance, num_atoms_by_stage, rank_by_stage, is_recomputed, margin_bytes, costs):  # type: ignore[no-untyped-def]
    """Fill ``costs`` for a partition (atoms of each stage) and placement; return whether tied atoms sit as they must.

    ``margin_bytes``, [num_ranks], is kept free for what the compiled searches don't count: boundaries in flight.
    """
    num_stages = num_atoms_by_stage.shape[0]
    num_ranks = instance.usable_bytes.shape[0]
    workspace = np.zeros(num_ranks, dtype=np.int64)
    parameters = np.zeros(num_ranks, dtype=np.int64)
    untrained = np.zeros(num_ranks, dtype=np.int64)
    first = 0
    for stage in range(num_stages):
        last = first + num_atoms_by_stage[stage]
        rank = rank_by_stage[stage]
        again = 1 if is_recomputed[stage] else 0
        slowdown = instance.slowdown[rank]
        for kind in range(4):
            total = instance.time_sums[again, rank, last, kind] - instance.time_sums[again, rank, first, kind]
            if slowdown != 1.0:
                total = np.int64(np.rint(total * slowdown))
            costs.duration_ns[stage, kind] = total + instance.overhead_ns[kind]
        costs.activation_bytes[stage] = instance.activation_sums[again, last] - instance.activation_sums[again, first]
        costs.held_bytes[stage] = instance.held_sums[last] - instance.held_sums[first]
        largest = np.int64(0)
        for atom in range(first, last):
            largest = max(largest, instance.workspace_bytes[again, atom])
        costs.workspace_bytes[stage] = largest
        costs.boundary_bytes[stage] = instance.output_bytes[last - 1] if stage < num_stages - 1 else 0
        costs.rank_by_stage[stage] = rank
        workspace[rank] = max(workspace[rank], largest)
        parameters[rank] += instance.parameter_sums[last] - instance.parameter_sums[first]
        untrained[rank] += instance.untrained_sums[last] - instance.untrained_sums[first]
        first = last
    for stage in range(num_stages):
        costs.forward_transfer_ns[stage] = 0
        costs.backward_transfer_ns[stage] = 0
    for stage in range(num_stages - 1):
        here, there = rank_by_stage[stage], rank_by_stage[stage + 1]
        if here != there:
            size = costs.boundary_bytes[stage]
            costs.forward_transfer_ns[stage] = instance.latency_ns[here, there] + np.int64(
                np.rint(size / instance.gb_per_s[here, there])
            )
            costs.backward_transfer_ns[stage + 1] = instance.latency_ns[there, here] + np.int64(
                np.rint(size / instance.gb_per_s[there, here])
            )
    sits_right = _share_weights(instance, num_atoms_by_stage, rank_by_stage, parameters, costs.tail_ns)
    for rank in range(num_ranks):
        states = np.int64(np.rint(parameters[rank] * instance.state_bytes_per_parameter))
        costs.state_bytes[rank] = states + untrained[rank]
        costs.capacity_bytes[rank] = (
            instance.usable_bytes[rank] - costs.state_bytes[rank] - workspace[rank] - margin_bytes[rank]
        )
    return sits_right


@njit(cache=True)
def can_recompute_stages(instance, num_atoms_by_stage, is_recomputed):  # type: ignore[no-untyped-def]
    """Return whether every stage that recomputes has only layers that can."""
    first = 0
    for stage in range(num_atoms_by_stage.shape[0]):
        last = first + num_atoms_by_stage[stage]
        num_layers = instance.num_layers[last] - instance.num_layers[first]
        if is_recomputed[stage] and instance.can_recompute[last] - instance.can_recompute[first] < num_layers:
            return False
        first = last
    return True


@njit(cache=True)
def _all_reduce_ns(count, num_bytes, latency_ns, gb_per_s):  # type: ignore[no-untyped-def]
    return 2 * (count - 1) * latency_ns + np.int64(np.rint(2 * (count - 1) / count * num_bytes / gb_per_s))


@njit(cache=True)
def _share_weights(instance, num_atoms_by_stage, rank_by_stage, parameters, tail_ns):  # type: ignore[no-untyped-def]
    """Count a weight that several atoms of a rank share once, and what reductions take after the last op.

    Returns whether atoms that must sit together do.
    """
    num_ranks = parameters.shape[0]
    sits_right = True
    tied_ns = np.zeros(num_ranks, dtype=np.int64)
    for group in range(instance.tied_parameters.shape[0]):
        seen = np.zeros(num_ranks, dtype=np.bool_)
        num_holders = 0
        for index in range(instance.tied_offsets[group], instance.tied_offsets[group + 1]):
            stage, last = 0, num_atoms_by_stage[0]
            while last <= instance.tied_atoms[index]:
                stage += 1
                last += num_atoms_by_stage[stage]
            rank = rank_by_stage[stage]
            if seen[rank]:
                parameters[rank] -= instance.tied_parameters[group]
            else:
                seen[rank] = True
                num_holders += 1
        if num_holders > 1:
            if instance.must_colocate:
                sits_right = False
            longest = np.int64(0)
            size = instance.tied_parameters[group] * GRADIENT_BYTES
            for one in range(num_ranks):
                for other in range(one + 1, num_ranks):
                    if seen[one] and seen[other]:
                        link_ns, rate = instance.latency_ns[one, other], instance.gb_per_s[one, other]
                        longest = max(longest, _all_reduce_ns(num_holders, size, link_ns, rate))
            for rank in range(num_ranks):
                if seen[rank]:
                    tied_ns[rank] += longest
    for rank in range(num_ranks):
        tail_ns[rank] = tied_ns[rank]
        if instance.num_replicas > 1:
            tail_ns[rank] += _all_reduce_ns(
                instance.num_replicas,
                parameters[rank] * GRADIENT_BYTES,
                instance.replica_latency_ns,
                instance.replica_gb_per_s,
            )
    return sits_right
