"""Calibration: from measured traces to host overheads, link latencies and corrected layer times."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from pipeplan.adapt.observations import (
    OpObservation,
    PairObservation,
    has_backward,
    observe_messages,
    observe_ops,
)
from pipeplan.cluster import Cluster, Link
from pipeplan.errors import ClusterError, ProfileError
from pipeplan.plan.ops import OpKind
from pipeplan.profile.types import LayerProfile, LayerTimes, Profile
from pipeplan.program.trace import Trace
from pipeplan.simulate import simulate

FloatArray = NDArray[np.float64]

# How far a profile may be off as a whole, before the rest counts as overhead of the host.
_SCALE_SPREAD_BY_SOURCE = {"measured": 0.01, "estimated": 0.3}
_OVERHEAD_SPREAD_NS = 1_000_000.0
# The same for what the traces say the layers took: layers run slower or quicker beside others than alone, by kind of
# op, and getting into them and out again (autograd's engine, for one) takes about a tenth of a millisecond.
_LAYER_SCALE_SPREAD = 0.3
_LAYER_OVERHEAD_NS = 100_000.0
_NOISE_SHARE = 0.005  # of an op's time, below which differences are taken for noise
_NOISE_NS = 10_000.0
_ALIKE = 1.5  # ratio of the longest op of a kind to the shortest, up to which slower layers look like an overhead
_LARGE_SHARE = 0.02  # of an op's time: an overhead that matters
_UNLIMITED_GB_PER_S = 1000.0  # of a link without figures: its measured latency then holds the bytes as well


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Costs that agree with measured traces.

    Attributes:
        factor_by_kind: Median over the layers of corrected / profiled time.
        measured_ns, before_ns, after_ns: Median time of a batch: measured, and predicted with the old and new costs.
        notes: What the traces could not tell, for people.
    """

    profile: Profile
    cluster: Cluster
    factor_by_kind: Mapping[OpKind, float]
    measured_ns: int
    before_ns: int
    after_ns: int
    notes: tuple[str, ...]


def calibrate(traces: Sequence[Trace], profile: Profile, cluster: Cluster) -> Calibration:
    """Return the costs under which the simulator reproduces ``traces``.

    Ops first: a factor on the profile and one overhead for each kind of op explain the medians as far as they can,
    robustly. Where the traces tell what ops take besides their layers, that is overhead, and the factor is each kind's
    own; elsewhere it is common to all kinds. The rest corrects the layers' times so that the stages' sums match. Then
    messages: host overheads of sends and waits, and the latency of links from messages that were waited for. What is
    left at the end of a batch is the overhead of the step.

    Args:
        traces: At least one; they may be of different plans of the same profile and cluster.

    Raises:
        ProfileError, ClusterError: A trace is of a model with other layers, or ran on other ranks.
    """
    for trace in traces:
        _check_fit(trace, profile, cluster)
    observations = observe_ops(traces)
    overheads, missing = _op_overheads(observations, profile, cluster)
    corrected, factors = _correct_profile(observations, overheads, profile, cluster)
    host_overhead_ns = dict(cluster.host_overhead_ns) | {kind.name: round(overheads[kind]) for kind in OpKind}
    messages = observe_messages(traces)
    links = cluster
    if messages.send_ns is not None and messages.wait_ns is not None:
        host_overhead_ns |= {"send": round(messages.send_ns), "wait": round(messages.wait_ns)}
        links = _correct_links(messages.pairs, messages.wait_ns, profile, cluster)
    host_overhead_ns["step"] = 0
    calibrated = replace(links, host_overhead_ns=host_overhead_ns)
    steps = [_end_ns(trace, corrected, calibrated) for trace in traces if has_backward(trace)]
    host_overhead_ns["step"] = round(median(steps)) if steps else cluster.host_overhead_ns.get("step", 0)
    calibrated = replace(calibrated, host_overhead_ns=host_overhead_ns)
    return Calibration(
        profile=corrected,
        cluster=calibrated,
        factor_by_kind=factors,
        measured_ns=round(median(trace.finish_ns for trace in traces)),
        before_ns=round(median(simulate(trace.plan, profile, cluster).makespan_ns for trace in traces)),
        after_ns=round(median(simulate(trace.plan, corrected, calibrated).makespan_ns for trace in traces)),
        notes=tuple(
            _notes(
                missing,
                is_ambiguous=_is_ambiguous(observations, overheads),
                has_waits=bool(messages.pairs),
                has_steps=bool(steps),
                num_ranks=cluster.num_ranks,
            )
        ),
    )


