"""A Python function as a list of layers: ``package.module:factory``.

The factory takes no arguments and returns ``(layers, loss_function, sample_batch)``: layers as DeepSpeed's
``PipelineModule`` takes them (``nn.Module``, ``LayerSpec``, ``TiedLayerSpec``, plain functions), recognised by what
they offer, so that DeepSpeed isn't needed to read them; and a sample batch ``(inputs, labels)`` or a function of
``(micro_batch_size, sequence_length, seed)`` that makes one.

A layer's or a spec's attribute ``is_splittable``, True or False, says whether its weight gradients may be put off until
W. Without it all layers' may but the head's: those of the last layer with weights.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pipeplan.errors import ModelError, nearest
from pipeplan.files import digest
from pipeplan.model.initialise import seed_of
from pipeplan.model.kinds import identity_of
from pipeplan.model.types import LayerSource, ModelLayers

_EXPECTED = "a factory returns (layers, loss_function, sample_batch)"


def is_factory_name(text: str) -> bool:
    """Return whether ``text`` has the form ``package.module:factory``."""
    module, colon, function = text.partition(":")
    return bool(colon) and function.isidentifier() and all(part.isidentifier() for part in module.split("."))


def layers_from_factory(text: str, root: Path, *, name: str | None = None, seed: int = 0) -> ModelLayers:
    """Return the layers that a factory gives.

    Args:
        text: ``package.module:factory``.
        root: The folder that holds the package; put on ``sys.path``.

    Raises:
        ModelError: The module or the function is missing or fails, or returns something else than it should.
    """
    factory = _load(text, root)
    with _seeded(seed):
        try:
            result = factory()
        except (Exception, SystemExit) as error:  # the user's own code may raise anything
            raise ModelError(f"factory {text} failed: {type(error).__name__}: {error}") from error
    if not isinstance(result, tuple | list) or len(result) != 3:
        raise ModelError(f"factory {text} returned {_describe(result)}; {_EXPECTED}")
    layers, loss_function, sample_batch = result
    if not isinstance(layers, Sequence | nn.ModuleList | nn.Sequential) or not len(layers):
        raise ModelError(f"factory {text} returned {_describe(layers)} as layers; {_EXPECTED}, layers a non-empty list")
    if not callable(loss_function):
        raise ModelError(f"factory {text} returned {_describe(loss_function)} as loss function; {_EXPECTED}")
    if not callable(sample_batch) and not (isinstance(sample_batch, tuple | list) and len(sample_batch) == 2):
        raise ModelError(
            f"factory {text} returned {_describe(sample_batch)} as sample batch; expected (inputs, labels) or a "
            f"function of (micro_batch_size, sequence_length, seed)"
        )
    return ModelLayers(
        name=name or text.partition(":")[2],
        layers=tuple(_source(layer, index, seed, text) for index, layer in enumerate(layers)),
        loss_function=partial(_checked_loss, loss_function, text),
        sample_batch=partial(_made_batch, sample_batch, text)
        if callable(sample_batch)
        else partial(_given_batch, tuple(sample_batch)),
        source={"factory": text, "root": str(root.resolve())},
    )


def find_root(text: str) -> Path:
    """Return the folder that holds the package of a factory, looking in the working directory first.

    Raises:
        ModelError: The module can't be imported.
    """
    module_name = text.partition(":")[0]
    module = _import(module_name, Path.cwd(), text)
    if module.__file__ is None:
        raise ModelError(f"factory {text}: {module_name} is no Python file")
    path = Path(module.__file__).resolve()
    levels = module_name.count(".") + (path.name == "__init__.py")
    return path.parents[levels]


def _load(text: str, root: Path) -> Callable[[], Any]:
    if not root.is_dir():
        raise ModelError(f"factory {text}: its folder {root} does not exist; run from a machine that has it")
    module_name, _, function_name = text.partition(":")
    module = _import(module_name, root, text)
    try:
        factory = getattr(module, function_name)
    except AttributeError:
        hint = nearest(function_name, [key for key, value in vars(module).items() if callable(value)])
        raise ModelError(f"factory {text}: module {module_name!r} has no {function_name!r}{hint}") from None
    if not callable(factory):
        raise ModelError(f"factory {text}: {function_name!r} is {_describe(factory)}, not a function")
    return factory  # type: ignore[no-any-return]


def _import(module_name: str, root: Path, text: str) -> Any:
    folder = str(root.resolve())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    importlib.invalidate_caches()
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise ModelError(f"factory {text}: there is no module {module_name!r} in {folder}") from None
        raise ModelError(f"factory {text}: {module_name!r} needs module {error.name!r}, which is missing") from error
    except (Exception, SystemExit) as error:  # the user's own code may raise anything; scripts read their arguments
        raise ModelError(
            f"factory {text}: importing {module_name!r} failed: {type(error).__name__}: {error}"
        ) from error


def _source(layer: Any, index: int, seed: int, text: str) -> LayerSource:
    if isinstance(layer, nn.Module):
        kind = type(layer).__name__.lower()
        return LayerSource(
            name=f"{kind}.{index}",
            kind=kind,
            build=lambda: layer,
            identity=identity_of([layer]),
            num_parameters=sum(parameter.numel() for parameter in layer.parameters()),
            is_splittable=getattr(layer, "is_splittable", None),
        )
    if callable(getattr(layer, "build", None)) and hasattr(layer, "typename"):
        return _spec_source(layer, index, seed)
    if callable(layer):
        function_name = getattr(layer, "__name__", type(layer).__name__)
        return LayerSource(
            name=f"{function_name.strip('<>')}.{index}",
            kind="function",
            build=lambda: layer,
            identity=digest([getattr(layer, "__module__", ""), getattr(layer, "__qualname__", function_name), index]),
            num_parameters=0,
            is_splittable=getattr(layer, "is_splittable", None),
        )
    raise ModelError(
        f"factory {text}: layer {index} is {_describe(layer)}; expected a module, LayerSpec, TiedLayerSpec or function"
    )


def _spec_source(spec: Any, index: int, seed: int) -> LayerSource:
    kind = getattr(spec.typename, "__name__", str(spec.typename)).lower()
    key = getattr(spec, "key", None)
    described = repr([spec.typename, getattr(spec, "module_args", ()), getattr(spec, "module_kwargs", {})])
    forward_function = getattr(spec, "forward_fn", None)
    identity = [described, getattr(forward_function, "__qualname__", None)]
    if " at 0x" in described:  # an argument without a value of its own: alike or not, no one can tell
        identity.append(index)
    names: tuple[str, ...] = ()
    if key is not None:
        attributes = getattr(spec, "tied_weight_attr", "weight")
        names = (attributes,) if isinstance(attributes, str) else tuple(attributes)
    if forward_function is not None:
        names = tuple(f"module.{attribute}" for attribute in names)
    # layers of one key share weights, so they start from the same ones
    layer_seed = seed_of(seed, f"layer {index}" if key is None else f"key {key}")
    return LayerSource(
        name=f"{kind}.{index}",
        kind=kind,
        build=partial(_build_spec, spec, forward_function, layer_seed),
        identity=digest(identity),
        tied=None if key is None else str(key),
        tied_weight_attr=names,
        is_splittable=getattr(spec, "is_splittable", None),
    )


def _build_spec(spec: Any, forward_function: Any, seed: int) -> Any:
    with _seeded(seed):
        built = spec.build()
    return built if forward_function is None else WithForward(built, forward_function)


class WithForward(nn.Module):
    """A module that runs another function instead of its forward, as a ``TiedLayerSpec`` may ask for."""

    def __init__(self, module: nn.Module, forward_function: Callable[[nn.Module, Any], Any]) -> None:
        super().__init__()
        self.module = module
        self._forward_function = forward_function

    def forward(self, value: Any) -> Any:
        """Return ``forward_function(module, value)``."""
        return self._forward_function(self.module, value)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def _given_batch(batch: tuple[Any, Any], micro_batch_size: int, sequence_length: int, seed: int) -> tuple[Any, Any]:
    return batch


def _made_batch(make: Callable[..., Any], text: str, micro_batch_size: int, sequence_length: int, seed: int) -> Any:
    try:
        batch = make(micro_batch_size, sequence_length, seed)
    except Exception as error:  # the user's own code may raise anything
        raise ModelError(
            f"factory {text}: its sample batch function failed, called with (micro_batch_size={micro_batch_size}, "
            f"sequence_length={sequence_length}, seed={seed}): {type(error).__name__}: {error}"
        ) from error
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise ModelError(
            f"factory {text}: its sample batch function returned {_describe(batch)}; expected (inputs, labels)"
        )
    return tuple(batch)


def _checked_loss(loss_function: Callable[[Any, Any], Any], text: str, outputs: Any, labels: Any) -> torch.Tensor:
    loss = loss_function(outputs, labels)
    if not isinstance(loss, torch.Tensor):
        raise ModelError(f"factory {text}: its loss function returned {_describe(loss)}; expected one number, a tensor")
    if loss.numel() != 1:
        raise ModelError(
            f"factory {text}: its loss function returned a tensor of shape {list(loss.shape)}; expected one number, "
            "such as the mean"
        )
    return loss


def _describe(value: Any) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"
