"""``checkpoint.yaml``: what is in a checkpoint's folder. It is written last, so that without it there is none."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeplan.errors import CheckpointError, FileFormatError
from pipeplan.files import Document, Flow, FlowList, check_format, dump_yaml, parse_document, read_yaml, write_text
from pipeplan.runtime.checkpoint.types import LayerOutline, Outline, Progress, Weight, WeightOutline

MANIFEST = "checkpoint.yaml"
_FORMAT = "pipeplan-checkpoint/1"
_WEIGHT = re.compile(r"(?P<dtype>\w+)\[(?P<shape>[\d, ]*)\](?: group (?P<group>\d+))?")


class _Layer(Document):
    name: str | None = None
    weights: dict[str, str]


class _Progress(Document):
    steps: int
    samples: int
    skipped_steps: int
    micro_batches: int


class _Manifest(Document):
    format: str
    model: str | None = None
    plan_digest: str | None = None
    progress: _Progress
    optimizer: str | None = None
    groups: list[dict[str, Any]]
    tied: list[list[str]]
    layers: list[_Layer]
    bytes_by_file: dict[str, int]


def write_manifest(outline: Outline, bytes_by_file: Mapping[str, int], folder: Path) -> None:
    """Write the manifest of the files that lie in ``folder``."""
    progress = outline.progress
    content = {
        "format": _FORMAT,
        "model": outline.model,
        "plan_digest": outline.plan_digest,
        "progress": Flow(
            steps=progress.steps,
            samples=progress.samples,
            skipped_steps=progress.skipped_steps,
            micro_batches=progress.micro_batches,
        ),
        "optimizer": outline.optimizer,
        "groups": [Flow(group) for group in outline.groups],
        "tied": [FlowList([_join(weight), _join(owner)]) for weight, owner in outline.owner_by_tied.items()],
        "layers": [
            {"name": layer.name, "weights": {name: _text_of(weight) for name, weight in layer.weights.items()}}
            for layer in outline.layers
        ],
        "bytes_by_file": dict(sorted(bytes_by_file.items())),
    }
    write_text(folder / MANIFEST, dump_yaml(content))


def read_manifest(folder: Path) -> tuple[Outline, dict[str, int]]:
    """Return what a checkpoint's folder holds, and the size of each of its files.

    Raises:
        CheckpointError: The folder holds no checkpoint, or its manifest can't be read.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise CheckpointError(f"{folder} holds no {MANIFEST}: it is no checkpoint of pipeplan, or was never finished")
    try:
        content = read_yaml(path, "checkpoint")
        check_format(content, _FORMAT, path)
        document = parse_document(content, _Manifest, path)
        return _outline_of(document), document.bytes_by_file
    except (FileFormatError, ValueError) as error:
        raise CheckpointError(str(error)) from None


def _outline_of(document: _Manifest) -> Outline:
    return Outline(
        layers=tuple(
            LayerOutline(name=layer.name, weights={name: _weight_of(text) for name, text in layer.weights.items()})
            for layer in document.layers
        ),
        progress=Progress(**document.progress.model_dump()),
        model=document.model,
        plan_digest=document.plan_digest,
        optimizer=document.optimizer,
        groups=tuple(document.groups),
        owner_by_tied={_split(weight): _split(owner) for weight, owner in document.tied},
    )


def _text_of(weight: WeightOutline) -> str:
    return str(weight) if weight.group is None else f"{weight} group {weight.group}"


def _weight_of(text: str) -> WeightOutline:
    match = _WEIGHT.fullmatch(text)
    if match is None:
        raise ValueError(f"{MANIFEST}: {text!r} is no weight; expected something like 'float32[16, 16] group 0'")
    return WeightOutline(
        dtype=match["dtype"],
        shape=tuple(int(size) for size in match["shape"].split(",") if size.strip()),
        group=None if match["group"] is None else int(match["group"]),
    )


def _join(weight: Weight) -> str:
    return f"{weight[0]}.{weight[1]}"


def _split(text: str) -> Weight:
    layer, _, name = text.partition(".")
    return int(layer), name
