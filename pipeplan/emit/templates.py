"""Renders the text templates of emitted files."""

from __future__ import annotations

from functools import cache
from typing import Any

import jinja2

from pipeplan.resources import template_path


@cache
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(template_path("emit")),
        undefined=jinja2.StrictUndefined,  # a forgotten value is an error, not an empty file
        autoescape=jinja2.select_autoescape(["html.j2"], default=False),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def render(name: str, **values: Any) -> str:
    """Return the text of a template under ``templates/emit``; names ending in ``.html.j2`` escape their values."""
    return _environment().get_template(name).render(**values)


def one_line(text: str) -> str:
    """Return ``text`` such that it can stand in a comment or docstring of a script: one line, no quotes."""
    return " ".join(text.split()).replace('"', "'").replace("\\", "/")
