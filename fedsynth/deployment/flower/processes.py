"""Flower's SuperLink and SuperNode as processes that end with this one.

They send no telemetry, check for no updates, collect no usage statistics of Ray, and install no
packages of an app.
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
"""The environment of every Flower process."""
GRACE_SECONDS = 10.0
"""How long a process has to end by itself."""
START_SECONDS = 60.0
"""How long a process has to listen on its port."""


class FlowerError(FedsynthError):
    """A Flower process did not start, or ended."""


def require_flower() -> None:
    """Raises FlowerError, which names the extra, if Flower is not installed."""
    try:
        import flwr  # noqa: F401
    except ImportError:
        raise FlowerError("Flower is not installed: pip install 'fedsynth[flower]'") from None


def environment(home: Path) -> dict[str, str]:
    """Returns the environment of a Flower process, whose files go into `home`."""
    scripts = str(Path(sys.executable).parent)  # where Flower's own commands look for each other
    path = os.pathsep.join([scripts, os.environ.get("PATH", "")])
    return {**os.environ, **QUIET, "FLWR_HOME": str(home), "PATH": path}


def start(module: str, arguments: Sequence[str], home: Path, output: Any) -> subprocess.Popen[str]:
    """Starts a Python module as a Flower process, in a process group of its own.

    Args:
        module: its name.
        arguments: its options.
        home: FLWR_HOME.
        output: receives its output and errors, as `subprocess.Popen(stdout=...)`.
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
    """Runs a listening SuperLink or SuperNode for the duration of the block.

    Args:
        name: "superlink" or "supernode".
        arguments: its options.
        port: its port on this machine.
        home: FLWR_HOME.
        log: the file for its output.

    Raises:
        FlowerError: it ended early, or does not listen in time; with the log's last line.
    """
    with open_regular(log, writing=True, create=True) as file:
        process = start("fedsynth.deployment.flower.launch", [name, *arguments], home, file)
        try:
            _wait_for_port(name, port, process, log)
            yield process
        finally:
            stop(process)


def stop(process: subprocess.Popen[str]) -> None:
    """Ends a process and its children: first with SIGTERM, then with SIGKILL."""
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
            raise FlowerError(f"the {name} has ended: {last_line(log)} ({log})")
        with suppress(OSError), socket.create_connection((LOCALHOST, port), timeout=1):
            return
        time.sleep(0.1)
    raise FlowerError(f"the {name} does not listen on {LOCALHOST}:{port} after {START_SECONDS:g} s")


def free_port() -> int:
    """Returns a port of this machine on which no process listens now."""
    with socket.socket() as probe:
        probe.bind((LOCALHOST, 0))
        return int(probe.getsockname()[1])
