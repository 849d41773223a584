"""Measuring layers: bytes against hand counts, and what is measured once, chained, refused or kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeplan.errors import ProfileError
from pipeplan.model.types import LayerSource, ModelLayers
from pipeplan.profile import LayerProfile, Profile, read_profile, write_profile
from pipeplan.profile.kept import MeasuredLayer
from pipeplan.profile.measure import measure_profile
from pipeplan.profile.sampling import SamplingBudget

torch.set_num_threads(1)

ONCE = SamplingBudget(num_warm_up=0, min_rounds=1, max_rounds=1)
BATCH, WIDTH, HIDDEN = 4, 8, 16


def source(name: str, build: Callable[[], Any], **others: Any) -> LayerSource:
    """A layer; its identity is its name unless given."""
    return LayerSource(**{"name": name, "kind": "test", "build": build, "identity": name, **others})


def model(*layers: LayerSource, inputs: Callable[[], Any] = lambda: torch.randn(BATCH, WIDTH)) -> ModelLayers:
    """A model of the given layers whose loss is the mean square error to zero labels."""
    return ModelLayers(
        name="test",
        layers=layers,
        loss_function=lambda outputs, labels: nn.functional.mse_loss(outputs, labels.expand_as(outputs)),
        sample_batch=lambda micro_batch_size, sequence_length, seed: (inputs(), torch.zeros(1)),
        source={"factory": "test:factory", "root": "."},
    )


def measure(*layers: LayerSource, dtype: str = "fp32", **others: Any) -> Profile:
    """Measure a model that ends in a layer of no interest, which carries the loss."""
    inputs = {"inputs": others.pop("inputs")} if "inputs" in others else {}
    end = source("end", lambda: lambda value: value)
    return measure_profile(
        model(*layers, end, **inputs), micro_batch_size=BATCH, sequence_length=1, dtype=dtype, budget=ONCE, **others
    )


def only(*layers: LayerSource, **others: Any) -> LayerProfile:
    """The figures of the first layer."""
    return measure(*layers, **others).layers[0]


def mlp() -> nn.Module:
    """Two linear layers around a ReLU."""
    return nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, WIDTH))


@pytest.mark.parametrize(("dtype", "width_bytes"), [("fp32", 4), ("bf16", 2)])
def test_bytes_of_an_mlp_equal_a_hand_count(dtype: str, width_bytes: int) -> None:
    """Parameters, boundary, activations, W-held and recomputed bytes are exact."""
    head = source("head", lambda: nn.Linear(WIDTH, WIDTH))  # so that the MLP's input takes a gradient
    layer = measure(head, source("mlp", mlp), dtype=dtype).layers[1]
    assert layer.num_parameters == WIDTH * HIDDEN + HIDDEN + HIDDEN * WIDTH + WIDTH
    boundary, middle = BATCH * WIDTH * width_bytes, BATCH * HIDDEN * width_bytes
    assert layer.output_bytes == boundary
    assert layer.activation_bytes == boundary + middle  # the input, and the ReLU's output, which two ops save
    assert layer.held_for_w_bytes == 2 * boundary + 2 * middle  # an input and an output gradient of each linear layer
    assert layer.recomputation is not None
    assert layer.recomputation.activation_bytes == boundary  # the input alone


def test_workspace_is_the_peak_above_what_stays() -> None:
    """A temporary that is dropped inside the op counts, what the graph keeps does not."""

    class Temporary(nn.Module):
        def forward(self, value: Tensor) -> Tensor:
            with torch.no_grad():
                scale = value.repeat(1, 10).exp().mean()  # two tensors of ten times the input at once
            return value * scale

    temporaries, output = 2 * 10 * BATCH * WIDTH * 4, BATCH * WIDTH * 4
    assert only(source("temporary", Temporary)).workspace_bytes == pytest.approx(temporaries - output, abs=8)


def test_constants_are_not_held_by_every_micro_batch() -> None:
    """A mask that all micro-batches share counts in no micro-batch's activations."""
    mask = torch.rand(BATCH, WIDTH)
    weight = nn.Linear(WIDTH, WIDTH, bias=False)

    def run(value: Tensor) -> Tensor:
        return value * mask

    profile = measure(source("linear", lambda: weight), source("masked", lambda: run))
    assert profile.layers[1].activation_bytes == 0


def test_expanded_tensors_count_once() -> None:
    """A saved view with stride 0 holds one row, not the shape it shows."""

    class Expanding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(100, WIDTH))

        def forward(self, value: Tensor) -> Tensor:
            return self.weight * value[:1].clone().expand(100, WIDTH)

    assert only(source("expanding", Expanding)).activation_bytes == WIDTH * 4


