from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from pipeplan.errors import ModelError
from pipeplan.model.source import model_from_source, open_model

FACTORIES = '''
import torch
from torch import nn


class Spec:
    """Looks like DeepSpeed's LayerSpec."""

    def __init__(self, typename, *args, **kwargs):
        self.typename, self.module_args, self.module_kwargs = typename, args, kwargs

    def build(self):
        return self.typename(*self.module_args, **self.module_kwargs)


class TiedSpec(Spec):
    """Looks like DeepSpeed's TiedLayerSpec."""

    def __init__(self, key, typename, *args, forward_fn=None, tied_weight_attr="weight", **kwargs):
        super().__init__(typename, *args, **kwargs)
        self.key, self.forward_fn, self.tied_weight_attr = key, forward_fn, [tied_weight_attr]


def double(value):
    return 2 * value


def logits(module, value):
    return value @ module.weight.T


def sample(micro_batch_size, sequence_length, seed):
    tokens = torch.full((micro_batch_size, sequence_length), seed)
    return tokens, tokens


def good():
    layers = [
        TiedSpec("words", nn.Embedding, 16, 8),
        nn.Linear(8, 8),
        Spec(nn.Linear, 8, 8, bias=False),
        Spec(nn.Linear, 8, 8, bias=False),
        double,
        TiedSpec("words", nn.Embedding, 16, 8, forward_fn=logits),
    ]
    return layers, lambda outputs, labels: nn.functional.cross_entropy(outputs.flatten(0, 1), labels.flatten()), sample


def given_batch():
    return [nn.Linear(8, 8)], nn.functional.mse_loss, (torch.zeros(2, 8), torch.ones(2, 8))


def fails():
    raise RuntimeError("no such luck")


def ends():
    raise SystemExit(3)


def two():
    return [nn.Linear(8, 8)], nn.functional.mse_loss


def no_layers():
    return [], nn.functional.mse_loss, sample


def odd_layer():
    return [nn.Linear(8, 8), 7], nn.functional.mse_loss, sample


def no_loss():
    return [nn.Linear(8, 8)], None, sample


def no_batch():
    return [nn.Linear(8, 8)], nn.functional.mse_loss, 3


def batch_fails():
    return [nn.Linear(8, 8)], nn.functional.mse_loss, lambda micro_batch_size, sequence_length, seed: 1 // seed


def odd_loss():
    return [nn.Linear(8, 8)], lambda outputs, labels: outputs - labels, lambda *shape: 5


value = 7
'''


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the package ``shop`` in it, which is the working directory."""
    folder = tmp_path / "shop"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "models.py").write_text(FACTORIES)
    (folder / "broken.py").write_text("import not_there_at_all\n")
    (folder / "script.py").write_text("import argparse\nargparse.ArgumentParser().parse_args(['--not-mine'])\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "shop"]:
        del sys.modules[name]


def test_a_factory_gives_deepspeed_style_layers(package: Path) -> None:
    """Modules, specs, tied specs and functions become layers that run in a row, and the loss gives gradients."""
    model = open_model("shop.models:good", seed=3)
    assert [layer.kind for layer in model.layers] == [
        "embedding",
        "linear",
        "linear",
        "linear",
        "function",
        "embedding",
    ]
    assert len({layer.name for layer in model.layers}) == 6
    assert [layer.tied for layer in model.layers] == ["words", None, None, None, None, "words"]
    assert model.layers[0].tied_weight_attr == ("weight",)
    assert model.layers[5].tied_weight_attr == ("module.weight",)
    assert model.layers[2].identity == model.layers[3].identity != model.layers[1].identity
    inputs, labels = model.sample_batch(2, 5, 3)
    built = [layer.build() for layer in model.layers]
    value = inputs
    for layer in built:
        value = layer(value)
    assert value.shape == (2, 5, 16)
    torch.autograd.backward(model.loss_function(value, labels))
    assert isinstance(built[2], nn.Module)
    assert built[2].weight.grad is not None


def test_factory_layers_are_the_same_in_every_process(package: Path) -> None:
    """Any layer built alone has the weights that it has among all; tied layers start equal; the seed counts."""
    first = [layer.build() for layer in open_model("shop.models:good", seed=3).layers]
    again = open_model("shop.models:good", seed=3).layers
    for index in (5, 3, 1, 0):
        built, before = again[index].build(), first[index]
        assert isinstance(built, nn.Module)
        assert isinstance(before, nn.Module)
        torch.testing.assert_close(built.state_dict(), before.state_dict(), rtol=0, atol=0)
    embedding, linear, head = first[0], first[2], first[5]
    other = open_model("shop.models:good", seed=4).layers[2].build()
    assert isinstance(embedding, nn.Embedding)
    assert isinstance(head, nn.Module)
    assert torch.equal(embedding.weight, head.get_parameter("module.weight"))
    assert isinstance(linear, nn.Linear)
    assert isinstance(other, nn.Linear)
    assert not torch.equal(other.weight, linear.weight)


def test_a_factory_is_found_again_by_its_recorded_root(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A profile records the folder of the package, so that the model is built from any working directory."""
    source = open_model("shop.models:good").source
    assert source == {"factory": "shop.models:good", "root": str(package)}
    for name in ("shop", "shop.models"):
        del sys.modules[name]
    sys.path.remove(str(package))
    monkeypatch.chdir("/")
    assert len(model_from_source(source, name="again").layers) == 6


