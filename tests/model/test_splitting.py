"""Which layers' backward may be split: the default, what layers say of themselves, and the same by every way in."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from torch import nn

from pipeplan.errors import ModelError
from pipeplan.model.factory import _source
from pipeplan.model.source import open_model
from pipeplan.model.splitting import splittable_layers


class Spec:
    """Looks like DeepSpeed's LayerSpec."""

    def __init__(self, typename: type[nn.Module], *args: int) -> None:
        self.typename, self.module_args, self.module_kwargs = typename, args, dict[str, Any]()

    def build(self) -> nn.Module:
        return self.typename(*self.module_args)


def double(value: Any) -> Any:
    return 2 * value


def marked(layer: Any, *, is_splittable: Any) -> Any:
    """The layer, which says whether it may be split."""
    layer.is_splittable = is_splittable
    return layer


def linear() -> nn.Module:
    return nn.Linear(2, 2)


LISTS: list[tuple[list[Any], tuple[bool, ...]]] = [
    ([linear(), linear(), linear()], (True, True, False)),
    ([Spec(nn.Linear, 2, 2), Spec(nn.Linear, 2, 2)], (True, False)),
    # the head is the last layer with weights; what comes behind it, a cast or the loss, is part of it
    ([linear(), linear(), nn.Softmax(-1), double], (True, False, False, False)),
    ([double, double], (True, True)),
    ([linear(), marked(linear(), is_splittable=True)], (True, True)),
    ([marked(Spec(nn.Linear, 2, 2), is_splittable=False), linear(), linear()], (False, True, False)),
    ([linear(), marked(functools.partial(double), is_splittable=False), linear()], (True, False, False)),
    ([linear(), marked(linear(), is_splittable=None)], (True, False)),
]


@pytest.mark.parametrize(("layers", "expected"), LISTS, ids=range(len(LISTS)))
def test_the_head_is_whole_unless_it_says_otherwise(layers: list[Any], expected: tuple[bool, ...]) -> None:
    """As a script gives its layers to the runtime, and as a factory gives them to the profiler."""
    assert splittable_layers(layers) == expected
    sources = [_source(layer, index, 0, "test:factory") for index, layer in enumerate(layers)]
    assert splittable_layers(sources) == expected


@pytest.mark.parametrize("template", ["tiny-llama", "tiny-jamba", "nemotron-nano-9b-v2"])
def test_hugging_face_models_split_all_but_the_head(template: str) -> None:
    """The head holds the largest gradients of all; tied or not, it has weights."""
    layers = open_model(template).layers
    assert [layer.name for layer, may in zip(layers, splittable_layers(layers), strict=True) if not may] == ["head"]


def test_other_values_are_refused() -> None:
    """The layer is named, and what may stand there."""
    with pytest.raises(ModelError, match=r"layer 1 \(Linear\): is_splittable is 'no'; set True, False or None"):
        splittable_layers([linear(), marked(linear(), is_splittable="no")])
