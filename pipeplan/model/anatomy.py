"""Where a Hugging Face causal language model can be cut, found by running its own forward without its layers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from pipeplan.errors import ModelError
from pipeplan.model.initialise import initialised_part, initialised_shell
from pipeplan.model.shells import stub_of

_PROBE_SHAPE = (1, 8)  # batch, tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Anatomy:
    """A causal language model on the meta device and the names of its parts.

    Attributes:
        model: The whole model; its weights take no memory.
        base: The part of it that returns hidden states, an attribute named ``base_name`` of ``model``.
        layers_name: The attribute of ``base`` that lists the decoder layers.
        front_names: Children of ``base`` with weights that run before the first decoder layer.
        tail_names: Children of ``base`` that run after the last decoder layer, in calling order; each takes what the
            one before it returned.
        aux_names: Children of ``base`` without weights: rotary tables and the like.
        embedding_name: The one of ``front_names`` that turns token ids into vectors.
        result_length: ``None`` when a decoder layer returns its hidden states alone, else the length of the tuple
            that starts with them.
        layers_read_embeddings: Whether decoder layers read its output besides the hidden states.
        has_router_loss: Whether the loss includes one on the router logits of all layers.
    """

    model: nn.Module
    base: nn.Module
    base_name: str
    layers_name: str
    front_names: tuple[str, ...]
    tail_names: tuple[str, ...]
    aux_names: tuple[str, ...]
    embedding_name: str
    result_length: int | None
    layers_read_embeddings: bool
    has_router_loss: bool

    @property
    def layers(self) -> list[nn.Module]:
        """The decoder layers, in order."""
        return list(self.base.get_submodule(self.layers_name).children())

    @property
    def head_names(self) -> tuple[str, ...]:
        """Children of ``model`` other than ``base``."""
        return tuple(name for name, _ in self.model.named_children() if name != self.base_name)


def dissect(model: Any, *, has_router_loss: bool) -> Anatomy:
    """Find the parts of a causal language model.

    Args:
        model: A ``PreTrainedModel`` for causal language modelling on the meta device.
        has_router_loss: What the config asks for; honoured where the model's loss knows it.

    Raises:
        ModelError: Its forward can't be cut between the decoder layers; names the class and the reason.
    """
    what = type(model).__name__
    base_name = _base_name(model)
    base = getattr(model, base_name, None)
    if not isinstance(base, nn.Module) or base is model:
        raise ModelError(f"{what} can't be cut into layers: it has no base model under {base_name!r}")
    for part, name in ((model, what), (base, type(base).__name__)):
        direct = [key for key, _ in part.named_parameters(recurse=False)]
        if direct:
            raise ModelError(f"{what} can't be cut into layers: {name} holds the weight {direct[0]!r} itself")
    layers_name = _layers_name(base, what)
    probe = _probe(base, layers_name, what)
    front_names = tuple(name for name in probe.before if has_weights(base.get_submodule(name)))
    _check_covered(base, {*front_names, *probe.after, layers_name}, what)
    embedding = model.get_input_embeddings()
    embedding_name = next((name for name in front_names if base.get_submodule(name) is embedding), None)
    if embedding_name is None:
        raise ModelError(
            f"{what} can't be cut into layers: the token embedding is no direct part of {type(base).__name__}"
        )
    if probe.layers_read_embeddings and len(front_names) > 1:
        raise ModelError(f"{what} can't be cut into layers: its decoder layers read more than the token embedding")
    return Anatomy(
        model=model,
        base=base,
        base_name=base_name,
        layers_name=layers_name,
        front_names=front_names,
        tail_names=tuple(probe.after),
        aux_names=tuple(
            name for name, child in base.named_children() if name not in probe.after and not has_weights(child)
        ),
        embedding_name=embedding_name,
        result_length=probe.result_length,
        layers_read_embeddings=probe.layers_read_embeddings,
        has_router_loss=has_router_loss and "output_router_logits" in inspect.signature(model.forward).parameters,
    )


def _base_name(model: Any) -> str:
    """Return the attribute that holds the base model: what the class says, or where that is wrong the only one."""
    from transformers import PreTrainedModel

    said: str = model.base_model_prefix
    found = [name for name, child in model.named_children() if isinstance(child, PreTrainedModel)]
    return found[0] if not hasattr(model, said) and len(found) == 1 else said


def _probe(base: nn.Module, layers_name: str, what: str) -> _Probe:
    """Run the probe with the form of result that the model expects of a layer, which only trying tells."""
    refusals: list[_RefusalError] = []
    for length in (None, 1, 2, 3):
        try:
            probe = _Probe(base, layers_name, what, result_length=length, follows_layers=False)
            _Probe(base, layers_name, what, result_length=length, follows_layers=True)
        except _RefusalError as refusal:
            refusals.append(refusal)
        else:
            return probe
    raise ModelError(str(max(refusals, key=lambda refusal: refusal.progress)))


def has_weights(module: nn.Module) -> bool:
    """Return whether the module or a part of it holds a parameter."""
    return next(module.parameters(), None) is not None


def _layers_name(base: nn.Module, what: str) -> str:
    lists = {name: child for name, child in base.named_children() if isinstance(child, nn.ModuleList) and len(child)}
    if not lists:
        raise ModelError(f"{what} can't be cut into layers: {type(base).__name__} has no list of decoder layers")
    return max(lists, key=lambda name: sum(parameter.numel() for parameter in lists[name].parameters()))


def _check_covered(base: nn.Module, covered: set[str], what: str) -> None:
    for name, child in base.named_children():
        if has_weights(child) and name not in covered:
            raise ModelError(
                f"{what} can't be cut into layers: {type(base).__name__} uses {name!r} ({type(child).__name__}) "
                f"neither before its first decoder layer nor after its last one"
            )


class _RefusalError(ModelError):
    """A probe's refusal; of several, the one that got furthest says most."""

    def __init__(self, message: str, progress: int) -> None:
        super().__init__(message)
        self.progress = progress


