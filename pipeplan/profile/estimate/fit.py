"""Fitting the efficiency table to profiles whose times are known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import lsq_linear

from pipeplan.errors import ProfileError
from pipeplan.profile.estimate.efficiency import Efficiency, Residual
from pipeplan.profile.estimate.gpus import Gpu
from pipeplan.profile.estimate.kernels import Category, Kernels, LayerCost
from pipeplan.profile.types import LayerTimes, Profile
from pipeplan.units import ms_from_ns

LAUNCH = "launch"

_MIN_SHARE = 0.1  # a category that is never a tenth of an entry is decided by the errors of the others
_PULL = 0.01  # towards the table's values, against directions that the entries leave open

# Where only forwards are known. Public benchmarks give attention's backward a share of its own, scans' none; a scan's
# backward computes the states again and two products for each of the forward's: 2.5 times the work on twice the bytes.
_FOLLOWERS = {Category.SCAN_BACKWARD: (Category.SCAN_FORWARD, 2 / 2.5)}

_HOST_BOUND_KINDS = ("embedding",)


@dataclass(frozen=True, slots=True)
class Entry:
    """One known time: of an op of one kind of layer."""

    profile: str
    kind: str
    op: str
    kernels: Kernels
    gpu: Gpu
    dtype: str
    time_ns: int


@dataclass(frozen=True, slots=True)
class KnownProfile:
    """A profile with times, and what each of its layers runs."""

    profile: Profile
    costs: Sequence[LayerCost]
    gpu: Gpu
    device: str

    def __post_init__(self) -> None:
        if len(self.costs) != len(self.profile.layers):
            raise ProfileError(
                f"profile of {self.profile.model!r} has {len(self.profile.layers)} layers, its model "
                f"{len(self.costs)}; was it made with another granularity?"
            )


@dataclass(frozen=True, slots=True)
class Fit:
    """A fitted table, and the entries that were left out, each with the reason."""

    efficiency: Efficiency
    left_out: tuple[str, ...]


def fit_efficiency(known: Sequence[KnownProfile], start: Efficiency, *, forward_only: bool = False) -> Fit:
    """Fit shares of the peak and the launch time by bounded least squares on relative errors.

    Shares stay at or below 1. Categories that matter for no entry keep the value that ``start`` has. Entries faster
    than the GPU's peak allows are left out, and those of embeddings, whose time the host decides.

    Args:
        forward_only: Fit F alone; the residuals still compare B.

    Raises:
        ProfileError: No entry is left.
    """
    labels = _labels(known)
    pairs = list(zip(known, labels, strict=True))
    entries, left_out = _usable([entry for pair in pairs for entry in _entries(*pair, forward_only=forward_only)])
    if not entries:
        raise ProfileError(f"nothing to fit an efficiency table on: {'; '.join(left_out) or 'no times are given'}")
    columns: list[Category | str] = [*Category, LAUNCH]
    # an unknown of the fit is the inverse of a share, or the launch time, relative to what the table has
    terms = np.array([_terms(entry, start) for entry in entries])
    times = np.array([entry.time_ns for entry in entries], dtype=float)
    shares = terms / times[:, None]
    is_free = (terms / terms.sum(axis=1, keepdims=True)).max(axis=0) >= _MIN_SHARE
    rest = 1 - shares[:, ~is_free].sum(axis=1)
    num_free = int(is_free.sum())
    # how much slower than the table everything is, by which the pull neither gains nor loses weight
    common = max(1.0, float(np.median(times / terms.sum(axis=1))))
    matrix = np.vstack([shares[:, is_free], _PULL / common * np.eye(num_free)])
    wanted = np.concatenate([rest, np.full(num_free, _PULL)])
    lower = np.array([start.share_by_category[one] if isinstance(one, Category) else 0.0 for one in columns])[is_free]
    solution = lsq_linear(matrix, wanted, bounds=(lower, np.inf)).x
    fitted = [one for one, free in zip(columns, is_free, strict=True) if free]
    factors = dict(zip(fitted, solution.tolist(), strict=True))
    share_by_category = {
        category: share / factors.get(category, 1.0) for category, share in start.share_by_category.items()
    }
    for follower, (leader, ratio) in _FOLLOWERS.items():
        if leader in factors and follower not in factors:
            share_by_category[follower] = ratio * share_by_category[leader]
    used = {entry.profile for entry in entries}
    names = ", ".join(dict.fromkeys(f"{one.profile.model} on {one.gpu.name}" for one, label in pairs if label in used))
    efficiency = Efficiency(
        share_by_category=share_by_category,
        launch_ns=start.launch_ns * factors.get(LAUNCH, 1.0),
        fitted=tuple(one.value if isinstance(one, Category) else one for one in fitted),
        fitted_on=f"{'F' if forward_only else 'F, I and W'} of {names}",
    )
    return Fit(replace(efficiency, residuals=_residuals(pairs, efficiency)), tuple(left_out))


def _usable(entries: Sequence[Entry]) -> tuple[list[Entry], list[str]]:
    usable, left_out = [], []
    for entry in entries:
        what = f"{entry.op} of {entry.kind} in {entry.profile}"
        peak_ns = sum(kernel.peak_ns(entry.gpu, entry.dtype) for kernel in entry.kernels)
        if entry.kind in _HOST_BOUND_KINDS:
            left_out.append(f"{what}: the host decides how long an embedding takes")
        elif entry.time_ns < peak_ns:
            left_out.append(
                f"{what}: {ms_from_ns(entry.time_ns):.4g} ms is less than the {ms_from_ns(peak_ns):.4g} ms that "
                f"{entry.gpu.name} needs at its peak"
            )
        else:
            usable.append(entry)
    return usable, left_out


def _terms(entry: Entry, start: Efficiency) -> list[float]:
    """Return how many nanoseconds of an entry each category, and launching, takes by the table that is given."""
    by_category = dict.fromkeys(Category, 0.0)
    for kernel in entry.kernels:
        peak_ns = kernel.peak_ns(entry.gpu, entry.dtype)
        by_category[kernel.category] += peak_ns / start.share_by_category[kernel.category]
    return [*by_category.values(), start.launch_ns * len(entry.kernels)]


def _labels(known: Sequence[KnownProfile]) -> list[str]:
    """Return what to call each profile: its model, and what else tells profiles of one model apart."""
    names = [one.profile.model for one in known]
    details = [
        (one.device, f"{one.profile.micro_batch_size} x {one.profile.sequence_length}", one.profile.dtype)
        for one in known
    ]
    labels = []
    for name, detail in zip(names, details, strict=True):
        same = [other for other_name, other in zip(names, details, strict=True) if other_name == name]
        differing = [own for own, others in zip(detail, zip(*same, strict=True), strict=True) if len(set(others)) > 1]
        labels.append(" ".join([name, *differing]))
    return labels


def _entries(known: KnownProfile, label: str, *, forward_only: bool) -> list[Entry]:
    """Return the known times of a profile, one for layers that run and take the same."""
    found: dict[tuple[object, ...], Entry] = {}
    for layer, cost in zip(known.profile.layers, known.costs, strict=True):
        times = layer.times(known.device)
        ops = _ops(times, cost)
        for op, (time_ns, kernels) in ops.items():
            if time_ns and kernels and (op == "F" or not forward_only):
                entry = Entry(label, layer.kind, op, kernels, known.gpu, known.profile.dtype, time_ns)
                found.setdefault((layer.kind, op, time_ns), entry)
    return list(found.values())


def _ops(times: LayerTimes, cost: LayerCost) -> dict[str, tuple[int, Kernels]]:
    ops: dict[str, tuple[int, Kernels]] = {"F": (times.forward_ns, cost.forward)}
    if times.input_gradient_ns is None or times.weight_gradient_ns is None or not cost.is_splittable:
        return ops | {"B": (times.backward_ns, cost.backward)}
    return ops | {
        "I": (times.input_gradient_ns, cost.input_gradient),
        "W": (times.weight_gradient_ns, cost.weight_gradient),
    }


def _residuals(known: Sequence[tuple[KnownProfile, str]], efficiency: Efficiency) -> tuple[Residual, ...]:
    """Return how well the table does on F and B of each kind of layer of each profile."""
    found: dict[tuple[str, str, str], Residual] = {}
    for one, label in known:
        profile = one.profile
        for layer, cost in zip(profile.layers, one.costs, strict=True):
            times = layer.times(one.device)
            for op, expected_ns, kernels in (
                ("F", times.forward_ns, cost.forward),
                ("B", times.backward_ns, cost.backward),
            ):
                key = (label, layer.kind, op)
                if not expected_ns or not kernels or key in found:
                    continue
                estimated_ns = efficiency.time_ns(kernels, one.gpu, profile.dtype)
                found[key] = Residual(
                    profile=label,
                    kind=layer.kind,
                    op=op,
                    expected_ms=ms_from_ns(expected_ns),
                    estimated_ms=ms_from_ns(estimated_ns),
                )
    return tuple(found.values())
