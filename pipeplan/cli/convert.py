"""``pipeplan convert``: weights between Hugging Face folders and checkpoints of training."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from pipeplan.cli.options import Quiet

if TYPE_CHECKING:
    from pipeplan.model.types import ModelLayers


def convert(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SOURCE", help="A folder of Hugging Face safetensors, or one that save_checkpoint wrote to."
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FOLDER", help="Folder to write.")],
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            help="A plan folder, a profile, or what 'pipeplan profile' takes; default: SOURCE's own config.json.",
        ),
    ] = None,
    granularity: Annotated[
        Literal["layer", "sublayer"],
        typer.Option("--granularity", help="How the model is cut, where --model is no plan and no profile."),
    ] = "layer",
    tag: Annotated[str | None, typer.Option("--tag", help="Checkpoint to take; the latest if not given.")] = None,
    quiet: Quiet = False,
) -> None:
    """Turn a trained checkpoint into a folder that transformers loads, or such a folder into a checkpoint.

    The weights keep their values and precision; optimizer state has no place in a Hugging Face folder. A checkpoint
    made from one loads under any plan with engine.load_checkpoint(FOLDER, load_module_only=True).

    Example: pipeplan convert checkpoints -o my-model --model plans/NAME
    """
    from pipeplan.cli.console import print_message, progress
    from pipeplan.errors import CheckpointError
    from pipeplan.runtime.checkpoint.convert import checkpoint_from_huggingface, huggingface_from_checkpoint

    if not source.is_dir():
        raise CheckpointError(f"{source} is no folder; name one with safetensors, or one that save_checkpoint wrote to")
    if any(source.glob("*.safetensors")) and not (source / "checkpoint.yaml").is_file():
        opened = _open(model or str(source), granularity)
        with progress("converting", quiet=quiet):
            written = checkpoint_from_huggingface(opened, source, output)
    else:
        if model is None:
            raise CheckpointError(f"which model is {source} a checkpoint of? give --model PLAN, a profile or a config")
        with progress("converting", quiet=quiet):
            huggingface_from_checkpoint(_open(model, granularity), source, output, tag)
        written = output
    if not quiet:
        print_message(f"wrote {written}")


def _open(text: str, granularity: str) -> ModelLayers:
    """Return the model of a plan folder, a profile, or what ``pipeplan profile`` takes."""
    from pipeplan.errors import ProfileError
    from pipeplan.model.source import model_from_source, open_model
    from pipeplan.plan.folder import PROFILE_FILE
    from pipeplan.profile.file import read_profile

    path = Path(text)
    path = path / PROFILE_FILE if (path / PROFILE_FILE).is_file() else path
    if path.suffix not in (".yaml", ".yml") or not path.is_file():
        return open_model(text, granularity=granularity)
    profile = read_profile(path)
    if profile.model_source is None:
        raise ProfileError(f"{path} does not say how to build model {profile.model!r}; give --model a config instead")
    return model_from_source(profile.model_source, name=profile.model)
