"""Weights of single layers in Hugging Face checkpoints (safetensors, one file or several).

A checkpoint may name and cut its tensors otherwise than the model does (experts one by one, older prefixes).
transformers knows how to convert each family; its conversions run here on the tensors of one layer at a time.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pipeplan.errors import FileFormatError, ModelError, nearest
from pipeplan.files import write_text
from pipeplan.model.types import ModelLayers

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


def load_weights(model: ModelLayers, modules: Mapping[int, nn.Module], folder: Path) -> None:
    """Copy weights from a Hugging Face checkpoint into built layers, reading only what they need.

    Args:
        modules: Built layers by their index in ``model.layers``.

    Raises:
        ModelError: The model has no checkpoint format, or a tensor is missing, unexpected or of another shape.
        FileFormatError: The folder holds no checkpoint, or a file of it can't be read.
    """
    if model.checkpoint is None:
        raise ModelError(f"model {model.name!r} comes from a factory; load its weights in the factory itself")
    model.checkpoint.load(modules, folder)


def save_weights(model: ModelLayers, modules: Mapping[int, nn.Module], folder: Path) -> None:
    """Write built layers as a Hugging Face checkpoint, one file a layer, an index of all, and the config.

    Args:
        modules: Every layer of the model, by its index.

    Raises:
        ModelError: The model has no checkpoint format, or a layer is left out.
    """
    if model.checkpoint is None:
        raise ModelError(f"model {model.name!r} comes from a factory; pipeplan knows no file format for its weights")
    from safetensors.torch import save_file

    missing = [layer.name for index, layer in enumerate(model.layers) if index not in modules]
    if missing:
        raise ModelError(f"can't save model {model.name!r} without its layer {missing[0]!r}")
    folder.mkdir(parents=True, exist_ok=True)
    file_by_name: dict[str, str] = {}
    num_bytes = 0
    for index in range(len(model.layers)):
        tensors = {
            name: tensor
            for name, tensor in model.checkpoint.tensors(index, modules[index]).items()
            if name not in file_by_name
        }
        if not tensors:
            continue
        file_name = f"model-{index + 1:05d}-of-{len(model.layers):05d}.safetensors"
        save_file(tensors, folder / file_name, metadata={"format": "pt"})
        file_by_name.update(dict.fromkeys(tensors, file_name))
        num_bytes += sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    index_content = {"metadata": {"total_size": num_bytes}, "weight_map": dict(sorted(file_by_name.items()))}
    write_text(folder / _INDEX, json.dumps(index_content, indent=2) + "\n")
    if "huggingface" in model.source:
        write_text(folder / "config.json", json.dumps(model.source["huggingface"], indent=2) + "\n")


class HuggingFaceCheckpoint:
    """Reads and writes the tensors of single layers of one Hugging Face model."""

    def __init__(
        self, meta_model: Any, weight_names: tuple[Mapping[str, str], ...], owner_by_name: Mapping[str, str]
    ) -> None:
        """Take the model on the meta device, each layer's weight names and the owners of shared weights."""
        self._model = meta_model
        self._weight_names = weight_names
        self._owner_by_name = owner_by_name

    def load(self, modules: Mapping[int, nn.Module], folder: Path) -> None:
        """Copy weights from the checkpoint in ``folder`` into built layers; reads and holds one layer at a time."""
        keys = self._matched(_file_by_key(folder), folder)
        for index, module in modules.items():
            self._load_layer(self._weight_names[index], module, keys, folder)

    def _load_layer(self, names: Mapping[str, str], module: nn.Module, keys: _Keys, folder: Path) -> None:
        wanted = {self._stored_name(name, keys) for name in names.values()}
        missing = sorted(wanted - set(keys.by_target))
        if missing:
            raise ModelError(
                f"checkpoint {folder} has no tensor for {missing[0]!r}{nearest(missing[0], keys.by_target)}"
                + (f", and for {len(missing) - 1} more" if len(missing) > 1 else "")
            )
        loaded = self._converted(keys, {key for name in wanted for key in keys.by_target[name]})
        own = module.state_dict(keep_vars=True)
        with torch.no_grad():
            for local, full in names.items():
                value = loaded[self._stored_name(full, keys)]
                if own[local].shape != value.shape:
                    raise ModelError(
                        f"checkpoint {folder}: {full!r} has shape {tuple(value.shape)}, the model "
                        f"{tuple(own[local].shape)}"
                    )
                own[local].copy_(value)

    def tensors(self, index: int, module: nn.Module) -> dict[str, Tensor]:
        """Return the weights of layer ``index`` as a checkpoint stores them; shared ones come with their owner."""
        from transformers.core_model_loading import revert_weight_conversion

        own = module.state_dict()
        named = {
            full: own[local].detach().cpu().contiguous()
            for local, full in self._weight_names[index].items()
            if self._owner_by_name.get(full, full) == full
        }
        reverted = revert_weight_conversion(self._model, named) if named else {}
        return {name: tensor.contiguous().clone() for name, tensor in reverted.items()}

    def _stored_name(self, name: str, keys: _Keys) -> str:
        """Return under which name a shared weight is stored: its own, or that of its first occurrence."""
        owner = self._owner_by_name.get(name, name)
        return owner if owner in keys.by_target or name not in keys.by_target else name

    @cached_property
    def _conversions(self) -> tuple[list[Any], list[Any]]:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter

        mapping = get_model_conversion_mapping(self._model)
        return (
            [entry for entry in mapping if not isinstance(entry, WeightConverter)],
            [entry for entry in mapping if isinstance(entry, WeightConverter)],
        )

    def _matched(self, file_by_key: Mapping[str, Path], folder: Path) -> _Keys:
        """Find which weights each tensor of a checkpoint is for.

        Raises:
            ModelError: A tensor is for none, and is none that transformers leaves out itself.
        """
        from transformers.core_model_loading import rename_source_key

        state = self._model.state_dict()
        renamings, converters = self._conversions
        keys = _Keys(file_by_key)
        prefix = self._model.base_model_prefix
        unexpected = []
        for key in sorted(file_by_key, key=_natural_order):
            target, pattern = rename_source_key(key, renamings, converters, prefix, state)
            if target not in state and key in state:
                target, pattern = key, None
            if target in state:
                keys.add(key, target, pattern, self._targets(target, pattern))
            elif not self._may_ignore(key) and not self._may_ignore(target):
                unexpected.append(key)
        if unexpected:
            raise ModelError(
                f"checkpoint {folder} holds {unexpected[0]!r}, which this model does not have"
                f"{nearest(unexpected[0], state)}; is it a checkpoint of another model?"
            )
        return keys

    def _targets(self, target: str, pattern: str | None) -> list[str]:
        """Return all weights that come out of the conversion whose first one is ``target``."""
        if pattern is None:
            return [target]
        converter = self._converter_by_pattern[pattern]
        first, *others = converter.target_patterns
        return [target, *(target.replace(first, other) for other in others)]

    @cached_property
    def _converter_by_pattern(self) -> dict[str, Any]:
        return {pattern: entry for entry in self._conversions[1] for pattern in entry.source_patterns}

    def _may_ignore(self, key: str) -> bool:
        patterns = [*(self._model._keys_to_ignore_on_load_unexpected or []), r"rotary_emb\.inv_freq$"]
        return any(re.search(pattern, key) for pattern in patterns)

    def _converted(self, keys: _Keys, wanted: Iterable[str]) -> dict[str, Tensor]:
        """Read tensors and return them as the model names and cuts them."""
        loaded: dict[str, Tensor] = {}
        running: dict[str, Any] = {}
        for key, tensor in _read_tensors(keys.file_by_key, sorted(wanted, key=_natural_order)):
            target, pattern = keys.target_of[key]
            if pattern is None:
                loaded[target] = tensor
                continue
            converter = running.setdefault(target, copy.deepcopy(self._converter_by_pattern[pattern]))
            converter.add_tensor(target, key, pattern, tensor)
        for target, converter in running.items():
            for name, value in converter.convert(target, model=self._model, config=self._model.config).items():
                loaded[name] = value[0] if isinstance(value, list) else value
        return loaded


