"""Reading and writing the files that users keep: YAML in, checked; text out, whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from pipeplan.errors import FileFormatError, nearest

# 1e-6 and 2e8 are numbers, as in YAML 1.2; PyYAML follows 1.1 and wants 1.0e-6. Not longer than numbers that people
# write, since digests may look like that.
_EXPONENT = re.compile(r"^[-+]?[0-9]{1,9}(\.[0-9]{0,9})?[eE][-+]?[0-9]{1,3}$")
_FLOAT = "tag:yaml.org,2002:float"


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Reads plain data, with the numbers of YAML 1.2."""


_Loader.add_implicit_resolver(_FLOAT, _EXPONENT, list("-+0123456789"))


class Document(BaseModel):
    """Base of the schema of every file: unknown keys are errors, numbers are finite and not parsed from strings."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, populate_by_name=True, allow_inf_nan=False)


SchemaT = TypeVar("SchemaT", bound=Document)


def read_yaml(path: Path, what: str) -> dict[str, Any]:
    """Return the mapping that a YAML file holds.

    Args:
        what: What the file should be, for messages: "profile", "cluster", "plan".

    Raises:
        FileFormatError: The file is missing, empty, not text, malformed, or not a mapping.
    """
    if path.is_dir():
        raise FileFormatError(f"{what} file {path} is a folder; name the file inside it")
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise FileFormatError(f"{what} file {path} does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise FileFormatError(f"{what} file {path} can't be read: {error}") from None
    try:
        content = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or "not YAML"
        raise FileFormatError(f"{what} file {path}{where}: {problem}; is it truncated?") from None
    if not isinstance(content, dict):
        raise FileFormatError(f"{what} file {path} holds no keys; expected a {what} (is it empty or truncated?)")
    return content


def check_format(content: Mapping[str, Any], expected: str, path: Path | str) -> None:
    """Check the ``format`` line of a file.

    Raises:
        FileFormatError: It is missing, of another kind, or of a newer version.
    """
    found = content.get("format")
    if found == expected:
        return
    kind, _, version = expected.partition("/")
    if not isinstance(found, str):
        raise FileFormatError(f"{path}: no 'format' key; expected 'format: {expected}' as the first line")
    found_kind, _, found_version = found.partition("/")
    if found_kind == kind and found_version.isdigit() and int(found_version) > int(version):
        raise FileFormatError(
            f"{path} is in {found}, which is newer than this pipeplan reads ({expected}); upgrade pipeplan"
        )
    raise FileFormatError(f"{path} is in format {found!r}; expected {expected!r}")


def parse_document(content: Mapping[str, Any], schema: type[SchemaT], path: Path | str) -> SchemaT:
    """Check ``content`` against ``schema``.

    Raises:
        FileFormatError: Names the first faulty key by its path, and for an unknown key the nearest known one.
    """
    try:
        return schema.model_validate(dict(content))
    except ValidationError as error:
        raise FileFormatError(f"{path}: {_explain(error, schema, content)}") from None


def _explain(error: ValidationError, schema: type[BaseModel], content: Mapping[str, Any]) -> str:
    faults = error.errors(include_url=False)
    unknown = [fault for fault in faults if fault["type"] == "extra_forbidden"]
    fault = unknown[0] if unknown else faults[0]
    location = fault["loc"]
    where = _dotted(location)
    if fault["type"] == "extra_forbidden":
        known = _known_keys(schema, location[:-1])
        hint = nearest(str(location[-1]), known) or f"; known keys: {', '.join(sorted(known))}"
        return f"unknown key {where!r}{hint}"
    if fault["type"] == "missing":
        return f"key {where!r} is missing"
    found = fault.get("input")
    return f"{where}: {fault['msg']}, got {_short(found)}" if where else str(fault["msg"])


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _dotted(location: tuple[int | str, ...]) -> str:
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else (f".{part}" if text else str(part))
    return text


def _known_keys(schema: type[BaseModel], location: tuple[int | str, ...]) -> set[str]:
    """Return the keys that the model at ``location`` knows, following containers by their annotations."""
    current: list[type[BaseModel]] = [schema]
    for part in location:
        below = [
            model
            for candidate in current
            for name, field in candidate.model_fields.items()
            if part in (name, field.alias)
            for model in _models_in(field.annotation)
        ]
        current = below or current  # an index or the key of a mapping: still the models of the container
    return {field.alias or name for candidate in current for name, field in candidate.model_fields.items()}


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    found: list[type[BaseModel]] = []
    for argument in getattr(annotation, "__args__", ()):
        found.extend(_models_in(argument))
    return found


def write_text(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` so that a reader sees the old content or the new one, never a part.

    Raises:
        FileFormatError: The folder can't be written to.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as stream:
                stream.write(text)
            Path(temporary).chmod(0o644 & ~_umask())
            Path(temporary).replace(path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise FileFormatError(f"{path} can't be written: {error}") from None


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current


def dump_yaml(content: Mapping[str, Any]) -> str:
    """Return ``content`` as YAML in the given key order; mappings wrapped in ``Flow`` take one line."""
    return yaml.dump(dict(content), Dumper=_Dumper, sort_keys=False, width=1_000_000, allow_unicode=True)


class Flow(dict[str, Any]):
    """A mapping that is written on one line."""


class FlowList(list[Any]):
    """A list that is written on one line."""


class _Dumper(yaml.SafeDumper):
    """Writes ``Flow`` and ``FlowList`` on one line, everything else as blocks; never aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


_Dumper.add_implicit_resolver(_FLOAT, _EXPONENT, list("-+0123456789"))  # so that such texts are quoted
_Dumper.add_representer(
    Flow, lambda dumper, data: dumper.represent_mapping("tag:yaml.org,2002:map", data.items(), flow_style=True)
)
_Dumper.add_representer(
    FlowList, lambda dumper, data: dumper.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=True)
)


def digest(content: Any) -> str:
    """Return ``sha256:`` and the hash of ``content`` (JSON-like), independent of key order."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()