def _check_fit(trace: Trace, profile: Profile, cluster: Cluster) -> None:
    if trace.partition.num_layers != profile.num_layers:
        raise ProfileError(
            f"the trace is of {trace.partition.num_layers} layers (model {trace.model!r}), but the profile has "
            f"{profile.num_layers} ({profile.model!r}); name the profile that the plan was made from"
        )
    if trace.num_ranks != cluster.num_ranks:
        raise ClusterError(
            f"the trace is of {trace.num_ranks} ranks, but the cluster has {cluster.num_ranks}; name the cluster that "
            "the plan was made for"
        )


def _notes(
    missing: Sequence[OpKind], *, is_ambiguous: bool, has_waits: bool, has_steps: bool, num_ranks: int
) -> list[str]:
    notes = []
    if is_ambiguous:
        notes.append(
            "the stages in the trace take about as long as each other: what they take beyond the profile counts as "
            "overhead of every op, though the layers may be slower instead, and plans with more stages may look slower "
            "than they are; add the trace of a plan with smaller stages to tell the two apart"
        )
    if missing:
        names = ", ".join(kind.name for kind in missing)
        notes.append(f"no {names} in the trace: taken like the kinds nearest to them; trace a plan that has them")
    if not has_waits and num_ranks > 1:
        notes.append("no rank waited for a message in the trace: the links stay as they were")
    if not has_steps:
        notes.append("the trace is of an evaluation: the overhead of the step stays as it was")
    return notes


def profiled_ns(observed: OpObservation, profile: Profile, cluster: Cluster) -> FloatArray:
    """Return what the profile says of every layer of the stage for that kind of op, [num_layers of the stage]."""
    rank = cluster.ranks[observed.rank]
    layers = profile.layers[observed.first_layer : observed.last_layer]
    return np.array(
        [
            rank.slowdown * _layer_ns(layer, rank.device, observed.kind, is_recomputed=observed.is_recomputed)
            for layer in layers
        ]
    )


def _layer_ns(layer: LayerProfile, device: str, kind: OpKind, *, is_recomputed: bool) -> int:
    """Return a layer's share of an op: the simulator's rule, in which a layer that can't split does all of B in I."""
    times = layer.times(device, recompute=is_recomputed)
    if kind is OpKind.F:
        return times.forward_ns
    if kind is OpKind.B:
        return times.backward_ns
    can_split = layer.is_splittable and times.input_gradient_ns is not None
    if kind is OpKind.I:
        return (times.input_gradient_ns or 0) if can_split else times.backward_ns
    return (times.weight_gradient_ns or 0) if can_split else 0


# Overheads of ops.


def _op_overheads(
    observations: Sequence[OpObservation], profile: Profile, cluster: Cluster
) -> tuple[dict[OpKind, float], list[OpKind]]:
    """Return the overhead of each kind in ns, and the kinds that no observation tells anything about."""
    besides_ns = _besides_layers(observations)
    if besides_ns is None:
        spread = _SCALE_SPREAD_BY_SOURCE.get(profile.source, _SCALE_SPREAD_BY_SOURCE["estimated"])
        found = _fitted_overheads(observations, profile, cluster, spread, 0.0, _OVERHEAD_SPREAD_NS)
    else:
        found = {}
        for kind, outside_ns in besides_ns.items():
            layers = [
                replace(one, duration_ns=one.layers_ns)
                for one in observations
                if one.kind is kind and one.layers_ns is not None
            ]
            within = _fitted_overheads(
                layers, profile, cluster, _LAYER_SCALE_SPREAD, _LAYER_OVERHEAD_NS, _LAYER_OVERHEAD_NS
            )
            found[kind] = outside_ns + within[kind]
    missing = [kind for kind in OpKind if kind not in found]
    return found | {kind: _nearest_overhead(kind, found, cluster) for kind in missing}, missing


def _besides_layers(observations: Sequence[OpObservation]) -> dict[OpKind, float] | None:
    """Return what ops of each kind take besides their layers, in ns: medians; ``None`` where a trace doesn't tell."""
    besides: dict[OpKind, list[float]] = defaultdict(list)
    for observed in observations:
        if observed.layers_ns is None:
            return None
        besides[observed.kind].append(observed.duration_ns - observed.layers_ns)
    return {kind: median(values) for kind, values in besides.items()}


