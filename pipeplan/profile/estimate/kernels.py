"""What a GPU would run for one layer: kernels with their work and traffic, by category."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from pipeplan.profile.estimate.gpus import Gpu
from pipeplan.units import NS_PER_S


class Category(Enum):
    """Kinds of kernels, each of which reaches its own share of a GPU's peak whatever model it runs in."""

    GEMM = "gemm"
    GROUPED_GEMM = "grouped_gemm"
    ATTENTION_FORWARD = "attention_forward"
    ATTENTION_BACKWARD = "attention_backward"
    SCAN_FORWARD = "scan_forward"
    SCAN_BACKWARD = "scan_backward"
    CROSS_ENTROPY = "cross_entropy"
    MEMORY = "memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One kernel launch.

    Attributes:
        flops: Floating-point operations of matrix products; all other arithmetic hides behind the traffic.
        whole_bytes: Bytes read and written that tensor parallelism leaves on every rank: tensors as large as the
            layer's input.
        split_bytes: Bytes read and written that it divides.
    """

    category: Category
    flops: int
    whole_bytes: int
    split_bytes: int

    @property
    def num_bytes(self) -> int:
        """All bytes read and written."""
        return self.whole_bytes + self.split_bytes

    def peak_ns(self, gpu: Gpu, dtype: str) -> float:
        """Return how long it takes at the GPU's peak: computing or moving bytes, whichever is longer."""
        seconds = max(self.flops / gpu.flop_per_s(dtype), self.num_bytes / gpu.memory_bytes_per_s)
        return seconds * NS_PER_S


Kernels = Sequence[Kernel]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCost:
    """What one layer runs and keeps on any GPU; layers of the same identity share it.

    Attributes:
        forward: F; includes the loss in the last layer.
        repeated_forward: What recomputation runs again: F without the loss.
        backward: B.
        input_gradient: I, and ``weight_gradient`` W, as the runtime splits B; W is empty where nothing can or may be
            deferred.
        num_split_parameters: Parameters that tensor parallelism divides: those with two dimensions or more.
        num_expert_parameters: Those of them that belong to single experts, of which there are ``num_experts``.
        untrained_bytes: Weights that get no gradient, and buffers.
        activation_bytes: Kept from F to B, as the measuring profiler counts; ``whole_activation_bytes`` of them in
            tensors as large as the layer's input.
        fused_activation_bytes: An estimate of what is kept where norms and activations are fused as well.
    """

    forward: tuple[Kernel, ...]
    repeated_forward: tuple[Kernel, ...]
    backward: tuple[Kernel, ...]
    input_gradient: tuple[Kernel, ...]
    weight_gradient: tuple[Kernel, ...]
    num_parameters: int
    num_split_parameters: int
    num_expert_parameters: int
    num_experts: int
    untrained_bytes: int
    output_bytes: int
    output_tensors: tuple[str, ...]
    activation_bytes: int
    whole_activation_bytes: int
    fused_activation_bytes: int
    recompute_activation_bytes: int
    held_for_w_bytes: int
    workspace_bytes: int

    @property
    def is_splittable(self) -> bool:
        """Whether any weight gradient could and may be deferred."""
        return bool(self.weight_gradient)
