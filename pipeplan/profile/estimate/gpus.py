"""The table of GPUs: peak figures, and how far each is confirmed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field

from pipeplan.errors import ProfileError, nearest
from pipeplan.files import Document, check_format, parse_document, read_yaml
from pipeplan.resources import template_path
from pipeplan.units import BYTES_PER_GB

FORMAT = "pipeplan-gpus/1"
_FLOP_PER_TFLOP = 10**12
_TF32_SHARE = 0.5  # tensor cores run TF32, which torch uses for fp32 where it is allowed to, at half the rate of bf16

Status = Literal["confirmed", "partly", "unconfirmed"]


class _GpuEntry(Document):
    bf16_tflop_per_s: float = Field(gt=0)
    memory_gb: float = Field(gt=0)
    memory_gb_per_s: float = Field(gt=0)
    p2p_oneway_gb_per_s: float = Field(gt=0)
    status: Status
    note: str | None = None


class _GpusDocument(Document):
    format: Literal["pipeplan-gpus/1"]
    gpus: dict[str, _GpuEntry] = Field(min_length=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """Peak figures of one GPU type.

    Attributes:
        bf16_flop_per_s: Dense, with fp32 accumulation; fp16 runs at the same rate.
        p2p_oneway_gb_per_s: What one send to another such GPU in the same node can hope for.
        status: How well public sources confirm the figures.
    """

    name: str
    bf16_flop_per_s: float
    memory_gb: float
    memory_bytes_per_s: float
    p2p_oneway_gb_per_s: float
    status: Status
    note: str | None = None

    def flop_per_s(self, dtype: str) -> float:
        """Return the peak rate of matrix products in ``dtype``; fp32 means TF32."""
        return self.bf16_flop_per_s * (_TF32_SHARE if dtype == "fp32" else 1.0)

    @property
    def summary(self) -> str:
        """The figures on one line, with their status."""
        return (
            f"{self.name}: {self.bf16_flop_per_s / _FLOP_PER_TFLOP:g} TFLOP/s bf16, {self.memory_gb:g} GB at "
            f"{self.memory_bytes_per_s / BYTES_PER_GB:g} GB/s (figures {self.status})"
        )


def read_gpus(path: Path | None = None) -> Mapping[str, Gpu]:
    """Return the GPUs of a table, by name; of the one that comes with pipeplan if no path is given.

    Raises:
        FileFormatError: The file is missing or malformed.
    """
    path = template_path("gpus.yaml") if path is None else path
    content = read_yaml(path, "GPU table")
    check_format(content, FORMAT, path)
    return {
        name: Gpu(
            name=name,
            bf16_flop_per_s=entry.bf16_tflop_per_s * _FLOP_PER_TFLOP,
            memory_gb=entry.memory_gb,
            memory_bytes_per_s=entry.memory_gb_per_s * BYTES_PER_GB,
            p2p_oneway_gb_per_s=entry.p2p_oneway_gb_per_s,
            status=entry.status,
            note=entry.note,
        )
        for name, entry in parse_document(content, _GpusDocument, path).gpus.items()
    }


def find_gpu(name: str, gpus: Mapping[str, Gpu]) -> Gpu:
    """Return one GPU of a table.

    Raises:
        ProfileError: It is not in there; names the nearest one.
    """
    if name not in gpus:
        raise ProfileError(
            f"no GPU {name!r} in the table{nearest(name, gpus)}; known: {', '.join(gpus)}; cpu and cuda are measured"
        )
    return gpus[name]
