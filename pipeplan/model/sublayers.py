"""Cutting a decoder layer into its residual halves: mixer and feed-forward.

A layer ``y = x + mix(x)``, ``z = y + feed(y)`` with the modules of ``feed`` answering zero computes ``y`` from
``x``, and with those of ``mix`` answering zero computes ``z`` from ``y``: each half is the layer's own forward with
the other half's modules exchanged for zeros. Where the cut is, and whether there is one, is found by running the
layer's forward with stand-ins for all its modules; norms and multipliers may stand wherever the model wants them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pipeplan.model.anatomy import layer_result, split_hidden
from pipeplan.model.kinds import STAND_IN_MARK
from pipeplan.model.shells import first_tensor, shell_of, stub_of

HALF_NAMES = ("mixer", "feed_forward")
Call = Callable[[nn.Module, Tensor], Any]
_RESULT_LENGTHS = (None, 2, 1, 3)  # a tensor, or a tuple that starts with one


@dataclass(frozen=True, slots=True)
class Cut:
    """The modules of the two halves of a decoder layer, by their attributes.

    Attributes:
        result_lengths: What each module returns; see ``Anatomy.result_length``.
    """

    halves: tuple[tuple[str, ...], tuple[str, ...]]
    result_lengths: Mapping[str, int | None]


def half_of(layer: nn.Module, cut: Cut, half: int) -> nn.Module:
    """Return a shell of ``layer`` that computes one half of it; the modules of that half are those of ``layer``."""
    shell = shell_of(layer)
    for name in cut.halves[1 - half]:
        shell._modules[name] = _stand_in(layer.get_submodule(name), _zeros_like, cut.result_lengths[name])
    return shell


def find_cut(layer: nn.Module, call: Call, hidden: Tensor) -> Cut | None:
    """Return where ``layer`` falls into two residual halves, or ``None`` if it doesn't.

    Args:
        layer: A decoder layer on the meta device.
        call: Runs a shell of the layer on hidden states and the layer's other arguments.
        hidden: Random hidden states on the CPU, one sample.
    """
    if next(layer.parameters(recurse=False), None) is not None:
        return None
    lengths: dict[str, int | None] = {}
    starts = _branch_starts(layer, call, hidden, lengths)
    if starts is None:
        return None
    order, branches = starts
    if len(branches) != 2:
        return None
    second = order.index(branches[1])
    cut = Cut((tuple(order[:second]), tuple(order[second:])), lengths)
    return cut if _halves_compose(layer, cut, call, hidden) else None


def _branch_starts(
    layer: nn.Module, call: Call, hidden: Tensor, lengths: dict[str, int | None]
) -> tuple[list[str], list[str]] | None:
    """Return the modules of ``layer`` in calling order, and those of them that read the residual stream.

    With every module answering zero, the stream keeps the value of ``hidden``. Fills ``lengths`` on the way.
    """
    order: list[str] = []
    branches: list[str] = []
    names = [name for name, _ in layer.named_children()]
    lengths.update(dict.fromkeys(names))

    def watched(name: str) -> Callable[[Tensor], Tensor]:
        def answer(value: Tensor) -> Tensor:
            if name in order:
                raise _CalledTwiceError
            order.append(name)
            if value.shape == hidden.shape and torch.equal(value, hidden):
                branches.append(name)
            return _zeros_like(value)

        return answer

    for _ in range(len(names) * len(_RESULT_LENGTHS)):
        order.clear()
        branches.clear()
        shell = shell_of(layer)
        for name in names:
            shell._modules[name] = _stand_in(layer.get_submodule(name), watched(name), lengths[name])
        try:
            output = first_tensor(call(shell, hidden))
        except _CalledTwiceError:
            return None
        except Exception:  # the module called last returned what the layer can't use: try the next form
            if not order or lengths[order[-1]] == _RESULT_LENGTHS[-1]:
                return None
            position = _RESULT_LENGTHS.index(lengths[order[-1]])
            lengths[order[-1]] = _RESULT_LENGTHS[position + 1]
        else:
            is_residual = output.shape == hidden.shape and torch.equal(output, hidden)
            return (order, branches) if is_residual and set(order) == set(names) else None
    return None


def _halves_compose(layer: nn.Module, cut: Cut, call: Call, hidden: Tensor) -> bool:
    """Return whether the halves in a row give what the layer gives, whatever their modules do with what they read.

    They don't where both halves read the same input and run in parallel.
    """
    generator = torch.Generator().manual_seed(1)
    answers = {name: torch.randn(hidden.shape, generator=generator) for half in cut.halves for name in half}

    def with_answers(*halves: int) -> nn.Module:
        shell = shell_of(layer)
        for index, names in enumerate(cut.halves):
            for name in names:
                answer = _plus(answers[name]) if index in halves else _zeros_like
                shell._modules[name] = _stand_in(layer.get_submodule(name), answer, cut.result_lengths[name])
        return shell

    with contextlib.suppress(RuntimeError, TypeError):
        whole = first_tensor(call(with_answers(0, 1), hidden))
        middle = first_tensor(call(with_answers(0), hidden))
        both = first_tensor(call(with_answers(1), middle))
        changes = not torch.equal(middle, hidden) and not torch.equal(both, middle)
        return changes and torch.allclose(whole, both, rtol=1e-6, atol=1e-6)
    return False


class _CalledTwiceError(Exception):
    """A module is called more than once in a layer."""


def _stand_in(module: nn.Module, answer: Callable[[Tensor], Tensor], length: int | None) -> nn.Module:
    """Return a stub without weights that answers from its input, in the form that the layer expects."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        hidden, _ = split_hidden(args, kwargs)
        return layer_result(answer(hidden), length)

    stub = stub_of(module, forward)
    for table in ("_parameters", "_buffers", "_modules"):
        stub.__dict__[table] = {}
    stub.__dict__[STAND_IN_MARK] = True
    return stub


def _zeros_like(value: Tensor) -> Tensor:
    """Return zeros in the shape of ``value`` that take no memory."""
    return value.new_zeros(1).expand(value.shape)


def _plus(answer: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda value: answer + 0.5 * value
