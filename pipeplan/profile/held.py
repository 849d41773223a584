"""Bytes that a layer holds and needs: what the graph keeps from F to B, and the peak while an op runs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


def activation_bytes(run: Callable[[Any], Any], make_inputs: Callable[[], Any], *, keeps_inputs: bool) -> int:
    """Return the bytes that one more forward keeps until its backward: distinct storages of saved tensors.

    Two forwards run on inputs of their own; what both keep (parameters, buffers, cached masks and rotary tables) is
    not held once a micro-batch and does not count.

    Args:
        keeps_inputs: Count the inputs even where no op saves them, as recomputation does.
    """
    with torch.enable_grad():
        kept = [_run_and_keep(run, make_inputs(), keeps_inputs=keeps_inputs) for _ in range(2)]
    shared = kept[0].keys()
    return sum(num_bytes for storage, num_bytes in kept[1].items() if storage not in shared)


class _Kept(dict[int, int]):
    """Bytes by storage, and the tensors that keep those storages alive; fake tensors have no addresses to go by."""

    def __init__(self, tensors: list[Tensor], graph: Any) -> None:
        super().__init__((storage._cdata, storage.nbytes()) for storage in map(Tensor.untyped_storage, tensors))
        self.tensors = tensors
        self.graph = graph


def _run_and_keep(run: Callable[[Any], Any], inputs: Any, *, keeps_inputs: bool) -> _Kept:
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = run(inputs)
    if keeps_inputs:
        saved.extend(tensors_in(inputs))
    return _Kept(saved, outputs)


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors of a pytree, in its order."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def untrained_bytes(module: nn.Module) -> int:
    """Return the bytes of weights that get no gradient, and of buffers: there all the time, and no optimizer's."""
    frozen = [parameter for parameter in module.parameters() if not parameter.requires_grad]
    return sum(tensor.untyped_storage().nbytes() for tensor in (*frozen, *module.buffers()))


class PeakMeter:
    """Measures how far memory rises while an op runs, above what it finds and what it leaves."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.workspace_bytes = 0

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Watch allocations inside; ops are marked with ``watch``.

        CUDA: the allocator's own statistics. CPU: tensors made by ops; scratch space inside a kernel is not seen.
        """
        if self._device.type == "cuda":
            yield
            return
        self._live = _LiveBytes()
        with self._live:
            yield

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Watch one op."""
        before = self._current()
        self._reset_peak()
        yield
        rise = self._peak() - max(before, self._current())
        self.workspace_bytes = max(self.workspace_bytes, rise)

    def _current(self) -> int:
        return torch.cuda.memory_allocated(self._device) if self._device.type == "cuda" else self._live.current

    def _peak(self) -> int:
        return torch.cuda.max_memory_allocated(self._device) if self._device.type == "cuda" else self._live.peak

    def _reset_peak(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            self._live.peak = self._live.current


class _LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of storages that ops make inside the mode and that are still alive."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.current = 0
        self.peak = 0
        self._known: weakref.WeakValueDictionary[int, torch.UntypedStorage] = weakref.WeakValueDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {tensor.untyped_storage()._cdata for tensor in tensors_in((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_in(result):
            storage = tensor.untyped_storage()
            if storage.nbytes() == 0 or storage._cdata in known or self._known.get(storage._cdata) is storage:
                continue
            self._known[storage._cdata] = storage
            self.current += storage.nbytes()
            weakref.finalize(storage, self._free, storage.nbytes())
        self.peak = max(self.peak, self.current)
        return result

    def _free(self, num_bytes: int) -> None:
        self.current -= num_bytes
