"""The estimating half of ``pipeplan profile``: a GPU that is not here, by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeplan.model.types import ModelLayers
    from pipeplan.profile import Profile
    from pipeplan.profile.estimate.efficiency import Efficiency
    from pipeplan.profile.estimate.gpus import Gpu
    from pipeplan.profile.estimate.parallel import ParallelSizes

MEASURED_DEVICES = ("cpu", "cuda")


def chosen_gpus(devices: str) -> list[Gpu]:
    """Return the GPUs that ``--device`` names, separated by commas.

    Raises:
        ProfileError: One is not in the table, named twice, or is measured instead.
    """
    from pipeplan.errors import ProfileError
    from pipeplan.profile.estimate.gpus import find_gpu, read_gpus

    gpus = read_gpus()
    names = [name.strip() for name in devices.split(",")]
    for name in names:
        if name in MEASURED_DEVICES:
            raise ProfileError(f"device {devices!r}: {name} is measured, the others estimated; make a profile of each")
        if names.count(name) > 1:
            raise ProfileError(f"device {devices!r} names {name} twice")
    return [find_gpu(name, gpus) for name in names]


def estimated_profile(
    model: ModelLayers,
    gpus: list[Gpu],
    *,
    efficiency_file: Path | None,
    micro_batch_size: int,
    sequence_length: int,
    dtype: str,
    sizes: ParallelSizes,
    has_kernels: bool,
    device_name: str | None,
    on_layer: Callable[[int, str], None],
) -> Profile:
    """Return what the layers of a model would cost on GPUs that are not here.

    Raises:
        ProfileError: A layer can't run without values or can't be divided, or one name is given to several GPUs.
        FileFormatError: The efficiency file is faulty.
    """
    from pipeplan.errors import ProfileError
    from pipeplan.profile.estimate.efficiency import read_efficiency
    from pipeplan.profile.estimate.model import estimate_profile

    if device_name is not None and len(gpus) > 1:
        raise ProfileError(f"--device-name {device_name} can't stand for {len(gpus)} GPUs; name one with --device")
    efficiency: Efficiency = read_efficiency(efficiency_file)
    return estimate_profile(
        model,
        gpus,
        efficiency,
        micro_batch_size=micro_batch_size,
        sequence_length=sequence_length,
        dtype=dtype,
        sizes=sizes,
        has_kernels=has_kernels,
        device_name=device_name,
        on_layer=on_layer,
    )
