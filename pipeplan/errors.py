"""Errors that a user can act on.

Every message is one sentence or two: what is wrong, where, and what to do. The
command line prints it without a traceback and exits with status 1.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class PipeplanError(Exception):
    """Base of every error that pipeplan raises on purpose."""


class FileFormatError(PipeplanError):
    """A file is missing, malformed, truncated or holds an unknown key."""


class ModelError(PipeplanError):
    """A model can't be turned into a list of layers."""


class ProfileError(PipeplanError):
    """A profile is inconsistent, or belongs to another model."""


class ClusterError(PipeplanError):
    """A cluster is inconsistent, or does not fit the plan or the launch."""


class PlanError(PipeplanError):
    """A partition, placement, order or plan is invalid."""


class VerificationError(PlanError):
    """A plan or program would hang, compute something wrong or not fit; the message shows where."""


class InfeasibleError(PipeplanError):
    """No plan meets the constraints; the message says which rank, by how much, and what would help."""


class CheckpointError(PipeplanError):
    """A checkpoint is incomplete, of another model, or can't be moved to where it should go."""


class LaunchError(PipeplanError):
    """The plan does not fit the world it was launched in, or DeepSpeed was asked for something unsupported."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return " (did you mean 'x'?)" for the known name nearest to ``name``, or an empty string."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" (did you mean {matches[0]!r}?)" if matches else ""