def test_a_factory_may_give_one_batch(package: Path) -> None:
    """A sample batch may be a pair of inputs and labels instead of a function."""
    inputs, labels = open_model("shop.models:given_batch").sample_batch(1, 1, 0)
    assert inputs.shape == labels.shape == (2, 8)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("shop.models:god", r"has no 'god' \(did you mean 'good'\?\)"),
        ("shop.model:good", "there is no module 'shop.model'"),
        ("nowhere.models:good", "there is no module 'nowhere.models'"),
        ("shop.broken:good", "needs module 'not_there_at_all'"),
        ("shop.models:value", "'value' is a int, not a function"),
        ("shop.models:fails", "failed: RuntimeError: no such luck"),
        ("shop.models:ends", "failed: SystemExit: 3"),
        ("shop.script:good", "importing 'shop.script' failed: SystemExit: 2"),
        ("shop.models:two", "returned a tuple of 2; a factory returns"),
        ("shop.models:no_layers", "returned a list of 0 as layers"),
        ("shop.models:odd_layer", "layer 1 is a int; expected a module"),
        ("shop.models:no_loss", "returned nothing as loss function"),
        ("shop.models:no_batch", "returned a int as sample batch"),
    ],
)
def test_faulty_factories_are_refused(package: Path, text: str, message: str) -> None:
    """A missing module or function, a failing factory and a wrong return value each give one clear message."""
    with pytest.raises(ModelError, match=message) as caught:
        open_model(text)
    assert text in str(caught.value)


def test_what_a_factorys_functions_return_is_checked(package: Path) -> None:
    """A sample batch that fails or is no pair, and a loss that is no single number, are laid to the factory."""
    with pytest.raises(ModelError, match=r"shop.models:batch_fails: .*seed=0\): ZeroDivisionError"):
        open_model("shop.models:batch_fails").sample_batch(1, 1, 0)
    model = open_model("shop.models:odd_loss")
    with pytest.raises(ModelError, match=r"shop.models:odd_loss: .*returned a int; expected \(inputs, labels\)"):
        model.sample_batch(1, 1, 0)
    with pytest.raises(ModelError, match=r"shop.models:odd_loss: .*shape \[2, 8\]; expected one number"):
        model.loss_function(torch.zeros(2, 8), torch.zeros(2, 8))


def test_a_factory_has_no_sublayers(package: Path) -> None:
    """Granularity is a question to Hugging Face configs only."""
    with pytest.raises(ModelError, match="taken as they are"):
        open_model("shop.models:good", granularity="sublayer")
