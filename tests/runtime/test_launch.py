"""What ``initialize`` refuses before it builds anything."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from pipeplan.errors import LaunchError
from pipeplan.runtime.launch import refuse_missing_arithmetic


def _device(*, fp16: bool, bf16: bool) -> Any:
    return SimpleNamespace(
        is_fp16_supported=lambda: fp16, is_bf16_supported=lambda: bf16, device_name=lambda: "some-device"
    )


@pytest.mark.parametrize(
    ("asked", "has_bf16", "instead"), [("fp16", True, "bf16"), ("fp16", False, "fp32"), ("bf16", False, "fp32")]
)
def test_missing_arithmetic_is_refused(asked: str, has_bf16: bool, instead: str) -> None:
    """A precision that the device lacks is named, with the device and what to use instead."""
    with pytest.raises(LaunchError, match=rf"trains in {asked}.*some-device: no {asked} arithmetic.*--dtype {instead}"):
        refuse_missing_arithmetic({asked: {"enabled": True}}, _device(fp16=False, bf16=has_bf16))


def test_arithmetic_that_is_there_passes() -> None:
    """fp32 everywhere; fp16 and bf16 where the device has them."""
    refuse_missing_arithmetic({}, _device(fp16=False, bf16=False))
    refuse_missing_arithmetic({"fp16": {"enabled": False}}, _device(fp16=False, bf16=False))
    refuse_missing_arithmetic({"fp16": {"enabled": True}}, _device(fp16=True, bf16=False))
    refuse_missing_arithmetic({"bf16": {"enabled": True}}, _device(fp16=False, bf16=True))
