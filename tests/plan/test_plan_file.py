"""The plan file and the plan folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings

from pipeplan.cluster import Cluster, write_cluster
from pipeplan.errors import ClusterError, FileFormatError, PipeplanError, PlanError, ProfileError
from pipeplan.files import dump_yaml
from pipeplan.plan.file import plan_document, plan_from_document, read_plan, write_plan
from pipeplan.plan.folder import load_plan, write_plan_folder
from pipeplan.plan.types import Plan, Prediction
from pipeplan.profile.file import profile_digest, write_profile
from pipeplan.profile.types import Profile
from tests.program.examples import V_PLAN, V_PROFILE, devices, equal_layers
from tests.strategies import planned

FULL_PLAN = replace(
    V_PLAN,
    profile_digest=profile_digest(V_PROFILE),
    prediction=Prediction(makespan_ns=12_345_678, peak_memory_bytes_by_rank=(1_500_000_000, 2), bubble_fraction=0.25),
)

TEXT = """\
format: pipeplan-plan/1
model: equal
profile_digest: {digest}
num_micro_batches: 3
partition: [1, 1, 1, 1]
placement: [0, 1, 1, 0]
order:
- 0F0 0F1 3F0 3I0 0F2 3F1 3I1 3W0 0I0 3F2 3I2 0W0 0I1 3W1 0W1 0I2 3W2 0W2
- 1F0 2F0 1F1 2F1 2B0 1B0 1F2 2F2 2B1 1B1 2B2 1B2
recompute: []
queue_model: ordered-pair
predicted: {{makespan_ms: 12.345678, peak_memory_gb: [1.5, 2.0e-09], bubble_fraction: 0.25}}
"""


@settings(max_examples=50, deadline=None)
@given(planned(recomputed=True))
def test_plans_survive_the_file(case: tuple[Plan, Profile, Cluster]) -> None:
    """What is written reads back as the same plan, with the same digest."""
    plan, _, _ = case
    again = plan_from_document(plan_document(plan), "plan.yaml")
    assert again == plan
    assert again.digest == plan.digest


def test_the_file_is_as_documented(tmp_path: Path) -> None:
    """Every key of the format, one line a rank, milliseconds and gigabytes."""
    write_plan(FULL_PLAN, tmp_path / "plan.yaml")
    assert (tmp_path / "plan.yaml").read_text() == TEXT.format(digest=FULL_PLAN.profile_digest)
    assert read_plan(tmp_path / "plan.yaml") == FULL_PLAN


def test_a_hand_written_plan_may_leave_out_what_it_does_not_know(tmp_path: Path) -> None:
    """Digest, prediction, recomputation and queue model are optional."""
    (tmp_path / "plan.yaml").write_text(
        "format: pipeplan-plan/1\nmodel: m\nnum_micro_batches: 1\npartition: [1, 2]\nplacement: [0, 1]\n"
        "order: [0F0 0B0, 1F0 1B0]\n"
    )
    plan = read_plan(tmp_path / "plan.yaml")
    assert (plan.profile_digest, plan.prediction, plan.recomputed_stages) == (None, None, ())


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (("placement:", "placment:"), "unknown key 'placment' (did you mean 'placement'?)"),
        (("pipeplan-plan/1", "pipeplan-plan/2"), "which is newer than this pipeplan reads"),
        (("pipeplan-plan/1", "pipeplan-profile/1"), "expected 'pipeplan-plan/1'"),
        (("num_micro_batches: 3\n", ""), "key 'num_micro_batches' is missing"),
        (("num_micro_batches: 3", "num_micro_batches: three"), "num_micro_batches: "),
        (("1F0 2F0", "1F0 2X0"), "order of rank 1, position 1: '2X0' is not an op"),
        (("[1, 1, 1, 1]", "[1, 1, 0, 1]"), "stage 2 of partition 1,1,0,1 has 0 layers"),
        (("ordered-pair", "per-pair"), "queue_model: "),
        (("peak_memory_gb", "peak_memory_gib"), "'predicted.peak_memory_gib' (did you mean 'peak_memory_gb'?)"),
        (("[0, 1, 1, 0]", "[0, 1, 1"), "line"),
    ],
)
def test_faulty_files_say_what_is_wrong(tmp_path: Path, change: tuple[str, str], text: str) -> None:
    """Unknown keys, newer versions, truncation: one sentence with the file's name."""
    path = tmp_path / "plan.yaml"
    content = TEXT.format(digest="sha256:0")
    assert change[0] in content
    path.write_text(content.replace(*change))
    with pytest.raises(PipeplanError) as caught:
        read_plan(path)
    assert text in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_truncated_file_is_refused_at_every_length(tmp_path: Path) -> None:
    """However much of the file is lost, reading fails with a message, or the plan check does."""
    path = tmp_path / "plan.yaml"
    text = TEXT.format(digest="sha256:0")
    whole = text.index("recompute")  # what follows is optional
    for length in range(0, whole - 1, 7):
        path.write_text(text[:length])
        try:
            plan = read_plan(path)
        except PipeplanError:
            continue
        assert plan.order != FULL_PLAN.order


