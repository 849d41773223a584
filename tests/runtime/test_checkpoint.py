"""Checkpoints in one process: what comes back, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import toy
from torch import nn

from pipeplan.errors import CheckpointError
from pipeplan.runtime.checkpoint import (
    Progress,
    capture_checkpoint,
    manifest,
    plain,
    read_checkpoint,
    restore_checkpoint,
    write_checkpoint,
)
from pipeplan.runtime.checkpoint.capture import capture_layer, number_groups
from pipeplan.runtime.checkpoint.restore import Target, check_numbers, check_outline, restore_layers
from pipeplan.runtime.checkpoint.types import LayerState, Outline, WeightState
from pipeplan.runtime.checkpoint.wrappers import locate

Make = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]


def sgd(weights: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """Return SGD with momentum."""
    return torch.optim.SGD(weights, lr=0.05, momentum=0.9)


def adam(weights: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """Return Adam with a third moment."""
    return torch.optim.Adam(weights, lr=0.01, amsgrad=True)


def adamw(weights: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """Return AdamW that decays matrices only."""
    return torch.optim.AdamW(
        [
            {"params": [weight for weight in weights if weight.ndim > 1], "weight_decay": 0.1},
            {"params": [weight for weight in weights if weight.ndim <= 1], "weight_decay": 0.0},
        ],
        lr=0.01,
    )


def weights_of(layers: Sequence[nn.Module]) -> list[nn.Parameter]:
    """Return the weights of a model, shared ones once."""
    return list({id(weight): weight for layer in layers for weight in layer.parameters()}.values())


def build(make: Make, model: str = "tied") -> tuple[list[nn.Module], torch.optim.Optimizer]:
    """Return a toy model and its optimizer."""
    layers = toy.build_all(model)
    return layers, make(weights_of(layers))


def train(layers: Sequence[nn.Module], optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Train one micro-batch a step."""
    for step in steps:
        inputs, labels = toy.micro_batch(step)
        toy.loss_function(toy.run(layers, inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()


def names_of(model: str) -> list[str]:
    """Return the names of a toy model's layers."""
    return [layer.name for layer in toy.layers_of(model)]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint of the tied model after two steps of AdamW."""
    layers, optimizer = build(adamw)
    train(layers, optimizer, range(2))
    checkpoint = capture_checkpoint(layers, optimizer, layer_names=names_of("tied"), progress=Progress(steps=2))
    write_checkpoint(checkpoint, tmp_path)
    return tmp_path


@pytest.mark.parametrize("make", [sgd, adam, adamw])
def test_training_goes_on_bit_by_bit(make: Make, tmp_path: Path) -> None:
    """Weights, every kind of state and settings of groups come back, even into a model that trained otherwise."""
    layers, optimizer = build(make)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    train(layers, optimizer, range(2))
    scheduler.step()
    write_checkpoint(
        capture_checkpoint(layers, optimizer, lr_scheduler=scheduler, client_state={"note": [1]}), tmp_path
    )
    others, other_optimizer = build(make)
    other_scheduler = torch.optim.lr_scheduler.ExponentialLR(other_optimizer, 0.9)
    train(others, other_optimizer, range(7, 8))
    checkpoint = read_checkpoint(tmp_path)
    assert checkpoint.client_state == {"note": [1]}
    restore_checkpoint(checkpoint, others, other_optimizer, lr_scheduler=other_scheduler)
    assert other_optimizer.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]
    train(layers, optimizer, range(2, 4))
    train(others, other_optimizer, range(2, 4))
    assert all(torch.equal(one, other) for one, other in zip(weights_of(layers), weights_of(others), strict=True))
    assert other_scheduler.state_dict() == scheduler.state_dict()


def test_state_is_by_layer_and_name(saved: Path) -> None:
    """The file of a layer holds the moments under the layer's own names; a shared weight is stepped in its first."""
    checkpoint = read_checkpoint(saved)
    layers, optimizer = build(adamw)
    train(layers, optimizer, range(2))
    weight = layers[4].get_parameter("up.weight")
    state = checkpoint.layers[4].optimizer["up.weight"]
    assert torch.equal(state.tensors["exp_avg"], optimizer.state[weight]["exp_avg"])
    assert state.numbers == {"step": 2}
    assert torch.equal(checkpoint.layers[4].weights["up.weight"], weight)
    assert checkpoint.outline.owner_by_tied == {(9, "weight"): (0, "weight")}
    assert not checkpoint.layers[9].optimizer
    assert torch.equal(checkpoint.layers[9].weights["weight"], checkpoint.layers[0].weights["weight"])
    decays = [
        checkpoint.outline.groups[one.group or 0]["weight_decay"]
        for one in checkpoint.outline.layers[4].weights.values()
    ]
    assert decays == [0.1 if one.ndim > 1 else 0.0 for one in layers[4].state_dict().values()]


def test_a_checkpoint_before_the_first_step_resets_the_optimizer(tmp_path: Path) -> None:
    """State that isn't there is no error and no leftover: training starts afresh."""
    layers, optimizer = build(sgd)
    write_checkpoint(capture_checkpoint(layers, optimizer), tmp_path)
    train(layers, optimizer, range(1))
    restore_checkpoint(read_checkpoint(tmp_path), layers, optimizer)
    assert not optimizer.state


def refuse(saved: Path, says: str, layers: Sequence[Any], optimizer: Any, names: Sequence[str] | None = None) -> None:
    """Check that a checkpoint is refused and nothing has changed."""
    before = [weight.detach().clone() for weight in weights_of(layers)]
    with pytest.raises(CheckpointError, match=says):
        restore_checkpoint(read_checkpoint(saved), layers, optimizer, layer_names=names)
    assert all(torch.equal(one, other) for one, other in zip(weights_of(layers), before, strict=True))


def test_another_model_is_refused(saved: Path) -> None:
    """Layer count, names, shapes, names of weights and sharing are compared, and the first difference is named."""
    layers, optimizer = build(adamw, "tied-thrice")
    refuse(saved, "10 layers, but this one has 11", layers, optimizer)
    layers, optimizer = build(adamw)
    swapped = names_of("tied")
    swapped[4], swapped[7] = swapped[7], swapped[4]  # the same shapes: only the names tell
    refuse(saved, "layer 4 is '4.perceptron', but '7.perceptron' in this model", layers, optimizer, swapped)
    layers, optimizer = build(adamw, "hybrid")
    refuse(saved, "shared with other layers", layers, optimizer)
    layers, _ = build(adamw)
    layers[2], layers[3] = layers[3], layers[2]
    refuse(saved, r"holds no weight 'up' of layer 2 \(2\.convolution\)", layers, adamw(weights_of(layers)))
    layers, _ = build(adamw)
    layers[4].get_submodule("up").weight = nn.Parameter(torch.zeros(3, 16))
    refuse(saved, r"'up\.weight' of layer 4 .* shape \[32, 16\], but \[3, 16\]", layers, adamw(weights_of(layers)))


def test_another_optimizer_is_refused(saved: Path, tmp_path: Path) -> None:
    """Neither another algorithm nor other parameter groups are loaded as if they were the same."""
    layers, _ = build(adamw)
    weights = weights_of(layers)
    refuse(saved, "trained with AdamW, but the optimizer here is Adam ", layers, torch.optim.Adam(weights))
    refuse(saved, "trained with AdamW, but the optimizer here is SGD ", layers, sgd(weights))
    refuse(saved, r"in one parameter group here, but .* weight_decay 0\.1 and 0\.0", layers, torch.optim.AdamW(weights))
    write_checkpoint(capture_checkpoint(layers), tmp_path / "weights")
    refuse(tmp_path / "weights", "no optimizer state; load the weights alone", layers, adamw(weights))


@pytest.mark.parametrize("name", ["layer_03-model_states.pt", "layer_03-optimizer_states.safetensors"])
def test_damaged_files_are_refused(saved: Path, name: str) -> None:
    """A truncated file, one of the right size with other content, and a missing one are each named."""
    path = saved / "global_step2" / name
    content = path.read_bytes()
    path.write_bytes(content[:-7])
    with pytest.raises(CheckpointError, match=f"{name} has .* bytes instead of .*truncated"):
        read_checkpoint(saved)
    path.write_bytes(bytes(len(content)))
    with pytest.raises(CheckpointError, match=f"{name} can't be read"):
        read_checkpoint(saved)
    path.unlink()
    with pytest.raises(CheckpointError, match=f"{name} is missing"):
        read_checkpoint(saved)


def test_what_is_no_checkpoint_is_said(saved: Path) -> None:
    """A folder without one, an unknown tag (with those that there are) and an unfinished checkpoint are told apart."""
    with pytest.raises(CheckpointError, match=r"there is no checkpoint 'best' in .*; it holds global_step2"):
        read_checkpoint(saved, "best")
    assert read_checkpoint(saved / "global_step2").outline == read_checkpoint(saved).outline
    (saved / "latest").unlink()
    with pytest.raises(CheckpointError, match=r"holds no checkpoint: no file 'latest'.*; it holds global_step2"):
        read_checkpoint(saved)
    (saved / "global_step2" / manifest.MANIFEST).write_text("format: pipeplan-checkpoint/2\n")
    with pytest.raises(CheckpointError, match="newer than this pipeplan reads"):
        read_checkpoint(saved, "global_step2")
    (saved / "global_step2" / manifest.MANIFEST).unlink()
    with pytest.raises(CheckpointError, match="was never finished"):
        read_checkpoint(saved, "global_step2")


def test_a_failed_write_leaves_the_older_checkpoint(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the disk is full, what was saved before under that name still stands, and nothing half-written shows."""
    layers, optimizer = build(adamw)
    checkpoint = capture_checkpoint(layers, optimizer)

    def fail(*_: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(plain, "write_manifest", fail)
    with pytest.raises(CheckpointError, match="no space left on device"):
        write_checkpoint(checkpoint, saved, "global_step2")
    assert read_checkpoint(saved).outline.progress.steps == 2
    assert sorted(path.name for path in saved.iterdir()) == ["global_step2", "latest"]


def test_names_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    """Tags that name no folder, and keys of the script's own state that the checkpoint needs."""
    layers, _ = build(sgd)
    for tag in ("", "../up", ".hidden", "latest"):
        with pytest.raises(CheckpointError, match="can't name a folder"):
            write_checkpoint(capture_checkpoint(layers), tmp_path, tag)
    with pytest.raises(CheckpointError, match="client_state uses the key 'global_steps'"):
        write_checkpoint(capture_checkpoint(layers, client_state={"global_steps": 1}), tmp_path)
    assert not list(tmp_path.glob("*/*"))


def partitioned(layer: nn.Module, num_replicas: int, replica: int, state: torch.optim.Optimizer) -> Any:
    """Return what DeepSpeed's ZeRO-1 for bf16 looks like on a replica: a flat fp32 partition of all weights."""
    weights = list(layer.parameters())
    flat = torch.cat([weight.detach().flatten() for weight in weights]).float()
    flat = torch.cat([flat, torch.zeros(-flat.numel() % num_replicas)])
    size = flat.numel() // num_replicas
    part = flat[replica * size : (replica + 1) * size].clone()
    state.param_groups[0]["params"] = [part]
    start = -replica * size
    for weight in weights:
        low, high = max(start, 0), min(start + weight.numel(), size)
        weight._hp_mapping = None  # type: ignore[attr-defined]
        if low < high:
            weight._hp_mapping = SimpleNamespace(  # type: ignore[attr-defined]
                hp_fragment_address=SimpleNamespace(start=low, numel=high - low),
                lp_fragment_address=SimpleNamespace(start=low - start, numel=high - low),
            )
        start += weight.numel()
    return SimpleNamespace(optimizer=state, bf16_groups=[weights], fp32_groups_flat_partition=[part])


def fresh(optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW) -> torch.optim.Optimizer:
    """Return an optimizer whose weights come later."""
    return optimizer_class([torch.zeros(1)], lr=0.01)  # type: ignore[call-arg]


@pytest.mark.parametrize("num_replicas", [1, 2, 3, 7])
def test_shards_are_filled_from_whole_tensors(num_replicas: int) -> None:
    """Every replica gets its part of masters and moments, wherever the cuts fall; together they are the whole."""
    source = toy.Attention()
    optimizer = adam(list(source.parameters()))
    for weight in source.parameters():
        weight.grad = torch.randn_like(weight)
    optimizer.step()
    captured = capture_layer(0, source, locate(optimizer), {}, name=None)
    layers, groups = number_groups([(captured.outline, captured.settings_by_weight)])
    outline = Outline(layers=layers, optimizer="Adam", groups=groups)
    masters, moments = [], []
    for replica in range(num_replicas):
        layer = toy.Attention().to(torch.bfloat16)
        wrapper = partitioned(layer, num_replicas, replica, fresh(torch.optim.Adam))
        target = Target(modules={0: layer}, num_layers=1, layer_names=None, owner_by_tied={}, located=locate(wrapper))
        check_outline(outline, target, "the checkpoint")
        restore_layers(outline, target, lambda _: captured.state)
        part = wrapper.fp32_groups_flat_partition[0]
        masters.append(part)
        moments.append(wrapper.optimizer.state[part]["exp_avg_sq"])
        assert wrapper.optimizer.state[part]["step"] == 1
        for one, other in zip(layer.parameters(), source.parameters(), strict=True):
            assert torch.equal(one, other.to(torch.bfloat16))
    whole = torch.cat([weight.detach().flatten() for weight in source.parameters()])
    assert torch.equal(torch.cat(masters)[: whole.numel()], whole)
    expected = torch.cat([optimizer.state[weight]["exp_avg_sq"].flatten() for weight in source.parameters()])
    assert torch.equal(torch.cat(moments)[: whole.numel()], expected)


def test_weights_stepped_differently_cannot_share_a_shard() -> None:
    """A weight that joined training later has another step count; an optimizer that steps all as one refuses it."""
    source = toy.Perceptron()
    optimizer = torch.optim.AdamW(source.parameters(), lr=0.01)
    captured = capture_layer(0, source, locate(optimizer), {}, name=None)
    layers, groups = number_groups([(captured.outline, captured.settings_by_weight)])
    numbers = {name: {"step": 2 + (name == "down.weight")} for name in captured.state.optimizer}
    layer = toy.Perceptron()
    target = Target(
        modules={0: layer},
        num_layers=1,
        layer_names=None,
        owner_by_tied={},
        located=locate(partitioned(layer, 2, 0, fresh())),
    )
    with pytest.raises(CheckpointError, match=r"'down\.weight of layer 0' were stepped differently .*'step': 2.*3"):
        check_numbers(Outline(layers=layers, optimizer="AdamW", groups=groups), target, lambda _: numbers)


def test_state_that_belongs_to_no_weight_is_refused() -> None:
    """An optimizer that keeps something else than one value a weight in a shard can't be saved for other plans."""
    layer = toy.Perceptron()
    wrapper = partitioned(layer, 1, 0, fresh())
    part = wrapper.fp32_groups_flat_partition[0]
    wrapper.optimizer.state[part] = {"row_means": torch.zeros(5)}
    with pytest.raises(CheckpointError, match="'row_means', which isn't one value for each weight"):
        capture_layer(0, layer, locate(wrapper), {}, name=None)


def test_masters_win_over_rounded_weights() -> None:
    """A model in fp32 that loads a checkpoint of bf16 training takes the fp32 weights that were stepped."""
    source = toy.Perceptron().to(torch.bfloat16)
    master = {name: weight.float() + 1e-4 for name, weight in source.named_parameters()}
    captured = capture_layer(0, source, None, {}, name=None)
    state = LayerState(
        weights=captured.state.weights,
        optimizer={name: WeightState(master=value) for name, value in master.items()},
    )
    layer = toy.Perceptron()
    target = Target(modules={0: layer}, num_layers=1, layer_names=None, owner_by_tied={})
    restore_layers(Outline(layers=(captured.outline,)), target, lambda _: state)
    for name, weight in layer.named_parameters():
        assert torch.equal(weight, master[name])


class DeepSpeedCPUAdam(torch.optim.Optimizer):
    """Keeps its state as DeepSpeed's optimizer of this name does: step counts are plain numbers."""

    adam_w_mode = True

    def __init__(self, weights: Sequence[nn.Parameter]) -> None:
        super().__init__(weights, {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1})


def test_implementations_of_one_algorithm_share_state(tmp_path: Path) -> None:
    """What torch's AdamW stepped goes on in DeepSpeed's, and comes back, each with step counts of its own kind."""
    layers = toy.build_all("hybrid")
    weights = weights_of(layers)
    first = torch.optim.AdamW(weights, lr=0.02, weight_decay=0.1)
    train(layers, first, range(3))
    write_checkpoint(capture_checkpoint(layers, first), tmp_path)
    second = DeepSpeedCPUAdam(weights)
    restore_checkpoint(read_checkpoint(tmp_path), layers, second)
    assert second.param_groups[0]["lr"] == 0.02
    assert second.param_groups[0]["betas"] == (0.9, 0.999)
    for weight in weights:
        assert second.state[weight]["step"] == 3
        assert isinstance(second.state[weight]["step"], int)
        assert torch.equal(second.state[weight]["exp_avg"], first.state[weight]["exp_avg"])
    write_checkpoint(capture_checkpoint(layers, second), tmp_path)
    third = torch.optim.AdamW(weights)
    restore_checkpoint(read_checkpoint(tmp_path), layers, third)
    train(layers, third, range(3, 4))
    assert all(torch.equal(third.state[weight]["step"], torch.tensor(4.0)) for weight in weights)
