"""The cost formula: what each stage takes and keeps on the rank that holds it."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeplan.cluster import Cluster
from pipeplan.errors import ProfileError
from pipeplan.plan.layout import Partition, Placement
from pipeplan.plan.ops import OpKind
from pipeplan.profile.types import LayerProfile, Profile
from pipeplan.simulate.encoding import IntArray

GRADIENT_BYTES = 4  # gradients are accumulated and reduced in fp32


@dataclass(frozen=True, slots=True, eq=False)
class StageCosts:
    """Costs of the stages of one partition under one placement; the only thing the clock and the memory walk read.

    Attributes:
        duration_ns: [num_stages, 4], columns F, B, I, W, host overhead of the op included.
        activation_bytes: [num_stages], kept from F until B or I.
        held_bytes: [num_stages], kept from I until W.
        workspace_bytes: [num_stages], extra while an op of the stage runs; where it recomputes, with the activations
            of its largest layer, which come back in the backward, one layer at a time.
        boundary_bytes: [num_stages], what stage s hands to s + 1 (and gets back as a gradient); 0 for the last.
        rank_by_stage: [num_stages].
        forward_transfer_ns: [num_stages], stage s to s + 1; 0 on one rank.
        backward_transfer_ns: [num_stages], stage s to s - 1; 0 on one rank.
        state_bytes: [num_ranks], weights, gradients, master weights and moments.
        send_ns, wait_ns: Host overhead of a message that leaves the rank, on the sending and the receiving rank.
    """

    duration_ns: IntArray
    activation_bytes: IntArray
    held_bytes: IntArray
    workspace_bytes: IntArray
    boundary_bytes: IntArray
    rank_by_stage: IntArray
    forward_transfer_ns: IntArray
    backward_transfer_ns: IntArray
    state_bytes: IntArray
    send_ns: int
    wait_ns: int

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.rank_by_stage)

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return len(self.state_bytes)


class CostTable:
    """Prefix sums over the layers of a profile, so that the costs of any stage take constant time.

    Raises:
        ProfileError: The cluster has a device type that a layer has no times for.
    """

    def __init__(self, profile: Profile, cluster: Cluster) -> None:
        self.profile = profile
        self.cluster = cluster
        layers = profile.layers
        self.num_layers = len(layers)
        devices = sorted({rank.device for rank in cluster.ranks})
        self._times_by_device = {device: _prefix([_times(layer, device) for layer in layers]) for device in devices}
        self._recomputed_by_device: dict[str, IntArray] = {}
        self._recomputable_by_device = {
            device: [
                layer.recomputation is not None and device in layer.recomputation.times_by_device for layer in layers
            ]
            for device in devices
        }
        for device in devices:
            self._recomputed_by_device[device] = _prefix([_recomputed_times(layer, device) for layer in layers])
        self._activation = _prefix_1d([layer.activation_bytes for layer in layers])
        self._recomputed_activation = _prefix_1d(
            [
                layer.activation_bytes if layer.recomputation is None else layer.recomputation.activation_bytes
                for layer in layers
            ]
        )
        self._held = _prefix_1d([layer.held_for_w_bytes if layer.is_splittable else 0 for layer in layers])
        self._splittable = _prefix_1d([int(layer.is_splittable) for layer in layers])
        self.parameters = _prefix_1d([layer.num_parameters for layer in layers])
        self.untrained_sums = _prefix_1d([layer.untrained_bytes for layer in layers])
        self._workspace = [layer.workspace_bytes for layer in layers]
        self._recomputed_workspace = [
            layer.workspace_bytes
            if layer.recomputation is None
            else layer.workspace_bytes + max(0, layer.activation_bytes - layer.recomputation.activation_bytes)
            for layer in layers
        ]
        self._output_bytes = np.array([layer.output_bytes for layer in layers], dtype=np.int64)
        self.tied_layers = _tied_layers(layers)
        self.overhead_ns = np.array([cluster.host_overhead_ns.get(kind.name, 0) for kind in OpKind], dtype=np.int64)

    def device_sums(self, device: str) -> IntArray:
        """Return prefix sums of times, [num_layers + 1, 4], on a device type without slowdown or overheads."""
        return self._times_by_device[device]

    def recomputed_device_sums(self, device: str) -> IntArray:
        """Return the same with recomputation; layers without such figures count as without recomputation."""
        return self._recomputed_by_device[device]

    @property
    def activation_sums(self) -> IntArray:
        """Prefix sums of activation bytes, [num_layers + 1]."""
        return self._activation

    @property
    def recomputed_activation_sums(self) -> IntArray:
        """The same with recomputation."""
        return self._recomputed_activation

    def is_recomputable(self, layer: int) -> bool:
        """Return whether the profile has recomputation figures for a layer on every device type of the cluster."""
        return all(recomputable[layer] for recomputable in self._recomputable_by_device.values())

    @property
    def can_recompute(self) -> bool:
        """Whether any layer can recompute on every device type of the cluster."""
        return any(self.is_recomputable(layer) for layer in range(self.num_layers))

    def workspace_bytes(self, layer: int, *, recompute: bool) -> int:
        """Return the workspace of a layer; one that recomputes has its activations again while its backward runs."""
        return self._recomputed_workspace[layer] if recompute else self._workspace[layer]

    @property
    def held_sums(self) -> IntArray:
        """Prefix sums of bytes held for W, [num_layers + 1]; layers that can't split count 0."""
        return self._held

    @property
    def output_bytes(self) -> IntArray:
        """Output bytes of each layer, [num_layers]."""
        return self._output_bytes

    def can_split(self, first: int, last: int) -> bool:
        """Return whether a stage of layers [first, last) has any layer whose W can be deferred."""
        return bool(self._splittable[last] > self._splittable[first])

    def stage_costs(
        self,
        partition: Partition | Sequence[int],
        placement: Placement | Sequence[int],
        recomputed_stages: Collection[int] = (),
    ) -> StageCosts:
        """Return the costs of the stages.

        Args:
            partition: The partition, or the number of layers of each stage.
            placement: The placement, or the rank of each stage.

        Raises:
            ProfileError: A recomputed stage has a layer without recomputation figures.
        """
        sizes = partition.num_layers_by_stage if isinstance(partition, Partition) else partition
        ranks = placement.rank_by_stage if isinstance(placement, Placement) else placement
        bounds = np.zeros(len(sizes) + 1, dtype=np.int64)
        np.cumsum(sizes, out=bounds[1:])
        num_stages = len(sizes)
        cluster = self.cluster
        duration = np.empty((num_stages, 4), dtype=np.int64)
        activation = self._activation[bounds[1:]] - self._activation[bounds[:-1]]
        for stage, rank_number in enumerate(ranks):
            rank = cluster.ranks[rank_number]
            first, last = int(bounds[stage]), int(bounds[stage + 1])
            sums = self._times_by_device[rank.device]
            if stage in recomputed_stages:
                self._check_recomputable(stage, first, last, rank.device)
                sums = self._recomputed_by_device[rank.device]
                activation[stage] = self._recomputed_activation[last] - self._recomputed_activation[first]
            total = sums[last] - sums[first]
            if rank.slowdown != 1.0:
                total = np.rint(total * rank.slowdown).astype(np.int64)
            duration[stage] = total + self.overhead_ns
        boundary = self._output_bytes[bounds[1:] - 1].copy()
        boundary[-1] = 0
        forward_transfer = np.zeros(num_stages, dtype=np.int64)
        backward_transfer = np.zeros(num_stages, dtype=np.int64)
        for stage in range(num_stages - 1):
            here, there = ranks[stage], ranks[stage + 1]
            forward_transfer[stage] = cluster.transfer_ns(here, there, int(boundary[stage]))
            backward_transfer[stage + 1] = cluster.transfer_ns(there, here, int(boundary[stage]))
        return StageCosts(
            duration_ns=duration,
            activation_bytes=activation,
            held_bytes=self._held[bounds[1:]] - self._held[bounds[:-1]],
            workspace_bytes=np.array(
                [
                    max(
                        self.workspace_bytes(layer, recompute=stage in recomputed_stages)
                        for layer in range(first, last)
                    )
                    for stage, (first, last) in enumerate(itertools.pairwise(bounds.tolist()))
                ],
                dtype=np.int64,
            ),
            boundary_bytes=boundary,
            rank_by_stage=np.array(ranks, dtype=np.int64),
            forward_transfer_ns=forward_transfer,
            backward_transfer_ns=backward_transfer,
            state_bytes=self._state_bytes(bounds, ranks),
            send_ns=cluster.host_overhead_ns.get("send", 0),
            wait_ns=cluster.host_overhead_ns.get("wait", 0),
        )

    def parameters_by_rank(self, bounds: Sequence[int] | IntArray, ranks: Sequence[int]) -> IntArray:
        """Return the distinct parameters of each rank, [num_ranks]; a weight tied within the rank counts once."""
        parameters = np.zeros(self.cluster.num_ranks, dtype=np.int64)
        for stage, rank in enumerate(ranks):
            parameters[rank] += self.parameters[bounds[stage + 1]] - self.parameters[bounds[stage]]
        for shared, layers in self.tied_layers.values():
            holders = [ranks[int(np.searchsorted(bounds, layer, side="right")) - 1] for layer in layers]
            for rank in set(holders):
                parameters[rank] -= (holders.count(rank) - 1) * shared
        return parameters

    def _state_bytes(self, bounds: IntArray, ranks: Sequence[int]) -> IntArray:
        per_parameter = self.profile.state_bytes_per_parameter
        states: NDArray[np.int64] = np.rint(self.parameters_by_rank(bounds, ranks) * per_parameter).astype(np.int64)
        np.add.at(states, np.asarray(ranks), np.diff(self.untrained_sums[bounds]))
        return states

    def _check_recomputable(self, stage: int, first: int, last: int, device: str) -> None:
        for layer in range(first, last):
            if not self._recomputable_by_device[device][layer]:
                raise ProfileError(
                    f"stage {stage} should recompute, but its layer {self.profile.layers[layer].name!r} has no "
                    f"'recompute' figures for {device} in the profile; profile it again, or leave the stage out of "
                    "'recompute'"
                )

    def tail_ns(self, bounds: Sequence[int] | IntArray, ranks: Sequence[int], end_ns_by_rank: IntArray) -> int:
        """Return when the batch is over: tied and data-parallel reductions and the step after each rank's last op.

        Reductions are ring all-reduces of fp32 gradients, 2 (n - 1) / n of the bytes over the slowest link of the
        group plus 2 (n - 1) latencies; replicas are taken to share a node.
        """
        cluster = self.cluster
        ready = end_ns_by_rank.astype(np.int64).copy()
        for shared, layers in self.tied_layers.values():
            holders = sorted({ranks[int(np.searchsorted(bounds, layer, side="right")) - 1] for layer in layers})
            if len(holders) > 1:
                duration = max(
                    _all_reduce_ns(cluster, len(holders), shared * GRADIENT_BYTES, a, b)
                    for a in holders
                    for b in holders
                    if a < b
                )
                ready[holders] = max(int(ready[rank]) for rank in holders) + duration
        if cluster.num_replicas > 1 and cluster.within_node is not None:
            link, count = cluster.within_node, cluster.num_replicas
            gradient_bytes = self.parameters_by_rank(bounds, ranks) * GRADIENT_BYTES
            for rank in range(cluster.num_ranks):
                moved = round(2 * (count - 1) / count * int(gradient_bytes[rank]) / link.gb_per_s)
                ready[rank] += 2 * (count - 1) * link.latency_ns + moved
        return int(ready.max()) + cluster.host_overhead_ns.get("step", 0)


