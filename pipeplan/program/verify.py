"""The verifier: a program is shown to finish and to compute what the plan says, before anything runs.

Checked in this order, each only where the ones before hold: the plan, the program against the plan, every rank by
itself (ops, inputs, sends and waits), both ends of every message, the run to the end under a queue model, memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import InitVar, dataclass

from pipeplan.cluster import Cluster
from pipeplan.errors import ClusterError, VerificationError
from pipeplan.plan.check import check_plan, find_order_faults
from pipeplan.plan.findings import Finding, FindingKind, RefusedError
from pipeplan.plan.ops import Op, Order
from pipeplan.plan.types import Plan, QueueModel
from pipeplan.profile.types import Profile
from pipeplan.program.boundaries import Boundaries
from pipeplan.program.deadlock import refuse_deadlocked_order
from pipeplan.program.lower import TAIL, lower
from pipeplan.program.matching import Posts, find_message_faults
from pipeplan.program.queues import find_queue_faults
from pipeplan.program.types import (
    Compute,
    Instruction,
    Message,
    OptimizerStep,
    Program,
    Receive,
    ReduceReplicas,
    ReduceTied,
    Send,
    WaitReceive,
    WaitSend,
)
from pipeplan.simulate.clock import run_clock
from pipeplan.simulate.costs import CostTable
from pipeplan.simulate.encoding import encode_order
from pipeplan.simulate.memory import peak_bytes_by_rank
from pipeplan.units import format_gb

_TOKEN = object()
_ENDING = " ".join(str(step) for step in TAIL)


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedProgram:
    """A program that ``verify`` has passed; only ``verify`` makes one, only this can be emitted or run.

    Attributes:
        queue_model: The queue model that it was shown to finish under.
    """

    program: Program
    plan: Plan
    queue_model: QueueModel
    token: InitVar[object]

    def __post_init__(self, token: object) -> None:
        if token is not _TOKEN:
            raise TypeError("only pipeplan.program.verify makes a VerifiedProgram")


def verify_plan(
    plan: Plan, profile: Profile, cluster: Cluster, queue_model: QueueModel | None = None
) -> VerifiedProgram:
    """Lower ``plan`` for the queue model in use (its own if not given) and verify the program; raises as both do."""
    return verify(lower(plan, profile, cluster, queue_model), plan, profile, cluster)


def verify(
    program: Program, plan: Plan, profile: Profile, cluster: Cluster, queue_model: QueueModel | None = None
) -> VerifiedProgram:
    """Show that ``program`` finishes, computes what ``plan`` says and fits into memory.

    Args:
        queue_model: What shares the order of messages at run time; the one it was lowered for if not given.

    Raises:
        RefusedError: It would hang, compute something wrong or not fit; shows where on the rank x step grid.
        VerificationError: It was lowered from another plan.
        PlanError: The plan contradicts itself or the profile.
        ClusterError: The cluster has another number of ranks.
        ProfileError: The profile lacks times that the cluster's devices need.
    """
    if cluster.num_ranks != plan.num_ranks:
        raise ClusterError(f"the plan is for {plan.num_ranks} ranks; the cluster has {cluster.num_ranks}")
    check_plan(plan, profile)
    _check_same_plan(program, plan)
    model = program.queue_model if queue_model is None else queue_model
    rows = program.instructions_by_rank
    refuse(_find_op_faults(program, plan), rows)
    boundaries = Boundaries(program.num_stages)
    scans = [_RankScan(program, rank, boundaries) for rank in range(program.num_ranks)]
    refuse([finding for scan in scans for finding in scan.findings], rows)
    posts = Posts.of(program)
    refuse(find_message_faults(program, posts), rows)
    peaks = _peak_bytes_by_rank(plan, profile, cluster)
    refuse(find_queue_faults(program, posts, model), rows)
    refuse(find_memory_faults(peaks, cluster), plan.order.ops_by_rank)
    return VerifiedProgram(program=program, plan=plan, queue_model=model, token=_TOKEN)


def refuse(findings: Sequence[Finding], rows: Sequence[Sequence[object]]) -> None:
    """Raise ``RefusedError`` if there are findings."""
    if findings:
        raise RefusedError(findings, rows)


def _check_same_plan(program: Program, plan: Plan) -> None:
    pairs = (
        ("number of ranks", program.num_ranks, plan.num_ranks),
        ("number of micro-batches", program.num_micro_batches, plan.num_micro_batches),
        ("placement", list(program.rank_by_stage), list(plan.placement.rank_by_stage)),
        ("plan digest", program.plan_digest, plan.digest),
    )
    for what, found, expected in pairs:
        if found != expected:
            raise VerificationError(
                f"the program is of another plan: its {what} is {found}, the plan's {expected}; delete the program to "
                "have it lowered again"
            )


def _find_op_faults(program: Program, plan: Plan) -> list[Finding]:
    """Return faults of the ops alone: their structure, then the first that differs from the plan's order."""
    positions_by_rank: list[list[int]] = []
    ops_by_rank: list[list[Op]] = []
    for steps in program.instructions_by_rank:
        positions_by_rank.append([place for place, step in enumerate(steps) if type(step) is Compute])
        ops_by_rank.append([step.op for step in steps if isinstance(step, Compute)])
    if Order.of(ops_by_rank) == plan.order:
        return []
    faults = find_order_faults(Order.of(ops_by_rank), plan.placement, plan.num_micro_batches)
    if faults:
        return [_at_instruction(fault, positions_by_rank) for fault in faults]
    for rank, (ops, expected) in enumerate(zip(ops_by_rank, plan.order, strict=True)):
        for number, (op, planned) in enumerate(zip(ops, expected, strict=True)):
            if op != planned:
                reason = f"the plan's order has {planned} here; delete the program to have it lowered again"
                position = positions_by_rank[rank][number]
                return [Finding(kind=FindingKind.MISMATCH, rank=rank, position=position, step=str(op), reason=reason)]
    return []


