"""Fitting the efficiency table: recovers what made the times, refuses the impossible, says what it left out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pipeplan.errors import ProfileError
from pipeplan.model.source import open_model
from pipeplan.model.types import ModelLayers
from pipeplan.profile import LayerTimes, Profile
from pipeplan.profile.estimate.efficiency import Efficiency, read_efficiency, write_efficiency
from pipeplan.profile.estimate.fit import KnownProfile, fit_efficiency
from pipeplan.profile.estimate.gpus import read_gpus
from pipeplan.profile.estimate.kernels import Category, LayerCost
from pipeplan.profile.estimate.model import estimate_profile, layer_costs
from tests.profile.published import DEVICE, published_profile
from tests.profile.test_estimate import nano_9b

torch.set_num_threads(1)

H100 = read_gpus()["h100-sxm"]
TYPICAL = Efficiency(
    share_by_category={
        Category.GEMM: 0.7,
        Category.GROUPED_GEMM: 0.55,
        Category.ATTENTION_FORWARD: 0.35,
        Category.ATTENTION_BACKWARD: 0.3,
        Category.SCAN_FORWARD: 0.1,
        Category.SCAN_BACKWARD: 0.1,
        Category.CROSS_ENTROPY: 0.3,
        Category.MEMORY: 0.8,
    },
    launch_ns=5000,
)


def known(model: ModelLayers, costs: list[LayerCost], truth: Efficiency) -> KnownProfile:
    """A profile whose times a table made."""
    profile = estimate_profile(model, [H100], truth, micro_batch_size=1, sequence_length=4096)
    return KnownProfile(replace(profile, source="measured"), costs, H100, "h100-sxm")


def with_times(one: KnownProfile, kind: str, times: LayerTimes) -> KnownProfile:
    """The same with other times for one kind of layer."""
    layers = tuple(
        replace(layer, times_by_device={one.device: times}) if layer.kind == kind else layer
        for layer in one.profile.layers
    )
    return replace(one, profile=replace(one.profile, layers=layers))


def test_a_fit_recovers_the_table_that_made_the_times() -> None:
    """Every category that matters for some layer comes back; the residuals vanish."""
    model, costs = nano_9b()
    shares = {category: 0.8 * share for category, share in TYPICAL.share_by_category.items()}
    truth = Efficiency(share_by_category=shares, launch_ns=5000)
    found = fit_efficiency([known(model, costs, truth)], TYPICAL).efficiency
    assert "launch" in found.fitted  # which is much of what the final norm takes
    assert found.launch_ns == pytest.approx(5000, rel=0.03)
    for name in set(found.fitted) - {"launch"}:
        category = Category(name)
        assert found.share_by_category[category] == pytest.approx(shares[category], rel=0.03)
    assert {"gemm", "attention_forward", "attention_backward", "memory"} <= set(found.fitted)
    assert found.share_by_category[Category.GROUPED_GEMM] == 0.55  # no layer has experts
    assert all(abs(one.relative_error) < 0.02 for one in found.residuals if one.kind != "embedding")


def test_a_fit_reaches_a_table_far_from_the_start(tmp_path: Path) -> None:
    """Kernels a thousand times slower than typical ones come back as exactly, through the file too."""
    model, costs = nano_9b()
    shares = {category: share / 1000 for category, share in TYPICAL.share_by_category.items()}
    truth = Efficiency(share_by_category=shares, launch_ns=5_000_000)
    write_efficiency(fit_efficiency([known(model, costs, truth)], TYPICAL).efficiency, tmp_path / "efficiency.yaml")
    found = read_efficiency(tmp_path / "efficiency.yaml")
    assert {"gemm", "attention_forward", "scan_forward", "memory", "launch"} <= set(found.fitted)
    for name in set(found.fitted) - {"launch"}:
        assert found.share_by_category[Category(name)] == pytest.approx(shares[Category(name)], rel=0.03)


def test_profiles_of_one_model_are_told_apart() -> None:
    """Each has its residuals, named by what differs."""
    model, costs = nano_9b()
    one, slow = (known(model, costs, replace(TYPICAL, launch_ns=launch_ns)) for launch_ns in (5000, 50_000))
    other = KnownProfile(replace(slow.profile, sequence_length=2048), costs, H100, "h100-sxm")
    found = fit_efficiency([one, other], TYPICAL).efficiency
    assert {residual.profile for residual in found.residuals} == {f"{model.name} 1 x 4096", f"{model.name} 1 x 2048"}
    assert found.fitted_on == f"F, I and W of {model.name} on h100-sxm"


def test_shares_stay_below_the_peak() -> None:
    """Times that only a share above 1 would explain leave the share at 1."""
    model, costs = nano_9b()
    truth = replace(TYPICAL, share_by_category={**TYPICAL.share_by_category, Category.GEMM: 0.99})
    one = known(model, costs, truth)
    fast = one.profile.layers[2].times("h100-sxm")
    assert one.profile.layers[2].kind == "mlp"
    faster = replace(fast, forward_ns=round(fast.forward_ns * 0.93))
    found = fit_efficiency([with_times(one, "mlp", faster)], TYPICAL).efficiency
    assert all(share <= 1 for share in found.share_by_category.values())


def test_impossible_times_and_embeddings_are_left_out() -> None:
    """An entry above the peak is named with both times and has no influence."""
    model, costs = nano_9b()
    one = known(model, costs, TYPICAL)
    impossible = LayerTimes(forward_ns=100_000, backward_ns=200_000, input_gradient_ns=10, weight_gradient_ns=10)
    result = fit_efficiency([with_times(one, "mlp", impossible)], TYPICAL)
    assert any("F of mlp" in text and "0.1 ms is less than" in text for text in result.left_out)
    assert any("embedding" in text for text in result.left_out)
    assert result.efficiency.share_by_category[Category.GEMM] == pytest.approx(0.7, rel=0.02)
    only = replace(one, profile=replace(one.profile, layers=one.profile.layers[:1]), costs=costs[:1])
    with pytest.raises(ProfileError, match=r"nothing to fit an efficiency table on: .*embedding"):
        fit_efficiency([only], TYPICAL)


def test_a_profile_of_another_granularity_is_refused() -> None:
    """Layers and costs must be the same ones."""
    model, costs = nano_9b()
    one = known(model, costs, TYPICAL)
    with pytest.raises(ProfileError, match="has 59 layers, its model 58"):
        KnownProfile(one.profile, costs[:-1], H100, "h100-sxm")


def test_the_shipped_table_comes_from_the_published_forward_times(tmp_path: Path) -> None:
    """Fitting typical values to the F column of Nemotron-Nano-9B-v2 gives the file that comes with pipeplan."""
    model, costs = nano_9b()
    published: Profile = published_profile(model)
    gpu = read_gpus()[DEVICE]
    found = fit_efficiency([KnownProfile(published, costs, gpu, DEVICE)], TYPICAL, forward_only=True).efficiency
    write_efficiency(found, tmp_path / "efficiency.yaml")
    again, shipped = read_efficiency(tmp_path / "efficiency.yaml"), read_efficiency()
    assert again.fitted == shipped.fitted
    assert again.share_by_category == pytest.approx(shipped.share_by_category, rel=0.01)
    assert "layer totals are off by -4% to +3%" in shipped.record


def test_a_table_can_be_fitted_to_several_profiles() -> None:
    """Experts of one model and attention of another both teach the table."""
    jamba = open_model("jamba-v0.1")
    jamba_costs = layer_costs(jamba, micro_batch_size=1, sequence_length=4096, dtype="bf16")
    truth = replace(TYPICAL, share_by_category={**TYPICAL.share_by_category, Category.GROUPED_GEMM: 0.4})
    profiles = [known(*nano_9b(), truth), known(jamba, jamba_costs, truth)]
    found = fit_efficiency(profiles, TYPICAL).efficiency
    assert found.share_by_category[Category.GROUPED_GEMM] == pytest.approx(0.4, rel=0.03)
    assert "nemotron-nano-9b-v2" in (found.fitted_on or "") and "jamba-v0.1" in (found.fitted_on or "")