def test_frozen_parameters_are_no_parameters() -> None:
    """Only what is trained takes optimizer state."""
    linear = nn.Linear(WIDTH, WIDTH)
    linear.bias.requires_grad_(False)
    assert only(source("linear", lambda: linear)).num_parameters == WIDTH * WIDTH


def test_a_layer_that_defers_nothing_can_not_be_split() -> None:
    """A norm has no I and W, and holds nothing for W; a linear layer has both."""
    profile = measure(source("linear", lambda: nn.Linear(WIDTH, WIDTH)), source("norm", lambda: nn.RMSNorm(WIDTH)))
    linear, norm = profile.layers[:2]
    assert linear.is_splittable and linear.times("cpu").weight_gradient_ns is not None
    assert linear.times("cpu", recompute=True).weight_gradient_ns is not None
    assert not norm.is_splittable and norm.held_for_w_bytes == 0
    assert norm.times("cpu").input_gradient_ns is None and norm.times("cpu").weight_gradient_ns is None


def test_the_head_is_not_split_unless_it_says_so() -> None:
    """By default the last layer with weights has B alone and holds nothing for W; every layer may choose."""
    linear: dict[str, Any] = {"build": lambda: nn.Linear(WIDTH, WIDTH), "identity": "linear", "num_parameters": 72}

    def profile(*choices: bool | None, **others: Any) -> Profile:
        sources = (source(f"linear{index}", **linear, is_splittable=one) for index, one in enumerate(choices))
        return measure_profile(
            model(*sources, source("end", lambda: lambda value: value, num_parameters=0)),
            micro_batch_size=BATCH,
            sequence_length=1,
            budget=ONCE,
            **others,
        )

    for choices, expected in (
        ((None, None, None), (True, True, False)),
        ((None, False, True), (True, False, True)),
    ):
        layers = profile(*choices).layers[:3]
        assert tuple(layer.is_splittable for layer in layers) == expected
        for layer in layers:
            assert layer.held_for_w_bytes == (2 * BATCH * WIDTH * 4 if layer.is_splittable else 0)
            for recompute in (False, True):
                times = layer.times("cpu", recompute=recompute)
                assert (times.weight_gradient_ns is not None) == layer.is_splittable
    measured: dict[str, MeasuredLayer] = {}
    profile(None, None, None, measured=measured)
    known = set(measured)
    profile(None, None, True, measured=measured)
    assert set(measured) == known, "split, it costs what its equal does"
    profile(None, False, True, measured=measured)
    assert set(measured) == known, "and whole, what its equal did"
    profile(False, None, None, measured=measured)
    assert len(set(measured) - known) == 1


def test_layers_of_equal_identity_are_measured_once() -> None:
    """Thirty equal layers are built once, and all get the same figures under their own names."""
    num_built = 0

    def build() -> nn.Module:
        nonlocal num_built
        num_built += 1
        return mlp()

    profile = measure(*(source(f"layers.{index}", build, identity="mlp") for index in range(30)))
    # the first one reads the batch, which takes no gradient, and so is another case
    assert num_built == 2
    assert all(replace(layer, name="") == replace(profile.layers[1], name="") for layer in profile.layers[1:30])
    assert [layer.name for layer in profile.layers[:30]] == [f"layers.{index}" for index in range(30)]


def test_equal_layers_on_other_shapes_are_measured_again() -> None:
    """Identity says what a layer is, not what it is run on."""
    relu = {"build": nn.ReLU, "identity": "relu"}
    profile = measure(source("a", **relu), source("wide", lambda: nn.Linear(WIDTH, HIDDEN)), source("b", **relu))
    assert [layer.output_bytes for layer in profile.layers[:3]] == [
        BATCH * WIDTH * 4,
        BATCH * HIDDEN * 4,
        BATCH * HIDDEN * 4,
    ]


def test_each_layer_runs_on_what_the_one_before_returned() -> None:
    """Boundaries may be pytrees with integers, bools and None; only floating tensors of the graph take gradients."""
    seen: list[Any] = []

    class Split(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, value: Tensor) -> Any:
            return {"hidden": self.linear(value), "index": torch.arange(3), "mask": torch.ones(2).bool(), "none": None}

    class Join(nn.Module):
        def forward(self, value: Any) -> Tensor:
            seen.append(value)
            return value["hidden"]

    profile = measure(source("split", Split), source("join", Join))
    assert profile.layers[0].output_bytes == BATCH * WIDTH * 4 + 3 * 8 + 2
    assert profile.extra["layers"]["split"]["output_tensors"] == [
        f"float32[{BATCH}, {WIDTH}]",
        "int64[3]",
        "bool[2]",
    ]
    assert {name: getattr(one, "requires_grad", None) for name, one in seen[0].items()} == {
        "hidden": True,
        "index": False,
        "mask": False,
        "none": None,
    }


