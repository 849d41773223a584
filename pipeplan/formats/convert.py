"""From a plan to another tool's file and back to its outline, by the name of the format."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

from pipeplan.errors import FileFormatError, PlanError
from pipeplan.files import dump_yaml, read_yaml
from pipeplan.formats.megatron_layout import read_layout, write_layout
from pipeplan.formats.octopipe import read_octopipe, write_octopipe
from pipeplan.formats.outline import Outline
from pipeplan.formats.torch_csv import read_torch_csv, write_torch_csv
from pipeplan.plan.file import plan_document, read_plan
from pipeplan.plan.folder import LoadedPlan, check_same_model
from pipeplan.profile.types import Profile
from pipeplan.simulate import simulate


class Format(StrEnum):
    """Formats of other tools, and the plan file itself."""

    TORCH_CSV = "torch-csv"
    MEGATRON_LAYOUT = "megatron-layout"
    OCTOPIPE = "octopipe"
    PIPEPLAN = "pipeplan"


def export_plan(loaded: LoadedPlan, target: Format) -> str:
    """Return the plan as the text of another tool's file.

    Raises:
        PlanError: The format can't say what the plan does.
    """
    match target:
        case Format.TORCH_CSV:
            return write_torch_csv(loaded.plan.order)
        case Format.MEGATRON_LAYOUT:
            return write_layout(loaded.plan, loaded.profile) + "\n"
        case Format.OCTOPIPE:
            timeline = simulate(loaded.plan, loaded.profile, loaded.cluster)
            return write_octopipe(loaded.plan, loaded.profile, timeline)
        case Format.PIPEPLAN:
            return dump_yaml(plan_document(loaded.plan))


def read_outline(
    path: Path,
    source: Format,
    profile: Profile,
    profile_path: Path,
    *,
    num_ranks: int | None,
    num_micro_batches: int | None,
) -> Outline:
    """Return what another tool's file says.

    Args:
        num_ranks, num_micro_batches: Needed for Megatron's layout, which has neither; otherwise only compared.

    Raises:
        FileFormatError: The file is missing or malformed.
        PlanError: It contradicts itself, the profile or the arguments.
    """
    outline: Outline
    match source:
        case Format.TORCH_CSV:
            outline = read_torch_csv(_read_text(path), str(path))
        case Format.OCTOPIPE:
            outline = read_octopipe(read_yaml(path, "OctoPipe"), profile, str(path))
        case Format.MEGATRON_LAYOUT:
            if num_ranks is None or num_micro_batches is None:
                missing = "--ranks or --cluster" if num_ranks is None else "--micro-batches"
                raise PlanError(f"a Megatron layout does not say how many; add {missing}")
            outline = read_layout(_read_text(path).strip(), profile, num_ranks, num_micro_batches)
        case Format.PIPEPLAN:
            plan = read_plan(path)
            check_same_model(plan, path, profile, profile_path)
            outline = Outline.of(plan)
    if num_ranks is not None and outline.order.num_ranks != num_ranks:
        raise PlanError(f"{path} is for {outline.order.num_ranks} ranks, not for {num_ranks}")
    return outline


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise FileFormatError(f"{path} does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise FileFormatError(f"{path} can't be read: {error}") from None
