"""Running one layer on fake tensors: its kernels by direction, and the bytes it keeps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from pipeplan.deferral import WeightGradientStore
from pipeplan.errors import ProfileError
from pipeplan.model.types import LayerSource
from pipeplan.profile.estimate import attention
from pipeplan.profile.estimate.fusion import FusedAway, fuse, held_bytes
from pipeplan.profile.estimate.kernels import Category, Kernel, LayerCost
from pipeplan.profile.estimate.opaque import FusedFunctions
from pipeplan.profile.estimate.recorder import OpRecorder, Recording, storage_key
from pipeplan.profile.held import activation_bytes, tensors_in, untrained_bytes
from pipeplan.profile.passes import Pass, deferring, describe, gradient_of, measure_bytes

_FP32_BYTES = 4
_MAX_OPS = 5_000  # of a forward, and more only where it has fewer than two for each token: a loop over blocks of them

Finish = Callable[[Any], Tensor]
"""The loss, a function of what the last layer returns."""


@dataclass(frozen=True, slots=True)
class LayerOnFakes:
    """One layer's cost, and what it returned: detached, the input of the layer after it."""

    cost: LayerCost
    outputs: Any


def run_on_fakes(
    source: LayerSource,
    value: Any,
    finish: Finish | None,
    dtype: torch.dtype,
    *,
    functions: FusedFunctions,
    has_kernels: bool,
    is_splittable: bool,
) -> LayerOnFakes:
    """Return the cost of one layer; inside a ``FakeTensorMode`` that takes real tensors for constants.

    Args:
        value: What the layer before it returned, fake.
        finish: The loss, for the last layer.
        functions: Shared by all layers of a model.
        has_kernels: Whether kernel packages (scans, convolutions of Mamba) are assumed to be installed. Bytes are
            otherwise those of transformers' plain torch code.
        is_splittable: Whether the layer may be split; otherwise its whole backward is I.
    """
    built = source.build()
    if isinstance(built, nn.Module):
        built = _cast_in_place(built, dtype).train()
    layer: Callable[[Any], Any] = built
    module = built if isinstance(built, nn.Module) else nn.Module()

    def make_inputs() -> Any:
        return pytree.tree_map_only(
            Tensor, lambda tensor: torch.empty_like(tensor).requires_grad_(tensor.requires_grad), value
        )

    with _settings_for_gpus(module), functions.exchanged(module), _OpLimit(source, value):
        outputs = layer(make_inputs())  # makes masks and rotary tables, which all micro-batches share
        outputs = pytree.tree_map_only(
            Tensor, lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad), outputs
        )
    work = _Work(layer, module, finish, make_inputs, _whole_sizes(value, outputs), is_splittable)
    with ExitStack() as stack:
        if has_kernels:
            stack.enter_context(_settings_for_gpus(module))
            stack.enter_context(functions.exchanged(module))
        sizes = work.sizes()
    kernels = work.kernels(functions)
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    expert_weights = [parameter for parameter in parameters if storage_key(parameter) in kernels.expert_weights]
    final = outputs if finish is None else finish(outputs).detach()
    cost = LayerCost(
        **kernels.by_direction,
        num_parameters=sum(parameter.numel() for parameter in parameters),
        num_split_parameters=sum(parameter.numel() for parameter in parameters if parameter.dim() > 1),
        num_expert_parameters=sum(parameter.numel() for parameter in expert_weights),
        num_experts=math.gcd(*(parameter.shape[0] for parameter in expert_weights)),
        untrained_bytes=untrained_bytes(module),
        output_bytes=sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(final)),
        output_tensors=tuple(describe(tensor) for tensor in tensors_in(final)),
        activation_bytes=sizes.activation_bytes,
        whole_activation_bytes=min(kernels.whole_activation_bytes, sizes.activation_bytes),
        fused_activation_bytes=min(kernels.fused_activation_bytes, sizes.activation_bytes),
        recompute_activation_bytes=sizes.recompute_activation_bytes,
        held_for_w_bytes=sizes.held_for_w_bytes,
        workspace_bytes=sizes.workspace_bytes,
    )
    return LayerOnFakes(cost, outputs)