def _at_instruction(fault: Finding, positions_by_rank: Sequence[Sequence[int]]) -> Finding:
    position = None if fault.position is None else positions_by_rank[fault.rank][fault.position]
    return Finding(kind=fault.kind, rank=fault.rank, position=position, step=fault.step, reason=fault.reason)


class _RankScan:
    """One pass over the instructions of a rank: what it can see by itself.

    Ops find their inputs, sends find what they send, waits what they wait for, and the rank ends with every send
    waited for, every received boundary used, and the reductions and the step.
    """

    def __init__(self, program: Program, rank: int, boundaries: Boundaries) -> None:
        self.findings: list[Finding] = []
        self._program = program
        self._rank = rank
        self._boundaries = boundaries
        self._made: set[Message] = set()
        self._sent: dict[Message, int] = {}
        self._unwaited_sends: dict[Message, int] = {}
        self._posted: dict[Message, int] = {}
        self._unwaited_receives: dict[Message, int] = {}
        self._arrived: dict[Message, int] = {}
        steps = program.instructions_by_rank[rank]
        has_tail = steps[-len(TAIL) :] == TAIL
        for position, step in enumerate(steps[: -len(TAIL)] if has_tail else steps):
            self._scan(position, step)
        if not has_tail:
            self._report(FindingKind.MISSING, None, "", f"it does not end with '{_ENDING}'")
        self._check_nothing_left()

    def _report(self, kind: FindingKind, position: int | None, step: object, reason: str) -> None:
        self.findings.append(Finding(kind=kind, rank=self._rank, position=position, step=str(step), reason=reason))

    def _scan(self, position: int, step: Instruction) -> None:
        match step:
            case Compute(op):
                self._compute(position, step, op)
            case Send(message):
                self._send(position, step, message)
            case Receive(message):
                self._receive(position, step, message)
            case WaitReceive(message):
                if self._unwaited_receives.pop(message, None) is None:
                    kind = FindingKind.DUPLICATE if message in self._posted else FindingKind.TOO_EARLY
                    what = "already waited for" if message in self._posted else "not posted before"
                    self._report(kind, position, step, f"its receive is {what}")
                self._arrived[message] = position
            case WaitSend(message):
                if self._unwaited_sends.pop(message, None) is None:
                    kind = FindingKind.DUPLICATE if message in self._sent else FindingKind.TOO_EARLY
                    what = "already waited for" if message in self._sent else "not started before"
                    self._report(kind, position, step, f"its send is {what}")
            case ReduceTied() | ReduceReplicas() | OptimizerStep():
                reason = f"every rank ends with '{_ENDING}', after its last op and wait, and has them nowhere else"
                self._report(FindingKind.TOO_EARLY, position, step, reason)

    def _compute(self, position: int, step: Compute, op: Op) -> None:
        program = self._program
        used = self._boundaries.used(op)
        if used is not None:
            source = program.rank_by_stage[used.source_stage]
            if source == self._rank:
                if used not in self._made:
                    reason = f"it needs what stage {used.source_stage} hands over on this rank, which runs later"
                    self._report(FindingKind.TOO_EARLY, position, step, reason)
            elif self._arrived.pop(used, None) is None:
                reason = f"it needs {used} from rank {source}, which no {WaitReceive(used)} before it waits for"
                self._report(FindingKind.TOO_EARLY, position, step, reason)
        made = self._boundaries.made(op)
        if made is not None:
            self._made.add(made)

    def _send(self, position: int, step: Send, message: Message) -> None:
        if not self._is_known(position, step, message):
            return
        if message in self._sent:
            self._report(FindingKind.DUPLICATE, position, step, f"sent before, at position {self._sent[message]}")
        elif self._program.source_rank(message) != self._rank:
            reason = f"stage {message.source_stage} is placed on rank {self._program.source_rank(message)}"
            self._report(FindingKind.WRONG_RANK, position, step, reason)
        elif message not in self._made:
            reason = "no op before it on this rank makes what it sends"
            self._report(FindingKind.TOO_EARLY, position, step, reason)
        self._sent.setdefault(message, position)
        self._unwaited_sends[message] = position

    def _receive(self, position: int, step: Receive, message: Message) -> None:
        if not self._is_known(position, step, message):
            return
        if message in self._posted:
            reason = f"posted before, at position {self._posted[message]}"
            self._report(FindingKind.DUPLICATE, position, step, reason)
        elif self._program.target_rank(message) != self._rank:
            reason = f"stage {message.target_stage} is placed on rank {self._program.target_rank(message)}"
            self._report(FindingKind.WRONG_RANK, position, step, reason)
        self._posted.setdefault(message, position)
        self._unwaited_receives[message] = position

    def _is_known(self, position: int, step: Send | Receive, message: Message) -> bool:
        program = self._program
        stages = range(program.num_stages)
        if message.source_stage not in stages or message.target_stage not in stages:
            reason = f"no such boundary; the plan has stages 0 to {program.num_stages - 1}"
        elif message.micro_batch >= program.num_micro_batches:
            reason = f"the plan has micro-batches 0 to {program.num_micro_batches - 1}"
        elif program.source_rank(message) == program.target_rank(message):
            reason = f"both of its stages are on rank {program.source_rank(message)}; they hand over without a message"
        else:
            return True
        self._report(FindingKind.UNKNOWN, position, step, reason)
        return False

    def _check_nothing_left(self) -> None:
        for message, position in self._unwaited_sends.items():
            reason = f"no {WaitSend(message)} after it keeps its tensors until they are sent"
            self._report(FindingKind.MISSING, position, Send(message), reason)
        for message, position in self._unwaited_receives.items():
            reason = f"no {WaitReceive(message)} waits for it; the message would be left over"
            self._report(FindingKind.MISSING, position, Receive(message), reason)
        for message, position in self._arrived.items():
            self._report(FindingKind.MISSING, position, WaitReceive(message), "no op after it uses the message")


