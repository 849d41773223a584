"""A Hugging Face config as a list of layers, made from transformers' own classes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from pipeplan.errors import ModelError
from pipeplan.model.anatomy import Anatomy, dissect
from pipeplan.model.config import check_widths, config_from_mapping, one_line
from pipeplan.model.context import ForwardContext
from pipeplan.model.initialise import initialised_part, seed_of
from pipeplan.model.kinds import identity_of, kind_of
from pipeplan.model.loss import loss_of
from pipeplan.model.routers import mark_routers
from pipeplan.model.segments import DecoderSegment, FrontSegment, HeadSegment, TailSegment
from pipeplan.model.sublayers import HALF_NAMES, Cut, find_cut, half_of
from pipeplan.model.types import LayerSource, ModelLayers
from pipeplan.model.weights import HuggingFaceCheckpoint

_NUM_PROBE_TOKENS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class _Unit:
    """One layer to be: which parts of the model it holds and how they become a module.

    Attributes:
        paths: Attribute of the built layer → path of the part in the model.
        assemble: Makes the layer of the parts, by attribute.
        reduce: What is left of a part in this layer: all of it, or half of a decoder layer.
    """

    name: str
    kind: str
    paths: Mapping[str, str]
    assemble: Callable[[dict[str, nn.Module]], nn.Module]
    reduce: Callable[[nn.Module], nn.Module] = lambda part: part


class HuggingFaceModel:
    """A causal language model on the meta device, and how to build any layer of it alone."""

    def __init__(self, config: Any, seed: int, where: str, granularity: str = "layer") -> None:
        self.config = config
        self.seed = seed
        self.anatomy = _dissected(config, where)
        self.model: Any = self.anatomy.model
        self._cut_by_identity: dict[str, Cut | None] = {}
        self.units = self._units(granularity)
        self._unit_by_path = {path: unit for unit in self.units for path in unit.paths.values()}

    @cached_property
    def context(self) -> ForwardContext:
        """What the model's forward hands to its decoder layers, shared by all of them in this process."""
        with unset_fake_temporarily():  # it outlives any fake mode that a layer is built in
            return ForwardContext(self.anatomy)

    @cached_property
    def owner_by_name(self) -> Mapping[str, str]:
        """Name of each shared weight → the name under which it occurs first, itself included."""
        names: dict[int, list[str]] = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        return {name: same[0] for same in names.values() if len(same) > 1 for name in same}

    def weight_names(self, unit: _Unit) -> dict[str, str]:
        """Return, for one unit, the name of each weight inside the built layer and in the model."""
        return {
            f"{attribute}.{name}": f"{path}.{name}"
            for attribute, path in unit.paths.items()
            for name in unit.reduce(self.model.get_submodule(path)).state_dict()
        }

    def build(self, unit: _Unit) -> nn.Module:
        """Build one layer, with the weights that the seed gives it."""
        parts = {attribute: unit.reduce(self._initialised(path)) for attribute, path in unit.paths.items()}
        module = unit.assemble(parts)
        self._copy_shared(unit, module)
        return module

    def _initialised(self, path: str) -> nn.Module:
        seed = seed_of(self.seed, path)
        inner = path.removeprefix(f"{self.anatomy.base_name}.")
        return initialised_part(self.model if inner == path else self.anatomy.base, inner, seed)

    def _copy_shared(self, unit: _Unit, module: nn.Module) -> None:
        """Give shared weights the values that they have where they occur first."""
        owners: dict[str, nn.Module] = {}
        for local, full in self.weight_names(unit).items():
            owner = self.owner_by_name.get(full, full)
            if owner == full:
                continue
            path = next(path for path in self._unit_by_path if owner.startswith(f"{path}."))
            if path not in owners:
                owners[path] = self._initialised(path)
            with torch.no_grad():
                module.get_parameter(local).copy_(owners[path].get_parameter(owner.removeprefix(f"{path}.")))

    def source(self, unit: _Unit) -> LayerSource:
        """Describe one layer."""
        parts = [unit.reduce(self.model.get_submodule(path)) for path in unit.paths.values()]
        parameters = {
            name: value
            for part, path in zip(parts, unit.paths.values(), strict=True)
            for name, value in part.named_parameters(prefix=path)
        }
        names = self.weight_names(unit)
        shared = {local: self.owner_by_name[full] for local, full in names.items() if full in self.owner_by_name}
        return LayerSource(
            name=unit.name,
            kind=unit.kind,
            build=partial(self.build, unit),
            identity=identity_of(parts),
            num_parameters=sum(value.numel() for value in parameters.values()),
            num_tied_parameters=sum(parameters[names[local]].numel() for local in shared),
            tied=_common_path(list(shared.values())) if shared else None,
            tied_weight_attr=tuple(shared),
            weight_names=names,
        )

    def _units(self, granularity: str) -> list[_Unit]:
        anatomy = self.anatomy
        base = anatomy.base_name
        family = type(anatomy.base).__name__.removesuffix("Model")
        units = [
            _Unit(
                name="embedding",
                kind="embedding",
                paths={name: f"{base}.{name}" for name in anatomy.front_names},
                assemble=lambda parts: FrontSegment(anatomy, self.context, parts),
            )
        ]
        for index, layer in enumerate(anatomy.layers):
            cut = self._cut(index, layer) if granularity == "sublayer" else None
            paths = {"layer": f"{base}.{anatomy.layers_name}.{index}"}
            if cut is None:
                units.append(
                    _Unit(
                        name=f"layers.{index}",
                        kind=kind_of(layer, family),
                        paths=paths,
                        assemble=partial(self._decoder, index, index == len(anatomy.layers) - 1),
                    )
                )
                continue
            for half, half_name in enumerate(HALF_NAMES):
                units.append(
                    _Unit(
                        name=f"layers.{index}.{half_name}",
                        kind=kind_of(layer, family, cut.halves[half]),
                        paths=paths,
                        assemble=partial(self._decoder, index, half == 1 and index == len(anatomy.layers) - 1),
                        reduce=partial(half_of, cut=cut, half=half),
                    )
                )
        if anatomy.tail_names:
            units.append(
                _Unit(
                    name="norm",
                    kind="norm",
                    paths={name: f"{base}.{name}" for name in anatomy.tail_names},
                    assemble=TailSegment,
                )
            )
        units.append(
            _Unit(
                name="head",
                kind="head",
                paths={name: name for name in anatomy.head_names},
                assemble=lambda parts: HeadSegment(anatomy, parts),
            )
        )
        return units

    def _decoder(self, index: int, is_last: bool, parts: dict[str, nn.Module]) -> nn.Module:
        return DecoderSegment(self.anatomy, self.context, index, parts["layer"], is_last=is_last)

    def _cut(self, index: int, layer: nn.Module) -> Cut | None:
        identity = identity_of([layer])
        if identity not in self._cut_by_identity:
            generator = torch.Generator().manual_seed(0)
            hidden = torch.randn(1, _NUM_PROBE_TOKENS, self.config.hidden_size, generator=generator)
            args, kwargs = self.context.arguments(index, hidden, {"inputs_embeds": hidden}, training=False)
            with torch.no_grad():
                self._cut_by_identity[identity] = find_cut(
                    layer, lambda shell, value: shell(value, *args, **kwargs), hidden
                )
        return self._cut_by_identity[identity]


