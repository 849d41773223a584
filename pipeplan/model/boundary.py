"""What one layer of a Hugging Face model hands to the next.

Mostly the hidden states alone. A padding mask, position ids, the embedding's output (where later layers read it)
and router logits (where the loss reads them) travel beside them in a mapping, and only while a later layer needs
them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from pipeplan.errors import ModelError, nearest

INPUT_NAMES = ("input_ids", "attention_mask", "position_ids")


def unpack_inputs(inputs: Any) -> tuple[Tensor, dict[str, Any]]:
    """Return the token ids of a batch and its mask and position ids, where given.

    Args:
        inputs: Token ids, shape (batch, sequence); a mapping with ``INPUT_NAMES``; or a tuple in that order.

    Raises:
        ModelError: It is something else; names the unknown key.
    """
    if isinstance(inputs, Tensor):
        return inputs, {}
    if isinstance(inputs, Mapping):
        for name in inputs:
            if name not in INPUT_NAMES:
                raise ModelError(
                    f"the batch holds {name!r}{nearest(name, INPUT_NAMES)}; known: {', '.join(INPUT_NAMES)}"
                )
        named = dict(inputs)
    elif isinstance(inputs, tuple | list) and 0 < len(inputs) <= len(INPUT_NAMES):
        named = dict(zip(INPUT_NAMES, inputs, strict=False))
    else:
        raise ModelError(f"the inputs of a batch must be token ids or a mapping of {', '.join(INPUT_NAMES)}")
    tokens = named.pop("input_ids", None)
    if not isinstance(tokens, Tensor):
        raise ModelError("the inputs of a batch have no 'input_ids'")
    return tokens, {name: value for name, value in named.items() if value is not None}


def pack(hidden: Tensor, extras: Mapping[str, Any]) -> Any:
    """Return the hidden states and what travels beside them as one value."""
    kept = {name: value for name, value in extras.items() if value is not None}
    return {"hidden_states": hidden, **kept} if kept else hidden


def unpack(value: Any) -> tuple[Tensor, dict[str, Any]]:
    """Undo ``pack``."""
    if isinstance(value, Tensor):
        return value, {}
    extras = dict(value)
    return extras.pop("hidden_states"), extras
