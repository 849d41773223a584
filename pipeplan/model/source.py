"""Which model: what the command line calls it, and what a profile records so that it can be built again."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeplan.errors import FileFormatError, ModelError, PipeplanError, nearest
from pipeplan.model.config import read_config
from pipeplan.model.factory import find_root, is_factory_name, layers_from_factory
from pipeplan.model.huggingface import layers_from_config
from pipeplan.model.types import ModelLayers
from pipeplan.resources import template_path

GRANULARITIES = ("layer", "sublayer")
_SOURCE_KEYS = ("huggingface", "factory", "root", "granularity")


def open_model(text: str, *, granularity: str = "layer", seed: int = 0) -> ModelLayers:
    """Return the model that a user names.

    Args:
        text: A Hugging Face ``config.json`` or its folder, ``package.module:factory``, or the name of a template.
        seed: The layers' weights depend on it.

    Raises:
        FileFormatError: The config file is missing or malformed.
        ModelError: There is no such model, or it can't be cut into layers.
    """
    path = Path(text)
    if path.is_dir():
        return _from_file(path / "config.json", path.resolve().name, granularity, seed)
    if path.is_file():
        resolved = path.resolve()
        name = resolved.parent.name if resolved.name == "config.json" else resolved.stem
        return _from_file(path, name, granularity, seed)
    if is_factory_name(text):
        _check_granularity(granularity, is_factory=True)
        return layers_from_factory(text, find_root(text), seed=seed)
    if text in template_names():
        return _from_file(_template_file(text), text, granularity, seed)
    if "/" in text or text.endswith(".json"):
        raise FileFormatError(f"model config {path} does not exist")
    raise ModelError(
        f"no model {text!r}{nearest(text, template_names())}; give a config.json, its folder, package.module:factory, "
        f"or a template: {', '.join(template_names())}"
    )


def model_from_source(source: Mapping[str, Any], *, name: str | None = None, seed: int = 0) -> ModelLayers:
    """Return the model that a profile's ``model_source`` describes.

    Args:
        source: ``{huggingface: CONFIG, granularity: layer}``, or ``{factory: "package.module:factory", root: FOLDER}``.
        name: What the profile calls the model.

    Raises:
        ModelError: The mapping holds neither, or an unknown key; or the model can't be built.
    """
    for key in source:
        if key not in _SOURCE_KEYS:
            raise ModelError(f"model_source: unknown key {key!r}{nearest(key, _SOURCE_KEYS)}")
    granularity = source.get("granularity", "layer")
    if "huggingface" in source and "factory" not in source:
        _check_granularity(granularity, is_factory=False)
        config = source["huggingface"]
        if not isinstance(config, Mapping):
            raise ModelError("model_source: 'huggingface' must hold a whole config, not a path or a name")
        return layers_from_config(
            config, name=name or str(config.get("model_type", "model")), granularity=granularity, seed=seed
        )
    if "factory" in source and "huggingface" not in source:
        _check_granularity(granularity, is_factory=True)
        text, root = source["factory"], source.get("root")
        if not isinstance(text, str) or not is_factory_name(text):
            raise ModelError(f"model_source: factory {text!r} does not have the form package.module:factory")
        if not isinstance(root, str):
            raise ModelError(f"model_source: factory {text} has no 'root', the folder that holds its package")
        return layers_from_factory(text, Path(root), name=name, seed=seed)
    raise ModelError("model_source: give either 'huggingface' or 'factory'")


def template_names() -> list[str]:
    """Return the names of the model templates that come with pipeplan."""
    try:
        folder = template_path("models")
    except PipeplanError:
        return []
    names = [path.stem for path in folder.glob("*.json")]
    names += [path.parent.name for path in folder.glob("*/config.json")]
    return sorted(names)


def _template_file(name: str) -> Path:
    single = template_path("models") / f"{name}.json"
    return single if single.is_file() else template_path(f"models/{name}/config.json")


def _from_file(path: Path, name: str, granularity: str, seed: int) -> ModelLayers:
    _check_granularity(granularity, is_factory=False)
    return layers_from_config(read_config(path), name=name, granularity=granularity, seed=seed, where=str(path))


def _check_granularity(granularity: Any, *, is_factory: bool) -> None:
    if granularity not in GRANULARITIES:
        raise ModelError(
            f"granularity {granularity!r} is unknown{nearest(str(granularity), GRANULARITIES)}; "
            f"choose from {', '.join(GRANULARITIES)}"
        )
    if is_factory and granularity != "layer":
        raise ModelError("a factory's layers are taken as they are; granularity 'sublayer' is for Hugging Face configs")
