"""Fake tensors for layers: a mode in which torch runs code for its sizes alone."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode


@contextmanager
def fake_tensors() -> Iterator[FakeTensorMode]:
    """Make every new tensor fake, on the CPU; real ones, such as rotary tables, are taken for constants.

    Fake CUDA and meta tensors won't do: on those, torch takes attention apart into its steps.
    """
    logger = logging.getLogger("torch._subclasses.fake_tensor")  # prints a traceback before it raises
    was_disabled = logger.disabled
    logger.disabled = True
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode, _GroupedProducts():  # type: ignore[no-untyped-call]
            yield mode
    finally:
        logger.disabled = was_disabled


class _GroupedProducts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answers grouped products of fp32 and fp16, which torch computes on a CPU but not on fake tensors."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not torch.ops.aten._grouped_mm.default or args[0].dtype == torch.bfloat16:
            return func(*args, **kwargs)
        left, right = args[0], args[1]
        offsets = kwargs.get("offs", args[2] if len(args) > 2 else None)
        return left.new_empty(_shape(left, right, offsets))


def _shape(left: Tensor, right: Tensor, offsets: Tensor | None) -> tuple[int, ...]:
    if left.dim() == 2 and right.dim() == 2:  # columns of the left operand meet rows of the right one, by group
        assert offsets is not None
        return offsets.shape[0], left.shape[0], right.shape[1]
    if left.dim() == 3 and right.dim() == 3:
        return left.shape[0], left.shape[1], right.shape[2]
    return (left.shape[-2], right.shape[-1])