class _OpLimit(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Ends a forward of more ops than any layer has that doesn't take its sequence step by step."""

    def __init__(self, source: LayerSource, value: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._source = source
        num_tokens = max((tensor.shape[1] for tensor in tensors_in(value) if tensor.dim() > 1), default=0)
        self._max_ops = max(_MAX_OPS, 2 * num_tokens)
        self._num_ops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._num_ops += func.namespace != "prim"  # questions, which must not raise
        if self._num_ops > self._max_ops and func.namespace != "prim":
            raise ProfileError(
                f"layer {self._source.name!r} ({self._source.kind}) can't be estimated: its forward runs more than "
                f"{self._max_ops:,} ops, as a loop over the sequence does, which real kernels take as one; measure it "
                "where the GPU is, with --device cuda, or estimate at a shorter --sequence-length"
            )
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True, slots=True)
class _Sizes:
    activation_bytes: int
    recompute_activation_bytes: int
    held_for_w_bytes: int
    workspace_bytes: int


@dataclass(frozen=True, slots=True)
class _Counted:
    by_direction: dict[str, tuple[Kernel, ...]]
    whole_activation_bytes: int
    fused_activation_bytes: int
    expert_weights: set[int]


@dataclass(frozen=True, slots=True)
class _Work:
    """A layer ready to run, and the loss after it if it is the last."""

    layer: Callable[[Any], Any]
    module: nn.Module
    finish: Finish | None
    make_inputs: Callable[[], Any]
    whole_sizes: frozenset[int]
    is_splittable: bool

    def sizes(self) -> _Sizes:
        """Count bytes by the measuring profiler's own rules."""

        def run(inputs: Any) -> Any:
            outputs = self.layer(inputs)
            return outputs if self.finish is None else self.finish(outputs)

        def run_recomputing(inputs: Any) -> Any:
            outputs = checkpoint(self.layer, inputs, use_reentrant=False, preserve_rng_state=False)
            return outputs if self.finish is None else self.finish(outputs)

        inputs = self.make_inputs()
        gradients = [gradient_of(root) for root in tensors_in(run(inputs)) if root.requires_grad]
        held, workspace = measure_bytes(
            Pass(run, inputs, gradients), torch.device("cpu"), is_splittable=self.is_splittable
        )
        return _Sizes(
            activation_bytes=activation_bytes(run, self.make_inputs, keeps_inputs=False),
            recompute_activation_bytes=activation_bytes(run_recomputing, self.make_inputs, keeps_inputs=True),
            held_for_w_bytes=held,
            workspace_bytes=workspace,
        )

    def kernels(self, functions: FusedFunctions) -> _Counted:
        """Record F and B, then F, I and W if the layer may be split, and group their ops into kernels."""
        recorder = OpRecorder()
        with _settings_for_gpus(self.module), functions.exchanged(self.module, recorder), recorder:
            plain = self._recorded(recorder, None)
            split = self._recorded(recorder, WeightGradientStore()) if self.is_splittable else plain
        num_bytes = recorder.num_bytes_by_storage
        weights = {storage_key(tensor) for tensor in (*self.module.parameters(), *self.module.buffers())}

        def kernels_of(one: _Recorded) -> tuple[list[tuple[Kernel, ...]], int]:
            found = []
            known: FusedAway = {}
            fused_bytes = 0
            for recording in (one.layer, one.loss, one.loss_backward, one.backward, one.weights):
                fusion = fuse(
                    recording,
                    num_bytes_by_storage=num_bytes,
                    whole_sizes=self.whole_sizes,
                    fused_away=known,
                    # the loss's backward is one pass over what its forward left, like any other pointwise op
                    memory=Category.CROSS_ENTROPY if recording is one.loss else Category.MEMORY,
                )
                known = fusion.fused_away
                found.append(fusion.kernels)
                if recording is one.loss:
                    fused_bytes = held_bytes(one.saved, fusion, num_bytes, without=weights)
            return found, fused_bytes

        (forward, loss, loss_backward, backward, _), fused_bytes = kernels_of(plain)
        (_, _, _, input_gradient, weight_gradient), _ = kernels_of(split)
        return _Counted(
            by_direction={
                "forward": forward + loss,
                "repeated_forward": forward,
                "backward": loss_backward + backward + _accumulated(plain.backward, plain.backward_gradients),
                "input_gradient": (
                    loss_backward + input_gradient + _accumulated(split.backward, split.backward_gradients)
                ),
                "weight_gradient": weight_gradient + _accumulated(split.weights, split.weight_gradients),
            },
            whole_activation_bytes=sum(
                num_bytes[key] for key in plain.saved - weights if num_bytes[key] in self.whole_sizes
            ),
            fused_activation_bytes=fused_bytes,
            expert_weights=recorder.expert_weights,
        )

    def _recorded(self, recorder: OpRecorder, store: WeightGradientStore | None) -> _Recorded:
        """Run and record one forward and backward; with a store the weight gradients come last."""
        one = _Recorded()
        inputs = self.make_inputs()
        for parameter in self.module.parameters():
            parameter.grad = None
        with recorder.into(one.layer), one.noting_saved(), deferring(store):
            outputs = self.layer(inputs)
        one.layer.keep(outputs)
        roots = [tensor for tensor in tensors_in(outputs) if tensor.requires_grad]
        gradients: Sequence[Tensor | None] = [torch.empty_like(root) for root in roots]
        if self.finish is not None:
            handed_on = pytree.tree_map_only(
                Tensor, lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad), outputs
            )
            read = [tensor for tensor in tensors_in(handed_on) if tensor.requires_grad]
            with recorder.into(one.loss), one.noting_saved():
                loss = self.finish(handed_on)
            with recorder.into(one.loss_backward):
                gradients = torch.autograd.grad(loss, read, torch.empty_like(loss), allow_unused=True)
            one.loss_backward.keep(gradients)
        pairs = [(root, gradient) for root, gradient in zip(roots, gradients, strict=True) if gradient is not None]
        roots, gradients = [root for root, _ in pairs], [gradient for _, gradient in pairs]
        parameters = list(self.module.parameters())
        leaves = [tensor for tensor in (*tensors_in(inputs), *parameters) if tensor.requires_grad]
        if store is None:
            # not backward(), which adds to .grad: ``_accumulated`` says what that costs
            with recorder.into(one.backward):
                found = torch.autograd.grad(roots, leaves, gradients, allow_unused=True) if roots and leaves else ()
            one.backward.keep(found)
            one.backward_gradients = [
                gradient for leaf, gradient in zip(leaves, found, strict=False) if isinstance(leaf, nn.Parameter)
            ]
            return one
        with recorder.into(one.backward), deferring(store):
            if roots:
                torch.autograd.backward(roots, gradients)
        one.backward.keep([*(leaf.grad for leaf in leaves), *store.held_tensors(0)])
        one.backward_gradients = [parameter.grad for parameter in parameters]
        with recorder.into(one.weights):
            one.weight_gradients = store.gradients(0)
        one.weights.keep(one.weight_gradients)
        return one


