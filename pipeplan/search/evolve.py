"""Search over partitions and rules together: each step changes a few and has the list scheduler make an order."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from pipeplan.search.instance import Costs, Instance, allocate_costs, fill_costs
from pipeplan.search.list_scheduler import TOO_LONG, Listing, Rules, list_schedule
from pipeplan.search.randomness import bell, below, uniform

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]

PACE, BACKWARD_FIRST, ROUND_TRIP, AHEAD, PATIENCE, W_FIT, W_BACKLOG, FORWARD_SPREAD, BACKWARD_SPREAD = range(9)
NUM_KNOBS = 9
# Low, high and step of each knob; times are in units of the busiest rank's work on one micro-batch.
KNOB_LOW = np.array([0.0, -6.0, 0.6, 0.0, 0.0, 0.0, 0.0, -1.0, 0.0])
KNOB_HIGH = np.array([3.0, 6.0, 5.0, 16.0, 1.0, 1.0, 16.0, 3.0, 8.0])
KNOB_STEP = np.array([0.2, 0.5, 0.25, 0.7, 0.15, 0.2, 1.0, 0.2, 0.4])
DEFAULT_KNOBS = np.array([0.7, -1.0, 2.0, 7.0, 0.3, 0.2, 8.0, 1.0, 3.0])

NO_MEMORY_SCORE = 1e18
TIES_APART_SCORE = 4e18
TOO_LONG_SCORE = 8e18


class Genome(NamedTuple):
    """What a search changes; everything else follows.

    Attributes:
        atoms: [num_stages], atoms of each stage.
        ranks: [num_stages], rank of each stage.
        knobs: [NUM_KNOBS], of the list scheduler.
        limit_change: [num_stages], added to the limit on what is in flight that the knobs give.
        urgency: [2, num_stages], how much earlier than the knobs say F and the backward are due, in the knobs' unit.
        is_fused: [num_stages], whether the backward runs whole.
        is_recomputed: [num_stages].
    """

    atoms: IntArray
    ranks: IntArray
    knobs: FloatArray
    limit_change: IntArray
    urgency: FloatArray
    is_fused: NDArray[np.bool_]
    is_recomputed: NDArray[np.bool_]

    def copy(self) -> Genome:
        """Return a copy that shares nothing."""
        return Genome(
            atoms=self.atoms.copy(),
            ranks=self.ranks.copy(),
            knobs=self.knobs.copy(),
            limit_change=self.limit_change.copy(),
            urgency=self.urgency.copy(),
            is_fused=self.is_fused.copy(),
            is_recomputed=self.is_recomputed.copy(),
        )


class Freedom(NamedTuple):
    """Which parts of a genome may change."""

    boundaries: bool
    ranks: bool
    fusion: bool
    recomputation: bool


class Workshop(NamedTuple):
    """Arrays that evaluations of genomes of one size reuse."""

    costs: Costs
    listing: Listing
    stages_of_rank: IntArray
    stage_offsets: IntArray
    due_forward_ns: IntArray
    due_backward_ns: IntArray
    limit: IntArray
    is_fused: NDArray[np.bool_]
    margin_bytes: IntArray


def build_workshop(instance: Instance, num_stages: int, margin_bytes: IntArray) -> Workshop:
    """Return the arrays for genomes with ``num_stages`` stages."""
    num_ranks = len(instance.usable_bytes)
    most_ops = 3 * instance.num_micro_batches * num_stages  # a rank may come to hold all but the others' one stage
    if num_ranks > 1:
        most_ops = 3 * instance.num_micro_batches * (num_stages - num_ranks + 1)

    def zeros(count: int) -> IntArray:
        return np.zeros(count, dtype=np.int64)

    return Workshop(
        costs=allocate_costs(num_stages, num_ranks, instance),
        listing=Listing(np.zeros((num_ranks, most_ops), dtype=np.int64), zeros(num_ranks)),
        stages_of_rank=zeros(num_stages),
        stage_offsets=zeros(num_ranks + 1),
        due_forward_ns=zeros(num_stages),
        due_backward_ns=zeros(num_stages),
        limit=zeros(num_stages),
        is_fused=np.zeros(num_stages, dtype=np.bool_),
        margin_bytes=margin_bytes,
    )


@njit(cache=True)
def group_stages(ranks, stages_of_rank, stage_offsets):  # type: ignore[no-untyped-def]
    """List the stages of each rank, ascending."""
    num_ranks = stage_offsets.shape[0] - 1
    at = 0
    for rank in range(num_ranks):
        stage_offsets[rank] = at
        for stage in range(ranks.shape[0]):
            if ranks[stage] == rank:
                stages_of_rank[at] = stage
                at += 1
    stage_offsets[num_ranks] = at


@njit(cache=True)
def schedule_genome(instance, genome, workshop, longest_ns):  # type: ignore[no-untyped-def]
    """Return the score of a genome, its makespan if it fits; the order is left in the workshop's listing.

    ``TOO_LONG_SCORE`` stands for any makespan above ``longest_ns``.
    """
    costs = workshop.costs
    num_stages = genome.atoms.shape[0]
    num_ranks = workshop.stage_offsets.shape[0] - 1
    if not fill_costs(instance, genome.atoms, genome.ranks, genome.is_recomputed, workshop.margin_bytes, costs):
        return TIES_APART_SCORE
    group_stages(genome.ranks, workshop.stages_of_rank, workshop.stage_offsets)
    duration = costs.duration_ns
    work = np.zeros(num_ranks, dtype=np.int64)
    needed = np.zeros(num_ranks, dtype=np.int64)
    first = 0
    for stage in range(num_stages):
        last = first + genome.atoms[stage]
        can_split = instance.can_split[last] > instance.can_split[first]
        first = last
        fused = genome.is_fused[stage] or not can_split
        workshop.is_fused[stage] = fused
        work[genome.ranks[stage]] += duration[stage, 0] + (
            duration[stage, 1] if fused else duration[stage, 2] + duration[stage, 3]
        )
        needed[genome.ranks[stage]] += costs.activation_bytes[stage]
    excess = 0.0
    for rank in range(num_ranks):
        excess += max(0, needed[rank] - costs.capacity_bytes[rank])
    if excess > 0:
        return NO_MEMORY_SCORE + excess
    unit = max(work.max(), 1)
    more_ns = instance.num_more_micro_batches * unit
    knobs = genome.knobs
    position = 0.0
    for stage in range(num_stages):
        workshop.due_forward_ns[stage] = np.int64(position - genome.urgency[0, stage] * unit)
        position += knobs[FORWARD_SPREAD] * (duration[stage, 0] + costs.forward_transfer_ns[stage])
    position -= knobs[BACKWARD_FIRST] * unit
    for stage in range(num_stages - 1, -1, -1):
        workshop.due_backward_ns[stage] = np.int64(position - genome.urgency[1, stage] * unit)
        kind = 1 if workshop.is_fused[stage] else 2
        position += knobs[BACKWARD_SPREAD] * (duration[stage, kind] + costs.backward_transfer_ns[stage])
    round_trip = 0.0
    for stage in range(num_stages - 1, -1, -1):
        kind = 1 if workshop.is_fused[stage] else 2
        round_trip += duration[stage, 0] + costs.forward_transfer_ns[stage] + duration[stage, kind]
        if stage < num_stages - 1:
            round_trip += costs.backward_transfer_ns[stage + 1]
        limit = np.int64(knobs[ROUND_TRIP] * round_trip / unit + knobs[AHEAD]) + genome.limit_change[stage]
        workshop.limit[stage] = max(1, limit)
    rules = Rules(
        workshop.due_forward_ns,
        workshop.due_backward_ns,
        int(knobs[PACE] * unit),
        workshop.limit,
        workshop.is_fused,
        knobs[PATIENCE],
        knobs[W_FIT],
        int(knobs[W_BACKLOG] * unit),
    )
    makespan = list_schedule(
        costs, rules, instance.num_micro_batches, workshop.stages_of_rank, workshop.stage_offsets,
        np.int64(min(longest_ns, 4e18)) - more_ns, workshop.listing,
    )  # fmt: skip
    if makespan >= 0:
        return np.float64(makespan + more_ns)
    return TOO_LONG_SCORE if makespan == TOO_LONG else NO_MEMORY_SCORE


@njit(cache=True)
def assign(target, source):  # type: ignore[no-untyped-def]
    """Copy a genome's arrays into another's."""
    target.atoms[:] = source.atoms
    target.ranks[:] = source.ranks
    target.knobs[:] = source.knobs
    target.limit_change[:] = source.limit_change
    target.urgency[:] = source.urgency
    target.is_fused[:] = source.is_fused
    target.is_recomputed[:] = source.is_recomputed


@njit(cache=True)
def shift_boundaries(atoms, ranks, state):  # type: ignore[no-untyped-def]
    """Move an atom from one stage to another; the stages between them slide along. Return whether it could."""
    num_stages = atoms.shape[0]
    if num_stages < 2:
        return False
    donor = below(state, num_stages)
    taker = below(state, num_stages)
    if uniform(state) < 0.5:  # neighbours: one boundary
        taker = donor + 1 if uniform(state) < 0.5 else donor - 1
    if taker < 0 or taker >= num_stages or taker == donor:
        return False
    count = 1
    while uniform(state) < 0.15:
        count += 1
    if atoms[donor] <= count:
        return False
    atoms[donor] -= count
    atoms[taker] += count
    return True


@njit(cache=True)
def _balance_ranks(instance, genome, state):  # type: ignore[no-untyped-def]
    """Move an atom off a rank with much work, or onto one with little; return whether it could."""
    num_stages = genome.atoms.shape[0]
    work = np.zeros(instance.slowdown.shape[0], dtype=np.float64)
    first = 0
    for stage in range(num_stages):
        last = first + genome.atoms[stage]
        rank = genome.ranks[stage]
        again = 1 if genome.is_recomputed[stage] else 0
        for kind in (0, 2, 3):
            sums = instance.time_sums[again, rank]
            work[rank] += (sums[last, kind] - sums[first, kind]) * instance.slowdown[rank]
        first = last
    for rank in range(work.shape[0]):
        work[rank] *= 1.0 + 0.03 * uniform(state)
    donor_rank, taker_rank = work.argmax(), work.argmin()
    choice = uniform(state)
    donor, taker = -1, -1
    for _ in range(2 * num_stages):
        stage = below(state, num_stages)
        if donor < 0 and genome.atoms[stage] > 1 and (choice < 0.3 or genome.ranks[stage] == donor_rank):
            donor = stage
        stage = below(state, num_stages)
        if taker < 0 and stage != donor and (choice > 0.7 or genome.ranks[stage] == taker_rank):
            taker = stage
    if donor < 0 or taker < 0 or donor == taker:
        return False
    genome.atoms[donor] -= 1
    genome.atoms[taker] += 1
    return True


@njit(cache=True)
def _mutate(instance, genome, freedom, state):  # type: ignore[no-untyped-def]
    num_stages = genome.atoms.shape[0]
    changed = False
    while not changed:
        choice = uniform(state)
        if choice < 0.50:
            if freedom.boundaries:
                if uniform(state) < 0.4:
                    changed = _balance_ranks(instance, genome, state)
                else:
                    changed = shift_boundaries(genome.atoms, genome.ranks, state)
                if uniform(state) < 0.25:
                    changed = shift_boundaries(genome.atoms, genome.ranks, state) or changed
            elif num_stages < 2 or uniform(state) < 0.5:
                choice = 0.6
        if 0.50 <= choice < 0.84:
            knob = below(state, NUM_KNOBS)
            scale = KNOB_STEP[knob] * (1.0 if uniform(state) < 0.8 else 3.0)
            value = genome.knobs[knob] + bell(state) * scale
            genome.knobs[knob] = min(max(value, KNOB_LOW[knob]), KNOB_HIGH[knob])
            changed = True
        elif 0.84 <= choice < 0.87:
            genome.limit_change[below(state, num_stages)] += 1 if uniform(state) < 0.5 else -1
            changed = True
        elif 0.87 <= choice < 0.92:
            scale = 0.3 if uniform(state) < 0.7 else 1.5
            genome.urgency[below(state, 2), below(state, num_stages)] += bell(state) * scale
            changed = True
        elif 0.92 <= choice < 0.95:
            if freedom.ranks:
                one, other = below(state, instance.slowdown.shape[0]), below(state, instance.slowdown.shape[0])
                for stage in range(num_stages):
                    if genome.ranks[stage] == one:
                        genome.ranks[stage] = other
                    elif genome.ranks[stage] == other:
                        genome.ranks[stage] = one
                changed = one != other
        elif 0.95 <= choice < 0.975:
            if freedom.fusion:
                stage = below(state, num_stages)
                genome.is_fused[stage] = not genome.is_fused[stage]
                changed = True
        elif choice >= 0.975 and freedom.recomputation:
            stage = below(state, num_stages)
            genome.is_recomputed[stage] = not genome.is_recomputed[stage]
            changed = True
    if freedom.recomputation:
        first = 0
        for stage in range(num_stages):
            last = first + genome.atoms[stage]
            if genome.is_recomputed[stage]:
                layers = instance.num_layers[last] - instance.num_layers[first]
                if instance.can_recompute[last] - instance.can_recompute[first] < layers:
                    genome.is_recomputed[stage] = False
            first = last


@njit(cache=True)
def evolve(  # type: ignore[no-untyped-def]
    instance, current, best, trial, scores, workshop, freedom, num_steps, hot, cold, state
):  # fmt: skip
    """Anneal from ``current`` for ``num_steps`` steps; keep the best genome in ``best``; return the ops scheduled.

    ``scores``, [2], holds the score of ``current`` and of ``best`` and is updated. ``hot`` and ``cold`` are
    temperatures as shares of the makespan.
    """
    num_ops = 0
    for step in range(num_steps):
        assign(trial, current)
        _mutate(instance, trial, freedom, state)
        scale = scores[1] if scores[1] < NO_MEMORY_SCORE else 1e8  # without a fit, scores count bytes
        temperature = hot * (cold / hot) ** (step / num_steps) * scale
        threshold = scores[0] - temperature * np.log(max(uniform(state), 1e-300))
        workshop.listing.counts[:] = 0
        score = schedule_genome(instance, trial, workshop, threshold)
        num_ops += workshop.listing.counts.sum() + 2 * trial.atoms.shape[0]
        if score <= threshold:
            assign(current, trial)
            scores[0] = score
            if score < scores[1]:
                assign(best, trial)
                scores[1] = score
    return num_ops
