"""What each layer costs on each device type."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pipeplan.errors import ProfileError, nearest


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTimes:
    """Times of one layer for one micro-batch on one device type, in nanoseconds.

    ``input_gradient_ns`` and ``weight_gradient_ns`` are both set or both ``None``; their sum may differ
    from ``backward_ns``, since the halves are measured the way the runtime runs them.
    """

    forward_ns: int
    backward_ns: int
    input_gradient_ns: int | None = None
    weight_gradient_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Recomputation:
    """What a layer costs when its activations are recomputed in the backward.

    The backward and input-gradient times include the repeated forward.
    """

    times_by_device: Mapping[str, LayerTimes]
    activation_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerProfile:
    """One layer of the model and what it costs.

    Attributes:
        kind: Free text, for display and per-kind efficiency.
        num_parameters: Trainable parameters of the layer (a tied one counts in each layer that names it).
        output_bytes: What the layer hands to the next one, per micro-batch.
        activation_bytes: Kept from F until B or I.
        held_for_w_bytes: Everything kept from I until W when W is split off.
        workspace_bytes: Peak extra while one op of the layer runs.
        untrained_bytes: Weights that get no gradient, and buffers; a shared one counts in each layer that holds it.
        is_splittable: Whether W may be deferred, in training as in the plan; needs I and W times on every device type
            used.
        tied: Key of a weight shared with the other layers of the same key.
        keep_with_previous: Whether the layer must share a stage with the one before it.
    """

    name: str
    kind: str
    num_parameters: int
    output_bytes: int
    activation_bytes: int
    held_for_w_bytes: int
    times_by_device: Mapping[str, LayerTimes]
    workspace_bytes: int = 0
    untrained_bytes: int = 0
    is_splittable: bool = True
    tied: str | None = None
    keep_with_previous: bool = False
    recomputation: Recomputation | None = None

    def times(self, device: str, *, recompute: bool = False) -> LayerTimes:
        """Return the times on ``device``.

        Raises:
            ProfileError: The layer has no times for that device type, or none with recomputation.
        """
        if recompute:
            if self.recomputation is None:
                raise ProfileError(f"layer {self.name!r} has no 'recompute' figures; profile it with recomputation")
            times_by_device = self.recomputation.times_by_device
        else:
            times_by_device = self.times_by_device
        try:
            return times_by_device[device]
        except KeyError:
            known = ", ".join(sorted(times_by_device))
            raise ProfileError(
                f"layer {self.name!r} has no times for device {device!r}{nearest(device, times_by_device)}; "
                f"the profile covers: {known}"
            ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A model as a list of layers with costs.

    Attributes:
        source: "measured" or "estimated".
        state_bytes_per_parameter: Weights, gradients, master weights and moments, after ZeRO sharding.
        count_boundary_buffers: Whether memory figures include tensors in flight between ranks.
        model_source: How to build the model again; see ``pipeplan.model.source``.
    """

    model: str
    source: str
    micro_batch_size: int
    sequence_length: int
    dtype: str
    state_bytes_per_parameter: float
    layers: tuple[LayerProfile, ...]
    count_boundary_buffers: bool = True
    model_source: Mapping[str, Any] | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_layers(self) -> int:
        """Number of layers, embedding and head included."""
        return len(self.layers)

    @property
    def devices(self) -> tuple[str, ...]:
        """Device types that every layer has times for, in alphabetical order."""
        common = set(self.layers[0].times_by_device)
        for layer in self.layers[1:]:
            common &= set(layer.times_by_device)
        return tuple(sorted(common))