def _all_reduce_ns(cluster: Cluster, count: int, num_bytes: int, source: int, target: int) -> int:
    link = cluster.link(source, target)
    if link is None:
        return 0
    return 2 * (count - 1) * link.latency_ns + round(2 * (count - 1) / count * num_bytes / link.gb_per_s)


def _tied_layers(layers: Sequence[LayerProfile]) -> dict[str, tuple[int, tuple[int, ...]]]:
    """Return, by key, the shared parameters and the layers that share them."""
    members: dict[str, list[int]] = {}
    for index, layer in enumerate(layers):
        if layer.tied is not None:
            members.setdefault(layer.tied, []).append(index)
    return {
        key: (min(layers[index].num_parameters for index in indices), tuple(indices))
        for key, indices in members.items()
        if len(indices) > 1
    }


def _times(layer: LayerProfile, device: str) -> tuple[int, int, int, int]:
    times = layer.times(device)
    if not layer.is_splittable or times.input_gradient_ns is None or times.weight_gradient_ns is None:
        return times.forward_ns, times.backward_ns, times.backward_ns, 0
    return times.forward_ns, times.backward_ns, times.input_gradient_ns, times.weight_gradient_ns


def _recomputed_times(layer: LayerProfile, device: str) -> tuple[int, int, int, int]:
    if layer.recomputation is None or device not in layer.recomputation.times_by_device:
        return _times(layer, device)
    times = layer.recomputation.times_by_device[device]
    if not layer.is_splittable or times.input_gradient_ns is None or times.weight_gradient_ns is None:
        return times.forward_ns, times.backward_ns, times.backward_ns, 0
    return times.forward_ns, times.backward_ns, times.input_gradient_ns, times.weight_gradient_ns


def _prefix(rows: Sequence[Sequence[int]]) -> IntArray:
    sums = np.zeros((len(rows) + 1, 4), dtype=np.int64)
    np.cumsum(np.array(rows, dtype=np.int64), axis=0, out=sums[1:])
    return sums


def _prefix_1d(values: Sequence[int]) -> IntArray:
    sums = np.zeros(len(values) + 1, dtype=np.int64)
    np.cumsum(np.array(values, dtype=np.int64), out=sums[1:])
    return sums
