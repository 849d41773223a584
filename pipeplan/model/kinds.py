"""What a layer is called in profiles, and which layers cost the same."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable

from torch import nn

# Parts of class names, as transformers' model families use them, the most telling first.
_KIND_BY_WORD = (
    ("gateddeltanet", "gated_delta_net"),
    ("mamba", "mamba"),
    ("attention", "attention"),
    ("moe", "moe"),
    ("experts", "moe"),
    ("mlp", "mlp"),
    ("feedforward", "mlp"),
    ("shortconv", "conv"),
    ("recurrentblock", "recurrent"),
)
_ORDER = ("mamba", "gated_delta_net", "conv", "recurrent", "attention", "moe", "mlp")  # mixers before feed-forward

STAND_IN_MARK = "_pipeplan_stand_in"
"""Attribute of a module that stands for one that belongs to another layer, and costs nothing."""

# Attributes that tell two layers apart without making them cost differently.
_NUMBERING = frozenset({"layer_idx", "layer_id", "idx", "training", "block_id", "_pipeplan_router_index"})


def kind_of(layer: nn.Module, family: str, names: Collection[str] | None = None) -> str:
    """Return the kind of a decoder layer: the kinds of its parts joined by ``+``, mixers before feed-forward.

    Args:
        family: What the class names of the model start with, such as ``Jamba``; it may itself sound like a kind.
        names: The children that count; all of them if not given.
    """
    parts = {name: child for name, child in layer.named_children() if names is None or name in names}
    kinds = {kind for name, part in parts.items() if (kind := _kind_of_part(name, part, family)) is not None}
    if not kinds:
        kinds = {_kind_by_class(layer, family) or _kind_by_class(layer, "") or type(layer).__name__.lower()}
    if "moe" in kinds:
        kinds.discard("mlp")  # a shared expert, part of the mixture
    return "+".join(sorted(kinds, key=lambda kind: _ORDER.index(kind) if kind in _ORDER else len(_ORDER)))


def _kind_of_part(attribute: str, part: nn.Module, family: str) -> str | None:
    if "norm" in type(part).__name__.lower():
        return None
    kind = _kind_by_class(part, family) or ("mamba" if attribute == "mamba" else None)
    if kind in (None, "mlp"):
        inner = [found for module in part.modules() if (found := _kind_by_class(module, family)) is not None]
        kind = (
            "moe" if kind == "mlp" and "moe" in inner else next(iter(inner), None)
        )  # GPT-OSS calls its mixture an MLP
    return kind or _kind_by_class(part, "")


def _kind_by_class(module: nn.Module, family: str) -> str | None:
    name = type(module).__name__.removeprefix(family).lower()
    return next((kind for word, kind in _KIND_BY_WORD if word in name), None)


def identity_of(parts: Iterable[nn.Module]) -> str:
    """Return a digest of structure: classes, weights' shapes and types, and settings, but no names or numbering."""
    text = hashlib.sha256()
    for part in parts:
        for path, module in part.named_modules():
            if STAND_IN_MARK in vars(module) or _is_half(module):
                continue
            text.update(f"\n{path}:{type(module).__module__}.{type(module).__qualname__}".encode())
            for tables in (module._parameters, module._buffers):
                for name, tensor in tables.items():
                    if tensor is not None:
                        text.update(f" {name}={tuple(tensor.shape)}{tensor.dtype}".encode())
            for name, value in sorted(vars(module).items()):
                if name not in _NUMBERING and isinstance(value, bool | int | float | str):
                    text.update(f" {name}={value!r}".encode())
    return text.hexdigest()[:16]


def _is_half(module: nn.Module) -> bool:
    """Return whether only a part of a module's work is left; what it costs is then told by the modules that do it."""
    return any(STAND_IN_MARK in vars(child) for child in module.children())
