"""The files of a checkpoint, one layer at a time, and the folder that appears whole or not at all.

A checkpoint named TAG is the folder ``TAG`` with

- ``layer_XX-model_states.pt``: the weights of a layer, DeepSpeed's own layer file;
- ``layer_XX-optimizer_states.safetensors``: what the optimizer keeps for them;
- ``mp_rank_00_model_states.pt``: counters, scheduler and the script's own state, as DeepSpeed names and fills it;
- ``checkpoint.yaml``: what there is; see ``manifest``.

Beside it the file ``latest`` names the newest.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from pipeplan.errors import CheckpointError
from pipeplan.files import write_text
from pipeplan.runtime.checkpoint.manifest import MANIFEST
from pipeplan.runtime.checkpoint.types import LayerState, WeightState

LATEST = "latest"
TRAINING_STATE = "mp_rank_00_model_states.pt"
_MASTER = "master"


def weights_file(layer: int) -> str:
    """Return the name of the file with the weights of a layer."""
    return f"layer_{layer:02d}-model_states.pt"


def optimizer_file(layer: int) -> str:
    """Return the name of the file with the optimizer state of a layer."""
    return f"layer_{layer:02d}-optimizer_states.safetensors"


def write_layer(state: LayerState, layer: int, folder: Path) -> dict[str, int]:
    """Write the files of a layer, those that have content; return their sizes in bytes."""
    written: list[str] = []
    if state.weights:
        weights = {
            name: value.detach().cpu().clone() if isinstance(value, Tensor) else value  # views would drag their base in
            for name, value in state.weights.items()
        }
        torch.save(weights, folder / weights_file(layer))
        written.append(weights_file(layer))
    if state.optimizer:
        tensors: dict[str, Tensor] = {}
        for name, entry in state.optimizer.items():
            tensors |= {f"{key}:{name}": value for key, value in entry.tensors.items()}
            if entry.master is not None:
                tensors[f"{_MASTER}:{name}"] = entry.master
        numbers = {name: dict(entry.numbers) for name, entry in state.optimizer.items()}
        save_file(
            {key: value.detach().cpu().contiguous().clone() for key, value in tensors.items()},
            folder / optimizer_file(layer),
            metadata={"numbers": json.dumps(numbers)},
        )
        written.append(optimizer_file(layer))
    return {name: (folder / name).stat().st_size for name in written}


def read_weights(layer: int, folder: Path) -> dict[str, Any]:
    """Return the weights of a layer, mapped from the file rather than copied.

    Raises:
        CheckpointError: The file can't be read.
    """
    path = folder / weights_file(layer)
    try:
        content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # whatever a truncated archive or pickle makes of itself
        raise CheckpointError(f"{path} can't be read ({_first_line(error)}); is it missing or damaged?") from None
    return content


def read_numbers(layer: int, folder: Path) -> dict[str, dict[str, int | float]]:
    """Return the numbers that the optimizer keeps for each weight of a layer, without reading tensors.

    Raises:
        CheckpointError: The file can't be read.
    """
    path = folder / optimizer_file(layer)
    try:
        with safe_open(path, framework="pt") as reader:
            numbers: dict[str, dict[str, int | float]] = json.loads(reader.metadata()["numbers"])
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} can't be read ({_first_line(error)}); is it missing or damaged?") from None
    return numbers


def read_optimizer(layer: int, folder: Path) -> dict[str, WeightState]:
    """Return what the optimizer keeps for each weight of a layer.

    Raises:
        CheckpointError: The file can't be read.
    """
    numbers = read_numbers(layer, folder)
    path = folder / optimizer_file(layer)
    tensors: dict[str, dict[str, Tensor]] = {name: {} for name in numbers}
    try:
        with safe_open(path, framework="pt") as reader:
            for entry in reader.keys():  # noqa: SIM118 (the reader is no mapping)
                key, _, name = entry.partition(":")
                tensors[name][key] = reader.get_tensor(entry)
    except (OSError, SafetensorError, KeyError) as error:
        raise CheckpointError(f"{path} can't be read ({_first_line(error)}); is it missing or damaged?") from None
    return {
        name: WeightState(master=found.pop(_MASTER, None), tensors=found, numbers=numbers[name])
        for name, found in tensors.items()
    }


def check_files(names: list[str], bytes_by_file: Mapping[str, int], folder: Path) -> None:
    """Check that files are there and as long as when they were written.

    Raises:
        CheckpointError: Names the first that is missing or truncated.
    """
    for name in names:
        if name not in bytes_by_file:
            raise CheckpointError(f"{folder / MANIFEST} does not list {name}")
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder / name} is missing; copy the whole folder of the checkpoint")
        size = (folder / name).stat().st_size
        if size != bytes_by_file[name]:
            raise CheckpointError(
                f"{folder / name} has {size} bytes instead of {bytes_by_file[name]}: it is truncated or was changed; "
                "copy the checkpoint again"
            )


def write_training_state(content: Mapping[str, Any], folder: Path) -> dict[str, int]:
    """Write counters, scheduler and the script's own state; return the file's size."""
    torch.save(dict(content), folder / TRAINING_STATE)
    return {TRAINING_STATE: (folder / TRAINING_STATE).stat().st_size}


def read_training_state(folder: Path) -> dict[str, Any]:
    """Return counters, scheduler and the script's own state. It may hold any object of the script: trust its writer.

    Raises:
        CheckpointError: The file can't be read.
    """
    path = folder / TRAINING_STATE
    try:
        content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=False)
    except Exception as error:  # whatever a truncated archive, or a class that is gone, makes of itself
        raise CheckpointError(f"{path} can't be read ({_first_line(error)}); is it missing or damaged?") from None
    return content


def check_tag(tag: str) -> str:
    """Return the tag if it can name a folder.

    Raises:
        CheckpointError: It can't.
    """
    if not tag or tag.startswith(".") or "/" in tag or tag == LATEST:
        raise CheckpointError(f"checkpoint tag {tag!r} can't name a folder; use letters, digits, '_' and '-'")
    return tag


def start_folder(save_folder: Path, tag: str) -> Path:
    """Return an empty folder to write a checkpoint into, out of sight of readers.

    Raises:
        CheckpointError: It can't be made.
    """
    partial = partial_folder(save_folder, tag)
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    except OSError as error:
        raise CheckpointError(f"checkpoint folder {partial} can't be made: {error}") from None
    return partial


def partial_folder(save_folder: Path, tag: str) -> Path:
    """Return where a checkpoint is written before it is complete."""
    return save_folder / f".{tag}.partial"


def commit_folder(save_folder: Path, tag: str, *, is_latest: bool) -> Path:
    """Let a complete checkpoint appear under its name, in place of an older one; returns its folder.

    Raises:
        CheckpointError: It can't be moved there.
    """
    partial, folder, replaced = partial_folder(save_folder, tag), save_folder / tag, save_folder / f".{tag}.replaced"
    try:
        shutil.rmtree(replaced, ignore_errors=True)
        if folder.exists():
            folder.rename(replaced)
        partial.rename(folder)
        shutil.rmtree(replaced, ignore_errors=True)
    except OSError as error:
        raise CheckpointError(f"checkpoint {folder} can't be put in place: {error}") from None
    if is_latest:
        write_text(save_folder / LATEST, tag)
    return folder


@contextmanager
def new_checkpoint(save_folder: Path, tag: str) -> Iterator[Path]:
    """Yield a folder to write a checkpoint into, which appears under its name afterwards if nothing was raised.

    Raises:
        CheckpointError: It can't be written.
    """
    partial = start_folder(save_folder, tag)
    try:
        yield partial
        commit_folder(save_folder, tag, is_latest=True)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"checkpoint {save_folder / tag} can't be written: {error}") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def find_folder(load_folder: Path, tag: str | None = None) -> Path:
    """Return the folder of a checkpoint: ``tag``, or the latest; ``load_folder`` may also be that folder itself.

    Raises:
        CheckpointError: There is none.
    """
    if tag is not None:
        folder = load_folder / str(tag)
        if not folder.is_dir():
            raise CheckpointError(f"there is no checkpoint {tag!r} in {load_folder}{_others(load_folder)}")
        return folder
    if (load_folder / MANIFEST).is_file():
        return load_folder
    if not (load_folder / LATEST).is_file():
        raise CheckpointError(
            f"{load_folder} holds no checkpoint: no file {LATEST!r}, no {MANIFEST}{_others(load_folder)}"
        )
    return find_folder(load_folder, (load_folder / LATEST).read_text(encoding="utf-8").strip())


def _others(load_folder: Path) -> str:
    if not load_folder.is_dir():
        return ""
    tags = sorted(path.parent.name for path in load_folder.glob(f"*/{MANIFEST}"))
    return f"; it holds {', '.join(tags)}" if tags else ""


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
