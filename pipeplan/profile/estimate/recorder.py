"""Recording what the ops of one layer read, write and compute, while they run on fake tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pipeplan.profile.estimate.flops import matrix_work
from pipeplan.profile.estimate.kernels import Category
from pipeplan.profile.held import tensors_in

# Ops that move rows to computed places. They touch as much of the larger operand as the smaller one is large.
_MOVING_OPS = frozenset(
    {
        "aten.embedding",
        "aten.gather",
        "aten.index",
        "aten.index_add",
        "aten.index_add_",
        "aten.index_copy",
        "aten.index_put",
        "aten.index_put_",
        "aten._index_put_impl_",
        "aten._unsafe_index",
        "aten._unsafe_index_put",
        "aten.index_select",
        "aten.nll_loss_forward",
        "aten.scatter",
        "aten.scatter_",
        "aten.scatter_add",
        "aten.scatter_add_",
    }
)
# Ops that a real kernel neither joins with what is before nor with what is after them.
_BARRIERS = frozenset(
    {
        "aten.embedding_dense_backward",
        "aten.histc",
        "aten.sort",
        "aten.topk",
        "aten._log_softmax",  # of the vocabulary: each row is read whole before any of it is written
    }
)
_FREE_OPS = frozenset(
    {"aten.empty", "aten.empty_like", "aten.empty_strided", "aten.new_empty", "aten.new_empty_strided"}
)


@dataclass(slots=True)
class Record:
    """One op.

    Attributes:
        category: ``None`` for an op that real kernels fuse with its neighbours: pointwise, reductions, copies.
        reads: Bytes read by storage, and ``writes`` bytes written.
    """

    name: str
    category: Category | None
    flops: int
    reads: dict[int, int]
    writes: dict[int, int]


@dataclass(slots=True)
class Recording:
    """The ops between two points, and the storages that outlive them.

    Attributes:
        kept: Storages that something after these ops needs.
    """

    records: list[Record] = field(default_factory=list)
    kept: set[int] = field(default_factory=set)

    def keep(self, value: Any) -> None:
        """Note that the tensors of a pytree are needed later."""
        self.kept.update(storage_key(tensor) for tensor in tensors_in(value))


class OpRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records every op that runs inside it; one recorder sees a layer from its inputs to its last gradient.

    Attributes:
        num_bytes_by_storage: Of every storage that any op touched.
        expert_weights: Storages of operands that hold one matrix for each group of rows.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.expert_weights: set[int] = set()
        self.num_bytes_by_storage: dict[int, int] = {}
        self._storages: list[torch.UntypedStorage] = []  # held, since the keys of freed storages are used again
        self._current = Recording()

    @contextmanager
    def into(self, recording: Recording) -> Iterator[None]:
        """Collect the ops that run inside this context in ``recording``."""
        previous, self._current = self._current, recording
        try:
            yield
        finally:
            self._current = previous

    def add(self, name: str, category: Category, inputs: Any, outputs: Any, flops: int = 0) -> None:
        """Record an op that runs unseen."""
        self._current.records.append(
            Record(name, category, flops, self._traffic(tensors_in(inputs)), self._traffic(tensors_in(outputs)))
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = str(func.overloadpacket)
        inputs = tensors_in((args, kwargs))
        outputs = tensors_in(result)
        if not outputs or name in _FREE_OPS:
            return result
        reads, writes = self._traffic(inputs), self._traffic(outputs)
        if func._schema.is_mutable:
            # results are operands; what isn't read before is overwritten, which costs the same
            writes = {key: writes.get(key, reads.get(key, 0)) for key in writes}
        elif writes.keys() <= reads.keys():
            return result  # a view
        work = matrix_work(name, args, result)
        if work is None:
            category = Category.MEMORY if name in _MOVING_OPS or name in _BARRIERS else None
            work_flops = 0
        else:
            category, work_flops = work
            if category is Category.GROUPED_GEMM:
                self.expert_weights.update(storage_key(tensor) for tensor in inputs if tensor.dim() == 3)
        if name in _MOVING_OPS:
            reads, writes = _moved(name, reads, writes, inputs)
        self._current.records.append(Record(name, category, work_flops, reads, writes))
        return result

    def _traffic(self, tensors: Iterable[Tensor]) -> dict[int, int]:
        """Return the bytes that ``tensors`` span in each storage; expanded dimensions count once."""
        traffic: dict[int, int] = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in self.num_bytes_by_storage:
                self.num_bytes_by_storage[key] = storage.nbytes()
                self._storages.append(storage)
            num_elements = 1
            for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
                num_elements *= size if stride else min(size, 1)
            span = min(num_elements * tensor.element_size(), storage.nbytes())
            traffic[key] = min(traffic.get(key, 0) + span, storage.nbytes())
        return traffic


def storage_key(tensor: Tensor) -> int:
    """Return what identifies the storage of a tensor while it lives; fake tensors have no address."""
    key: int = tensor.untyped_storage()._cdata
    return key


def _moved(
    name: str, reads: dict[int, int], writes: dict[int, int], inputs: list[Tensor]
) -> tuple[dict[int, int], dict[int, int]]:
    """Cap the traffic at the rows that are moved: the result of a gather, the source of a scatter."""
    if "put" in name or "scatter" in name or "index_add" in name or "index_copy" in name:
        target = storage_key(inputs[0])
        source = max((num for key, num in reads.items() if key != target), default=0)
        if name.endswith("_"):  # in place: the rest of the target stays as it is
            return {key: min(num, source) for key, num in reads.items()}, dict.fromkeys(writes, source)
        return reads, writes
    moved = sum(writes.values())
    return {key: min(num, moved) for key, num in reads.items()}, writes
