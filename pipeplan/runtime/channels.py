"""Messages between pipeline ranks: one two-rank process group for every ordered pair of ranks that talks.

A group of its own for each direction of each pair means that no message waits behind one for another rank or in
the other direction, on NCCL as on gloo. Within one group messages arrive in the order in which they were sent, so
no tags are needed; the program's verifier has checked that both ends agree on the order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed import comm as dist

from pipeplan.errors import LaunchError
from pipeplan.plan.ops import Op
from pipeplan.program.types import Compute, Message, Payload, Program, Send, WaitReceive
from pipeplan.runtime.boundary import BoundarySpec
from pipeplan.runtime.deadlines import Deadlines

_KEPT_SENDS = 2  # to one rank; what a send holds on to is mostly alive for the backward anyhow

# Communicators are scarce (threads and sockets on gloo, device memory on NCCL), so the engines of a process share
# one per ordered pair of global ranks.
_GROUP_BY_PAIR: dict[tuple[int, int], Any] = {}


# (stage, micro-batch with dynamic shapes, whether gradients flow)
_SpecKey = tuple[int, int | None, bool]


@dataclass(slots=True, eq=False)
class _Arrival:
    """A receive, posted or still waiting for the structure of its boundary."""

    message: Message
    is_posted: bool = False
    tensors: Sequence[torch.Tensor] = ()
    works: Sequence[Any] = ()


class Channels:
    """Sends and receives the messages of one pipeline rank.

    The structure of a stage's boundary travels once, ahead of its first message, and is checked afterwards; with
    dynamic shapes it travels ahead of every message. Gradients need none: they answer a boundary that both ends know.

    Args:
        rank: The pipeline rank.
        replicas: For every data-parallel replica, the global rank of each pipeline rank.
        replica: The replica of this process.
        limit_s: How long to wait for one message.
        is_dynamic: Whether boundaries may differ from micro-batch to micro-batch.
    """

    def __init__(
        self,
        rank: int,
        replicas: Sequence[Sequence[int]],
        replica: int,
        device: torch.device,
        *,
        limit_s: float,
        is_dynamic: bool = False,
    ) -> None:
        self._rank = rank
        self._replicas = replicas
        self._global_ranks = replicas[replica]
        self._device = device
        self._is_dynamic = is_dynamic
        self.deadlines = Deadlines(rank, limit_s, device)
        self._is_broken = False
        self._op_by_message: dict[Message, Op] = {}
        self._rank_by_stage: tuple[int, ...] = ()
        self._group_to: dict[int, Any] = {}
        self._group_from: dict[int, Any] = {}
        self._pending_sends: dict[Message, tuple[list[Any], list[torch.Tensor]]] = {}
        self._arrivals: dict[Message, _Arrival] = {}
        self._releasable_by_rank: dict[int, deque[Message]] = {}
        self._is_learning = True
        self._learned: set[bool] = set()  # whether gradients flowed, of the batches so far
        self._unposted_by_rank: dict[int, deque[_Arrival]] = {}
        self._specs: dict[_SpecKey, BoundarySpec] = {}

    def prepare(self, program: Program) -> None:
        """Create and warm up the groups that ``program`` needs; collective over all ranks of the launch."""
        self._rank_by_stage = program.rank_by_stage
        pairs = sorted(
            {
                (program.source_rank(step.message), program.target_rank(step.message))
                for steps in program.instructions_by_rank
                for step in steps
                if isinstance(step, Send)
            }
        )
        for source, target in pairs:
            for global_ranks in self._replicas:
                _ensure_group(global_ranks[source], global_ranks[target], self._device)
            if self._rank not in (source, target):
                continue
            group = _GROUP_BY_PAIR[self._global_ranks[source], self._global_ranks[target]]
            self.deadlines.limit_collectives([group])
            if source == self._rank:
                self._group_to[target] = group
            if target == self._rank:
                self._group_from[source] = group
        self._op_by_message = _ops_by_message(program, self._rank)

    def spec(self, stage: int, micro_batch: int) -> BoundarySpec:
        """Return the structure of what ``stage`` hands on; known once such a boundary was made or arrived."""
        return self._specs[self._spec_key(stage, micro_batch)]

    def _spec_key(self, stage: int, micro_batch: int) -> _SpecKey:
        return stage, micro_batch if self._is_dynamic else None, torch.is_grad_enabled()

    def forget_shapes(self) -> None:
        """Learn the structure of every boundary anew; all ranks do so between the same two batches."""
        self._specs.clear()
        self._learned.clear()

    def record(self, stage: int, micro_batch: int, spec: BoundarySpec) -> bool:
        """Note the structure of a boundary made here; return whether the receiver has yet to be told.

        Raises:
            LaunchError: The boundary has another structure than in the first batch.
        """
        key = self._spec_key(stage, micro_batch)
        known = self._specs.get(key)
        if known is None:
            self._specs[key] = spec
            return True
        known.check(spec, f"stage {stage}, micro-batch {micro_batch}")
        return False

    def send(self, message: Message, tensors: Sequence[torch.Tensor], header: BoundarySpec | None = None) -> None:
        """Start sending; the tensors are kept until ``wait_send``.

        Args:
            header: Structure of the boundary, which goes ahead of a stage's first one.
        """
        target = self._rank_by_stage[message.target_stage]
        target_global = self._global_ranks[target]
        group = self._group_to[target]
        kept: list[torch.Tensor] = []
        if header is not None:
            content = torch.frombuffer(bytearray(header.encode()), dtype=torch.uint8).to(self._device)
            kept += [torch.tensor([content.numel()], dtype=torch.int64, device=self._device), content]
        kept += [_wire(tensor.detach().contiguous()) for tensor in tensors if tensor.numel()]
        works = [dist.isend(part, target_global, group=group) for part in kept]
        self._pending_sends[message] = (works, kept)

    def wait_send(self, message: Message) -> None:
        """Let go of a message's tensors, in a while.

        The wait itself is put off until a few more messages to the same rank wait to be released: backends complete
        a send only when its receive is posted, and a rank that waits for a slow neighbour loses time for nothing.
        Waiting later than the verified program does can't hang it.
        """
        releasable = self._releasable_by_rank.setdefault(self._rank_by_stage[message.target_stage], deque())
        releasable.append(message)
        if self._is_learning:
            self._release_completed()
        else:
            while len(releasable) > _KEPT_SENDS:
                self._finish_send(releasable.popleft())

    def start_batch(self) -> None:
        """Prepare for a batch. In the first one of its kind no send is waited for before the end.

        A receive of unknown structure is posted when somebody waits for it, which may be after a send that the
        verifier has shown to complete first; so a send must not hold up its rank. With dynamic shapes every batch is
        such a one: what is sent is kept until the end where the backend doesn't tell that it has left.
        """
        self._is_learning = self._is_dynamic or torch.is_grad_enabled() not in self._learned
        self._learned.add(torch.is_grad_enabled())
        if self._is_dynamic:
            self._specs.clear()

    def check_usable(self) -> None:
        """Check that no batch was abandoned.

        Raises:
            LaunchError: One was.
        """
        if self._is_broken:
            raise LaunchError(
                f"a batch was interrupted on rank {self._rank}, and messages of it are still on their way; build a "
                "new engine, or start again from a checkpoint"
            )

    def abandon(self) -> None:
        """Give up the batch and the groups: messages of it may still lie in them."""
        self._is_broken = True
        _GROUP_BY_PAIR.clear()

    def finish_batch(self) -> None:
        """Wait for the sends whose waits were put off."""
        self._releasable_by_rank.clear()
        for message in list(self._pending_sends):
            self._finish_send(message)

    def post_receive(self, message: Message) -> None:
        """Post the receive of a message without waiting.

        Before the structure of its boundary is known there is nothing to post; it, and whatever comes behind it
        from the same rank, is then posted by the first wait that needs it.
        """
        arrival = self._arrivals[message] = _Arrival(message)
        source = self._rank_by_stage[message.source_stage]
        self._unposted_by_rank.setdefault(source, deque()).append(arrival)
        self._post_what_is_known(source)

    def wait_receive(self, message: Message) -> Sequence[torch.Tensor]:
        """Wait until a message has arrived and return its tensors."""
        arrival = self._arrivals.pop(message)
        source = self._rank_by_stage[message.source_stage]
        while not arrival.is_posted:  # what comes ahead of it was sent ahead of it: this waits for nothing new
            self._post(self._unposted_by_rank[source].popleft(), source, may_block=True)
        self._post_what_is_known(source)
        self.deadlines.wait(arrival.works, lambda: self._describe_receive(message))
        return arrival.tensors

    def _describe_receive(self, message: Message) -> str:
        source = self._rank_by_stage[message.source_stage]
        return f"message {message} from rank {source}, which {self._op_of(message)} needs"

    def _describe_send(self, message: Message) -> str:
        target = self._rank_by_stage[message.target_stage]
        return f"rank {target} to take message {message}, which {self._op_of(message)} made"

    def _op_of(self, message: Message) -> Op | str:
        return self._op_by_message.get(message, f"stage {message.source_stage} to {message.target_stage}")

    def _finish_send(self, message: Message) -> None:
        works, _ = self._pending_sends.pop(message)
        self.deadlines.wait(works, lambda: self._describe_send(message))

    def _release_completed(self) -> None:
        """Let go of what has left, as far as the backend tells without waiting (gloo doesn't)."""
        for releasable in self._releasable_by_rank.values():
            while releasable and all(work.is_completed() for work in self._pending_sends[releasable[0]][0]):
                self._finish_send(releasable.popleft())

    def _post_what_is_known(self, source: int) -> None:
        unposted = self._unposted_by_rank[source]
        while unposted and self._post(unposted[0], source, may_block=False):
            unposted.popleft()

    def _post(self, arrival: _Arrival, source: int, *, may_block: bool) -> bool:
        message = arrival.message
        source_global = self._global_ranks[source]
        group = self._group_from[source]
        is_gradient = message.payload is Payload.GRADIENT
        key = self._spec_key(message.target_stage if is_gradient else message.source_stage, message.micro_batch)
        spec = self._specs.get(key)
        if spec is None:
            if not may_block:
                return False
            spec = self._specs[key] = self._receive_header(message, source_global, group)
        wanted = spec.gradient_tensors if is_gradient else spec.tensors
        arrival.tensors = [torch.empty(one.shape, dtype=one.dtype, device=self._device) for one in wanted]
        arrival.is_posted = True
        arrival.works = [
            dist.irecv(_wire(tensor), source_global, group=group) for tensor in arrival.tensors if tensor.numel()
        ]
        return True

    def _receive_header(self, message: Message, source_global: int, group: Any) -> BoundarySpec:
        size = torch.empty(1, dtype=torch.int64, device=self._device)
        self._receive_now(size, message, source_global, group)
        content = torch.empty(int(size.item()), dtype=torch.uint8, device=self._device)
        self._receive_now(content, message, source_global, group)
        return BoundarySpec.decode(bytes(content.cpu().numpy()))

    def _receive_now(self, tensor: torch.Tensor, message: Message, source_global: int, group: Any) -> None:
        work = dist.irecv(tensor, source_global, group=group)
        self.deadlines.wait([work], lambda: self._describe_receive(message))


def _ops_by_message(program: Program, rank: int) -> dict[Message, Op]:
    """Return the op of ``rank`` that makes or needs each of its messages, in training and in evaluation."""
    found: dict[Message, Op] = {}
    awaited: list[Message] = []
    last: Op | None = None
    for step in program.instructions_by_rank[rank]:
        match step:
            case WaitReceive():
                awaited.append(step.message)
            case Compute():
                found |= dict.fromkeys(awaited, step.op)
                awaited.clear()
                last = step.op
            case Send() if last is not None:
                found[step.message] = last
            case _:
                pass
    return found


def forget_groups() -> None:
    """Let go of every group, so that it ends when nothing else refers to it."""
    _GROUP_BY_PAIR.clear()


def _ensure_group(source: int, target: int, device: torch.device) -> None:
    """Create the group of an ordered pair of global ranks, once, and send a first message through it."""
    if (source, target) in _GROUP_BY_PAIR:
        return
    group = _GROUP_BY_PAIR[source, target] = dist.new_group([source, target])
    token = torch.zeros(1, device=device)
    own = dist.get_rank()
    if own == source:
        dist.send(token, target, group=group)
    elif own == target:
        dist.recv(token, source, group=group)


def _wire(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor as the backends take it: NCCL has no bool."""
    return tensor.view(torch.uint8) if tensor.dtype is torch.bool else tensor