def test_a_folder_loads_with_its_profile_and_cluster(tmp_path: Path) -> None:
    """The folder is the unit: nothing else has to be named."""
    cluster = devices(2, memory_gb=8.0)
    write_plan_folder(FULL_PLAN, V_PROFILE, cluster, tmp_path / "plan")
    loaded = load_plan(tmp_path / "plan")
    assert (loaded.plan, loaded.cluster) == (FULL_PLAN, cluster)
    assert profile_digest(loaded.profile) == FULL_PLAN.profile_digest
    assert loaded.folder == tmp_path / "plan"


def test_a_plan_file_needs_a_profile(tmp_path: Path) -> None:
    """A file alone has no costs; with a profile it gets equal ranks and free links."""
    write_plan(FULL_PLAN, tmp_path / "mine.yaml")
    write_profile(V_PROFILE, tmp_path / "profile.yaml")
    with pytest.raises(FileFormatError, match="add --profile FILE, or name a plan folder"):
        load_plan(tmp_path / "mine.yaml")
    loaded = load_plan(tmp_path / "mine.yaml", tmp_path / "profile.yaml")
    assert loaded.folder is None
    assert [rank.device for rank in loaded.cluster.ranks] == ["gpu", "gpu"]
    assert loaded.cluster.transfer_ns(0, 1, 10**9) == 0


def test_a_plan_of_another_profile_is_refused(tmp_path: Path) -> None:
    """Another layer count is never right; other costs only where they are asked for."""
    folder = tmp_path / "plan"
    write_plan_folder(FULL_PLAN, V_PROFILE, devices(2), folder)
    write_profile(equal_layers(5), tmp_path / "five.yaml")
    slower = replace(V_PROFILE, sequence_length=256)
    write_profile(slower, tmp_path / "slower.yaml")
    for allow in (False, True):
        with pytest.raises(PlanError, match=r"partitions 4 layers; .*five.yaml .equal. has 5"):
            load_plan(folder, tmp_path / "five.yaml", allow_other_costs=allow)
    with pytest.raises(PlanError, match="was made for another profile"):
        load_plan(folder, tmp_path / "slower.yaml")
    assert load_plan(folder, tmp_path / "slower.yaml", allow_other_costs=True).profile.sequence_length == 256


def test_folders_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    """No plan in the folder; a cluster of another size; several device types and no cluster."""
    with pytest.raises(FileFormatError, match=r"holds no plan\.yaml"):
        load_plan(tmp_path)
    folder = tmp_path / "plan"
    write_plan_folder(FULL_PLAN, V_PROFILE, devices(2), folder)
    write_cluster(devices(3), tmp_path / "three.yaml")
    with pytest.raises(ClusterError, match=r"has 3 ranks; .* is for 2"):
        load_plan(folder, cluster_path=tmp_path / "three.yaml")
    mixed = replace(
        V_PROFILE,
        layers=tuple(
            replace(layer, times_by_device={"gpu": layer.times("gpu"), "cpu": layer.times("gpu")})
            for layer in V_PROFILE.layers
        ),
    )
    write_profile(mixed, tmp_path / "mixed.yaml")
    (folder / "cluster.yaml").unlink()
    with pytest.raises(ProfileError, match=r"covers several device types .cpu, gpu.; say which"):
        load_plan(folder, tmp_path / "mixed.yaml", allow_other_costs=True)


def test_notes_are_kept(tmp_path: Path) -> None:
    """What a tool or a person notes beside a plan survives, and changes nothing."""
    noted = replace(FULL_PLAN, extra={"made_by": {"seed": 1}})
    write_plan(noted, tmp_path / "plan.yaml")
    assert read_plan(tmp_path / "plan.yaml") == noted
    assert noted.digest == FULL_PLAN.digest
    assert "notes:" in dump_yaml(plan_document(noted))
