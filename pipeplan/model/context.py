"""What a model's own forward hands to each decoder layer besides the hidden states.

Masks, position ids and rotary tables are made again where they are needed, by the model's own code, from the
shape of the hidden states and the padding mask; nothing of them travels between stages.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import OrderedDict
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map, tree_map_only

from pipeplan.model.anatomy import Anatomy, Others, layer_result, split_hidden
from pipeplan.model.initialise import initialised_part, initialised_shell
from pipeplan.model.shells import Reached, shell_of, stub_of

_FROM_BATCH = ("attention_mask", "position_ids")
_MAX_CACHED = 8  # shapes in use at once: training, evaluation, a last short batch


class ForwardContext:
    """Gives the arguments of each decoder layer; one per model and process, shared by its layers."""

    def __init__(self, anatomy: Anatomy) -> None:
        base: Any = anatomy.base
        self._config = base.config
        self._has_embeddings = anatomy.layers_read_embeddings
        self._result_length = anatomy.result_length
        self._recorded: list[Others] = []
        self._embeds: Tensor | None = None
        self._num_layers = len(anatomy.layers)
        self._shell = initialised_shell(base)
        for name in anatomy.aux_names:
            self._shell._modules[name] = initialised_part(base, name, seed=0)
        for name in anatomy.front_names:  # what they compute reaches the layers through the hidden states alone
            self._shell._modules[name] = stub_of(base.get_submodule(name), self._stand_in)
        self._shell._modules[anatomy.layers_name] = nn.ModuleList(
            stub_of(layer, self._record) for layer in anatomy.layers
        )
        self._aux_names = anatomy.aux_names
        self._aux = [self._shell.get_submodule(name) for name in anatomy.aux_names]
        self._cache: OrderedDict[tuple[Any, ...], list[Others]] = OrderedDict()
        self._masked: tuple[tuple[Any, ...], weakref.ref[Tensor], int, list[Others]] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> ForwardContext:
        return self  # a copied layer belongs to the same model

    def front_shell(self) -> nn.Module:
        """Return a shell of the base model whose forward ends at the first decoder layer."""
        shell = shell_of(self._shell)
        for name, module in zip(self._aux_names, self._aux, strict=True):
            shell._modules[name] = stub_of(module, partial(_run_with_values, module))
        return shell

    def prepare(self, device: torch.device, *, training: bool) -> None:
        """Bring the parts without weights (rotary tables, dropout) to a device and into a mode."""
        for module in self._aux:
            module.to(device)
            module.train(training)

    def arguments(self, index: int, hidden: Tensor, extras: dict[str, Any], *, training: bool) -> Others:
        """Return the positional and keyword arguments of decoder layer ``index`` after its hidden states.

        Args:
            extras: ``attention_mask``, ``position_ids`` and ``inputs_embeds`` where the batch or the model has them.
        """
        is_fake = type(hidden) is FakeTensor and all(extras.get(name) is None for name in _FROM_BATCH)
        if self._has_embeddings:
            # carries a gradient, so it belongs to one micro-batch's graph
            embeds = extras["inputs_embeds"]
            others = self._run(hidden, extras, embeds, training)[index]
            if not is_fake:
                return others

            def real_but_for_embeds(own: Any, real: Any) -> Any:
                return own if isinstance(own, Tensor) and own.shape == embeds.shape else real

            found: Others = tree_map(real_but_for_embeds, others, self._arguments_of_shape(index, hidden, training))
            return found
        with torch.no_grad():
            embeds = hidden.detach()  # only its shape, type and device count
            if is_fake:
                return self._arguments_of_shape(index, hidden, training)
            if type(embeds) is not Tensor:  # wrapped by a transform, which they must not outlive
                return self._run(hidden, extras, embeds, training)[index]
            key = self._key(hidden, training)
            if extras.get("position_ids") is not None:
                return self._run(hidden, extras, embeds, training)[index]
            mask = extras.get("attention_mask")
            if mask is not None:
                return self._masked_arguments(key, mask, hidden, extras, embeds, training)[index]
            return self._arguments_of_key(key, hidden, extras, training)[index]

    def _key(self, hidden: Tensor, training: bool) -> tuple[Any, ...]:
        """Return what decides the arguments of a batch that brings none of its own."""
        return (
            *(hidden.shape, hidden.dtype, hidden.device, training, torch.is_inference_mode_enabled()),
            self._config._attn_implementation,  # decides what masks are made of
        )

    def _arguments_of_key(
        self, key: tuple[Any, ...], hidden: Tensor, extras: dict[str, Any], training: bool
    ) -> list[Others]:
        if key not in self._cache:
            self._cache[key] = self._run(hidden, extras, hidden.detach(), training)
            if len(self._cache) > _MAX_CACHED:
                self._cache.popitem(last=False)
        return self._cache[key]

    def _arguments_of_shape(self, index: int, hidden: Tensor, training: bool) -> Others:
        """Return the arguments for hidden states without values, made from some that have them.

        Masks are made by code that looks at values, and does other things where there are none.
        """
        with torch.no_grad(), _disable_current_modes():
            stand_in = torch.zeros(1, dtype=hidden.dtype).expand(hidden.shape)
            if self._has_embeddings:  # without a gradient, so of any micro-batch
                return self._arguments_of_key(self._key(stand_in, training), stand_in, {}, training)[index]
            return self.arguments(index, stand_in, {"inputs_embeds": stand_in}, training=training)

    def _masked_arguments(
        self,
        key: tuple[Any, ...],
        mask: Tensor,
        hidden: Tensor,
        extras: dict[str, Any],
        embeds: Tensor,
        training: bool,
    ) -> list[Others]:
        """Keep what the last mask gave: the layers of a stage follow each other with the same mask."""
        version = 0 if mask.is_inference() else mask._version
        if self._masked is not None:
            last_key, last_mask, last_version, arguments = self._masked
            if last_key == key and last_mask() is mask and last_version == version:
                return arguments
        arguments = self._run(hidden, extras, embeds, training)
        self._masked = (key, weakref.ref(mask), version, arguments)
        return arguments

    def _run(self, hidden: Tensor, extras: dict[str, Any], embeds: Tensor, training: bool) -> list[Others]:
        self.prepare(hidden.device, training=training)
        self._shell.training = training
        self._recorded = []
        self._embeds = embeds
        inputs = {name: extras[name] for name in _FROM_BATCH if extras.get(name) is not None}
        with contextlib.suppress(Reached):
            self._shell(inputs_embeds=embeds, use_cache=False, **inputs)
        recorded, self._recorded, self._embeds = self._recorded, [], None
        return recorded

    def _record(self, *args: Any, **kwargs: Any) -> Any:
        hidden, others = split_hidden(args, kwargs)
        self._recorded.append(others)
        if len(self._recorded) == self._num_layers:
            raise Reached
        return layer_result(hidden, self._result_length)

    def _stand_in(self, *args: Any, **kwargs: Any) -> Any:
        return self._embeds


def _run_with_values(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run a part without weights; one that looks at values, as some rotary tables do, gets zeros for fake tensors."""
    try:
        return module(*args, **kwargs)
    except DataDependentOutputException:
        with _disable_current_modes():
            zeros = tree_map_only(
                FakeTensor, lambda value: torch.zeros(1, dtype=value.dtype).expand(value.shape), (args, kwargs)
            )
            return module(*zeros[0], **zeros[1])