def _fitted_overheads(
    observations: Sequence[OpObservation],
    profile: Profile,
    cluster: Cluster,
    scale_spread: float,
    usual_overhead_ns: float,
    overhead_spread_ns: float,
) -> dict[OpKind, float]:
    """Return the overhead of each observed kind in ns.

    Minimises, over a factor for each device type and an overhead for each kind, the differences between measured and
    predicted medians in units of their noise; large ones count less (soft L1). Where the data can't tell a factor from
    an overhead, how far factors usually are from 1, and overheads from what they usually are, decides.
    """
    devices = sorted({cluster.ranks[observed.rank].device for observed in observations})
    kinds = sorted({observed.kind for observed in observations})
    measured = np.array([observed.duration_ns for observed in observations])
    predicted = np.array([profiled_ns(observed, profile, cluster).sum() for observed in observations])
    device_index = [devices.index(cluster.ranks[observed.rank].device) for observed in observations]
    kind_index = [kinds.index(observed.kind) for observed in observations]
    noise = np.array(
        [
            max(_NOISE_NS, _NOISE_SHARE * observed.duration_ns, observed.spread_ns / np.sqrt(observed.num_samples))
            for observed in observations
        ]
    )

    def differences(unknowns: FloatArray) -> FloatArray:
        scales, overheads = unknowns[: len(devices)], unknowns[len(devices) :] * overhead_spread_ns
        return np.concatenate(
            [
                (predicted * scales[device_index] + overheads[kind_index] - measured) / noise,
                (scales - 1.0) / scale_spread,
                (overheads - usual_overhead_ns) / overhead_spread_ns,
            ]
        )

    start = np.concatenate([np.ones(len(devices)), np.full(len(kinds), 0.1)])
    solution = least_squares(differences, start, bounds=(0.0, np.inf), loss="soft_l1").x[len(devices) :]
    return dict(zip(kinds, (solution * overhead_spread_ns).tolist(), strict=True))


def _is_ambiguous(observations: Sequence[OpObservation], overheads: Mapping[OpKind, float]) -> bool:
    """Return whether a large overhead was found from ops of about one length, so that it may be none.

    Never where the traces tell what the layers took.
    """
    if _besides_layers(observations) is not None:
        return False
    for kind, overhead_ns in overheads.items():
        durations_ns = [observed.duration_ns for observed in observations if observed.kind is kind]
        if (
            durations_ns
            and max(durations_ns) <= _ALIKE * min(durations_ns)
            and overhead_ns > _LARGE_SHARE * max(durations_ns)
        ):
            return True
    return False


def _nearest_overhead(kind: OpKind, found: Mapping[OpKind, float], cluster: Cluster) -> float:
    """Return what the cluster says of a kind that wasn't measured, or what the kinds most like it take."""
    known = cluster.host_overhead_ns.get(kind.name)
    if known is not None:
        return known
    backward = [found[other] for other in (OpKind.B, OpKind.I, OpKind.W) if other in found]
    return median(backward or found.values())


# Times of layers.


def _correct_profile(
    observations: Sequence[OpObservation], overheads: Mapping[OpKind, float], profile: Profile, cluster: Cluster
) -> tuple[Profile, dict[OpKind, float]]:
    """Return the profile whose stage sums match the observations, and the median factor of each kind."""
    groups: dict[tuple[str, bool, OpKind], list[OpObservation]] = defaultdict(list)
    for observed in observations:
        device = cluster.ranks[observed.rank].device
        groups[device, observed.is_recomputed, observed.kind].append(observed)
    factors: dict[tuple[str, bool, OpKind], FloatArray] = {
        key: _layer_factors(group, overheads[key[2]], profile, cluster) for key, group in groups.items()
    }
    layers = list(profile.layers)
    for device in sorted({key[0] for key in factors}):
        for is_recomputed in (False, True):
            by_kind = _complete(
                {
                    kind: factors.get((device, is_recomputed, kind), factors.get((device, not is_recomputed, kind)))
                    for kind in OpKind
                },
                np.array([layer.is_splittable for layer in layers]),
            )
            layers = [
                _corrected(layer, device, {kind: by_kind[kind][index] for kind in OpKind}, is_recomputed=is_recomputed)
                for index, layer in enumerate(layers)
            ]
    summary = {
        kind: float(np.nanmedian(np.concatenate(found)))
        for kind in OpKind
        if (found := [values for key, values in factors.items() if key[2] is kind])
    }
    return replace(profile, layers=tuple(layers)), summary


def _layer_factors(
    group: Sequence[OpObservation], overhead_ns: float, profile: Profile, cluster: Cluster
) -> FloatArray:
    """Return a factor for each layer, [num_layers], NaN for layers that no observation covers.

    The smallest change of the profile, weighted by time, under which the stages' sums match: within one stage all
    layers change by the same factor; where traces of several partitions overlap, least squares.
    """
    rows = np.zeros((len(group), profile.num_layers))
    missing_ns = np.zeros(len(group))
    for number, observed in enumerate(group):
        times = profiled_ns(observed, profile, cluster)
        span = slice(observed.first_layer, observed.last_layer)
        rows[number, span] = np.sqrt(times)
        missing_ns[number] = max(observed.duration_ns - overhead_ns, 0.0) - times.sum()
    changes = np.linalg.lstsq(rows, missing_ns, rcond=None)[0]
    factors = np.full(profile.num_layers, np.nan)
    for observed in group:
        times = profiled_ns(observed, profile, cluster)
        span = slice(observed.first_layer, observed.last_layer)
        roots = np.sqrt(times)
        factors[span] = np.where(times > 0, 1.0 + changes[span] / np.maximum(roots, 1.0), 1.0)
    lowest: FloatArray = np.maximum(factors, 0.0)
    return lowest


