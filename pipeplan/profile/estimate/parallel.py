"""One rank's share of a layer under tensor and expert parallelism: a step of its own, asked for by the user.

Tensor parallelism over N divides the work and the weights of matrix products, attention, scans and the loss by N, and
the traffic and activations of every tensor but those as large as the layer's input, which each rank keeps whole (no
sequence parallelism). Parameters with one dimension stay whole. Expert parallelism over N divides the parameters of
the experts; with balanced routing the work stays. Nothing is added: the communication inside the layer that either
needs costs time that the estimate leaves out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pipeplan.errors import ProfileError
from pipeplan.profile.estimate.kernels import Category, Kernel, LayerCost


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelSizes:
    """Sizes of the groups that share one pipeline rank's layers."""

    tensor: int = 1
    expert: int = 1

    def __post_init__(self) -> None:
        for name, size in (("tensor", self.tensor), ("expert", self.expert)):
            if size < 1:
                raise ProfileError(f"{name}-parallel size must be at least 1, got {size}")

    @property
    def is_parallel(self) -> bool:
        """Whether anything is divided."""
        return self.tensor > 1 or self.expert > 1


def share_of(cost: LayerCost, sizes: ParallelSizes, name: str) -> LayerCost:
    """Return what one rank of the group runs and keeps of a layer.

    Raises:
        ProfileError: The layer's parameters can't be divided evenly; names it.
    """
    if not sizes.is_parallel:
        return cost
    plain = cost.num_split_parameters - cost.num_expert_parameters
    for what, number, divisor in (
        ("weights", plain, sizes.tensor),
        ("experts", cost.num_experts, sizes.expert),
        ("expert weights", cost.num_expert_parameters, sizes.tensor * sizes.expert),
    ):
        if number % divisor:
            raise ProfileError(f"layer {name!r}: its {number:,} {what} can't be divided evenly by {divisor}")
    kept = (cost.num_parameters - cost.num_split_parameters) + plain // sizes.tensor
    experts = cost.num_expert_parameters // (sizes.tensor * sizes.expert)
    whole = cost.whole_activation_bytes

    def kernels(found: tuple[Kernel, ...]) -> tuple[Kernel, ...]:
        return tuple(_share_of_kernel(kernel, sizes.tensor) for kernel in found)

    def split(num_bytes: int) -> int:
        unsplit = min(whole, num_bytes)
        return unsplit + (num_bytes - unsplit) // sizes.tensor

    return replace(
        cost,
        forward=kernels(cost.forward),
        repeated_forward=kernels(cost.repeated_forward),
        backward=kernels(cost.backward),
        input_gradient=kernels(cost.input_gradient),
        weight_gradient=kernels(cost.weight_gradient),
        num_parameters=kept + experts,
        num_split_parameters=plain // sizes.tensor + experts,
        num_expert_parameters=experts,
        num_experts=cost.num_experts // sizes.expert,
        activation_bytes=split(cost.activation_bytes),
        fused_activation_bytes=split(cost.fused_activation_bytes),
        held_for_w_bytes=split(cost.held_for_w_bytes),
        workspace_bytes=split(cost.workspace_bytes),
    )


def _share_of_kernel(kernel: Kernel, tensor: int) -> Kernel:
    flops = kernel.flops if kernel.category is Category.MEMORY else kernel.flops // tensor
    return replace(kernel, flops=flops, split_bytes=kernel.split_bytes // tensor)
