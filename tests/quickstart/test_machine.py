"""Commands of the quickstart: bounded, logged, and gone when they should be."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from pipeplan.errors import PipeplanError
from pipeplan.quickstart.machine import LoggedCommand, check_compiler, cpu_environment, find_script, free_port


def command(tmp_path: Path, code: str, timeout_s: float = 30) -> LoggedCommand:
    """Return a command that runs Python code."""
    return LoggedCommand(
        what="counting sheep",
        arguments=[sys.executable, "-c", code],
        log=tmp_path / "logs" / "sheep.log",
        environment=cpu_environment(),
        timeout_s=timeout_s,
    )


def test_output_goes_to_the_log(tmp_path: Path) -> None:
    """The log holds the command line, stdout and stderr."""
    command(tmp_path, "import sys; print('out'); print('err', file=sys.stderr)").run()
    log = (tmp_path / "logs" / "sheep.log").read_text()
    assert log.startswith(f"$ {sys.executable}")
    assert {"out", "err"} <= set(log.splitlines())


def test_a_failure_names_and_shows_the_log(tmp_path: Path) -> None:
    """A failing command is one error with its status, its log and the last lines of it."""
    with pytest.raises(PipeplanError) as caught:
        command(tmp_path, "print('the reason'); raise SystemExit(7)").run()
    for word in ("counting sheep failed with status 7", str(tmp_path / "logs" / "sheep.log"), "the reason"):
        assert word in str(caught.value)


def test_a_timeout_ends_every_child(tmp_path: Path) -> None:
    """A command that takes too long is ended together with the processes that it started."""
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    with pytest.raises(PipeplanError, match="took longer than 2 s"):
        command(tmp_path, code, timeout_s=2).run()
    child = int((tmp_path / "logs" / "sheep.log").read_text().splitlines()[-1])
    for _ in range(50):
        try:
            os.kill(child, 0)
        except ProcessLookupError:
            return
        status = Path(f"/proc/{child}/stat")
        if status.exists() and status.read_text().split(") ")[1].startswith("Z"):
            return  # dead, and not yet collected by its new parent
        time.sleep(0.1)
    pytest.fail(f"process {child} is still running")


def test_a_missing_compiler_is_said_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without a C++ compiler the quickstart stops before any work and says how to get one."""
    from pipeplan.quickstart.steps import run_quickstart

    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    said: list[str] = []
    with pytest.raises(PipeplanError, match=r"no C\+\+ compiler \(c\+\+\).*apt-get install g\+\+"):
        run_quickstart(tmp_path / "plan", 3, said.append)
    assert said == []
    assert list(tmp_path.iterdir()) == []


def test_the_compiler_of_the_environment_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """CXX names the compiler, as it does for torch's extension builder."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(PipeplanError, match="no-such-compiler"):
        check_compiler()
    monkeypatch.setenv("CXX", sys.executable)
    check_compiler()


def test_ports_are_free_and_scripts_are_found() -> None:
    """A chosen port can be listened on; a script that isn't installed is named."""
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", free_port()))
    assert find_script("deepspeed").is_file()
    with pytest.raises(PipeplanError, match="no-such-script"):
        find_script("no-such-script")
