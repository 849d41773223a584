"""``pipeplan profile`` on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeplan.profile import measure, read_profile
from tests.cli.conftest import Run

SHAPE = ("--sequence-length", "8", "--micro-batch-size", "2", "--time-limit", "0")


def test_profile_writes_what_it_prints(run: Run, tmp_path: Path) -> None:
    """The file holds every layer with all its times; --json prints the same document, messages go to stderr."""
    path = tmp_path / "profile.yaml"
    outcome = run("profile", "tiny-llama", "-o", path, *SHAPE, "--json")
    assert outcome.status == 0, outcome.err
    profile = read_profile(path)
    assert [layer["name"] for layer in json.loads(outcome.out)["layers"]] == [layer.name for layer in profile.layers]
    assert (profile.source, profile.micro_batch_size, profile.sequence_length) == ("measured", 2, 8)
    assert profile.model_source is not None and "huggingface" in profile.model_source
    for layer in profile.layers:
        times = layer.times("cpu")
        assert times.forward_ns > 0 and times.backward_ns > 0
        assert (times.weight_gradient_ns is not None) == layer.is_splittable
    assert f"wrote {path}" in outcome.err


def test_the_table_folds_equal_layers(run: Run, tmp_path: Path) -> None:
    """Equal decoder layers take one row, and --quiet leaves stderr empty."""
    outcome = run("profile", "tiny-llama", "-o", tmp_path / "profile.yaml", *SHAPE, "--quiet", "--device-name", "slow")
    assert outcome.status == 0
    assert outcome.err == ""
    assert "tiny-llama on slow: measured, micro-batch 2 x 8, fp32" in outcome.out
    assert "layers.0 + " in outcome.out
    assert read_profile(tmp_path / "profile.yaml").devices == ("slow",)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("tiny-lama",), "no model 'tiny-lama' (did you mean 'tiny-llama'?)"),
        (("missing/config.json",), "missing/config.json does not exist"),
        (("tiny-llama", "--device", "h100-smx"), "no GPU 'h100-smx' in the table (did you mean 'h100-sxm'?)"),
        (("tiny-llama", "--device", "cpu,h100-sxm"), "cpu is measured, the others estimated"),
        (("tiny-llama", "--device", "h100-sxm,a100-80gb", "--device-name", "x"), "can't stand for 2 GPUs"),
        (("tiny-llama", "--device", "h100-sxm", "--efficiency", "missing.yaml"), "missing.yaml does not exist"),
        (("tiny-llama", "--optimizer", "adma"), "unknown optimizer 'adma' (did you mean 'adam'?)"),
        (("tiny-llama", "--zero-stage", "2"), "ZeRO stage 2 shards gradients"),
        (("tiny-llama", "--update"), "nothing to update"),
    ],
)
def test_bad_input_is_one_clear_message(run: Run, tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    """A model or device that does not exist: exit 1, one line, no file."""
    path = tmp_path / "profile.yaml"
    outcome = run("profile", *arguments, "-o", path, *SHAPE)
    assert outcome.status == 1
    assert message in outcome.err
    assert outcome.err.count("\n") == 1
    assert not path.exists()


def test_states_follow_the_options(run: Run, tmp_path: Path) -> None:
    """Optimizer, ZeRO stage and replicas decide the bytes of a parameter, and stand in the file."""
    path = tmp_path / "profile.yaml"
    arguments = ("profile", "tiny-llama", "-o", path, *SHAPE, "--dtype", "bf16", "--quiet")
    assert run(*arguments).status == 0
    assert read_profile(path).state_bytes_per_parameter == 18
    assert run(*arguments, "--update", "--optimizer", "lion", "--data-parallel", 4).status == 0
    found = read_profile(path)
    assert found.state_bytes_per_parameter == 2 + 4 + (4 + 4) / 4
    assert found.extra["states"] == {"optimizer": "lion", "zero_stage": 1, "data_parallel": 4}


@pytest.mark.parametrize("device", ["cpu", "h100-sxm"])
def test_what_a_model_prints_stays_out_of_the_result(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """A factory and layers that print leave --json one document."""
    (tmp_path / "talking.py").write_text(
        "from torch import nn, zeros\n"
        "class Layer(nn.Linear):\n"
        "    def forward(self, value):\n"
        "        print('in the layer')\n"
        "        return super().forward(value)\n"
        "def factory():\n"
        "    print('in the factory')\n"
        "    return [Layer(4, 4)], nn.functional.mse_loss, (zeros(2, 4), zeros(2, 4))\n"
    )
    monkeypatch.chdir(tmp_path)
    outcome = run("profile", "talking:factory", "--device", device, "-o", tmp_path / "x.yaml", *SHAPE, "--json")
    assert outcome.status == 0, outcome.err
    assert json.loads(outcome.out)["model"] == "factory"
    assert "in the layer" in outcome.err and "in the factory" in outcome.err


@pytest.mark.parametrize(
    ("device", "num_bytes"), [("cpu", 4 * (64 * 64 + 64) + 4000), ("h100-sxm", 2 * (64 * 64 + 1064))]
)
def test_weights_that_are_not_trained_are_counted(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, num_bytes: int
) -> None:
    """A frozen layer and its buffer have no states, but take memory; an update keeps what is known of them."""
    (tmp_path / "frozen.py").write_text(
        "from torch import nn, zeros\n"
        "def factory():\n"
        "    layer = nn.Linear(64, 64).requires_grad_(False)\n"
        "    layer.register_buffer('table', zeros(1000))\n"
        "    return [layer, nn.Linear(64, 4)], nn.functional.mse_loss, (zeros(2, 64), zeros(2, 4))\n"
    )
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "x.yaml"
    for update in ((), ("--update",)) if device == "cpu" else ((),):
        outcome = run("profile", "frozen:factory", "--device", device, "-o", path, *SHAPE, *update)
        assert outcome.status == 0, outcome.err
        assert [layer.untrained_bytes for layer in read_profile(path).layers] == [num_bytes, 0]


def test_an_interrupted_run_goes_on(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the middle leaves the layers so far beside the output and says where; the next run uses them."""
    path = tmp_path / "profile.yaml"
    measure_layer = measure._measure_layer
    num_measured = 0

    def interrupted(*arguments: object, **options: object) -> object:
        nonlocal num_measured
        if num_measured == 1:
            raise KeyboardInterrupt
        num_measured += 1
        return measure_layer(*arguments, **options)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(measure, "_measure_layer", interrupted)
        outcome = run("profile", "tiny-llama", "-o", path, *SHAPE)
    assert outcome.status == 130
    assert "profile.yaml.partial; the same command goes on from there" in outcome.err
    assert not path.exists()
    outcome = run("profile", "tiny-llama", "-o", path, *SHAPE)
    assert outcome.status == 0
    assert "holds 1 measured layer on cpu" in outcome.err
    assert [entry.name for entry in tmp_path.iterdir()] == ["profile.yaml"]


