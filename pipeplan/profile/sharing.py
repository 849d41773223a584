"""Dealing the layers of one device type out among ranks: whoever is free measures the next one.

What a layer takes to build and to measure is known only afterwards, so nothing is dealt out beforehand: the first
layers of each identity stand in a queue, in model order, and a rank that has finished one takes the next. Each layer
is thus built once in the whole launch. The rank that measures it runs it forward first and posts what it returned, on
which the next one measures the layer behind it, while the first is still timing.
"""

from __future__ import annotations

import io
import json
import pickle
from dataclasses import replace
from typing import Any, Protocol

import torch

from pipeplan.model.splitting import splittable_layers
from pipeplan.model.types import ModelLayers
from pipeplan.profile.kept import UNKNOWN, MeasuredLayer


class Board(Protocol):
    """Where ranks leave notes for each other; reading one waits for it, but not for ever."""

    def take(self, counter: str) -> int:
        """Return 0, 1, 2 and so on, each number to one rank only."""

    def post(self, name: str, content: bytes) -> None:
        """Leave a note, once."""

    def read(self, name: str) -> bytes:
        """Return a note, once it is there."""


class SharedLayers:
    """The layers of a model on one device type, as one of the ranks that measure them sees them.

    Every rank asks for every layer that it has no result of, in model order, and all ranks know the same results from
    earlier runs.

    Args:
        device_type: Under which the layers are dealt out; the ranks of another type deal out their own.
        device: Where the outputs of other ranks' layers are wanted.
    """

    def __init__(self, board: Board, device_type: str, model: ModelLayers, device: torch.device) -> None:
        self._board = board
        self._prefix = f"layers/{device_type}"
        self._device = device
        self._queue = first_layers(model)
        self._number_by_index = {index: number for number, index in enumerate(self._queue)}
        self._own_number = -1

    def takes(self, index: int, key: str) -> bool:
        """Return whether this rank measures layer ``index``; exactly one rank is told so for each key.

        A layer that is equal to an earlier one but runs on other inputs stands in no queue: the first to ask gets it.
        """
        number = self._number_by_index.get(index)
        if number is None:
            return self._board.take(f"{self._prefix}/again/{key}") == 0
        self._queue_up(number)
        return self._own_number == number

    def next_own(self, index: int) -> int | None:
        """Return the layer behind ``index`` that this rank takes next, or ``None`` when none is left.

        Time spent waiting for the layers before it may be spent on building it.
        """
        self._queue_up(sum(first <= index for first in self._queue))
        return self._queue[self._own_number] if self._own_number < len(self._queue) else None

    def _queue_up(self, number: int) -> None:
        """Take a number at or behind ``number``."""
        while self._own_number < number:
            self._own_number = self._board.take(f"{self._prefix}/queue")

    def post_outputs(self, key: str, outputs: Any, output_tensors: tuple[str, ...]) -> None:
        """Hand on what a layer of this rank returned, and how it is described."""
        content = io.BytesIO()
        torch.save(outputs, content)
        self._board.post(f"{self._prefix}/outputs/{key}", content.getvalue())
        self._board.post(f"{self._prefix}/described/{key}", json.dumps(output_tensors).encode())

    def output_tensors(self, key: str) -> tuple[str, ...]:
        """Return how another rank's layer describes what it returned, once it has run."""
        return tuple(json.loads(self._board.read(f"{self._prefix}/described/{key}")))

    def outputs(self, key: str) -> Any:
        """Return what another rank's layer returned, on this rank's device."""
        content = io.BytesIO(self._board.read(f"{self._prefix}/outputs/{key}"))
        return torch.load(content, map_location=self._device, weights_only=False)  # any pytree, of our own ranks

    def post_result(self, key: str, measured: MeasuredLayer) -> None:
        """Tell the other ranks what a layer of this rank costs."""
        self._board.post(f"{self._prefix}/result/{key}", pickle.dumps(replace(measured, outputs=None)))

    def result(self, key: str) -> MeasuredLayer:
        """Return what another rank's layer costs, once it is measured."""
        measured: MeasuredLayer = pickle.loads(self._board.read(f"{self._prefix}/result/{key}"))
        return replace(measured, outputs=UNKNOWN)


def first_layers(model: ModelLayers) -> tuple[int, ...]:
    """Return the first layer of each identity, in model order.

    The last layer counts apart, since it has the loss, and so do layers that are not to be split.
    """
    last = len(model.layers) - 1
    index_by_identity: dict[tuple[str, bool, bool], int] = {}
    for index, (layer, is_splittable) in enumerate(zip(model.layers, splittable_layers(model.layers), strict=True)):
        index_by_identity.setdefault((layer.identity, index == last, is_splittable), index)
    return tuple(index_by_identity.values())
