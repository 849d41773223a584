"""Fresh weights and buffers for one part of a model, by transformers' own rules and by nothing but the seed."""

from __future__ import annotations

import copy
import hashlib
from typing import Any

import torch
from torch import nn
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import unset_fake_temporarily

from pipeplan.errors import ModelError
from pipeplan.model.shells import shell_of


def initialised_part(owner: Any, path: str, seed: int) -> nn.Module:
    """Return a copy on the CPU of a part of a model on the meta device, initialised.

    Args:
        owner: The ``PreTrainedModel`` that the part belongs to; its ``_init_weights`` sets the values.
        path: A child of ``owner``, or a member of one of its module lists.
        seed: The values depend on it alone; the global random state stays as it is. Inside a ``FakeTensorMode`` the
            copy holds fake tensors, which have no values.

    Raises:
        ModelError: transformers leaves a weight or buffer of the part without a value; names it.
    """
    config = owner.config
    mode = active_fake_mode()
    with unset_fake_temporarily():
        part: nn.Module = copy.deepcopy(owner.get_submodule(path), {id(config): config})
    if mode is not None:
        return _faked(part)
    part = part.to_empty(device="cpu")
    _erase(part)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        part.apply(owner._init_weights)
        # some models set buffers of their layers from outside
        list_name, _, name = path.rpartition(".")
        surroundings = shell_of(owner)
        surroundings._modules[list_name or name] = nn.ModuleList([part]) if list_name else part
        owner._init_weights(surroundings)
    _check_values(part, f"{type(owner).__name__}.{path}")
    return part


def _faked(part: nn.Module) -> nn.Module:
    """Return ``part`` with fake tensors on the CPU for its weights and buffers: sizes without values."""
    fakes: dict[int, torch.Tensor] = {}
    for module in part.modules():
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is None:
                    continue
                if id(tensor) not in fakes:
                    fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
                    is_parameter = isinstance(tensor, nn.Parameter)
                    fakes[id(tensor)] = nn.Parameter(fake, tensor.requires_grad) if is_parameter else fake
                table[name] = fakes[id(tensor)]  # type: ignore[assignment]
    return part


def initialised_shell(owner: Any) -> nn.Module:
    """Return a shell of a model on the meta device whose own buffers (not its children's) have values on the CPU."""
    shell = shell_of(owner)
    buffers = {name: buffer for name, buffer in owner._buffers.items() if buffer is not None}
    if buffers:
        for name, buffer in buffers.items():
            shell._buffers[name] = torch.empty_like(buffer, device="cpu")
        _erase(shell, recurse=False)
        with torch.no_grad():
            owner._init_weights(shell)
        _check_values(shell, type(owner).__name__, recurse=False)
    return shell


def seed_of(seed: int, path: str) -> int:
    """Return the seed of one part of a model."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{path}".encode()).digest()[:7], "big")


def _erase(module: nn.Module, *, recurse: bool = True) -> None:
    """Make values that transformers doesn't set show."""
    with torch.no_grad():
        for tensor in (*module.parameters(recurse), *module.buffers(recurse)):
            if tensor.is_floating_point():
                tensor.fill_(torch.nan)


def _check_values(module: nn.Module, what: str, *, recurse: bool = True) -> None:
    tensors = (*module.named_parameters(recurse=recurse), *module.named_buffers(recurse=recurse))
    for name, tensor in tensors:
        # a tensor that was set was set whole, up to a row of zeros; looking at its end is enough and takes no time
        if tensor.is_floating_point() and tensor.numel() and torch.isnan(tensor.detach().flatten()[-1]):
            raise ModelError(f"transformers gives {what}.{name} no initial value, so the layer can't be built alone")
