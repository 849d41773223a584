"""What this machine must have, and running commands on it: bounded, logged, never left behind."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeplan.errors import PipeplanError

_LOG_TAIL_LINES = 12


def check_compiler() -> None:
    """Check that DeepSpeed can compile its CPU communication.

    Raises:
        PipeplanError: There is no C++ compiler; says how to get one.
    """
    compiler = os.environ.get("CXX", "c++")  # what torch's extension builder runs
    if shutil.which(compiler) is None:
        raise PipeplanError(
            f"there is no C++ compiler ({compiler}), which DeepSpeed needs once on CPU; install one, "
            "on Debian and Ubuntu with: apt-get install g++"
        )


def find_script(name: str) -> Path:
    """Return the path of a console script of this Python environment.

    Raises:
        PipeplanError: It is not installed.
    """
    path = Path(sysconfig.get_path("scripts")) / name
    if not path.is_file():
        raise PipeplanError(f"{path} is missing; install pipeplan with its dependencies into this environment")
    return path


def cpu_environment() -> dict[str, str]:
    """Return the environment for training on CPU: this Python's scripts first, one thread a process."""
    scripts = sysconfig.get_path("scripts")  # DeepSpeed looks for ninja on the path
    return {
        **os.environ,
        "PATH": os.pathsep.join([scripts, os.environ.get("PATH", os.defpath)]),
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }


def free_port() -> int:
    """Return a TCP port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedCommand:
    """A command whose output goes to a file.

    Attributes:
        what: What it does, for messages: "training with the plan".
    """

    what: str
    arguments: Sequence[str]
    log: Path
    environment: Mapping[str, str]
    timeout_s: float

    def run(self) -> None:
        """Run to the end; on failure, timeout or Ctrl-C no process of it stays behind.

        Raises:
            PipeplanError: It failed or took too long; names the log and shows its end.
        """
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("w", encoding="utf-8") as stream:
            stream.write(f"$ {shlex.join(self.arguments)}\n")
            stream.flush()
            process = subprocess.Popen(
                self.arguments,
                stdout=stream,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=dict(self.environment),
                start_new_session=True,  # a group of its own, so that the launcher's children end with it
            )
            try:
                status = process.wait(self.timeout_s)
            except subprocess.TimeoutExpired:
                raise PipeplanError(
                    f"{self.what} took longer than {self.timeout_s:.0f} s and was ended; its output is in {self.log}"
                    f"{self._tail()}"
                ) from None
            finally:
                _end_group(process)
        if status != 0:
            raise PipeplanError(f"{self.what} failed with status {status}; its output is in {self.log}{self._tail()}")

    def _tail(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        return ", which ends:\n" + "\n".join(f"  {line}" for line in lines[-_LOG_TAIL_LINES:])


def _end_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):  # the whole group may have ended by itself
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