def layers_from_config(
    content: Mapping[str, Any], *, name: str, granularity: str = "layer", seed: int = 0, where: str | None = None
) -> ModelLayers:
    """Return the layers of the causal language model that a Hugging Face config describes; builds none of them.

    Args:
        where: What to call the config in errors; ``name`` if not given.

    Raises:
        ModelError: The config is faulty, or the model can't be cut into layers.
    """
    config = config_from_mapping(content, where or name)
    model = HuggingFaceModel(config, seed, where or name, granularity)
    layers = tuple(model.source(unit) for unit in model.units)
    check_widths(content, config, {layer.kind for layer in layers}, where or name)
    return ModelLayers(
        name=name,
        layers=layers,
        loss_function=loss_of(model.anatomy, config),
        sample_batch=partial(_sample_batch, config.vocab_size),
        source={"huggingface": dict(content), "granularity": granularity},
        vocab_size=config.vocab_size,
        checkpoint=HuggingFaceCheckpoint(
            model.model, tuple(layer.weight_names for layer in layers), model.owner_by_name
        ),
    )


def build_reference(content: Mapping[str, Any], *, seed: int = 0) -> nn.Module:
    """Return the plain Hugging Face model of a config, with the weights that its layers have when built alone.

    Args:
        content: The config, as ``model_source`` holds it under ``huggingface``.
    """
    config = config_from_mapping(content, "config")
    has_router_loss = getattr(config, "output_router_logits", False)
    layers = HuggingFaceModel(config, seed, "config")
    config.output_router_logits = has_router_loss
    reference = _instantiated(config)
    state = reference.state_dict(keep_vars=True)
    with torch.no_grad():
        for unit in layers.units:
            built = layers.build(unit).state_dict()
            for local, full in layers.weight_names(unit).items():
                state[full].copy_(built[local])
    return reference


def _dissected(config: Any, where: str) -> Anatomy:
    has_router_loss = bool(getattr(config, "output_router_logits", False))
    config.output_router_logits = False  # transformers would record them with hooks on modules that are not there
    try:
        with torch.device("meta"):
            model = _instantiated(config)
    except Exception as error:  # a config that passes the checks may still not describe a model
        raise ModelError(
            f"{where}: transformers can't build this {config.model_type} model: {one_line(error)}"
        ) from error
    anatomy = dissect(model, has_router_loss=has_router_loss)
    recorders = getattr(anatomy.base, "_can_record_outputs", None) or {}
    if anatomy.has_router_loss:
        for layer in anatomy.layers:
            mark_routers(layer, recorders.get("router_logits", []))
    return anatomy


def _instantiated(config: Any) -> nn.Module:
    from transformers import AutoModelForCausalLM

    create: Any = AutoModelForCausalLM.from_config
    model: nn.Module = create(config, dtype=torch.float32)
    return model


def _sample_batch(vocab_size: int, micro_batch_size: int, sequence_length: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocab_size, (micro_batch_size, sequence_length), generator=generator)
    return tokens, tokens.clone()


def _common_path(names: list[str]) -> str:
    parts = [name.split(".") for name in names]
    common = []
    for column in zip(*parts, strict=False):
        if len(set(column)) > 1:
            break
        common.append(column[0])
    return ".".join(common)
