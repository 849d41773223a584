"""Templates: the examples are valid, and a wheel carries every one of them."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from pipeplan.cluster import read_cluster
from pipeplan.emit.launch import render_hostfile, render_launch_script
from pipeplan.emit.templates import one_line
from pipeplan.resources import template_path, template_root

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("path", sorted(template_path("clusters").glob("*.yaml")), ids=lambda path: path.stem)
def test_example_clusters_are_valid(path: Path) -> None:
    """Every example cluster reads, and launch files can be made for it."""
    cluster = read_cluster(path)
    render_hostfile(cluster)
    assert "deepspeed" in render_launch_script("model", cluster)


def test_bundled_text_trains_any_vocabulary_of_bytes() -> None:
    """The bundled text is plain ASCII and long enough for fifty batches of the quickstart."""
    content = template_path("data/text.txt").read_bytes()
    assert content.isascii()
    assert len(content) > 14 * 2048


def test_one_line_leaves_no_way_out() -> None:
    """Names stay one line without quotes or escapes, whatever they hold."""
    assert one_line('a"b\n\tc\\n\r\u2028d') == "a'b c/n d"


def test_wheel_carries_the_templates(tmp_path: Path) -> None:
    """A built wheel holds every file under templates/, where the resolver of an installed package looks first."""
    code = (
        "import sys\n"
        "from hatchling.builders.wheel import WheelBuilder\n"
        "print(next(WheelBuilder(sys.argv[1]).build(directory=sys.argv[2], versions=['standard'])))\n"
    )
    command = [sys.executable, "-c", code, str(ROOT), str(tmp_path)]
    built = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    with zipfile.ZipFile(built.stdout.strip()) as wheel:
        packed = {name for name in wheel.namelist() if name.startswith("pipeplan/_templates/")}
        names = set(wheel.namelist())
    expected = {
        f"pipeplan/_templates/{path.relative_to(template_root()).as_posix()}"
        for path in template_root().rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert packed == expected
    assert "pipeplan/cli/app.py" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
