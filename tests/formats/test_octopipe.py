"""OctoPipe's YAML, and the published plan as a case."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings

from pipeplan.cluster import Cluster
from pipeplan.errors import PipeplanError
from pipeplan.formats.octopipe import read_octopipe, write_octopipe
from pipeplan.formats.outline import complete_plan
from pipeplan.plan.types import Plan
from pipeplan.profile.types import Profile
from pipeplan.program.verify import verify_plan
from pipeplan.simulate import simulate
from tests.formats.test_megatron_layout import with_kinds
from tests.program.examples import V_PLAN, V_PROFILE, devices, equal_layers
from tests.strategies import planned

V_TEXT = """\
schedule: octopipe
partition: [1, 1, 1, 1]
placement: [[0, 3], [1, 2]]
scheduling:
- (f, 0, 0, 0, 0, 1000)
- (f, 1, 0, 0, 1000, 2000)
- (f, 0, 3, 0, 5020, 6020)
- (b, 0, 3, 0, 6020, 7020)
"""


def test_the_file_is_as_documented() -> None:
    """Stages by rank, tuples of type, micro-batch, stage, rank and times in microseconds."""
    text = write_octopipe(V_PLAN, V_PROFILE, simulate(V_PLAN, V_PROFILE, devices(2)))
    assert text.startswith(V_TEXT)
    assert text.count("(f, ") == text.count("(b, ") == 12
    assert text.count("(w, ") == 6


def test_files_of_either_spelling_read_the_same() -> None:
    """Entries come as strings in parentheses or as lists, in any order; b is the input gradient only beside a w."""
    content: dict[str, Any] = {
        "partition": [1, 1],
        "placement": [[0], [1]],
        "scheduling": [
            "(w, 0, 0, 0, 40, 50)",
            "(f, 0, 0, 0, 0, 10)",
            ["b", 0, 0, 0, 30, 40],
            "('f', 0, 1, 1, 10, 20)",
            ["b", 0, 1, 1, 20.5, 30],
        ],
    }
    outline = read_octopipe(content, equal_layers(2), "octopipe.yaml")
    assert outline.order.lines() == ["0F0 0I0 0W0", "1F0 1B0"]


@settings(max_examples=30, deadline=None)
@given(planned())
def test_plans_survive_the_file(case: tuple[Plan, Profile, Cluster]) -> None:
    """Any plan whose ops take time reads back: partition, placement and order."""
    plan, profile, cluster = case
    slow = replace(cluster, host_overhead_ns=dict.fromkeys("FBIW", 1000))
    text = write_octopipe(plan, profile, simulate(plan, profile, slow))
    outline = read_octopipe(yaml.safe_load(text), profile, "octopipe.yaml")
    assert (outline.partition, outline.placement, outline.order) == (plan.partition, plan.placement, plan.order)


def test_embedding_and_head_are_left_out() -> None:
    """The published partitions count decoder layers; files that count everything are taken as they are."""
    profile = with_kinds(4)
    scheduling = [f"({kind}, 0, {stage}, {stage}, 0, 1)" for stage in (0, 1) for kind in "fb"]
    for partition in ([2, 2], [3, 4]):
        content = {"partition": partition, "placement": [[0], [1]], "scheduling": scheduling}
        outline = read_octopipe(content, profile, "octopipe.yaml")
        plan = complete_plan(outline, profile, devices(2))
        assert str(plan.partition) == "3,4"
        verify_plan(plan, profile, devices(2))
        text = write_octopipe(plan, profile, simulate(plan, profile, devices(2)))
        assert yaml.safe_load(text)["partition"] == [2, 2]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"partition": [2, 1]}, "octopipe.yaml partitions 3 layers; equal has 2"),
        ({"placement": [[0], [0, 1]]}, "'placement' has stage 0 on ranks 0 and 1"),
        ({"placement": [[0], []]}, "'placement' has no rank for stage 1"),
        ({"placement": [[0], [1, 2]]}, "'placement' has 3 stages, 'partition' 2"),
        ({"scheduling": ["(f, 0, 0)"]}, "scheduling[0]: '(f, 0, 0)' is not (f, b or w, micro-batch"),
        ({"scheduling": [["x", 0, 0, 0, 0, 1]]}, "scheduling[0]: "),
        ({"scheduling": ["(f, 0, 0, 2, 0, 1)"]}, "scheduling[0] runs on rank 2; 'placement' has 2 ranks"),
        ({"schedulling": []}, "unknown key 'schedulling' (did you mean 'schedul"),
    ],
)
def test_faulty_files_say_what_is_wrong(change: dict[str, Any], message: str) -> None:
    """Named by key and entry."""
    content = {"partition": [1, 1], "placement": [[0], [1]], "scheduling": ["(f, 0, 0, 0, 0, 1)"], **change}
    with pytest.raises(PipeplanError) as caught:
        read_octopipe(content, equal_layers(2), "octopipe.yaml")
    assert message in str(caught.value)


def test_times_may_be_missing_from_nothing(tmp_path: Path) -> None:
    """An empty schedule is no plan."""
    with pytest.raises(PipeplanError, match="scheduling"):
        read_octopipe({"partition": [1], "placement": [[0]], "scheduling": []}, equal_layers(1), "octopipe.yaml")
