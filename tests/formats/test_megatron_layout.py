"""Megatron's layout strings."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipeplan.errors import PlanError
from pipeplan.formats.megatron_layout import read_layout, write_layout
from pipeplan.formats.outline import Ends, complete_plan
from pipeplan.plan.layout import Partition, Placement
from pipeplan.plan.types import Plan
from pipeplan.profile.types import Profile
from pipeplan.program.verify import verify_plan
from tests.program.examples import V_PLAN, V_PROFILE, devices, equal_layers


def with_kinds(num_body: int) -> Profile:
    """Return a profile of an embedding, ``num_body`` decoder layers, a norm and a head."""
    kinds = ["embedding", *["block"] * num_body, "norm", "head"]
    profile = equal_layers(len(kinds))
    layers = zip(profile.layers, kinds, strict=True)
    return replace(profile, layers=tuple(replace(layer, kind=kind) for layer, kind in layers))


def plan_for(sizes: tuple[int, ...], num_ranks: int) -> Plan:
    """Return a plan that only has its layout right."""
    placement = Placement(tuple(stage % num_ranks for stage in range(len(sizes))))
    return replace(
        V_PLAN,
        partition=Partition(sizes),
        placement=placement,
        order=replace(V_PLAN.order, ops_by_rank=((),) * num_ranks),
    )


@pytest.mark.parametrize(
    ("layout", "sizes", "num_body"),
    [
        ("Et*3|t*4|t*4|t*3L", (4, 4, 4, 5), 14),
        ("Et|t|tt|L", (2, 1, 2, 2), 4),
        ("E|t*6|t*6|tL", (1, 6, 6, 3), 13),
    ],
)
def test_layouts_survive_the_round_trip(layout: str, sizes: tuple[int, ...], num_body: int) -> None:
    """The embedding counts with E, norm and head with L."""
    profile = with_kinds(num_body)
    assert Ends.of(profile) == Ends(1, 2)
    outline = read_layout(layout, profile, 4, 8)
    assert outline.partition == Partition(sizes)
    assert write_layout(plan_for(sizes, 4), profile) == layout


def test_multiplications_and_commas_are_written_out() -> None:
    """The published example without its prediction layer: 31 stages of two, embedding with three, the loss alone."""
    outline = read_layout("Et*3|(tt|)*29,tt|L", with_kinds(63), 16, 32)
    assert outline.partition == Partition((4, *[2] * 30, 2))
    assert outline.placement.rank_by_stage == (*range(16), *range(16))


def test_an_imported_layout_runs() -> None:
    """With two stages a rank it gets interleaved 1F1B, and verifies."""
    profile = with_kinds(6)
    outline = read_layout("Et|tt|tt|tL", profile, 2, 4)
    plan = complete_plan(outline, profile, devices(2))
    assert str(plan.placement) == "0,1,0,1"
    verify_plan(plan, profile, devices(2))


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("Et|t|m|L", "stage 2 of layout 'Et|t|m|L' has a multi-token prediction layer"),
        ("Et||tt|tL", "stage 1 of layout 'Et||tt|tL' is empty"),
        ("Et|tt|tt|tX", "stage 3 of layout 'Et|tt|tt|tX' reads 'tX'; expected E, t and L"),
        ("Et|tEt|tt|tL", "reads 'tEt'"),
        ("Et|tt|tt|t*9L", "makes 17 layers, equal has 9: expected 6 t between E and L"),
        ("Et|tt|tttL", "the 3 stages of layout 'Et|tt|tttL' don't divide over 2 ranks"),
        ("Et*999999999|L", "more than 100000 stages and layers"),
    ],
)
def test_faulty_layouts_say_what_is_wrong(layout: str, message: str) -> None:
    """Named by stage."""
    with pytest.raises(PlanError) as caught:
        read_layout(layout, with_kinds(6), 2, 4)
    assert message in str(caught.value)


def test_plans_that_a_layout_cannot_say_are_refused() -> None:
    """A V placement, and a head split over two stages."""
    with pytest.raises(PlanError, match="placement 0,1,1,0 is no loop over the ranks"):
        write_layout(V_PLAN, V_PROFILE)
    with pytest.raises(PlanError, match="stage 2 holds only a part of norm and head"):
        write_layout(plan_for((2, 2, 3, 1), 2), with_kinds(5))