def _complete(
    factors: Mapping[OpKind, FloatArray | None], is_splittable: NDArray[np.bool_]
) -> dict[OpKind, FloatArray]:
    """Return a factor for every kind and layer: unmeasured ones are those of the related kinds, else 1."""
    whole, first, second = (factors[kind] for kind in (OpKind.B, OpKind.I, OpKind.W))
    both = first
    if first is not None and second is not None:  # a layer that can't split does all of its backward in I
        both = np.where(is_splittable, (first + second) / 2, first)
    related: dict[OpKind, FloatArray | None] = {OpKind.F: None, OpKind.B: both, OpKind.I: whole, OpKind.W: whole}
    completed = {}
    for kind in OpKind:
        values = np.full(len(is_splittable), np.nan)
        for source in (factors[kind], related[kind]):
            if source is not None:
                values = np.where(np.isnan(values), source, values)
        completed[kind] = np.where(np.isnan(values), 1.0, values)
    return completed


def _corrected(
    layer: LayerProfile, device: str, factor_by_kind: Mapping[OpKind, float], *, is_recomputed: bool
) -> LayerProfile:
    if is_recomputed:
        recomputation = layer.recomputation
        if recomputation is None or device not in recomputation.times_by_device:
            return layer
        times = dict(recomputation.times_by_device)
        times[device] = _scaled(times[device], factor_by_kind)
        return replace(layer, recomputation=replace(recomputation, times_by_device=times))
    if device not in layer.times_by_device:
        return layer
    times = dict(layer.times_by_device)
    times[device] = _scaled(times[device], factor_by_kind)
    return replace(layer, times_by_device=times)


def _scaled(times: LayerTimes, factor_by_kind: Mapping[OpKind, float]) -> LayerTimes:
    def scale(value_ns: int | None, kind: OpKind) -> int | None:
        return None if value_ns is None else round(value_ns * factor_by_kind[kind])

    return LayerTimes(
        forward_ns=round(times.forward_ns * factor_by_kind[OpKind.F]),
        backward_ns=round(times.backward_ns * factor_by_kind[OpKind.B]),
        input_gradient_ns=scale(times.input_gradient_ns, OpKind.I),
        weight_gradient_ns=scale(times.weight_gradient_ns, OpKind.W),
    )


# Messages and the end of the batch.


def _correct_links(pairs: Sequence[PairObservation], wait_ns: float, profile: Profile, cluster: Cluster) -> Cluster:
    """Return the cluster with the latencies of its links corrected; bandwidths stay as they are."""
    latencies: dict[tuple[int, int] | str, list[float]] = defaultdict(list)
    for pair in pairs:
        ranks = (min(pair.source_rank, pair.target_rank), max(pair.source_rank, pair.target_rank))
        link = cluster.link(*ranks)
        num_bytes = profile.layers[pair.boundary_layer].output_bytes
        moving_ns = num_bytes / (_UNLIMITED_GB_PER_S if link is None else link.gb_per_s)
        is_within = cluster.ranks[ranks[0]].node == cluster.ranks[ranks[1]].node
        name = ranks if ranks in cluster.link_by_pair else "within" if is_within else "between"
        latencies[name].append(pair.latency_ns - wait_ns - moving_ns)

    def corrected(link: Link | None, name: tuple[int, int] | str) -> Link | None:
        if name not in latencies:
            return link
        bandwidth = _UNLIMITED_GB_PER_S if link is None else link.gb_per_s
        return Link(max(0, round(median(latencies[name]))), bandwidth)

    return replace(
        cluster,
        within_node=corrected(cluster.within_node, "within"),
        between_nodes=corrected(cluster.between_nodes, "between"),
        link_by_pair={pair: corrected(link, pair) or link for pair, link in cluster.link_by_pair.items()},
    )


def _end_ns(trace: Trace, profile: Profile, cluster: Cluster) -> int:
    """Return what a batch takes after its last op beyond the reductions that the simulator knows of."""
    predicted = simulate(
        trace.plan, profile, replace(cluster, host_overhead_ns={**cluster.host_overhead_ns, "step": 0})
    )
    reductions_ns = predicted.makespan_ns - predicted.last_op_ns
    return max(0, trace.finish_ns - trace.last_op_ns - reductions_ns)