class _Keys:
    """The tensors of one checkpoint: in which file each is, and which weights of the model it is for."""

    def __init__(self, file_by_key: Mapping[str, Path]) -> None:
        self.file_by_key = file_by_key
        self.target_of: dict[str, tuple[str, str | None]] = {}
        self.by_target: dict[str, list[str]] = {}

    def add(self, key: str, target: str, pattern: str | None, weights: Iterable[str]) -> None:
        """Note that tensor ``key`` goes into ``weights``, by the conversion of ``pattern`` named after ``target``."""
        self.target_of[key] = (target, pattern)
        for weight in weights:
            self.by_target.setdefault(weight, []).append(key)


def _file_by_key(folder: Path) -> dict[str, Path]:
    from safetensors import safe_open

    if not folder.is_dir():
        raise FileFormatError(f"checkpoint folder {folder} does not exist")
    index = folder / _INDEX
    if index.is_file():
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            return {str(key): folder / str(name) for key, name in weight_map.items()}
        except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
            raise FileFormatError(f"checkpoint index {index} can't be read ({error}); is it truncated?") from None
    single = folder / _SINGLE
    if not single.is_file():
        raise FileFormatError(f"checkpoint folder {folder} holds neither {_SINGLE} nor {_INDEX}")
    try:
        with safe_open(single, framework="pt") as reader:
            return dict.fromkeys(reader.keys(), single)
    except Exception as error:  # safetensors raises its own kinds
        raise FileFormatError(f"checkpoint file {single} can't be read ({error}); is it truncated?") from None


def _read_tensors(file_by_key: Mapping[str, Path], keys: list[str]) -> Iterable[tuple[str, Tensor]]:
    from safetensors import safe_open

    for path in dict.fromkeys(file_by_key[key] for key in keys):
        try:
            with safe_open(path, framework="pt") as reader:
                for key in keys:
                    if file_by_key[key] == path:
                        yield key, reader.get_tensor(key)
        except FileFormatError:
            raise
        except Exception as error:  # safetensors raises its own kinds; a missing shard, a truncated file
            raise FileFormatError(
                f"checkpoint file {path} can't be read ({error}); is it missing or truncated?"
            ) from None


def _natural_order(key: str) -> list[tuple[int, str]]:
    """Sort numbers inside names by value, so that expert 10 comes after expert 9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in key.split(".")]
