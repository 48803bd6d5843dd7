"""Runs Flower's SuperLink and SuperNode as processes that end with this process.

They send no telemetry, do not check for updates, collect no usage statistics for Ray, and install
no packages that an app names.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fedsynth.errors import FedsynthError
from fedsynth.privacy.files import last_line, open_regular

LOCALHOST = "127.0.0.1"
QUIET: Mapping[str, str] = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",
}
"""Environment variables of every Flower process."""
GRACE_SECONDS = 10.0
"""The number of seconds that a process has to end by itself."""
START_SECONDS = 60.0
"""The number of seconds that a process has until it must listen on its port."""


class FlowerError(FedsynthError):
    """Raised if Flower is missing, or if a Flower process did not start, failed or ended early."""


def require_flower() -> None:
    """Raises a FlowerError that names the extra to install if Flower is not installed."""
    try:
        import flwr  # noqa: F401
    except ImportError:
        raise FlowerError("Flower is not installed: pip install 'fedsynth[flower]'") from None


def environment(home: Path) -> dict[str, str]:
    """Returns the environment of a Flower process. Flower stores its files in `home`."""
    scripts = str(Path(sys.executable).parent)  # where Flower's own commands look for each other
    path = os.pathsep.join([scripts, os.environ.get("PATH", "")])
    return {**os.environ, **QUIET, "FLWR_HOME": str(home), "PATH": path}


def start(module: str, arguments: Sequence[str], home: Path, output: Any) -> subprocess.Popen[str]:
    """Starts a Python module as a Flower process, in a new process group.

    Args:
        module: the name of the module.
        arguments: the command-line arguments.
        home: the folder for FLWR_HOME.
        output: receives the standard output and error, as in `subprocess.Popen(stdout=...)`.
    """
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        env=environment(home),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


@contextmanager
def listening(
    name: str, arguments: Sequence[str], port: int, home: Path, log: Path
) -> Iterator[subprocess.Popen[str]]:
    """Runs a SuperLink or SuperNode for the duration of the block, which begins when the process
    listens.

    Args:
        name: "superlink" or "supernode".
        arguments: the command-line options of the process.
        port: the port on this machine on which the process listens.
        home: the folder for FLWR_HOME.
        log: the file that receives the output of the process.

    Raises:
        FlowerError: if the process ended early, or does not listen in time. If it ended, the
            message contains the last line of the log.
    """
    with open_regular(log, writing=True, create=True) as file:
        process = start("fedsynth.deployment.flower.launch", [name, *arguments], home, file)
        try:
            _wait_for_port(name, port, process, log)
            yield process
        finally:
            stop(process)


def stop(process: subprocess.Popen[str]) -> None:
    """Ends a process and its children, first with SIGTERM and then with SIGKILL."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(GRACE_SECONDS)
    with suppress(ProcessLookupError, PermissionError):  # no process of its group is left
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _wait_for_port(name: str, port: int, process: subprocess.Popen[str], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise FlowerError(f"the {name} ended before it was ready: {last_line(log)} (see {log})")
        with suppress(OSError), socket.create_connection((LOCALHOST, port), timeout=1):
            return
        time.sleep(0.1)
    raise FlowerError(f"the {name} did not listen on {LOCALHOST}:{port} within {START_SECONDS:g} s")


def free_port() -> int:
    """Returns a port on this machine on which no process listens at the moment."""
    with socket.socket() as probe:
        probe.bind((LOCALHOST, 0))
        return int(probe.getsockname()[1])