def _accumulated(recording: Recording, gradients: Sequence[Tensor | None]) -> tuple[Kernel, ...]:
    """Return the kernel that adds gradients of weights to those of earlier micro-batches, which are kept in fp32.

    Matrix products do so while they write theirs; all other gradients are read once more and added in one pass.
    """
    by_products = {
        key
        for record in recording.records
        if record.category in (Category.GEMM, Category.GROUPED_GEMM)
        for key in record.writes
    }
    num_bytes = sum(
        gradient.numel() * (gradient.element_size() + 2 * _FP32_BYTES)
        for gradient in gradients
        if gradient is not None and storage_key(gradient) not in by_products
    )
    if not num_bytes:
        return ()
    return (Kernel(category=Category.MEMORY, flops=0, whole_bytes=0, split_bytes=num_bytes),)


class _Recorded:
    """One forward and backward of a layer, op by op."""

    def __init__(self) -> None:
        self.layer, self.loss, self.loss_backward = Recording(), Recording(), Recording()
        self.backward, self.weights = Recording(), Recording()
        self.backward_gradients: Sequence[Tensor | None] = ()
        self.weight_gradients: Sequence[Tensor | None] = ()
        self.saved: set[int] = set()

    def noting_saved(self) -> Any:
        """Note the storages that autograd keeps."""

        def pack(tensor: Tensor) -> Tensor:
            self.saved.add(storage_key(tensor))
            return tensor

        return saved_tensors_hooks(pack, lambda tensor: tensor)


def _whole_sizes(inputs: Any, outputs: Any) -> frozenset[int]:
    """Return the sizes in bytes, in any type, of a tensor as large as the hidden states of the layer."""
    numbers = [
        max((tensor.numel() for tensor in tensors_in(value) if tensor.is_floating_point()), default=0)
        for value in (inputs, outputs)
    ]
    number = numbers[0] or numbers[1]
    return frozenset({2 * number, 4 * number})


def _cast_in_place(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Give ``module`` parameters and buffers of another type; ``Module.to`` can't exchange fake ones."""
    casts: dict[int, Tensor] = {}
    for part in module.modules():
        for table in (part._parameters, part._buffers):
            for name, tensor in table.items():
                if tensor is None or not tensor.is_floating_point():
                    continue
                if id(tensor) not in casts:
                    fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype)
                    is_parameter = isinstance(tensor, nn.Parameter)
                    casts[id(tensor)] = nn.Parameter(fake, tensor.requires_grad) if is_parameter else fake
                table[name] = casts[id(tensor)]  # type: ignore[assignment]
    return module


@contextmanager
def _settings_for_gpus(module: nn.Module) -> Iterator[None]:
    """Let a Hugging Face layer call our attention op and grouped experts, inside this context."""
    found: list[Any] = [getattr(part, "config", None) for part in module.modules()]
    configs = {id(config): config for config in found if hasattr(config, "model_type")}
    if not configs:
        yield
        return
    attention.register()
    before = [
        (config, name, getattr(config, name))
        for config in configs.values()
        for name in ("_attn_implementation", "_experts_implementation")
    ]
    try:
        for config in configs.values():
            config._attn_implementation = attention.NAME
            config._experts_implementation = "grouped_mm"
        yield
    finally:
        for config, name, value in before:
            setattr(config, name, value)
