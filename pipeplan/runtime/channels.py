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
from pipeplan.program.types import Message, Payload, Program, Send
from pipeplan.runtime.boundary import BoundarySpec

_KEPT_SENDS = 2  # to one rank; what a send holds on to is mostly alive for the backward anyhow

# Communicators are scarce (threads and sockets on gloo, device memory on NCCL), so the engines of a process share
# one per ordered pair of global ranks.
_GROUP_BY_PAIR: dict[tuple[int, int], Any] = {}


@dataclass(slots=True, eq=False)
class _Arrival:
    """A receive, posted or still waiting for the structure of its boundary."""

    message: Message
    is_posted: bool = False
    tensors: Sequence[torch.Tensor] = ()
    works: Sequence[Any] = ()


class Channels:
    """Sends and receives the messages of one pipeline rank.

    The structure of a stage's boundary travels once, ahead of its first message, and is checked afterwards.
    Gradients need none: they answer a boundary that both ends know.

    Args:
        rank: The pipeline rank.
        replicas: For every data-parallel replica, the global rank of each pipeline rank.
        replica: The replica of this process.
    """

    def __init__(self, rank: int, replicas: Sequence[Sequence[int]], replica: int, device: torch.device) -> None:
        self._rank = rank
        self._replicas = replicas
        self._global_ranks = replicas[replica]
        self._device = device
        self._rank_by_stage: tuple[int, ...] = ()
        self._group_to: dict[int, Any] = {}
        self._group_from: dict[int, Any] = {}
        self._pending_sends: dict[Message, tuple[list[Any], list[torch.Tensor]]] = {}
        self._arrivals: dict[Message, _Arrival] = {}
        self._releasable_by_rank: dict[int, deque[Message]] = {}
        self._is_learning = True
        self._learned: set[bool] = set()  # whether gradients flowed, of the batches so far
        self._unposted_by_rank: dict[int, deque[_Arrival]] = {}
        self._spec_by_stage: dict[tuple[int, bool], BoundarySpec] = {}  # keyed by (stage, whether gradients flow)

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
            group = _GROUP_BY_PAIR[self._global_ranks[source], self._global_ranks[target]]
            if source == self._rank:
                self._group_to[target] = group
            if target == self._rank:
                self._group_from[source] = group

    def spec(self, stage: int) -> BoundarySpec:
        """Return the structure of what ``stage`` hands on; known once one of its boundaries was made or arrived."""
        return self._spec_by_stage[stage, torch.is_grad_enabled()]

    def record(self, stage: int, micro_batch: int, spec: BoundarySpec) -> bool:
        """Note the structure of a boundary made here; return whether it is the first of its stage.

        Raises:
            LaunchError: The boundary has another structure than in the first batch.
        """
        key = (stage, torch.is_grad_enabled())
        known = self._spec_by_stage.get(key)
        if known is None:
            self._spec_by_stage[key] = spec
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
        verifier has shown to complete first; so a send must not hold up its rank.
        """
        self._is_learning = torch.is_grad_enabled() not in self._learned
        self._learned.add(torch.is_grad_enabled())

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
        self._wait(arrival.works, message, "from", source)
        return arrival.tensors

    def _finish_send(self, message: Message) -> None:
        works, _ = self._pending_sends.pop(message)
        self._wait(works, message, "to", self._rank_by_stage[message.target_stage])

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
        key = (message.target_stage if is_gradient else message.source_stage, torch.is_grad_enabled())
        spec = self._spec_by_stage.get(key)
        if spec is None:
            if not may_block:
                return False
            spec = self._spec_by_stage[key] = self._receive_header(source_global, group)
        wanted = spec.gradient_tensors if is_gradient else spec.tensors
        arrival.tensors = [torch.empty(one.shape, dtype=one.dtype, device=self._device) for one in wanted]
        arrival.is_posted = True
        arrival.works = [
            dist.irecv(_wire(tensor), source_global, group=group) for tensor in arrival.tensors if tensor.numel()
        ]
        return True

    def _receive_header(self, source_global: int, group: Any) -> BoundarySpec:
        size = torch.empty(1, dtype=torch.int64, device=self._device)
        dist.recv(size, source_global, group=group)
        content = torch.empty(int(size.item()), dtype=torch.uint8, device=self._device)
        dist.recv(content, source_global, group=group)
        return BoundarySpec.decode(bytes(content.cpu().numpy()))

    def _wait(self, works: Sequence[Any], message: Message, direction: str, peer: int) -> None:
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise LaunchError(
                f"rank {self._rank} waited for message {message} {direction} rank {peer}, which did not come through: "
                f"{error}"
            ) from error


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
