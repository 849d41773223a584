"""Where the files under ``templates/`` are: inside the wheel, or beside the package in a checkout."""

from __future__ import annotations

from pathlib import Path

from pipeplan.errors import PipeplanError

_PACKAGE = Path(__file__).resolve().parent


def template_root() -> Path:
    """Return the folder that holds the templates.

    Raises:
        PipeplanError: Neither a wheel's ``_templates`` nor a checkout's ``templates`` exists.
    """
    packaged = _PACKAGE / "_templates"
    if packaged.is_dir():
        return packaged
    checkout = _PACKAGE.parent / "templates"
    if checkout.is_dir():
        return checkout
    raise PipeplanError(f"pipeplan's templates are missing (looked in {packaged} and {checkout}); reinstall pipeplan")


def template_path(relative: str) -> Path:
    """Return the path of one template file or folder, such as ``models/tiny-llama.json``.

    Raises:
        PipeplanError: It does not exist.
    """
    path = template_root() / relative
    if not path.exists():
        raise PipeplanError(f"pipeplan's template {relative!r} is missing from {template_root()}; reinstall pipeplan")
    return path
