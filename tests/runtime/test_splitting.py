"""Who says which layers' backward a launch splits."""

from __future__ import annotations

from typing import Any

import launching
import pytest
import toy

from pipeplan.cluster import equal_ranks
from pipeplan.plan.layout import Partition
from pipeplan.plan.orders import looped_placement, zb_h1
from pipeplan.plan.types import Plan
from pipeplan.program.verify import verify_plan
from pipeplan.runtime import module
from pipeplan.runtime.loading import RunnablePlan


def runnable(model: str, *, knows_profile: bool) -> RunnablePlan:
    """A plan of a toy model."""
    profile, cluster = launching.profile_of(model), equal_ranks(2, launching.DEVICE)
    plan = Plan(
        model=model,
        num_micro_batches=2,
        partition=Partition((5, 5)),
        placement=looped_placement(2, 1),
        order=zb_h1(2, 2),
    )
    return RunnablePlan(verified=verify_plan(plan, profile, cluster), profile=profile if knows_profile else None)


def test_the_plans_profile_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan that was made with a split head runs so, and says it; without a profile the layers decide."""
    said: list[str] = []
    monkeypatch.setattr(module.logger, "info", said.append)
    monkeypatch.setattr(module.dist, "get_rank", lambda: 0)
    layers: Any = toy.layers_of("hybrid")

    def found(model: str, *, knows_profile: bool) -> tuple[bool, ...]:
        return module._splittable_layers(layers, runnable(model, knows_profile=knows_profile))

    by_default = (*[True] * 9, False)
    assert found("hybrid", knows_profile=True) == found("own-splits", knows_profile=False) == by_default
    assert said == []
    planned = found("own-splits", knows_profile=True)
    assert planned[-1] and not planned[1]
    assert "splits the backward of 9.head, which the model would not" in said[0]
