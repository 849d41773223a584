"""What a calibration changed, as plain data."""

from __future__ import annotations

from typing import Any

from pipeplan.adapt.calibrate import Calibration
from pipeplan.cluster import OVERHEAD_KEYS, Cluster, Link
from pipeplan.plan.ops import OpKind
from pipeplan.units import ms_from_ns, us_from_ns


def calibration_summary(result: Calibration, before: Cluster) -> dict[str, Any]:
    """Return overheads and link latencies before and after in us, factors on layer times, and batch times in ms."""
    after = result.cluster
    overheads = {
        key: (us_from_ns(before.host_overhead_ns.get(key, 0)), us_from_ns(after.host_overhead_ns.get(key, 0)))
        for key in OVERHEAD_KEYS
    }
    links = {
        "within_node": (_latency_us(before.within_node), _latency_us(after.within_node)),
        "between_nodes": (_latency_us(before.between_nodes), _latency_us(after.between_nodes)),
        **{
            f"ranks {low} and {high}": (_latency_us(before.link_by_pair[low, high]), _latency_us(link))
            for (low, high), link in after.link_by_pair.items()
        },
    }
    return {
        "measured_ms": ms_from_ns(result.measured_ns),
        "predicted_before_ms": ms_from_ns(result.before_ns),
        "predicted_after_ms": ms_from_ns(result.after_ns),
        "host_overheads_us": {key: {"before": old, "after": new} for key, (old, new) in overheads.items()},
        "link_latencies_us": {
            name: {"before": old, "after": new} for name, (old, new) in links.items() if new is not None
        },
        "time_factors": {kind.name: result.factor_by_kind[kind] for kind in OpKind if kind in result.factor_by_kind},
        "notes": list(result.notes),
    }


def _latency_us(link: Link | None) -> float | None:
    return None if link is None else us_from_ns(link.latency_ns)