def _peak_bytes_by_rank(plan: Plan, profile: Profile, cluster: Cluster) -> list[int]:
    """Return the peaks of a simulated run; raises ``RefusedError`` for an order whose ops wait in a circle.

    The circle of ops is shorter to read than that of their instructions, so this comes before the queues.
    """
    costs = CostTable(profile, cluster).stage_costs(plan.partition, plan.placement, plan.recomputed_stages)
    encoded = encode_order(plan.order)
    clocked = run_clock(costs, encoded, plan.num_micro_batches, plan.queue_model)
    if clocked.num_done < encoded.num_ops:
        refuse_deadlocked_order(plan.order, plan.num_stages)
    peaks = peak_bytes_by_rank(costs, encoded, clocked, count_boundaries=profile.count_boundary_buffers)
    return [int(peak) for peak in peaks]


def find_memory_faults(peak_bytes_by_rank: Sequence[int], cluster: Cluster) -> list[Finding]:
    """Return a finding for every rank whose peak is over its cap, the worst first."""
    over: list[tuple[int, Finding]] = []
    for rank, peak in enumerate(peak_bytes_by_rank):
        usable = cluster.usable_bytes(rank)
        if usable is not None and peak > usable:
            reason = (
                f"it needs {format_gb(peak)} at its peak and has {format_gb(usable)}: "
                f"{format_gb(peak - usable)} too much; move layers to another rank, keep fewer "
                "micro-batches in flight, or recompute a stage"
            )
            over.append((usable - peak, Finding(kind=FindingKind.OUT_OF_MEMORY, rank=rank, reason=reason)))
    return [finding for _, finding in sorted(over, key=lambda pair: pair[0])]
