"""Layers of one device type dealt out among ranks, here threads with a board in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from pipeplan.model.types import LayerSource, ModelLayers
from pipeplan.profile import LayerProfile, Profile
from pipeplan.profile.kept import kept_layers
from pipeplan.profile.measure import measure_profile
from pipeplan.profile.sharing import SharedLayers, first_layers
from tests.profile.test_measure import ONCE, model, source

torch.set_num_threads(1)

LIMIT_S = 60  # a deadlock shows as a failed test, not as a hang
ROWS, COLUMNS = 2, 64


class MemoryBoard:
    """A board for threads."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._counters: dict[str, int] = {}
        self._notes: dict[str, bytes] = {}

    def take(self, counter: str) -> int:
        with self._changed:
            self._counters[counter] = self._counters.get(counter, -1) + 1
            return self._counters[counter]

    def post(self, name: str, content: bytes) -> None:
        with self._changed:
            assert name not in self._notes, "a note is left once"
            self._notes[name] = content
            self._changed.notify_all()

    def read(self, name: str) -> bytes:
        with self._changed:
            assert self._changed.wait_for(lambda: name in self._notes, timeout=LIMIT_S), f"nobody posts {name}"
            return self._notes[name]


class Scale(nn.Module):
    """Takes inputs of any width."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, value: Tensor) -> Tensor:
        return value * self.weight


class Halve(Scale):
    """Returns half the width, so that an equal layer behind it costs something else."""

    def forward(self, value: Tensor) -> Tensor:
        return (value * self.weight)[:, ::2].clone()


def scaling(identity: int) -> LayerSource:
    return source("scale", Scale, identity=f"scale {identity}")


def halving() -> LayerSource:
    return source("halve", Halve)


layer_lists = st.lists(
    st.one_of(st.builds(scaling, st.integers(0, 3)), st.builds(halving)), min_size=1, max_size=8
).filter(lambda layers: sum(layer.name == "halve" for layer in layers) <= 4)


def built(layers: Sequence[LayerSource]) -> ModelLayers:
    named = [replace(layer, name=f"{index}.{layer.name}") for index, layer in enumerate(layers)]
    return model(*named, inputs=lambda: torch.ones(ROWS, COLUMNS))


def measured(of: ModelLayers, sharing: SharedLayers | None = None, **others: object) -> Profile:
    return measure_profile(
        of,
        micro_batch_size=1,
        sequence_length=1,
        budget=ONCE,
        sharing=sharing,
        **others,  # type: ignore[arg-type]
    )


def without_times(profile: Profile) -> list[tuple[LayerProfile, str]]:
    """What doesn't depend on the clock."""
    return [
        (replace(layer, times_by_device={}, recomputation=None), profile.extra["layers"][layer.name]["measured_as"])
        for layer in profile.layers
    ]


@given(layers=layer_lists, num_ranks=st.integers(1, 4), data=st.data())
@settings(max_examples=20, deadline=None)
def test_each_layer_is_measured_once_and_known_to_all(
    layers: list[LayerSource], num_ranks: int, data: st.DataObject
) -> None:
    """Whatever the model, the ranks and what is known already: no layer twice, and all ranks have the one profile.

    Its bytes and keys are those of one process.
    """
    of = built(layers)
    alone = measured(of)
    keys = {note["measured_as"] for note in alone.extra["layers"].values()}
    known_keys = data.draw(st.sets(st.sampled_from(sorted(keys))))
    board = MemoryBoard()
    new_keys: list[str] = []

    def rank(number: int) -> Profile:
        kept = {key: one for key, one in kept_layers(alone, "cpu").items() if key in known_keys}
        mine = SharedLayers(board, "cpu", of, torch.device("cpu"))
        return measured(of, mine, measured=kept, on_measured=lambda so_far: new_keys.append(last_key(so_far)))

    def last_key(so_far: Profile) -> str:
        key: str = so_far.extra["layers"][so_far.layers[-1].name]["measured_as"]
        return key

    with ThreadPoolExecutor(num_ranks) as pool:
        profiles = list(pool.map(rank, range(num_ranks), timeout=LIMIT_S))
    assert sorted(new_keys) == sorted(keys - known_keys)
    for profile in profiles:
        assert profile == profiles[0]
        assert without_times(profile) == without_times(alone)


def test_a_free_rank_takes_the_next_layer() -> None:
    """While one rank measures the first layer, another goes on with all the others: they wait for no measurement."""
    order: list[str] = []
    others_are_done = threading.Event()

    def noting(name: str, wait: Callable[[], object] = lambda: None) -> LayerSource:
        class Noting(Scale):
            def __init__(self) -> None:
                super().__init__()
                self.num_runs = 0

            def forward(self, value: Tensor) -> Tensor:
                self.num_runs += 1
                if self.num_runs == 2:  # the first run is for those who wait for its outputs
                    wait()
                    order.append(name)
                return super().forward(value)

        return source(name, Noting)

    def wait() -> None:
        assert others_are_done.wait(LIMIT_S)

    of = model(noting("heavy", wait), noting("light"), noting("lighter"), inputs=lambda: torch.ones(ROWS, COLUMNS))
    board = MemoryBoard()

    def rank(number: int) -> None:
        def note(so_far: Profile) -> None:
            if so_far.layers[-1].name == "lighter":
                others_are_done.set()

        measured(of, SharedLayers(board, "cpu", of, torch.device("cpu")), on_measured=note)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(rank, range(2), timeout=LIMIT_S))
    assert order == ["light", "lighter", "heavy"]


def test_the_queue_holds_what_differs() -> None:
    """Equal layers stand in it once; the last one by itself, since it has the loss, and one that isn't split too."""
    layers = [scaling(0), scaling(1), scaling(0), scaling(1), scaling(1)]
    assert first_layers(built(layers)) == (0, 1, 4)
    layers[2] = replace(layers[2], is_splittable=False)
    assert first_layers(built(layers)) == (0, 1, 2, 4)
