"""Weights between Hugging Face checkpoints and ours, one layer in memory at a time; needs no DeepSpeed."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from pipeplan.errors import CheckpointError
from pipeplan.files import write_text
from pipeplan.model.types import LayerSource, ModelLayers
from pipeplan.model.weights import load_weights, save_weights
from pipeplan.runtime.checkpoint.capture import capture_layer
from pipeplan.runtime.checkpoint.files import (
    check_files,
    find_folder,
    new_checkpoint,
    read_weights,
    start_folder,
    write_layer,
    write_training_state,
)
from pipeplan.runtime.checkpoint.manifest import read_manifest, write_manifest
from pipeplan.runtime.checkpoint.plain import training_state
from pipeplan.runtime.checkpoint.restore import Target, check_outline, source_of
from pipeplan.runtime.checkpoint.types import LayerOutline, Outline, Progress, Weight

_TAG = "global_step0"


def checkpoint_from_huggingface(model: ModelLayers, source: Path, save_folder: Path) -> Path:
    """Write the weights of a Hugging Face checkpoint as one of ours, without optimizer state; returns its folder.

    Raises:
        ModelError: A tensor is missing, unexpected or of another shape.
        FileFormatError: The source holds no checkpoint, or a file of it can't be read.
        CheckpointError: It can't be written.
    """
    owner_by_tied = _owner_by_tied(model)
    outlines: list[LayerOutline] = []
    sizes: dict[str, int] = {}
    with new_checkpoint(save_folder, _TAG) as partial:
        for index, layer in enumerate(model.layers):
            module = _build(layer)
            if module is not None:
                load_weights(model, {index: module}, source)
            captured = capture_layer(index, module, None, owner_by_tied, name=layer.name)
            sizes |= write_layer(captured.state, index, partial)
            outlines.append(captured.outline)
        sizes |= write_training_state(training_state(Progress(), None, {}, num_replicas=1), partial)
        write_manifest(Outline(layers=tuple(outlines), model=model.name, owner_by_tied=owner_by_tied), sizes, partial)
    return save_folder / _TAG


def huggingface_from_checkpoint(model: ModelLayers, source: Path, output: Path, tag: str | None = None) -> None:
    """Write the weights of a checkpoint as a folder that transformers loads, in the precision that they were run in.

    Args:
        output: A folder that doesn't exist yet, or is empty.

    Raises:
        CheckpointError: The source is no checkpoint of this model, or is damaged.
        ModelError: The model has no Hugging Face format.
    """
    if output.is_file() or (output.is_dir() and any(output.iterdir())):
        raise CheckpointError(f"{output} is there already; name a new folder")
    folder = find_folder(source, tag)
    outline, bytes_by_file = read_manifest(folder)
    check_files([name for name in bytes_by_file if name.endswith("-model_states.pt")], bytes_by_file, folder)
    layers = _FilledLayers(model, outline, folder)
    partial = start_folder(output.parent, output.name)
    try:
        save_weights(model, layers, partial)
        _set_dtype(partial / "config.json", outline)
        if output.is_dir():
            output.rmdir()
        partial.rename(output)
    except OSError as error:
        raise CheckpointError(f"{output} can't be written: {error}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


class _FilledLayers(Mapping[int, nn.Module]):
    """The layers of a model, each built and filled from a checkpoint when it is asked for, and kept by nobody."""

    def __init__(self, model: ModelLayers, outline: Outline, folder: Path) -> None:
        self._model = model
        self._outline = outline
        self._folder = folder
        self._owner_by_tied = _owner_by_tied(model)

    def __getitem__(self, index: int) -> nn.Module:
        module = _build(self._model.layers[index]) or nn.Module()
        target = Target(
            modules={index: module},
            num_layers=len(self._model.layers),
            layer_names=[layer.name for layer in self._model.layers],
            owner_by_tied=self._owner_by_tied,
        )
        check_outline(self._outline, target, f"checkpoint {self._folder}")
        sources = {name: source_of(target, index, name) for name in module.state_dict()}
        states: dict[int, dict[str, Any]] = {
            layer: read_weights(layer, self._folder) for layer in {layer for layer, _ in sources.values()}
        }
        module.load_state_dict({name: states[layer][source] for name, (layer, source) in sources.items()}, assign=True)
        return module

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self)))

    def __len__(self) -> int:
        return len(self._model.layers)


def _build(layer: LayerSource) -> nn.Module | None:
    built = layer.build()
    return built if isinstance(built, nn.Module) else None


def _owner_by_tied(model: ModelLayers) -> dict[Weight, Weight]:
    """Return the shared weights of the model, each with its first occurrence."""
    first_by_key: dict[str, tuple[int, tuple[str, ...]]] = {}
    tied: dict[Weight, Weight] = {}
    for index, layer in enumerate(model.layers):
        if layer.tied is None:
            continue
        first, names = first_by_key.setdefault(layer.tied, (index, tuple(layer.tied_weight_attr)))
        if first != index:
            tied |= {(index, own): (first, name) for own, name in zip(layer.tied_weight_attr, names, strict=True)}
    return tied


def _set_dtype(config_file: Path, outline: Outline) -> None:
    """Let the config name the precision of the weights: transformers casts them to the one that it names."""
    if not config_file.is_file():
        return
    config = json.loads(config_file.read_text(encoding="utf-8"))
    counts = Counter(
        weight.dtype for layer in outline.layers for weight in layer.weights.values() if "float" in weight.dtype
    )
    config.pop("torch_dtype", None)  # the older name
    config["dtype"] = counts.most_common(1)[0][0] if counts else "float32"
    write_text(config_file, json.dumps(config, indent=2) + "\n")
