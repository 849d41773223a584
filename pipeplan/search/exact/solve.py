"""The exact search: layers of states, widened until nothing is cut, under a limit on work or time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipeplan.errors import InfeasibleError
from pipeplan.plan.ops import Op, OpKind, Order
from pipeplan.search.exact.instance import Instance, build_instance
from pipeplan.search.exact.layers import NEVER, Layer, expand
from pipeplan.search.exact.states import KIND_WAIT, bound_state, num_columns
from pipeplan.simulate.clock import Clocked, run_clock
from pipeplan.simulate.costs import StageCosts
from pipeplan.simulate.encoding import EncodedOrder, IntArray, encode_order
from pipeplan.simulate.memory import peak_bytes_by_rank

FIRST_WIDTH = 64
WIDENING = 8
STATE_MEMORY_BYTES = 1_500_000_000  # for the three layers in use; sets the greatest width
MOST_TIGHTENINGS = 40
STATES_PER_CALL = 2_000  # between looks at the limits


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactResult:
    """The best order found and how good any order could be.

    Attributes:
        makespan_ns: Of ``order``, reductions and step included where ``tail_ns_by_rank`` has them.
        lower_bound_ns: No order of this layout that fits is faster; equal to the makespan when proved.
        num_nodes: Partial orders looked at.
    """

    order: Order
    makespan_ns: int
    lower_bound_ns: int
    num_nodes: int

    @property
    def is_proved(self) -> bool:
        """Whether no order is faster."""
        return self.lower_bound_ns >= self.makespan_ns

    @property
    def gap(self) -> float:
        """Share of the makespan that is not proved necessary."""
        return 1.0 - self.lower_bound_ns / self.makespan_ns if self.makespan_ns else 0.0


def solve_order(
    costs: StageCosts,
    num_micro_batches: int,
    usable_bytes_by_rank: Sequence[int | None],
    *,
    can_split_by_stage: Sequence[bool],
    tail_ns_by_rank: Sequence[int] | None = None,
    count_boundaries: bool = False,
    incumbent: Order | None = None,
    work_limit: int = 3_000_000,
    time_limit_s: float | None = None,
) -> ExactResult:
    """Return the fastest order of a fixed layout on the clock's terms, with a proof where the limits allow it.

    Args:
        usable_bytes_by_rank: Caps less the reserve; states count against them.
        can_split_by_stage: Where each micro-batch may take I and W instead of B.
        tail_ns_by_rank: From a rank's last op to the end of the batch.
        incumbent: An order to start from; ignored if it does not fit.
        work_limit: Partial orders to look at; the same limit gives the same result on any machine.

    Raises:
        InfeasibleError: No order fits, or none was found within the limits.
    """
    outcome = search_order(
        costs, num_micro_batches, usable_bytes_by_rank, can_split_by_stage, tail_ns_by_rank or [0] * costs.num_ranks,
        count_boundaries=count_boundaries, incumbent=incumbent, work_limit=work_limit, time_limit_s=time_limit_s,
    )  # fmt: skip
    if outcome.order is None:
        if outcome.was_interrupted:
            raise KeyboardInterrupt
        raise InfeasibleError(
            "no order of this partition and placement fits the memory of every rank; give more memory, fewer layers to "
            "the fullest rank, or recompute"
            if outcome.lower_bound_ns >= NEVER
            else "found no order that fits the memory of every rank within the limit; raise the work or time limit, or "
            "give an order that fits to start from"
        )
    return ExactResult(
        order=outcome.order,
        makespan_ns=outcome.makespan_ns,
        lower_bound_ns=outcome.lower_bound_ns,
        num_nodes=outcome.num_nodes,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a search under a given limit found; without an order, ``makespan_ns`` is that limit.

    Attributes:
        lower_bound_ns: No order is faster; ``NEVER`` where none fits at all; at most ``makespan_ns`` otherwise.
        was_interrupted: Whether Ctrl-C ended it; order and bound hold all the same.
    """

    order: Order | None
    makespan_ns: int
    lower_bound_ns: int
    num_nodes: int
    was_interrupted: bool


def search_order(
    costs: StageCosts,
    num_micro_batches: int,
    usable_bytes_by_rank: Sequence[int | None],
    can_split_by_stage: Sequence[bool],
    tail_ns_by_rank: Sequence[int],
    *,
    count_boundaries: bool,
    incumbent: Order | None = None,
    below_ns: int = NEVER,
    work_limit: int,
    time_limit_s: float | None,
) -> Outcome:
    """Search as ``solve_order`` does, for an order faster than ``below_ns``."""
    search = _Search(
        costs, num_micro_batches, usable_bytes_by_rank, tail_ns_by_rank, count_boundaries, work_limit, time_limit_s
    )
    search.makespan_ns = below_ns
    if incumbent is not None:
        search.offer(incumbent)
    was_interrupted = False
    try:
        search.run(can_split_by_stage)
    except KeyboardInterrupt:
        was_interrupted = True
    return Outcome(
        order=search.order,
        makespan_ns=search.makespan_ns,
        lower_bound_ns=search.lower_bound_ns,
        num_nodes=search.num_nodes,
        was_interrupted=was_interrupted,
    )


