"""A small writer for orders with two stages a rank: steps name kind and half of the V, the micro-batch follows."""

from __future__ import annotations

from collections import Counter, deque

from pipeplan.plan.ops import Op, OpKind


class Walk:
    """Ops of one rank; ``F0`` is the next forward of its first stage, ``B1`` the next backward of its second.

    B and I take from the same sequence of micro-batches. ``W0`` is the next W of the first stage, ``W`` the W that has
    waited longest.
    """

    def __init__(self, first_stage: int, second_stage: int) -> None:
        """Start with no ops."""
        self.ops: list[Op] = []
        self._stages = (first_stage, second_stage)
        self._num_forward: Counter[int] = Counter()
        self._num_backward: Counter[int] = Counter()
        self._waiting: deque[Op] = deque()

    def num_forward(self, half: int) -> int:
        """Return how many forwards of that half are written."""
        return self._num_forward[half]

    def repeat(self, times: int, steps: str) -> None:
        """Append ``steps`` that many times."""
        for _ in range(times):
            for step in steps.split():
                self._append(step)

    def flush(self, step: str) -> None:
        """Append ``step``, ``W0`` or ``W1``, until no such W waits."""
        stage = self._stages[int(step[1])]
        while any(op.stage == stage for op in self._waiting):
            self._append(step)

    def _append(self, step: str) -> None:
        kind = OpKind[step[0]]
        if kind is OpKind.W:
            wanted = None if len(step) == 1 else self._stages[int(step[1])]
            op = next((op for op in self._waiting if wanted in (None, op.stage)), None)
            if op is not None:
                self._waiting.remove(op)
                self.ops.append(op)
            return
        half = int(step[1])
        counter = self._num_forward if kind is OpKind.F else self._num_backward
        micro_batch = counter[half]
        counter[half] += 1
        self.ops.append(Op(self._stages[half], kind, micro_batch))
        if kind is OpKind.I:
            self._waiting.append(Op(self._stages[half], OpKind.W, micro_batch))