class _Probe:
    """One run of the base model's forward, its decoder layers left out, that notes who calls what with what.

    Runs on the CPU, since masks are made by code that looks at values; only modules with weights run on the meta
    device. The output of every module is a new tensor, so that it can be recognised where it is used; gradients tell
    what is computed from it.
    """

    def __init__(
        self, base: Any, layers_name: str, what: str, *, result_length: int | None, follows_layers: bool
    ) -> None:
        """Run the forward.

        Args:
            follows_layers: Look for layers that read what earlier layers gave, other than the hidden states, which is
                refused; else for layers that read what the modules before the first layer gave.
        """
        self.before: list[str] = []
        self.after: list[str] = []
        self.layers_read_embeddings = False
        self._what = what
        self.result_length = result_length
        self._follows_layers = follows_layers
        self._hidden: Tensor | None = None
        self._num_reached = 0
        self._num_layers = len(base.get_submodule(layers_name))
        shell = initialised_shell(base)
        for name, child in base.named_children():
            if name == layers_name:
                stubs = [stub_of(layer, self._layer_forward(index)) for index, layer in enumerate(child.children())]
                shell._modules[name] = nn.ModuleList(stubs)
            elif has_weights(child):
                shell._modules[name] = stub_of(child, self._watched(name, child))
            else:
                aux = initialised_part(base, name, seed=0)
                shell._modules[name] = stub_of(aux, self._watched(name, aux))
        tokens = torch.zeros(_PROBE_SHAPE, dtype=torch.long)
        try:
            with torch.enable_grad():
                output = shell(input_ids=tokens, use_cache=False)
        except _RefusalError:
            raise
        except Exception as error:  # any failure of foreign code means the same: not a model that can be cut
            raise self._refusal(f"its forward fails without its decoder layers ({error})") from error
        if self._num_reached != self._num_layers:
            raise self._refusal(f"its forward runs {self._num_reached} of its {self._num_layers} decoder layers")
        if not _is_same(output[0], self._hidden):
            raise self._refusal("it changes the hidden states after its last module")

    def _refusal(self, reason: str) -> _RefusalError:
        return _RefusalError(
            f"{self._what} can't be cut into layers: {reason}", self._num_reached + 2 * self._follows_layers
        )

    def _layer_forward(self, index: int) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if index != self._num_reached:
                raise self._refusal("it doesn't run its decoder layers in order")
            hidden, others = split_hidden(args, kwargs)
            if index and hidden is not self._hidden:
                raise self._refusal(f"it changes the hidden states between layers {index - 1} and {index}")
            self._check_others(index, others)
            self._num_reached += 1
            self._hidden = torch.zeros_like(hidden, requires_grad=self._follows_layers)
            more = torch.zeros(1, requires_grad=True) if self._follows_layers else None
            return layer_result(self._hidden, self.result_length, more)

        return forward

    def _check_others(self, index: int, others: Others) -> None:
        if any(isinstance(value, dict | list) for value in (*others[0], *others[1].values())):
            raise self._refusal(f"layer {index} is given a container that layers may fill for each other")
        leaves = tree_leaves(others)
        if any(isinstance(value, Tensor) and value.requires_grad for value in leaves):
            if self._follows_layers:
                raise self._refusal(f"layer {index} reads more of the layers before it than the hidden states")
            self.layers_read_embeddings = True

    def _watched(self, name: str, child: nn.Module) -> Callable[..., Any]:
        device = "meta" if has_weights(child) else "cpu"

        def forward(*args: Any, **kwargs: Any) -> Any:
            if 0 < self._num_reached < self._num_layers:
                raise self._refusal(f"it runs {name!r} between decoder layers")
            if self._num_reached:
                hidden, others = split_hidden(args, kwargs)
                if hidden is not self._hidden or others[0] or others[1]:
                    raise self._refusal(f"after its last decoder layer, {name!r} takes more than the hidden states")
                self.after.append(name)
            elif name not in self.before:
                self.before.append(name)
            moved_args, moved_kwargs = tree_map_only(Tensor, lambda value: value.to(device), (args, kwargs))
            output = child(*moved_args, **moved_kwargs)
            if device == "meta":
                output = tree_map_only(Tensor, self._new_on_cpu, output)
            if self._num_reached:
                self._hidden = output
            return output

        return forward

    def _new_on_cpu(self, value: Tensor) -> Tensor:
        requires_grad = value.is_floating_point() and not self._follows_layers
        return torch.zeros(value.shape, dtype=value.dtype, requires_grad=requires_grad)


def _is_same(output: Tensor, hidden: Tensor | None) -> bool:
    """Return whether ``output`` is ``hidden`` or a view of all of it."""
    return hidden is not None and output.shape == hidden.shape and output.data_ptr() == hidden.data_ptr()


Others = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments besides the hidden states."""


def split_hidden(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Others]:
    """Return the hidden states that a module is called with, and its other arguments."""
    if args:
        return args[0], (args[1:], kwargs)
    others = dict(kwargs)
    return others.pop("hidden_states"), ((), others)


def layer_result(hidden: Tensor, length: int | None, more: Any = None) -> Any:
    """Return ``hidden`` in the form in which a decoder layer returns it: alone, or first in a tuple, then ``more``."""
    return hidden if length is None else (hidden, *[more] * (length - 1))