def test_merge(run: Run, tmp_path: Path) -> None:
    """Two device types become one profile, which optimize may use for both; two sizes give one between them."""
    here, there, both = (tmp_path / f"{name}.yaml" for name in ("here", "there", "both"))
    arguments = ("profile", "tiny-llama", *SHAPE, "--quiet")
    assert run(*arguments, "-o", here, "--device-name", "here").status == 0
    assert run(*arguments, "-o", there, "--device-name", "there").status == 0
    outcome = run("merge", here, there, "-o", both)
    assert outcome.status == 0, outcome.err
    assert read_profile(both).devices == ("here", "there")
    assert "tiny-llama on here, there" in outcome.err
    refused = run("merge", here, here, "-o", tmp_path / "none.yaml")
    assert refused.status == 1
    assert "both have times on 'here'" in refused.err
    assert run("merge", here, "-o", tmp_path / "none.yaml").status == 2
    assert run(*arguments, "-o", there, "--device-name", "here", "--micro-batch-size", 4).status == 0
    outcome = run("merge", here, there, "--micro-batch-size", 3, "-o", both)
    assert outcome.status == 0, outcome.err
    assert "note: interpolated, not measured" in outcome.err
    assert read_profile(both).micro_batch_size == 3


@pytest.mark.parametrize("arguments", [("--links",), ("tiny-llama", "--ranks")])
def test_without_the_launcher(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    """Started alone, what needs several processes says how it is started; nothing is written."""
    monkeypatch.delenv("RANK", raising=False)
    outcome = run("profile", *arguments, "-o", tmp_path / "out.yaml")
    assert outcome.status == 1
    assert "deepspeed --no_local_rank --num_gpus N --module pipeplan profile" in outcome.err
    assert arguments[-1] in outcome.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--ranks", "--links"), "two launches"),
        (("tiny-llama", "--ranks", "--device", "h100-sxm"), "h100-sxm is estimated"),
        (("tiny-llama", "--ranks", "--cluster", "c.yaml", "--device-name", "a"), "--device-name"),
        (("tiny-llama", "--cluster", "c.yaml"), "--ranks"),
        (("--ranks",), "name a model"),
    ],
)
def test_what_can_not_go_with_ranks(run: Run, tmp_path: Path, arguments: tuple[str, ...], word: str) -> None:
    """Options that contradict each other are wrong usage, and the message says which."""
    outcome = run("profile", *arguments, "-o", tmp_path / "x")
    assert outcome.status == 2
    assert word in " ".join(outcome.err.replace("│", " ").split())
    assert not list(tmp_path.iterdir())


