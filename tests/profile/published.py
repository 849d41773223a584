"""Published per-layer times, as profiles of the models they belong to."""

from __future__ import annotations

from dataclasses import dataclass

from pipeplan.model.types import ModelLayers
from pipeplan.profile import LayerProfile, LayerTimes, Profile
from pipeplan.units import ns_from_ms

DEVICE = "h800-sxm"

# Nemotron-Nano-9B-v2 on H800, sequence 4096, micro-batch 1, bf16 (OctoPipe paper): F, input gradient, weight gradient.
# The final norm is part of the head.
NANO_9B_MS = {
    "embedding": (0.7589, 2.8654, 0.0),
    "mamba": (2.6768, 4.2984, 1.7599),
    "mlp": (1.8477, 1.9090, 1.6866),
    "attention": (1.9254, 2.4534, 0.6547),
    "norm": (0.0, 0.0, 0.0),
    "head": (14.2155, 15.7056, 0.0595),
}


@dataclass(frozen=True, slots=True)
class Published:
    """Times of one kind of layer, in milliseconds."""

    forward: float
    input_gradient: float
    weight_gradient: float

    @property
    def backward(self) -> float:
        """The whole backward."""
        return self.input_gradient + self.weight_gradient

    @property
    def total(self) -> float:
        """Forward and backward."""
        return self.forward + self.backward


NANO_9B = {kind: Published(*times) for kind, times in NANO_9B_MS.items()}


def published_profile(model: ModelLayers) -> Profile:
    """Return Nemotron-Nano-9B-v2's published times for the layers of its template; memory is left at zero."""
    return Profile(
        model=model.name,
        source="measured",
        micro_batch_size=1,
        sequence_length=4096,
        dtype="bf16",
        state_bytes_per_parameter=0,
        count_boundary_buffers=False,
        layers=tuple(
            LayerProfile(
                name=layer.name,
                kind=layer.kind,
                num_parameters=layer.num_parameters or 0,
                output_bytes=0,
                activation_bytes=0,
                held_for_w_bytes=0,
                times_by_device={
                    DEVICE: LayerTimes(
                        forward_ns=ns_from_ms(NANO_9B[layer.kind].forward),
                        backward_ns=ns_from_ms(NANO_9B[layer.kind].backward),
                        input_gradient_ns=ns_from_ms(NANO_9B[layer.kind].input_gradient),
                        weight_gradient_ns=ns_from_ms(NANO_9B[layer.kind].weight_gradient),
                    )
                },
            )
            for layer in model.layers
        ),
    )