class _Search:
    """One run: the best order so far, the best bound so far, and what is left of the limits."""

    def __init__(
        self,
        costs: StageCosts,
        num_micro_batches: int,
        usable_bytes_by_rank: Sequence[int | None],
        tail_ns_by_rank: Sequence[int],
        count_boundaries: bool,
        work_limit: int,
        time_limit_s: float | None,
    ) -> None:
        self.costs = costs
        self.num_micro_batches = num_micro_batches
        self.usable = list(usable_bytes_by_rank)
        self.tail_ns_by_rank = np.array(tail_ns_by_rank, dtype=np.int64)
        self.count_boundaries = count_boundaries
        self.order: Order | None = None
        self.makespan_ns = NEVER
        self.lower_bound_ns = 0
        self.num_nodes = 0
        self._work_limit = work_limit
        self._deadline = None if time_limit_s is None else time.monotonic() + time_limit_s

    @property
    def is_over(self) -> bool:
        """Whether a limit is reached."""
        return self.num_nodes >= self._work_limit or (self._deadline is not None and time.monotonic() >= self._deadline)

    def offer(self, order: Order) -> bool:
        """Keep the order if it is the fastest that fits; return whether it fits."""
        encoded = encode_order(order)
        clocked = run_clock(self.costs, encoded, self.num_micro_batches)
        if clocked.num_done < encoded.num_ops:
            return False
        excess = self._excess_by_rank(encoded, clocked)
        if any(excess):
            return False
        makespan_ns = self._end_of_batch(encoded, clocked)
        if makespan_ns < self.makespan_ns:
            self.order, self.makespan_ns = order, makespan_ns
        return True

    def _excess_by_rank(self, encoded: EncodedOrder, clocked: Clocked) -> list[int]:
        peaks = peak_bytes_by_rank(self.costs, encoded, clocked, count_boundaries=self.count_boundaries)
        return [
            0 if cap is None else max(0, int(peak) - cap) for peak, cap in zip(peaks.tolist(), self.usable, strict=True)
        ]

    def _end_of_batch(self, encoded: EncodedOrder, clocked: Clocked) -> int:
        return int((clocked.end_ns[encoded.offsets[1:] - 1] + self.tail_ns_by_rank).max())

    def run(self, can_split_by_stage: Sequence[bool]) -> None:
        """Prove what the limits allow; where boundaries in flight refuse the best order, look under tighter caps."""
        usable = list(self.usable)
        for _ in range(MOST_TIGHTENINGS):
            shop = build_instance(
                self.costs, self.num_micro_batches, usable, can_split_by_stage, self.tail_ns_by_rank.tolist(),
                count_boundaries=self.count_boundaries,
            )  # fmt: skip
            excess = self._widen(shop, is_whole_problem=usable == self.usable)
            is_settled = self.order is not None and (self.is_over or self.makespan_ns <= self.lower_bound_ns)
            if excess is None or is_settled:
                return
            usable = [None if cap is None else cap - (more + 1) // 2 for cap, more in zip(usable, excess, strict=True)]

    def _widen(self, shop: Instance, *, is_whole_problem: bool) -> list[int] | None:
        """Search wider and wider; return by how much an order is too large for the real memory formula, if any is."""
        if shop.in_flight_limit.min() < 1:
            if is_whole_problem:
                self.lower_bound_ns = NEVER
            return None
        if is_whole_problem:
            self.lower_bound_ns = _root_bound(shop)
        columns = num_columns(shop.num_stages, shop.num_ranks, shop.num_micro_batches)
        greatest = max(FIRST_WIDTH, STATE_MEMORY_BYTES // (3 * 3 * 8 * columns))
        width = FIRST_WIDTH
        refused: list[int] | None = None
        while self.makespan_ns > self.lower_bound_ns and (width == FIRST_WIDTH or not self.is_over):
            width = min(width, greatest)
            actions, bound = _beam(shop, width, self)
            best = self.makespan_ns
            if actions is not None:
                order = _replay(shop, actions)
                encoded = encode_order(order)
                clocked = run_clock(self.costs, encoded, self.num_micro_batches)
                best = min(best, self._end_of_batch(encoded, clocked))
                refused = None if self.offer(order) else self._excess_by_rank(encoded, clocked)
            if is_whole_problem:
                self.lower_bound_ns = max(self.lower_bound_ns, min(bound, self.makespan_ns))
            if bound >= best or width == greatest:
                break
            width *= WIDENING
        return refused


def _root_bound(shop: Instance) -> int:
    row = np.zeros(num_columns(shop.num_stages, shop.num_ranks, shop.num_micro_batches), dtype=np.int64)
    return int(_bound(row, shop)[0])


def _bound(row: IntArray, shop: Instance) -> tuple[int, int]:
    shape = (shop.num_stages, shop.num_micro_batches)
    jobs = np.empty((3, 4 * shop.num_stages * shop.num_micro_batches), dtype=np.int64)
    bound, total = bound_state(row, shop, np.empty(shape, dtype=np.int64), np.empty(shape, dtype=np.int64), jobs, NEVER)
    return int(bound), int(total)


def _beam(shop: Instance, width: int, search: _Search) -> tuple[list[int] | None, int]:
    """Go once through all layers with at most ``width`` states each.

    Returns the actions to the best end below the incumbent, if one was reached, and the least bound of the ends and of
    everything cut: no order below the incumbent beats it.
    """
    columns = num_columns(shop.num_stages, shop.num_ranks, shop.num_micro_batches)
    num_layers = 3 * shop.num_stages * shop.num_micro_batches
    layers = [Layer.empty(3 * width + 8 * shop.num_stages, columns) for _ in range(3)]
    histories: list[tuple[IntArray, IntArray]] = []
    tally = np.array([0, NEVER], dtype=np.int64)
    limit = search.makespan_ns
    least_cut = NEVER
    start = layers[0]
    start.count[0] = 1
    start.is_alive[0] = True
    start.bounds[0], start.sums[0] = _bound(start.rows[0], shop)
    for depth in range(num_layers):
        here, one_on, two_on = (layers[(depth + step) % 3] for step in range(3))
        dropped = here.keep_best(width, shop.num_stages)
        least_cut = least_cut if dropped is None else min(least_cut, dropped)
        first = 0
        while first < here.count[0]:
            before = int(tally[0])
            next_first = expand(
                first, first + STATES_PER_CALL, shop, limit, here.arrays, one_on.arrays, two_on.arrays, tally
            )
            search.num_nodes += int(tally[0]) - before
            if search.is_over and width > FIRST_WIDTH:  # the narrowest pass is quick, and gives the first order
                return None, min(least_cut, int(tally[1]), _least_alive([here, one_on, two_on]))
            if next_first - first < STATES_PER_CALL and next_first < here.count[0]:
                for layer in (one_on, two_on):
                    dropped = layer.keep_best(width, shop.num_stages)
                    least_cut = least_cut if dropped is None else min(least_cut, dropped)
            first = next_first
        count = int(here.count[0])
        histories.append((here.parents[:count].copy(), here.actions[:count].copy()))
        here.clear()
    last = layers[num_layers % 3]
    dropped = last.keep_best(1, shop.num_stages)
    least_cut = min(least_cut, int(tally[1]))
    if int(last.count[0]) == 0:
        return None, min(least_cut, limit)
    histories.append((last.parents[:1].copy(), last.actions[:1].copy()))
    return _trace_back(histories, shop.num_stages), min(least_cut, int(last.bounds[0]))


def _least_alive(layers: Sequence[Layer]) -> int:
    least = NEVER
    for layer in layers:
        count = int(layer.count[0])
        alive = layer.bounds[:count][layer.is_alive[:count]]
        if len(alive):
            least = min(least, int(alive.min()))
    return least


def _trace_back(histories: Sequence[tuple[IntArray, IntArray]], num_stages: int) -> list[int]:
    actions: list[int] = []
    depth, index = len(histories) - 1, 0
    while depth > 0 or histories[0][0].shape[0] > index > 0:
        parents, taken = histories[depth]
        action = int(taken[index])
        index = int(parents[index])
        actions.append(action)
        kind = action // num_stages
        if kind != KIND_WAIT:
            depth -= 2 if kind == OpKind.B else 1
    return actions[::-1]


def _replay(shop: Instance, actions: Sequence[int]) -> Order:
    """Return the order of the actions, micro-batches numbered as they come."""
    ops_by_rank: list[list[Op]] = [[] for _ in range(shop.num_ranks)]
    num_forward = [0] * shop.num_stages
    num_backward = [0] * shop.num_stages
    pending: list[deque[int]] = [deque() for _ in range(shop.num_stages)]
    for action in actions:
        kind, stage = divmod(action, shop.num_stages)
        if kind == KIND_WAIT:
            continue
        if kind == OpKind.F:
            micro_batch = num_forward[stage]
            num_forward[stage] += 1
        elif kind == OpKind.W:
            micro_batch = pending[stage].popleft()
        else:
            micro_batch = num_backward[stage]
            num_backward[stage] += 1
            if kind == OpKind.I:
                pending[stage].append(micro_batch)
        ops_by_rank[int(shop.rank_by_stage[stage])].append(Op(stage, OpKind(kind), micro_batch))
    return Order.of(ops_by_rank)
