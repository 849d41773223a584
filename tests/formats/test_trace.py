"""Traces for Perfetto."""

from __future__ import annotations

import json

from hypothesis import given, settings

from pipeplan.cluster import Cluster
from pipeplan.formats.trace import write_trace
from pipeplan.plan.types import Plan
from pipeplan.profile.types import Profile
from pipeplan.simulate import simulate
from tests.program.examples import PAIR_PLAN, PAIR_PROFILE, devices
from tests.strategies import planned


def test_ops_and_transfers_are_slices_in_microseconds() -> None:
    """The first forward, its transfer of 10 MB at 10 GB/s and 10 us, and the forward that waits for it."""
    events = json.loads(write_trace(simulate(PAIR_PLAN, PAIR_PROFILE, devices(2))))["traceEvents"]
    slices = {(event["name"], event["args"]["micro_batch"]): event for event in events if event["ph"] == "X"}
    first, moved, then = slices["0F0", 0], slices["activation 0 to 1", 0], slices["1F0", 0]
    assert (first["ts"], first["dur"], first["tid"]) == (0.0, 1000.0, 0)
    assert (moved["ts"], moved["dur"]) == (1000.0, 1010.0)
    assert (then["ts"], then["tid"]) == (2010.0, 1)


@settings(max_examples=20, deadline=None)
@given(planned())
def test_traces_are_whole(case: tuple[Plan, Profile, Cluster]) -> None:
    """Every op is there once; rows never overlap; every arrow starts, passes and ends in order of time."""
    plan, profile, cluster = case
    timeline = simulate(plan, profile, cluster)
    events = json.loads(write_trace(timeline))["traceEvents"]
    names = [event["name"] for event in events if event["ph"] == "X" and event["cat"] != "transfer"]
    assert sorted(names) == sorted(str(op) for ops in plan.order for op in ops)
    arrows: dict[int, list[float]] = {}
    for event in events:
        if event["ph"] in "stf":
            arrows.setdefault(event["id"], []).append(event["ts"])
    assert len(arrows) == len(timeline.transfers)
    assert all(times == sorted(times) and len(times) == 3 for times in arrows.values())
