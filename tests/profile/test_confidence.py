"""Which measured times are uncertain enough to matter."""

from __future__ import annotations

from dataclasses import replace

from pipeplan.profile.confidence import uncertain_ops
from tests.profile.test_merge import profile, times


def test_spread_counts_by_its_share_of_time() -> None:
    """A wide spread of a long op comes before a wider one of a short op; tiny and steady ops are left out."""
    base = profile()
    layers = [
        replace(base.layers[0], name=name, times_by_device={"fast": times(unit_ns)})
        for name, unit_ns in (("long", 10_000), ("short", 1_000), ("tiny", 10))
    ]
    spread = {"long": 0.2, "short": 0.5, "tiny": 0.9}
    notes = {
        name: {
            "spread": {
                "fast": {
                    "F": {"relative_spread": value, "num_samples": 5},
                    "B": {"relative_spread": 0.05, "num_samples": 5},
                }
            }
        }
        for name, value in spread.items()
    }
    found = uncertain_ops(replace(base, layers=tuple(layers), extra={"layers": notes}))
    assert [(one.layer, one.op) for one in found] == [("long", "F"), ("short", "F")]
    assert 0.17 < found[0].time_share < 0.19  # 10,000 of 5 x 11,010
    assert uncertain_ops(replace(base, extra={})) == []
