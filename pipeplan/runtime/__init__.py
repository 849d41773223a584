"""Runs plans on DeepSpeed; the only package that imports it.

A DeepSpeed pipeline script changes two lines: the module class becomes ``PlannedPipelineModule`` and the call
becomes ``pipeplan.runtime.initialize``; its last line is ``close_groups()``. Everything is imported on first use, so
that importing this package is free.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOMES = {
    "PlannedPipelineEngine": "engine",
    "PlannedPipelineModule": "module",
    "PlannedSchedule": "schedule",
    "RunnablePlan": "loading",
    "close_groups": "process_groups",
    "initialize": "launch",
    "load_runnable_plan": "loading",
}

__all__ = [
    "PlannedPipelineEngine",
    "PlannedPipelineModule",
    "PlannedSchedule",
    "RunnablePlan",
    "close_groups",
    "initialize",
    "load_runnable_plan",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
