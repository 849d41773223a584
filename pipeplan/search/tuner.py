"""The default strategy: co-optimise partition, placement and order.

1. Every placement worth trying starts a *track*: partition and scheduler rules evolve together (``evolve``). In rounds,
   the better half goes on with more work a track.
2. The orders of the best tracks, and the best named orders, go to local search with boundaries (``order_search``).
3. Where I and W ended up side by side, B replaces them if that is not slower.

All scores are checked with the simulator before they count: an *incumbent* fits every cap and is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from pipeplan.plan.layout import Partition, Placement
from pipeplan.plan.types import Plan
from pipeplan.search.baselines import Baseline
from pipeplan.search.budget import ORDER_STEP_WEIGHT, Budget
from pipeplan.search.evolve import (
    DEFAULT_KNOBS,
    NO_MEMORY_SCORE,
    TIES_APART_SCORE,
    Freedom,
    Genome,
    Workshop,
    assign,
    build_workshop,
    evolve,
    schedule_genome,
)
from pipeplan.search.instance import Instance, build_instance
from pipeplan.search.one_at_a_time import Layout, layouts_of_placements, one_at_a_time, roomiest_layout
from pipeplan.search.order_search import INVALID, Bench, Ordering, build_bench, makespan_of, search_order
from pipeplan.search.partition import balanced_bounds
from pipeplan.search.problem import Candidate, Evaluation, Problem, fuse_backward
from pipeplan.search.randomness import random_state
from pipeplan.search.structures import placements
from pipeplan.simulate import EncodedOrder, encode_order, peak_bytes_by_rank, run_clock

IntArray = NDArray[np.int64]

CHUNK_WORK = 1_500_000.0  # between two looks at the budget: about a tenth of a second
FEWEST_CHUNKS = 300
# Of the budget; the rest goes to local search on orders, which pays where there are few ops.
ROUND_SHARES = (0.15, 0.15, 0.15, 0.15, 0.15, 0.15)
FEW_OPS_ROUND_SHARES = (0.25, 0.2, 0.2, 0.2)
FEW_OPS = 300  # F, I and W of two stages a rank
KEPT_SHARE = 0.4
MAX_REPLICAS = 4  # tracks for one placement, which end up far apart
FIRST_STEPS = 170  # that a track should get in the first round, for another replica to pay
SHORT_BATCH = 3  # micro-batches a rank that show how a longer batch runs
FEWEST_STEPS = 90  # that a track should get in the first round, to be started at all
HOT, COLD = 0.006, 0.0003
ORDER_HOT, ORDER_COLD = 0.004, 0.0001
BOUNDARY_SHARE = 0.15
MOST_OPS_TO_FUSE_SINGLY = 1500


@dataclass(slots=True, eq=False)
class Track:
    """One placement on its way through the rounds."""

    current: Genome
    best: Genome
    trial: Genome
    scores: NDArray[np.float64]
    workshop: Workshop
    state: NDArray[np.uint64]
    freedom: Freedom
    work_per_step: float


@dataclass(slots=True, eq=False)
class OrderTrack:
    """One order on its way through local search."""

    current: Ordering
    best: Ordering
    scores: NDArray[np.float64]
    bench: Bench
    state: NDArray[np.uint64]
    boundary_share: float
    rank_by_stage: tuple[int, ...]


class Tuner:
    """A search for one problem; ``run`` it, then read ``incumbent``."""

    def __init__(
        self,
        problem: Problem,
        known: Sequence[Baseline],
        budget: Budget,
        seed: int,
        report: Callable[[str, int | None], None],
        lower_bound_ns: int = 0,
    ) -> None:
        """Prepare; ``report`` is called with the phase and the best makespan now and then."""
        self._lower_bound_ns = lower_bound_ns
        self._problem = problem
        self._known = known
        self._budget = budget
        self._report = report
        self._whole = build_instance(problem)
        self._instance: Instance = self._whole
        self._num_atoms = len(self._instance.num_layers) - 1
        self._chunk_work = min(CHUNK_WORK, budget.expected_work / FEWEST_CHUNKS)
        num_ops = 6 * problem.num_ranks * problem.num_micro_batches
        self._round_shares = FEW_OPS_ROUND_SHARES if num_ops <= FEW_OPS else ROUND_SHARES
        self._seeds = np.random.SeedSequence(seed)
        self._margin = np.zeros(problem.num_ranks, dtype=np.int64)
        self._tracks: list[Track] = []
        self._given: list[Candidate] = []
        self.incumbent: tuple[Candidate, Evaluation] | None = None
        for baseline in known:
            self._offer(baseline.candidate, baseline.evaluation)

    def start_from(self, plan: Plan) -> None:
        """Count a plan as found; local search on orders also starts from it."""
        candidate = Candidate(
            partition=plan.partition,
            placement=plan.placement,
            order=encode_order(plan.order),
            recomputed_stages=plan.recomputed_stages,
        )
        evaluation = self._problem.evaluate(candidate)
        assert evaluation is not None, "a plan never deadlocks"
        self._given.append(candidate)
        self._offer(candidate, evaluation)

    def run(self) -> None:
        """Search until the budget is used or the bound is reached."""
        self._use_short_batch()
        tracks = self._tracks
        tracks.extend(self._starting_tracks())
        shares = self._round_shares
        temperatures = np.geomspace(HOT, COLD, len(shares) + 1)
        for number, share in enumerate(shares):
            if self._is_at_bound:
                break
            if number == len(shares) - 1:
                self._use_whole_batch()
            until = self._budget.fraction + share
            for index, track in enumerate(tracks):
                goal = self._budget.fraction + (until - self._budget.fraction) / (len(tracks) - index)
                self._evolve(track, goal, temperatures[number], temperatures[number + 1])
                self._offer_track(track)
            tracks.sort(key=lambda track: track.scores[1])
            del tracks[max(3, round(len(tracks) * KEPT_SHARE)) :]
        if self.incumbent is None:
            self._offer_one_at_a_time()
        if not self._is_at_bound:
            self._search_orders(tracks)
        self._fuse()
        self._fuse_single()

    @property
    def _is_at_bound(self) -> bool:
        """Whether nothing can be faster than what was found, so that more search is in vain."""
        return self.incumbent is not None and self.incumbent[1].makespan_ns <= self._lower_bound_ns

    def _use_short_batch(self) -> None:
        """Search with fewer micro-batches where there are many: what repeats in the middle then costs no time."""
        count, fewer = self._problem.num_micro_batches, SHORT_BATCH * self._problem.num_ranks
        if count > fewer:
            self._instance = self._instance._replace(num_micro_batches=fewer, num_more_micro_batches=count - fewer)

    def _use_whole_batch(self) -> None:
        count = self._problem.num_micro_batches
        if self._instance.num_more_micro_batches:
            self._instance = self._instance._replace(num_micro_batches=count, num_more_micro_batches=0)
            self._judge_again()

    def _starting_tracks(self) -> list[Track]:
        """Return tracks for as many placements and replicas as the budget can follow."""
        starts = placements(self._problem, self._num_atoms)
        per_stage = 3.0 * self._instance.num_micro_batches
        first_work = self._round_shares[0] * self._budget.expected_work
        while len(starts) > 1 and sum(map(len, starts)) * per_stage * FEWEST_STEPS > first_work:
            starts.pop()
        once = sum(map(len, starts)) * per_stage * FIRST_STEPS
        num_replicas = min(MAX_REPLICAS, max(1, round(first_work / once)))
        return [self._track(ranks) for ranks in starts for _ in range(num_replicas)]

    def _track(self, ranks: tuple[int, ...]) -> Track:
        num_stages = len(ranks)
        instance = self._instance
        rank_array = np.array(ranks, dtype=np.int64)
        fixed = self._problem.constraints
        genome = Genome(
            atoms=self._starting_atoms(rank_array),
            ranks=rank_array,
            knobs=DEFAULT_KNOBS.copy(),
            limit_change=np.zeros(num_stages, dtype=np.int64),
            urgency=np.zeros((2, num_stages)),
            is_fused=np.zeros(num_stages, dtype=np.bool_),
            is_recomputed=np.zeros(num_stages, dtype=np.bool_),
        )
        workshop = build_workshop(self._whole, num_stages, self._margin)
        score = schedule_genome(instance, genome, workshop, np.inf)
        if score == TIES_APART_SCORE and fixed.partition is None:  # placements for tied layers balance them by time
            sums = instance.time_sums[0]
            genome.atoms[:] = np.diff(balanced_bounds(np.diff(sums[0, :, 0] + sums[0, :, 1]), num_stages))
            score = schedule_genome(instance, genome, workshop, np.inf)
        sums = instance.time_sums[0]
        freedom = Freedom(
            boundaries=fixed.partition is None,
            ranks=fixed.placement is None and not self._problem.are_ranks_alike,
            fusion=bool((sums[:, -1, 1] < sums[:, -1, 2] + sums[:, -1, 3]).any()),
            recomputation=bool(instance.can_recompute[-1] > 0),
        )
        return Track(
            current=genome,
            best=genome.copy(),
            trial=genome.copy(),
            scores=np.array([score, score]),
            workshop=workshop,
            state=random_state(int(self._seeds.spawn(1)[0].generate_state(1)[0])),
            freedom=freedom,
            work_per_step=3.0 * num_stages * instance.num_micro_batches,
        )

    def _starting_atoms(self, ranks: IntArray) -> IntArray:
        """Return a partition for a placement: stages balanced by time, with larger ones on faster ranks."""
        fixed = self._problem.constraints.partition
        if fixed is not None:
            bounds = np.searchsorted(self._instance.num_layers, fixed.bounds)
            return np.diff(bounds).astype(np.int64)
        sums = self._instance.time_sums[0]
        work = (sums[:, :, 0] + sums[:, :, 1]) * self._instance.slowdown[:, None]
        if np.allclose(work, work[0]):
            return np.diff(np.array(balanced_bounds(np.diff(sums[0, :, 0] + sums[0, :, 1]), len(ranks))))
        mean = np.cumsum(np.concatenate(([0.0], np.diff(work, axis=1).mean(axis=0))))
        speed = mean[-1] / work[:, -1]
        per_rank = np.bincount(ranks, minlength=len(speed))
        share = speed[ranks] / per_rank[ranks]
        targets = np.cumsum(share) / share.sum() * mean[-1]
        cuts = [0]
        for stage, target in enumerate(targets[:-1]):
            lowest, highest = cuts[-1] + 1, self._num_atoms - (len(ranks) - 1 - stage)
            cuts.append(int(np.clip(np.searchsorted(mean, target), lowest, highest)))
        return np.diff([*cuts, self._num_atoms]).astype(np.int64)

    def _evolve(self, track: Track, goal: float, hot: float, cold: float) -> None:
        """Anneal a track until the budget's fraction reaches ``goal``."""
        begin = self._budget.fraction
        num_steps = max(1, int(self._chunk_work / track.work_per_step))
        while self._budget.fraction < min(goal, 1.0):
            done = min(1.0, (self._budget.fraction - begin) / max(goal - begin, 1e-9))
            now = hot * (cold / hot) ** done
            num_ops = evolve(
                self._instance, track.current, track.best, track.trial, track.scores, track.workshop, track.freedom,
                num_steps, now, now, track.state,
            )  # fmt: skip
            self._budget.spend(float(num_ops))
            self._tell("partition, placement and rules")
        assign(track.current, track.best)
        track.scores[0] = track.scores[1]

    def _offer_track(self, track: Track) -> None:
        if track.scores[1] >= NO_MEMORY_SCORE:
            return
        candidate = self._candidate_of(track)
        evaluation = self._problem.evaluate(candidate)
        assert evaluation is not None, "a list schedule never deadlocks"
        self._offer(candidate, evaluation)
        if not evaluation.fits:
            self._widen_margins(evaluation)

    def _widen_margins(self, evaluation: Evaluation) -> None:
        """Keep free what boundaries in flight took beyond the cap, and judge every track again."""
        for rank, usable in enumerate(self._problem.usable_bytes):
            if usable is not None:
                self._margin[rank] += max(0, int(evaluation.peak_bytes_by_rank[rank]) - usable)
        self._judge_again()

    def _judge_again(self) -> None:
        """Score every track anew, since the instance or the margins changed."""
        for track in self._tracks:
            track.scores[0] = schedule_genome(self._instance, track.current, track.workshop, np.inf)
            track.scores[1] = schedule_genome(self._instance, track.best, track.workshop, np.inf)

    @cached_property
    def closest_layouts(self) -> tuple[Layout, Layout]:
        """The layout that needs least beyond the caps, and the one whose heaviest rank needs least of all.

        Where no layout keeps tied layers together, both are one that doesn't.
        """
        closest = roomiest_layout(self._problem, self._layouts, within_caps=True)
        roomiest = roomiest_layout(self._problem, self._layouts_to_start_from, within_caps=False)
        if closest is None or roomiest is None:
            apart = next(self._layouts(self._problem))
            return apart, apart
        return closest, roomiest

    def _layouts_to_start_from(self, problem: Problem) -> Iterator[Layout]:
        return layouts_of_placements(problem, placements(problem, self._num_atoms))

    def _layouts(self, problem: Problem) -> Iterator[Layout]:
        """Yield the layouts to start from and those that the tracks have come to."""
        yield from self._layouts_to_start_from(problem)
        for track in self._tracks:
            yield self._partition(track.best.atoms), Placement(tuple(track.best.ranks.tolist()))

    def _offer_one_at_a_time(self) -> None:
        """Where nothing fits yet, try what needs least memory: one micro-batch at a time."""
        for layout in self.closest_layouts:
            candidate = one_at_a_time(self._problem, *layout)
            evaluation = self._problem.evaluate(candidate)
            assert evaluation is not None, "one micro-batch at a time never deadlocks"
            self._offer(candidate, evaluation)
        if self.incumbent is not None:
            self._given.append(self.incumbent[0])

    def _candidate_of(self, track: Track) -> Candidate:
        schedule_genome(self._whole, track.best, track.workshop, np.inf)
        listing = track.workshop.listing
        counts = listing.counts
        flat = np.concatenate([listing.ops[rank, : counts[rank]] for rank in range(len(counts))])
        offsets = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
        order = EncodedOrder(flat >> 34, (flat >> 32) & 3, flat & 0xFFFFFFFF, offsets)
        return Candidate(
            partition=self._partition(track.best.atoms),
            placement=Placement(tuple(track.best.ranks.tolist())),
            order=order,
            recomputed_stages=tuple(np.flatnonzero(track.best.is_recomputed).tolist()),
        )

    def _partition(self, atoms: IntArray) -> Partition:
        bounds = self._instance.num_layers[np.concatenate(([0], np.cumsum(atoms)))]
        return Partition(tuple(np.diff(bounds).tolist()))

    def _offer(self, candidate: Candidate, evaluation: Evaluation) -> None:
        if not evaluation.fits or not self._problem.respects_ties(candidate.partition, candidate.placement):
            return
        if self.incumbent is None or evaluation.makespan_ns < self.incumbent[1].makespan_ns:
            self.incumbent = (candidate, evaluation)

    def _search_orders(self, tracks: list[Track]) -> None:
        """Local search on the best tracks' orders and on the best named orders that fit."""
        starts = [self._candidate_of(track) for track in tracks if track.scores[1] < NO_MEMORY_SCORE]
        starts += self._given
        starts += [baseline.candidate for baseline in self._known[:2] if baseline.evaluation.fits]
        orders = [track for start in starts if (track := self._order_track(start)) is not None]
        begin = self._budget.fraction
        span = max(1.0 - begin, 1e-9)
        while orders and self._budget.fraction < 1.0:
            keep = len(orders)
            until = begin + span * (1.0 if keep == 1 else 0.5 * (1.0 - 0.5 / keep))
            for index, order in enumerate(orders):
                goal = self._budget.fraction + (until - self._budget.fraction) / (keep - index)
                self._search_order(order, goal, begin, span)
            orders.sort(key=lambda order: order.scores[1])
            orders = orders[: max(1, keep // 3)]
            if len(orders) == 1 and keep > 1 and self._fuse_single():
                assert self.incumbent is not None
                polished = self._order_track(self.incumbent[0])
                orders = orders if polished is None else [polished]
            if keep == 1:
                break

    def _order_track(self, candidate: Candidate) -> OrderTrack | None:
        atoms = np.diff(np.searchsorted(self._instance.num_layers, candidate.partition.bounds)).astype(np.int64)
        recomputed = np.zeros(len(atoms), dtype=np.bool_)
        recomputed[list(candidate.recomputed_stages)] = True
        order = candidate.order
        ordering = Ordering(atoms, order.stage.copy(), order.kind.copy(), order.micro_batch.copy())
        ranks = np.array(candidate.placement.rank_by_stage, dtype=np.int64)
        margin = self._margin.copy()
        bench = build_bench(self._whole, ordering, ranks, recomputed, order.offsets.copy(), margin)
        score = makespan_of(self._whole, ordering, bench)
        if score >= INVALID and (room := self._room_beside(candidate)) is not None:
            np.minimum(margin, room, out=margin)  # it fits as it is: keep free as much as it leaves
            score = makespan_of(self._whole, ordering, bench)
        if score >= INVALID:
            return None
        can_move = self._problem.constraints.partition is None
        return OrderTrack(
            current=ordering,
            best=ordering.copy(),
            scores=np.array([score, score]),
            bench=bench,
            state=random_state(int(self._seeds.spawn(1)[0].generate_state(1)[0])),
            boundary_share=BOUNDARY_SHARE if can_move else 0.0,
            rank_by_stage=candidate.placement.rank_by_stage,
        )

    def _room_beside(self, candidate: Candidate) -> IntArray | None:
        """Return what a candidate that fits leaves free of each rank's cap, boundaries in flight not counted."""
        evaluation = self._problem.evaluate(candidate)
        if evaluation is None or not evaluation.fits:
            return None
        costs = self._problem.table.stage_costs(candidate.partition, candidate.placement, candidate.recomputed_stages)
        clocked = run_clock(costs, candidate.order, self._problem.num_micro_batches)
        peaks = peak_bytes_by_rank(costs, candidate.order, clocked, count_boundaries=False)
        return self._whole.usable_bytes - peaks

    def _search_order(self, track: OrderTrack, goal: float, begin: float, span: float) -> None:
        work_per_step = ORDER_STEP_WEIGHT * len(track.current.stage)
        num_steps = max(1, int(self._chunk_work / work_per_step))
        while self._budget.fraction < min(goal, 1.0):
            done = min(1.0, (self._budget.fraction - begin) / span)
            now = ORDER_HOT * (ORDER_COLD / ORDER_HOT) ** done
            search_order(
                self._instance, track.current, track.best, track.scores, track.bench, track.boundary_share,
                num_steps, now, now, track.state,
            )  # fmt: skip
            self._budget.spend(num_steps * work_per_step)
            self._tell("order")
        self._offer_order(track)

    def _offer_order(self, track: OrderTrack) -> None:
        best = track.best
        candidate = Candidate(
            partition=self._partition(best.atoms),
            placement=Placement(track.rank_by_stage),
            order=EncodedOrder(best.stage.copy(), best.kind.copy(), best.micro_batch.copy(), track.bench.offsets),
            recomputed_stages=tuple(np.flatnonzero(track.bench.is_recomputed).tolist()),
        )
        evaluation = self._problem.evaluate(candidate)
        if evaluation is not None:
            self._offer(candidate, evaluation)
            if not evaluation.fits:
                self._widen_margins(evaluation)

    def _fuse_single(self) -> bool:
        """Try B for each I and its W, wherever they are; keep what makes the batch shorter. Return whether any did."""
        if self.incumbent is None or self.incumbent[0].order.num_ops > MOST_OPS_TO_FUSE_SINGLY:
            return False
        improved = False
        order = self.incumbent[0].order
        pairs = np.unique(np.stack((order.stage, order.micro_batch))[:, order.kind == 2], axis=1).T
        for stage, micro_batch in pairs:
            candidate, evaluation = self.incumbent
            order = candidate.order
            fused = Candidate(
                partition=candidate.partition,
                placement=candidate.placement,
                order=fuse_backward(order, (order.stage == stage) & (order.micro_batch == micro_batch)),
                recomputed_stages=candidate.recomputed_stages,
            )
            after = self._problem.evaluate(fused)
            self._budget.spend(order.num_ops)
            if after is not None and after.fits and after.makespan_ns < evaluation.makespan_ns:
                self.incumbent = (fused, after)
                improved = True
        return improved

    def _fuse(self) -> None:
        """Replace I directly followed by its W with B where that does not make the batch longer."""
        if self.incumbent is None:
            return
        candidate, evaluation = self.incumbent
        order = candidate.order
        starts = np.flatnonzero(
            (order.kind[:-1] == 2)
            & (order.kind[1:] == 3)
            & (order.stage[:-1] == order.stage[1:])
            & (order.micro_batch[:-1] == order.micro_batch[1:])
        )
        if not len(starts):
            return
        is_fused = np.zeros(order.num_ops, dtype=np.bool_)
        is_fused[starts] = True
        is_fused[starts + 1] = True
        fused = Candidate(
            partition=candidate.partition,
            placement=candidate.placement,
            order=fuse_backward(order, is_fused),
            recomputed_stages=candidate.recomputed_stages,
        )
        after = self._problem.evaluate(fused)
        if after is not None and after.fits and after.makespan_ns <= evaluation.makespan_ns:
            self.incumbent = (fused, after)

    def _tell(self, phase: str) -> None:
        self._report(phase, None if self.incumbent is None else self.incumbent[1].makespan_ns)
