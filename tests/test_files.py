"""Numbers in files, and what is written reads back."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from pipeplan.cluster import equal_ranks
from pipeplan.errors import ClusterError, FileFormatError
from pipeplan.files import Document, dump_yaml, parse_document, read_yaml

# PyYAML loses some control characters and line separators.
WORDS = st.text(alphabet=st.characters(exclude_categories=("C", "Z"), include_characters=" "))


@pytest.mark.parametrize("text", ["1e-6", "2e8", "+3E4", "-1.5e3", "2.e2", "0.25", "7"])
def test_numbers_as_people_write_them(text: str, tmp_path: Path) -> None:
    """An exponent needs neither point nor sign, as in YAML 1.2 and JSON."""
    (tmp_path / "file.yaml").write_text(f"value: {text}\n")
    found = read_yaml(tmp_path / "file.yaml", "test")["value"]
    assert isinstance(found, int | float)
    assert found == float(text)


@given(st.text(alphabet="0123456789eE+-.", max_size=18) | st.floats(allow_nan=False, allow_infinity=False) | WORDS)
def test_what_is_written_reads_back(tmp_path_factory: pytest.TempPathFactory, value: float | str) -> None:
    """Texts stay texts, whatever number they look like (digests may), and numbers keep their value."""
    path = tmp_path_factory.mktemp("files") / "file.yaml"
    path.write_text(dump_yaml({"value": value}), encoding="utf-8")
    found = read_yaml(path, "test")["value"]
    assert type(found) is type(value)
    assert found == value


def test_digests_of_older_files_stay_texts(tmp_path: Path) -> None:
    """Sixteen hexadecimal digits with one e among them are no number, though nobody quoted them."""
    (tmp_path / "file.yaml").write_text("value: 1234567890123e45\n")
    assert read_yaml(tmp_path / "file.yaml", "test")["value"] == "1234567890123e45"
    assert yaml.safe_load("1e5") == "1e5"  # what PyYAML makes of numbers without a point; other files are as they were


@pytest.mark.parametrize("text", [".inf", "-.inf", ".nan"])
def test_numbers_are_finite(text: str, tmp_path: Path) -> None:
    """Infinity and no-number are refused by the key's name, in files as in arguments."""

    class _Schema(Document):
        value: float

    (tmp_path / "file.yaml").write_text(f"value: {text}\n")
    with pytest.raises(FileFormatError, match=r"file.yaml: value: Input should be a finite number"):
        parse_document(read_yaml(tmp_path / "file.yaml", "test"), _Schema, tmp_path / "file.yaml")
    number = float(text.replace(".", ""))
    for options in ({"memory_gb": number}, {"link_gb_per_s": number}):
        with pytest.raises(ClusterError, match="must be positive"):
            equal_ranks(2, "cpu", **options)
    with pytest.raises(ClusterError, match="must not be negative"):
        equal_ranks(2, "cpu", link_gb_per_s=1.0, link_latency_us=math.nan)