def test_the_last_layer_includes_the_loss() -> None:
    """The head hands on a scalar, and keeps what the loss keeps."""
    profile = measure_profile(
        model(source("head", lambda: nn.Linear(WIDTH, HIDDEN))), micro_batch_size=BATCH, sequence_length=1, budget=ONCE
    )
    head = profile.layers[0]
    assert head.output_bytes == 4
    # the linear layer's input, its output, which the loss saves, and the labels' single number is a constant
    assert head.activation_bytes == BATCH * WIDTH * 4 + BATCH * HIDDEN * 4


def test_integer_inputs_and_embeddings() -> None:
    """An embedding keeps its token ids, and defers its whole backward."""
    layer = only(source("embedding", lambda: nn.Embedding(10, WIDTH)), inputs=lambda: torch.arange(6).reshape(2, 3))
    assert layer.is_splittable
    assert layer.activation_bytes == 6 * 8
    assert layer.held_for_w_bytes == 6 * 8 + 6 * WIDTH * 4


@pytest.mark.parametrize(("dtype", "expected"), [("fp32", 16), ("bf16", 18)])
def test_state_bytes_follow_the_dtype(dtype: str, expected: float) -> None:
    """bf16 keeps fp32 gradients, master weights and moments beside its weights."""
    assert measure(source("linear", lambda: nn.Linear(WIDTH, WIDTH)), dtype=dtype).state_bytes_per_parameter == expected


def test_bytes_are_the_same_every_time_and_survive_the_file(tmp_path: Path) -> None:
    """Two measurements differ in times and spread alone; the file gives back what was measured."""
    layers = (source("mlp", mlp), source("norm", lambda: nn.RMSNorm(WIDTH)))
    first, second = measure(*layers), measure(*layers)
    for one, other in zip(first.layers, second.layers, strict=True):
        assert replace(one, times_by_device={}, recomputation=None) == replace(
            other, times_by_device={}, recomputation=None
        )
    write_profile(first, tmp_path / "profile.yaml")
    found = read_profile(tmp_path / "profile.yaml")
    assert found.layers == first.layers
    assert found.extra == first.extra
    assert {"torch", "pipeplan"} <= found.extra["software"].keys()


class Failing(nn.Module):
    """A layer that raises."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def forward(self, value: Tensor) -> Tensor:
        raise self.error


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            RuntimeError("not implemented for 'Half'\nstack"),
            "layer 'bad' \\(test\\) can't run in bf16 on cpu: not impl",
        ),
        (torch.OutOfMemoryError("CUDA out of memory"), "layer 'bad' \\(test\\) does not fit in the memory of cpu"),
    ],
)
def test_a_failing_layer_is_named_and_the_rest_is_kept(error: Exception, message: str) -> None:
    """The message names the layer, and what was measured before it is used by the next try."""
    measured: dict[str, MeasuredLayer] = {}
    good = source("good", lambda: nn.Linear(WIDTH, WIDTH))
    with pytest.raises(ProfileError, match=message):
        measure(good, source("bad", lambda: Failing(error)), dtype="bf16", measured=measured)
    assert len(measured) == 1

    def build() -> nn.Module:
        raise AssertionError("measured already")

    profile = measure(replace(good, build=build), dtype="bf16", measured=measured)
    assert profile.layers[0].num_parameters == WIDTH * WIDTH + WIDTH


def test_unknown_settings_are_refused() -> None:
    """An unknown dtype or device is refused before anything is built, with what to use."""
    with pytest.raises(ProfileError, match="unknown dtype 'bf61' \\(did you mean 'bf16'"):
        measure(source("linear", lambda: nn.Linear(WIDTH, WIDTH)), dtype="bf61")
    with pytest.raises(ProfileError, match="cpu or cuda"):
        measure(source("linear", lambda: nn.Linear(WIDTH, WIDTH)), device="tpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_missing_gpu_is_refused() -> None:
    """Profiling for a GPU that is not there says so."""
    with pytest.raises(ProfileError, match="no usable GPU"):
        measure(source("linear", lambda: nn.Linear(WIDTH, WIDTH)), device="cuda")
