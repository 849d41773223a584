"""Running a model's own forward with most of its modules left out.

A *shell* is a copy of a module that shares everything with the original except its children, which can be
exchanged freely. A *stub* is a shell with another ``forward``: it keeps the class and the attributes of the
original, which the surrounding code may ask for, and none of its work. So a model's own ``forward``, run on a
shell, tells how it calls each part; nothing about a model family has to be written down here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


class Reached(BaseException):
    """Ends a model's forward early, at the point that was asked for.

    Not an ``Exception``, so that no handler inside the model takes it for an error.
    """


def shell_of(module: nn.Module) -> nn.Module:
    """Return a copy of ``module`` that shares its children and weights, but not the tables they are kept in."""
    shell = object.__new__(type(module))
    shell.__dict__.update(module.__dict__)
    for table in ("_parameters", "_buffers", "_modules"):
        shell.__dict__[table] = dict(module.__dict__[table])
    return shell


def stub_of(module: nn.Module, forward: Callable[..., Any]) -> nn.Module:
    """Return a shell of ``module`` that runs ``forward`` instead of its own."""
    stub = shell_of(module)
    stub.__dict__["forward"] = forward
    return stub


def first_tensor(output: Any) -> Tensor:
    """Return the hidden states that a decoder layer returned, alone or first in a tuple."""
    result = output[0] if isinstance(output, tuple) else output
    assert isinstance(result, Tensor)
    return result


class BaseOutput:
    """What the base model would have returned: hidden states, router logits, and ``None`` for all else."""

    def __init__(self, hidden: Tensor | None, router_logits: tuple[Tensor, ...] | None = None) -> None:
        self.last_hidden_state = hidden
        self.router_logits = router_logits

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    def __getitem__(self, index: Any) -> Any:
        return (self.last_hidden_state,)[index]
