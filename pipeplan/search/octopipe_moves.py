"""The moves of the three-phase tuner: from one state to a better one, or to nothing."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from pipeplan.plan.layout import Partition, Placement
from pipeplan.plan.orders import looped_placement, one_f_one_b
from pipeplan.search.budget import Budget
from pipeplan.search.evolve import (
    KNOB_HIGH,
    KNOB_LOW,
    KNOB_STEP,
    NO_MEMORY_SCORE,
    Genome,
    Workshop,
    build_workshop,
    schedule_genome,
)
from pipeplan.search.instance import build_instance
from pipeplan.search.one_at_a_time import one_at_a_time
from pipeplan.search.partition import balanced_bounds, split_uniform
from pipeplan.search.problem import Candidate, Evaluation, Problem
from pipeplan.simulate import EncodedOrder, encode_order

IntArray = NDArray[np.int64]

MOST_LAPS = 8  # stages a rank
MOST_REARRANGEMENTS = 600  # tried in one placement phase; beyond, a sample
# Not DEFAULT_KNOBS, which are tuned: a published tuner starts from rules that weigh what is due alike.
PLAIN_KNOBS = np.array([1.0, 1.0, 1.2, 1.0, 0.1, 0.5, 6.0, 1.0, 1.0])
KNOB_STEPS = (-3.0, -1.0, 1.0, 3.0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class State:
    """Where the tuner stands.

    Attributes:
        atoms: [num_stages], layers of each stage, those that keep together counted as one.
        knobs, is_fused: What the list scheduler goes by, for orders of neighbours.
    """

    atoms: IntArray
    knobs: NDArray[np.float64]
    is_fused: NDArray[np.bool_]
    candidate: Candidate
    evaluation: Evaluation

    @property
    def ranks(self) -> IntArray:
        """Rank of each stage, [num_stages]."""
        return np.array(self.candidate.placement.rank_by_stage, dtype=np.int64)

    @property
    def makespan_ns(self) -> int:
        """Predicted time of a batch."""
        return self.evaluation.makespan_ns


class Moves:
    """The moves of one problem; ``None`` where none makes the batch faster within the caps."""

    def __init__(self, problem: Problem, budget: Budget, seed: int) -> None:
        """Prepare; ``budget`` ends phases early."""
        self._problem = problem
        self._budget = budget
        self._instance = build_instance(problem)
        self._layer_bounds = self._instance.num_layers
        self._margin = np.zeros(problem.num_ranks, dtype=np.int64)
        self._workshops: dict[int, Workshop] = {}
        self._random = np.random.default_rng(seed)

    def first_layout(self) -> tuple[Partition, Placement]:
        """Return the layout that tuning starts from: DeepSpeed's uniform split, or what is fixed."""
        fixed, num_ranks = self._problem.constraints, self._problem.num_ranks
        partition, placement = fixed.partition, fixed.placement
        if placement is None:
            num_stages = num_ranks if partition is None else partition.num_stages
            placement = Placement(tuple(stage % num_ranks for stage in range(num_stages)))
        if partition is None:
            partition = split_uniform(self._problem.profile.layers, placement.num_stages)
        return partition, placement

    def start(self) -> State | None:
        """Return 1F1B on the first layout; where that does not fit or is not defined, a list schedule.

        Where that does not fit either, one micro-batch at a time; ``None`` where nothing fits.
        """
        partition, placement = self.first_layout()
        num_ranks = self._problem.num_ranks
        atoms = np.diff(np.searchsorted(self._layer_bounds, partition.bounds))
        fused = np.ones(len(atoms), dtype=np.bool_)
        if placement == looped_placement(num_ranks, 1):
            candidate = Candidate(
                partition=partition,
                placement=placement,
                order=encode_order(one_f_one_b(num_ranks, self._problem.num_micro_batches)),
            )
            state = self._judge(atoms, PLAIN_KNOBS, fused, candidate)
            if state is not None:
                return state
        ranks = np.array(placement.rank_by_stage, dtype=np.int64)
        for is_fused in (fused, ~fused):
            state = self._schedule(atoms, ranks, PLAIN_KNOBS, is_fused)
            if state is not None:
                return state
        return self._judge(atoms, PLAIN_KNOBS, fused, one_at_a_time(self._problem, partition, placement))

    def balance(self, state: State) -> State | None:
        """Move layers from the most to the least loaded rank until balanced; return the best state on the way."""
        if self._problem.constraints.partition is not None:
            return None
        best: State | None = None
        current = state
        while self._budget.fraction < 1.0:
            load = self._load_by_rank(current.atoms, current.ranks)
            moved = [
                neighbour
                for atoms in self._towards_balance(current, load)
                if (neighbour := self._with_atoms(current, atoms)) is not None
            ]
            if not moved:
                break
            current = min(moved, key=lambda each: each.makespan_ns)
            if current.makespan_ns < (best or state).makespan_ns:
                best = current
        return best

    def can_balance(self, state: State) -> bool:
        """Return whether moving a layer from the most to the least loaded rank makes their work more even."""
        if self._problem.constraints.partition is not None:
            return False
        return any(True for _ in self._towards_balance(state, self._load_by_rank(state.atoms, state.ranks)))

    def _towards_balance(self, state: State, load: IntArray) -> Iterator[IntArray]:
        """Yield partitions with one layer off the most and one more on the least loaded rank, if that balances."""
        ranks, spread = state.ranks, int(load.max() - load.min())
        for donor, taker in itertools.product(
            np.flatnonzero(ranks == load.argmax()), np.flatnonzero(ranks == load.argmin())
        ):
            if state.atoms[donor] < 2:
                continue
            atoms = state.atoms.copy()
            atoms[donor] -= 1
            atoms[taker] += 1
            after = self._load_by_rank(atoms, ranks)
            if int(after.max() - after.min()) < spread:
                yield atoms

    def _with_atoms(self, state: State, atoms: IntArray) -> State | None:
        """Return the better of the same order on the new partition and a new order."""
        partition = self._partition(atoms)
        same_order = replace(
            state.candidate,
            partition=partition,
            order=self._problem.fuse_unsplittable(state.candidate.order, partition),
        )
        options = (
            self._judge(atoms, state.knobs, state.is_fused, same_order),
            self._schedule(atoms, state.ranks, state.knobs, state.is_fused),
        )
        return min((each for each in options if each is not None), key=lambda each: each.makespan_ns, default=None)

    def rearrange(self, state: State) -> State | None:
        """Return the best of: another number of stages a rank, two stages exchanged, a stage on another rank.

        Another number of stages means new stages and a new order, so these are balanced and fine-tuned before they are
        compared.
        """
        if self._problem.constraints.placement is not None:
            return None
        best: State | None = None
        for atoms, ranks, is_fused in self._layouts(state):
            if self._budget.fraction >= 1.0:
                break
            found = self._schedule(atoms, ranks, state.knobs, is_fused)
            found = None if found is None else self._settle(found)
            if found is not None and found.makespan_ns < (best or state).makespan_ns:
                best = found
        for ranks in self._rearranged_ranks(state):
            if self._budget.fraction >= 1.0:
                break
            found = self._schedule(
                state.atoms, ranks, state.knobs, state.is_fused, below_ns=(best or state).makespan_ns
            )
            best = found or best
        return best

    def _settle(self, state: State) -> State:
        while True:
            better = self.balance(state) or self.fine_tune(state)
            if better is None:
                return state
            state = better

    def _layouts(self, state: State) -> Iterator[tuple[IntArray, IntArray, NDArray[np.bool_]]]:
        """Yield balanced partitions, looped placements and whether the backward is whole, for other stage counts."""
        if self._problem.constraints.partition is not None:
            return
        num_ranks = self._problem.num_ranks
        weights = np.diff(self._instance.time_sums[0, 0, :, :2].sum(axis=1))
        for laps in range(1, min(MOST_LAPS, len(weights) // num_ranks) + 1):
            num_stages = num_ranks * laps
            if num_stages == len(state.atoms):
                continue
            looped = np.array(looped_placement(num_ranks, laps).rank_by_stage, dtype=np.int64)
            balanced = np.diff(np.array(balanced_bounds(weights, num_stages)))
            for is_fused in (False, True):
                yield balanced, looped, np.full(num_stages, is_fused)

    def _rearranged_ranks(self, state: State) -> Iterator[IntArray]:
        num_ranks, ranks = self._problem.num_ranks, state.ranks
        swaps = [
            (one, other) for one, other in itertools.combinations(range(len(ranks)), 2) if ranks[one] != ranks[other]
        ]
        takeovers = [
            (stage, -1 - rank) for stage in range(len(ranks)) for rank in range(num_ranks) if rank != ranks[stage]
        ]
        choices = swaps + takeovers
        if len(choices) > MOST_REARRANGEMENTS:
            sampled = self._random.choice(len(choices), MOST_REARRANGEMENTS, replace=False)
            choices = [choices[index] for index in np.sort(sampled)]
        for one, other in choices:
            moved = ranks.copy()
            if other >= 0:
                moved[one], moved[other] = ranks[other], ranks[one]
            else:
                moved[one] = -1 - other
            if len(np.unique(moved)) == num_ranks:
                yield moved

    def fine_tune(self, state: State) -> State | None:
        """Return the best order of the same layout with the backward split or whole, or one rule changed."""
        best: State | None = None
        num_stages = len(state.atoms)
        options = [
            (state.knobs, np.zeros(num_stages, dtype=np.bool_)),
            (state.knobs, np.ones(num_stages, dtype=np.bool_)),
        ]
        for knob, steps in itertools.product(range(len(KNOB_STEP)), KNOB_STEPS):
            knobs = state.knobs.copy()
            knobs[knob] = np.clip(knobs[knob] + steps * KNOB_STEP[knob], KNOB_LOW[knob], KNOB_HIGH[knob])
            options.append((knobs, state.is_fused))
        for stage in range(num_stages):
            is_fused = state.is_fused.copy()
            is_fused[stage] = not is_fused[stage]
            options.append((state.knobs, is_fused))
        for knobs, is_fused in options:
            if self._budget.fraction >= 1.0:
                break
            found = self._schedule(state.atoms, state.ranks, knobs, is_fused, below_ns=(best or state).makespan_ns)
            best = found or best
        return best

    def _load_by_rank(self, atoms: IntArray, ranks: IntArray) -> IntArray:
        """Return each rank's work on one micro-batch."""
        bounds = np.concatenate(([0], np.cumsum(atoms)))
        load = np.zeros(self._problem.num_ranks, dtype=np.float64)
        for stage, rank in enumerate(ranks):
            sums = self._instance.time_sums[0, rank]
            times = sums[bounds[stage + 1]] - sums[bounds[stage]]
            load[rank] += (times[0] + times[1]) * self._instance.slowdown[rank]
        return load.astype(np.int64)

    def _partition(self, atoms: IntArray) -> Partition:
        bounds = self._layer_bounds[np.concatenate(([0], np.cumsum(atoms)))]
        return Partition(tuple(np.diff(bounds).tolist()))

    def _schedule(
        self,
        atoms: IntArray,
        ranks: IntArray,
        knobs: NDArray[np.float64],
        is_fused: NDArray[np.bool_],
        *,
        below_ns: float = np.inf,
    ) -> State | None:
        """Return the state with the list scheduler's order, or ``None`` if it does not fit or is not faster."""
        num_stages = len(atoms)
        if num_stages not in self._workshops:
            self._workshops[num_stages] = build_workshop(self._instance, num_stages, self._margin)
        workshop = self._workshops[num_stages]
        genome = Genome(
            atoms=atoms,
            ranks=ranks,
            knobs=knobs,
            limit_change=np.zeros(num_stages, dtype=np.int64),
            urgency=np.zeros((2, num_stages)),
            is_fused=is_fused,
            is_recomputed=np.zeros(num_stages, dtype=np.bool_),
        )
        for _ in range(2):  # a second time where boundaries in flight took more than was kept free for them
            self._budget.spend(3.0 * num_stages * self._problem.num_micro_batches)
            score = schedule_genome(self._instance, genome, workshop, below_ns)
            if score >= NO_MEMORY_SCORE or score >= below_ns:
                return None
            counts = workshop.listing.counts
            flat = np.concatenate([workshop.listing.ops[rank, : counts[rank]] for rank in range(len(counts))])
            offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
            candidate = Candidate(
                partition=self._partition(atoms),
                placement=Placement(tuple(ranks.tolist())),
                order=EncodedOrder(flat >> 34, (flat >> 32) & 3, flat & 0xFFFFFFFF, offsets),
            )
            evaluation = self._problem.evaluate(candidate)
            if evaluation is None:
                return None
            if evaluation.fits:
                if evaluation.makespan_ns >= below_ns:
                    return None
                return State(atoms=atoms, knobs=knobs, is_fused=is_fused, candidate=candidate, evaluation=evaluation)
            for rank, usable in enumerate(self._problem.usable_bytes):
                if usable is not None:
                    self._margin[rank] += max(0, int(evaluation.peak_bytes_by_rank[rank]) - usable)
        return None

    def _judge(
        self, atoms: IntArray, knobs: NDArray[np.float64], is_fused: NDArray[np.bool_], candidate: Candidate
    ) -> State | None:
        """Return the state of a candidate that fits."""
        self._budget.spend(candidate.order.num_ops)
        evaluation = self._problem.evaluate(candidate)
        if evaluation is None or not evaluation.fits:
            return None
        if not self._problem.respects_ties(candidate.partition, candidate.placement):
            return None
        return State(atoms=atoms, knobs=knobs, is_fused=is_fused, candidate=candidate, evaluation=evaluation)
