"""Running a model as its layers, and as the plain Hugging Face model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipeplan.model.types import ModelLayers

LENGTH = 12


def build_all(model: ModelLayers) -> list[nn.Module]:
    """Build every layer, for evaluation."""
    modules = [layer.build() for layer in model.layers]
    assert all(isinstance(module, nn.Module) for module in modules)
    return [module.eval() for module in modules if isinstance(module, nn.Module)]


def run(modules: Sequence[nn.Module], inputs: Any) -> Any:
    """Run layers in order."""
    value = inputs
    for module in modules:
        value = module(value)
    return value


def logits_of(outputs: Any) -> Tensor:
    """Return the logits that the last layer returned, with or without a router loss beside them."""
    logits = outputs["logits"] if isinstance(outputs, Mapping) else outputs
    assert isinstance(logits, Tensor)
    return logits


def batch(vocab_size: int, *, padded: bool) -> tuple[dict[str, Tensor], Tensor]:
    """Return the inputs of two samples, the first padded on the left if asked for, and their labels."""
    tokens = torch.randint(3, vocab_size, (2, LENGTH), generator=torch.Generator().manual_seed(5))
    labels = tokens.clone()
    labels[1, 4] = -100
    if not padded:
        return {"input_ids": tokens}, labels
    mask = torch.ones_like(tokens)
    mask[0, :5] = 0
    return {"input_ids": tokens.masked_fill(mask == 0, 0), "attention_mask": mask}, labels.masked_fill(mask == 0, -100)


def gradients_by_name(model: ModelLayers, modules: Sequence[nn.Module], reference: nn.Module) -> dict[str, Tensor]:
    """Return the gradients of all layers by the names of the whole model; those of shared weights are summed."""
    whole = dict(reference.named_parameters(remove_duplicate=False))
    first_name: dict[int, str] = {}
    for name, parameter in whole.items():
        first_name.setdefault(id(parameter), name)
    gradients: dict[str, Tensor] = {}
    for layer, module in zip(model.layers, modules, strict=True):
        for local, parameter in module.named_parameters(remove_duplicate=False):
            if parameter.grad is not None:
                name = first_name[id(whole[layer.weight_names[local]])]
                gradients[name] = gradients[name] + parameter.grad if name in gradients else parameter.grad
    return gradients
