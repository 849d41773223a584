"""Local search on the order itself, and on boundaries under it, with the clock as the judge.

An op on the critical path moves a few places along its rank, or boundaries shift; the clock runs again; annealing
decides. Moves never let an op overtake what it depends on within its rank; across ranks, the clock notices deadlocks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from pipeplan.search.evolve import TIES_APART_SCORE, shift_boundaries
from pipeplan.search.instance import Costs, Instance, allocate_costs, can_recompute_stages, fill_costs
from pipeplan.search.randomness import below, uniform
from pipeplan.simulate.clock import run_ordered_pair_kernel
from pipeplan.simulate.memory import order_peaks_kernel

IntArray = NDArray[np.int64]

INVALID = 1e19


class Ordering(NamedTuple):
    """What the search changes: partition and order.

    Attributes:
        atoms: [num_stages].
        stage, kind, micro_batch: [num_ops], as in an encoded order.
    """

    atoms: IntArray
    stage: IntArray
    kind: IntArray
    micro_batch: IntArray

    def copy(self) -> Ordering:
        """Return a copy that shares nothing."""
        return Ordering(*(array.copy() for array in self))


class Bench(NamedTuple):
    """What stays the same during a search, and arrays that every step reuses.

    Attributes:
        offsets: [num_ranks + 1], of the encoded order.
        where: [2, num_stages, num_micro_batches], index of the op that yields each result.
        critical: [num_ops], indices of the ops on the critical path; how many, the search keeps.
    """

    costs: Costs
    trial_costs: Costs
    ranks: IntArray
    is_recomputed: NDArray[np.bool_]
    offsets: IntArray
    margin_bytes: IntArray
    local_ns: IntArray
    message_start_ns: IntArray
    message_end_ns: IntArray
    start_ns: IntArray
    end_ns: IntArray
    where: IntArray
    critical: IntArray


def build_bench(
    instance: Instance,
    ordering: Ordering,
    ranks: IntArray,
    is_recomputed: NDArray[np.bool_],
    offsets: IntArray,
    margin_bytes: IntArray,
) -> Bench:
    """Return the arrays for a search from ``ordering``."""
    num_stages, num_ops = len(ordering.atoms), len(ordering.stage)
    num_ranks = len(offsets) - 1
    shape = (2, num_stages, instance.num_micro_batches)
    return Bench(
        costs=allocate_costs(num_stages, num_ranks, instance),
        trial_costs=allocate_costs(num_stages, num_ranks, instance),
        ranks=ranks,
        is_recomputed=is_recomputed,
        offsets=offsets,
        margin_bytes=margin_bytes,
        local_ns=np.zeros(shape, dtype=np.int64),
        message_start_ns=np.zeros(shape, dtype=np.int64),
        message_end_ns=np.zeros(shape, dtype=np.int64),
        start_ns=np.zeros(num_ops, dtype=np.int64),
        end_ns=np.zeros(num_ops, dtype=np.int64),
        where=np.zeros(shape, dtype=np.int64),
        critical=np.zeros(num_ops, dtype=np.int64),
    )


@njit(cache=True)
def fits(instance, costs, ordering, bench):  # type: ignore[no-untyped-def]
    """Return whether every rank stays within its cap."""
    peaks = order_peaks_kernel(
        ordering.stage, ordering.kind, bench.offsets, costs.activation_bytes, costs.held_bytes, costs.workspace_bytes
    )
    for rank in range(peaks.shape[0]):
        if peaks[rank] + costs.state_bytes[rank] + bench.margin_bytes[rank] > instance.usable_bytes[rank]:
            return False
    return True


@njit(cache=True)
def rank_fits(instance, costs, ordering, bench, rank):  # type: ignore[no-untyped-def]
    """Return whether one rank stays within its cap."""
    peaks = order_peaks_kernel(
        ordering.stage, ordering.kind, bench.offsets[rank : rank + 2], costs.activation_bytes, costs.held_bytes,
        costs.workspace_bytes,
    )  # fmt: skip
    return peaks[0] + costs.state_bytes[rank] + bench.margin_bytes[rank] <= instance.usable_bytes[rank]


@njit(cache=True)
def clock_order(costs, ordering, bench):  # type: ignore[no-untyped-def]
    """Return the makespan, or ``INVALID`` for a deadlock; leave the times in ``bench``."""
    bench.local_ns[:] = -1
    bench.message_end_ns[:] = -1
    num_done = run_ordered_pair_kernel(
        ordering.stage, ordering.kind, ordering.micro_batch, bench.offsets,
        costs.duration_ns, costs.rank_by_stage, costs.forward_transfer_ns, costs.backward_transfer_ns,
        costs.send_ns, costs.wait_ns,
        bench.local_ns, bench.message_start_ns, bench.message_end_ns, bench.start_ns, bench.end_ns,
    )  # fmt: skip
    if num_done < ordering.stage.shape[0]:
        return INVALID
    makespan = np.int64(0)
    for rank in range(bench.offsets.shape[0] - 1):
        makespan = max(makespan, bench.end_ns[bench.offsets[rank + 1] - 1] + costs.tail_ns[rank])
    return np.float64(makespan)


@njit(cache=True)
def trace_critical(costs, ordering, bench):  # type: ignore[no-untyped-def]
    """Fill ``bench.critical`` from the times of the last run; return how many ops the critical path has."""
    offsets = bench.offsets
    num_ranks = offsets.shape[0] - 1
    num_stages = ordering.atoms.shape[0]
    index, rank, latest = -1, -1, -1
    for each in range(num_ranks):
        end = bench.end_ns[offsets[each + 1] - 1] + costs.tail_ns[each]
        if end > latest:
            latest, rank, index = end, each, offsets[each + 1] - 1
    for position in range(ordering.stage.shape[0]):
        kind = ordering.kind[position]
        if kind != 3:
            result = 0 if kind == 0 else 1
            bench.where[result, ordering.stage[position], ordering.micro_batch[position]] = position
    count = 0
    while index >= 0:
        bench.critical[count] = index
        count += 1
        start = bench.start_ns[index]
        stage, kind, micro_batch = ordering.stage[index], ordering.kind[index], ordering.micro_batch[index]
        if start == 0:
            break
        if kind == 3:
            previous = index - 1
        else:
            neighbour = stage - 1 if kind == 0 else stage + 1
            result = 0 if kind == 0 else 1
            previous = index - 1 if index > offsets[rank] else -1
            if 0 <= neighbour < num_stages:
                arrival = bench.message_end_ns[result, neighbour, micro_batch]
                on_rank = bench.end_ns[previous] if previous >= 0 else -1
                if arrival >= on_rank:
                    previous = bench.where[result, neighbour, micro_batch]
                    rank = bench.ranks[neighbour]
        index = previous
    return count


@njit(cache=True)
def _may_pass(ordering, num_stages, mover, passed, earlier):  # type: ignore[no-untyped-def]
    """Return whether an op may move to the other side of another op of its rank; ``earlier`` if to its front."""
    if ordering.micro_batch[mover] != ordering.micro_batch[passed]:
        return ordering.stage[mover] != ordering.stage[passed] or ordering.kind[mover] != ordering.kind[passed]
    kind, other_kind = ordering.kind[mover], ordering.kind[passed]
    stage, other_stage = ordering.stage[mover], ordering.stage[passed]
    if kind == 3:
        return not (earlier and other_kind != 3 and other_stage == stage)
    if other_kind == 3:
        return earlier or other_stage != stage
    place = stage if kind == 0 else 2 * num_stages - 1 - stage
    other_place = other_stage if other_kind == 0 else 2 * num_stages - 1 - other_stage
    return place < other_place if earlier else place > other_place


@njit(cache=True)
def shift(ordering, source, target):  # type: ignore[no-untyped-def]
    """Move the op at ``source`` to ``target``; those between slide along."""
    stage, kind, micro_batch = ordering.stage[source], ordering.kind[source], ordering.micro_batch[source]
    step = 1 if target > source else -1
    index = source
    while index != target:
        ordering.stage[index] = ordering.stage[index + step]
        ordering.kind[index] = ordering.kind[index + step]
        ordering.micro_batch[index] = ordering.micro_batch[index + step]
        index += step
    ordering.stage[target], ordering.kind[target], ordering.micro_batch[target] = stage, kind, micro_batch


@njit(cache=True)
def _copy_costs(target, source):  # type: ignore[no-untyped-def]
    target.duration_ns[:] = source.duration_ns
    target.activation_bytes[:] = source.activation_bytes
    target.held_bytes[:] = source.held_bytes
    target.workspace_bytes[:] = source.workspace_bytes
    target.boundary_bytes[:] = source.boundary_bytes
    target.rank_by_stage[:] = source.rank_by_stage
    target.forward_transfer_ns[:] = source.forward_transfer_ns
    target.backward_transfer_ns[:] = source.backward_transfer_ns
    target.state_bytes[:] = source.state_bytes
    target.capacity_bytes[:] = source.capacity_bytes
    target.tail_ns[:] = source.tail_ns


@njit(cache=True)
def _save(best, current):  # type: ignore[no-untyped-def]
    best.atoms[:] = current.atoms
    best.stage[:] = current.stage
    best.kind[:] = current.kind
    best.micro_batch[:] = current.micro_batch


@njit(cache=True)
def search_order(  # type: ignore[no-untyped-def]
    instance, current, best, scores, bench, boundary_share, num_steps, hot, cold, state
):  # fmt: skip
    """Anneal from ``current`` for ``num_steps`` steps and keep the best in ``best``.

    ``scores``, [2], holds the makespans of both and is updated. ``boundary_share`` of the steps shift boundaries, the
    others move ops. Only what fits the caps and finishes is ever accepted.
    """
    num_stages = current.atoms.shape[0]
    atoms = current.atoms.copy()
    fill_costs(instance, current.atoms, bench.ranks, bench.is_recomputed, bench.margin_bytes, bench.costs)
    clock_order(bench.costs, current, bench)
    num_critical = trace_critical(bench.costs, current, bench)
    for step in range(num_steps):
        temperature = hot * (cold / hot) ** (step / num_steps) * scores[1]
        threshold = scores[0] - temperature * np.log(max(uniform(state), 1e-300))
        if uniform(state) < boundary_share:
            atoms[:] = current.atoms
            if not shift_boundaries(current.atoms, bench.ranks, state):
                continue
            if uniform(state) < 0.3:
                shift_boundaries(current.atoms, bench.ranks, state)
            score = INVALID
            if (
                can_recompute_stages(instance, current.atoms, bench.is_recomputed)
                and fill_costs(
                    instance, current.atoms, bench.ranks, bench.is_recomputed, bench.margin_bytes, bench.trial_costs
                )
                and fits(instance, bench.trial_costs, current, bench)
            ):
                score = clock_order(bench.trial_costs, current, bench)
            if score <= threshold:
                scores[0] = score
                _copy_costs(bench.costs, bench.trial_costs)
                num_critical = trace_critical(bench.costs, current, bench)
                if score < scores[1]:
                    scores[1] = score
                    _save(best, current)
            else:
                current.atoms[:] = atoms
            continue
        source = bench.critical[below(state, num_critical)]
        if uniform(state) < 0.1:
            source = below(state, current.stage.shape[0])
        rank = bench.ranks[current.stage[source]]
        first, last = bench.offsets[rank], bench.offsets[rank + 1] - 1
        distance = 1
        while distance < 64 and uniform(state) < 0.7:
            distance += 1
        earlier = uniform(state) < 0.5
        target = source
        while distance > 0:
            following = target - 1 if earlier else target + 1
            if following < first or following > last or not _may_pass(current, num_stages, source, following, earlier):
                break
            target = following
            distance -= 1
        if target == source:
            continue
        shift(current, source, target)
        score = INVALID
        if rank_fits(instance, bench.costs, current, bench, rank):
            score = clock_order(bench.costs, current, bench)
        if score <= threshold:
            scores[0] = score
            num_critical = trace_critical(bench.costs, current, bench)
            if score < scores[1]:
                scores[1] = score
                _save(best, current)
        else:
            shift(current, target, source)


def makespan_of(instance: Instance, ordering: Ordering, bench: Bench) -> float:
    """Return the makespan of an ordering, ``INVALID`` if it doesn't fit or deadlocks."""
    sits_right = fill_costs(instance, ordering.atoms, bench.ranks, bench.is_recomputed, bench.margin_bytes, bench.costs)
    if not sits_right:
        return TIES_APART_SCORE
    if not fits(instance, bench.costs, ordering, bench):
        return INVALID
    return float(clock_order(bench.costs, ordering, bench))
