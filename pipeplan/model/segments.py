"""The layers of a Hugging Face model: modules with one argument and one result, made of the model's own parts."""

from __future__ import annotations

import contextlib
from typing import Any

from torch import Tensor, nn

from pipeplan.model.anatomy import Anatomy, split_hidden
from pipeplan.model.boundary import pack, unpack, unpack_inputs
from pipeplan.model.context import ForwardContext
from pipeplan.model.routers import record_router_logits
from pipeplan.model.shells import BaseOutput, Reached, first_tensor, shell_of, stub_of


class FrontSegment(nn.Module):
    """Everything before the first decoder layer: token ids → hidden states."""

    def __init__(self, anatomy: Anatomy, context: ForwardContext, parts: dict[str, nn.Module]) -> None:
        super().__init__()
        self._reads_embeddings = anatomy.layers_read_embeddings
        shell: Any = context.front_shell()
        for name, part in parts.items():
            self.add_module(name, part)
            shell._modules[name] = part
        self._embedding_name = anatomy.embedding_name
        shell._modules[anatomy.layers_name] = nn.ModuleList(stub_of(layer, self._reach) for layer in anatomy.layers)
        self._shell = (shell,)  # in a tuple, so that its parts are registered once
        self._context = context
        self._reached: Tensor | None = None

    def forward(self, inputs: Any) -> Any:
        """Return the hidden states of the first decoder layer, with mask and position ids where the batch has them."""
        tokens, extras = unpack_inputs(inputs)
        shell: Any = self._shell[0]
        shell.training = self.training
        self._context.prepare(tokens.device, training=self.training)
        named = {"input_ids": tokens, **extras}
        if self._reads_embeddings:
            embeds = self.get_submodule(self._embedding_name)(tokens)
            extras["inputs_embeds"] = embeds
            named = {"inputs_embeds": embeds, **{name: value for name, value in named.items() if name != "input_ids"}}
        with contextlib.suppress(Reached):
            shell(use_cache=False, **named)
        hidden, self._reached = self._reached, None
        assert hidden is not None
        return pack(hidden, extras)

    def _reach(self, *args: Any, **kwargs: Any) -> Tensor:
        self._reached, _ = split_hidden(args, kwargs)
        raise Reached


class DecoderSegment(nn.Module):
    """One decoder layer, or a half of it."""

    def __init__(
        self, anatomy: Anatomy, context: ForwardContext, index: int, layer: nn.Module, *, is_last: bool
    ) -> None:
        super().__init__()
        self.layer = layer
        self._context = context
        self._index = index
        self._records_router_logits = anatomy.has_router_loss
        self._is_last = is_last

    def forward(self, value: Any) -> Any:
        """Return the hidden states after the layer, and what later layers need besides."""
        hidden, extras = unpack(value)
        args, kwargs = self._context.arguments(self._index, hidden, extras, training=self.training)
        if self._records_router_logits:
            with record_router_logits(self.layer) as logits:
                hidden = first_tensor(self.layer(hidden, *args, **kwargs))
            if logits:
                extras["router_logits"] = (*extras.get("router_logits", ()), *logits)
        else:
            hidden = first_tensor(self.layer(hidden, *args, **kwargs))
        if self._is_last:
            extras.pop("position_ids", None)
            extras.pop("inputs_embeds", None)
            if not self._records_router_logits:
                extras.pop("attention_mask", None)
        return pack(hidden, extras)


class TailSegment(nn.Module):
    """Everything between the last decoder layer and the head: the final norm."""

    def __init__(self, parts: dict[str, nn.Module]) -> None:
        super().__init__()
        self._names = tuple(parts)
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, value: Any) -> Any:
        """Return the normed hidden states, and what the head needs besides."""
        hidden, extras = unpack(value)
        for name in self._names:
            hidden = self.get_submodule(name)(hidden)
        return pack(hidden, extras)


class HeadSegment(nn.Module):
    """The head: hidden states → logits, and the router loss where the config asks for one."""

    def __init__(self, anatomy: Anatomy, parts: dict[str, nn.Module]) -> None:
        super().__init__()
        self._has_router_loss = anatomy.has_router_loss
        shell: Any = shell_of(anatomy.model)
        for name, part in parts.items():
            self.add_module(name, part)
            shell._modules[name] = part
        shell._modules[anatomy.base_name] = stub_of(anatomy.base, self._base_output)
        self._shell = (shell,)  # in a tuple, so that its parts are registered once
        self._output: BaseOutput | None = None

    def forward(self, value: Any) -> Any:
        """Return the logits, or a mapping of ``logits`` and ``aux_loss``."""
        hidden, extras = unpack(value)
        shell: Any = self._shell[0]
        shell.training = self.training
        self._output = BaseOutput(hidden, extras.get("router_logits"))
        options: dict[str, Any] = {}
        if self._has_router_loss:
            options = {"output_router_logits": True, "attention_mask": extras.get("attention_mask")}
        try:
            result = shell(inputs_embeds=hidden, use_cache=False, **options)
        finally:
            self._output = None
        if self._has_router_loss:
            return {"logits": result.logits, "aux_loss": result.aux_loss}
        return result.logits

    def _base_output(self, *args: Any, **kwargs: Any) -> BaseOutput:
        assert self._output is not None
        return self._output
