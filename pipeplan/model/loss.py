"""The loss of a Hugging Face causal language model, as a function of what its last layer returns.

Most models shift the labels and take the cross-entropy of their logits; some add terms of their own (Bamba's
z-loss). Which of the two it is, is found out once on a few random numbers, by comparing with the model's own forward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from pipeplan.errors import ModelError
from pipeplan.model.anatomy import Anatomy, has_weights
from pipeplan.model.config import one_line
from pipeplan.model.initialise import initialised_part
from pipeplan.model.shells import BaseOutput, shell_of, stub_of

_NUM_PROBE_TOKENS = 5


def loss_of(anatomy: Anatomy, config: Any) -> Callable[[Any, Any], Tensor]:
    """Return ``loss_function(outputs, labels)`` of a model.

    Labels have the shape of the token ids, are shifted by the loss itself, and are ignored where they are -100.

    Raises:
        ModelError: The loss can't be computed from the logits.
    """
    model: Any = anatomy.model

    def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = model.loss_function(logits=logits, labels=labels, vocab_size=config.vocab_size)
        return loss

    what = type(model).__name__
    own = _OwnLoss(anatomy)
    generator = torch.Generator().manual_seed(0)
    raw = torch.randn(1, _NUM_PROBE_TOKENS, config.vocab_size, generator=generator) * 5
    labels = torch.randint(config.vocab_size, (1, _NUM_PROBE_TOKENS), generator=generator)
    labels[0, 2] = -100
    with torch.no_grad():
        try:
            logits, expected = own.run(raw, labels)
        except Exception as error:  # any failure of foreign code means the same: a loss that needs more
            raise ModelError(f"{what}: its loss can't be computed from its logits alone ({one_line(error)})") from error
        if torch.equal(cross_entropy(logits, labels), expected):
            from_logits = cross_entropy
        elif torch.equal(own(logits, labels), expected):
            from_logits = own
        else:
            raise ModelError(f"{what}: its loss can't be computed from its logits alone")
    if not anatomy.has_router_loss:
        return from_logits
    coefficient = float(getattr(model, "router_aux_loss_coef", config.router_aux_loss_coef))

    def with_router_loss(outputs: Mapping[str, Tensor], labels: Tensor) -> Tensor:
        loss = from_logits(outputs["logits"], labels)
        return loss + coefficient * outputs["aux_loss"].to(loss.device)

    return with_router_loss


class _OwnLoss:
    """The model's own forward from the output of its head on, with labels."""

    def __init__(self, anatomy: Anatomy) -> None:
        model: Any = anatomy.model
        head = model.get_output_embeddings()
        self._raw: Tensor | None = None
        self._shell: Any = shell_of(model)
        self._shell._modules[anatomy.base_name] = stub_of(anatomy.base, lambda *args, **kwargs: BaseOutput(self._raw))
        found = False
        for name in anatomy.head_names:
            part = model.get_submodule(name)
            if part is head:
                self._shell._modules[name] = stub_of(part, lambda *args: self._raw)
                found = True
            elif not has_weights(part):
                self._shell._modules[name] = initialised_part(model, name, seed=0)
        if not found:
            raise ModelError(f"{type(model).__name__} can't be cut into layers: its head is not a part of its own")

    def run(self, raw: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits and the loss that follow from what the head module returned."""
        self._raw = raw
        try:
            output = self._shell(inputs_embeds=raw, labels=labels, use_cache=False)
        finally:
            self._raw = None
        return output.logits, output.loss

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of logits that the model takes for the head's output."""
        return self.run(logits, labels)[1]