def test_links_measure_no_model(run: Run, tmp_path: Path) -> None:
    """A model and --links together are wrong usage, and so is neither."""
    assert run("profile", "tiny-llama", "--links", "-o", tmp_path / "x").status == 2
    assert run("profile", "-o", tmp_path / "x").status == 2


def test_a_gpu_by_name_is_estimated(run: Run, tmp_path: Path) -> None:
    """Two GPUs in one profile, bf16 by default; the table of each says that it is estimated and how well that does."""
    path = tmp_path / "profile.yaml"
    outcome = run("profile", "tiny-llama", "--device", "h100-sxm,a100-80gb", "-o", path, *SHAPE, "--quiet")
    assert (outcome.status, outcome.err) == (0, "")
    text = " ".join(outcome.out.split())
    for gpu in ("h100-sxm", "a100-80gb"):
        assert f"tiny-llama on {gpu}: estimated, micro-batch 2 x 8, bf16" in text
    assert "figures confirmed" in text and "layer totals are off by" in text
    profile = read_profile(path)
    assert (profile.source, profile.devices) == ("estimated", ("a100-80gb", "h100-sxm"))


def test_fit_efficiency_writes_a_table_that_profile_takes(run: Run, tmp_path: Path) -> None:
    """What it can't learn from it says; an estimate is refused, since it holds nothing new."""
    measured, table = tmp_path / "measured.yaml", tmp_path / "efficiency.yaml"
    outcome = run("profile", "tiny-llama", "--device-name", "h100-sxm", "-o", measured, *SHAPE, "--dtype", "bf16")
    assert outcome.status == 0, outcome.err
    outcome = run("fit-efficiency", measured, "-o", table, "--json")
    assert outcome.status == 0, outcome.err
    assert "left out F of embedding in tiny-llama" in outcome.err
    document = json.loads(outcome.out)
    assert document["fitted_on"] == "F, I and W of tiny-llama on h100-sxm"
    assert all(0 < share <= 1 for share in document["share_of_peak"].values())
    estimate = tmp_path / "estimate.yaml"
    outcome = run("profile", "tiny-llama", "--device", "h100-sxm", "--efficiency", table, "-o", estimate, *SHAPE)
    assert outcome.status == 0, outcome.err
    refused = run("fit-efficiency", estimate, "-o", tmp_path / "other.yaml")
    assert refused.status == 1 and "is estimated" in refused.err
    assert not (tmp_path / "other.yaml").exists()
