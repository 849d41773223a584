"""The layers of a model one behind the other: where they are built, and what each of them runs on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipeplan.errors import PipeplanError, ProfileError
from pipeplan.model.types import LayerSource
from pipeplan.profile.kept import UNKNOWN
from pipeplan.profile.passes import signature

Layer = Callable[[Any], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where layers run, and what messages call it."""

    device: torch.device
    device_type: str
    dtype: torch.dtype
    dtype_name: str

    def build(self, source: LayerSource) -> Layer:
        """Return the layer, ready to train; raises as ``naming``."""
        with self.naming(source):
            built = source.build()
            return built.to(self.device, self.dtype).train() if isinstance(built, nn.Module) else built

    @contextmanager
    def naming(self, source: LayerSource) -> Iterator[None]:
        """Turn what goes wrong inside into a ``ProfileError`` that names the layer."""
        where = f"layer {source.name!r} ({source.kind})"
        try:
            yield
        except PipeplanError:
            raise
        except (torch.OutOfMemoryError, MemoryError) as error:
            raise ProfileError(
                f"{where} does not fit in the memory of {self.device_type}; use a smaller --micro-batch-size or "
                "--sequence-length"
            ) from error
        except Exception as error:
            reason = str(error).strip().splitlines()
            raise ProfileError(
                f"{where} can't run in {self.dtype_name} on {self.device_type}: "
                f"{reason[0] if reason else type(error).__name__}"
            ) from error


class Chain:
    """What the next layer runs on.

    Layers that this process didn't measure run only where one behind them is to be measured here, and not where
    another rank has what they returned.
    """

    def __init__(self, value: Any, place: Place) -> None:
        self.signature = signature(value)
        self._value = value
        self._place = place
        # By key, since layers of one key hand on the same: what to run, or where to get what it returned.
        self._skipped: dict[str, tuple[LayerSource, Callable[[], Any] | None]] = {}

    def advance(
        self,
        source: LayerSource,
        key: str,
        output_tensors: Sequence[str],
        outputs: Any = UNKNOWN,
        fetch: Callable[[], Any] | None = None,
    ) -> None:
        """Go on behind a layer that returned ``outputs``; without them, ``fetch`` gets them from elsewhere."""
        self.signature = ", ".join(output_tensors)
        if outputs is not UNKNOWN:
            self._value = outputs
            self._skipped.clear()
        elif key in self._skipped:
            for later in list(self._skipped)[list(self._skipped).index(key) + 1 :]:
                del self._skipped[later]
        else:
            self._skipped[key] = (source, fetch)

    def value(self) -> Any:
        """Return it; raises as ``Place.naming``."""
        to_run: list[LayerSource] = []
        for source, fetch in reversed(self._skipped.values()):
            if fetch is not None:
                self._value = detach(fetch())
                break
            to_run.append(source)
        for source in reversed(to_run):
            with self._place.naming(source):
                self._value = detach(self._place.build(source)(self._value))
        self._skipped.clear()
        return self._value


class Workshop:
    """Builds layers, one of them ahead of its turn."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._prepared: tuple[LayerSource, Layer] | None = None

    def prepare(self, source: LayerSource) -> None:
        """Build the layer that will be taken next, unless it is built; raises as ``Place.naming``."""
        if self._prepared is None or self._prepared[0] is not source:
            self._prepared = None  # before the next one takes its place in memory
            self._prepared = (source, self._place.build(source))

    def take(self, source: LayerSource) -> Layer:
        """Return the layer, and keep none; raises as ``Place.naming``."""
        prepared, self._prepared = self._prepared, None
        if prepared is not None and prepared[0] is source:
            return prepared[1]
        del prepared
        return self._place.build(source)


def detach(outputs: Any) -> Any:
    """Return a pytree of tensors without their graph, each still asking for a gradient if it did."""
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad), outputs)
