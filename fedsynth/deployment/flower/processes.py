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

HERE = "127.0.0.1"
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


def command(name: str) -> str:
    """Returns the path of one of Flower's commands, of the same environment as this process.

    Raises:
        FlowerError: it is missing.
    """
    require_flower()
    path = Path(sys.executable).parent / name
    if not path.exists():
        raise FlowerError(f"{path} is missing: pip install 'fedsynth[flower]'")
    return str(path)


@contextmanager
def listening(
    name: str, arguments: Sequence[str], port: int, home: Path, log: Path
) -> Iterator[subprocess.Popen[bytes]]:
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
    module = [sys.executable, "-m", "fedsynth.deployment.flower.launch", name]
    with open_regular(log, writing=True, create=True) as file:
        process = subprocess.Popen(
            [*module, *arguments],
            env=environment(home),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            _wait_for_port(name, port, process, log)
            yield process
        finally:
            stop(process)


def stop(process: subprocess.Popen[Any], grace: float = GRACE_SECONDS) -> None:
    """Ends a process and its children: first with SIGTERM, then with SIGKILL."""
    for sent, seconds in ((signal.SIGTERM, grace), (signal.SIGKILL, grace)):
        if process.poll() is None:
            process.send_signal(sent)
            with suppress(subprocess.TimeoutExpired):
                process.wait(seconds)
    with suppress(ProcessLookupError, PermissionError):  # its group, if any process of it is left
        os.killpg(process.pid, signal.SIGKILL)


def _wait_for_port(name: str, port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    ends = time.monotonic() + START_SECONDS
    while time.monotonic() < ends:
        if process.poll() is not None:
            raise FlowerError(f"the {name} has ended: {last_line(log)} ({log})")
        with suppress(OSError), socket.create_connection((HERE, port), timeout=1):
            return
        time.sleep(0.1)
    raise FlowerError(f"the {name} does not listen on {HERE}:{port} after {START_SECONDS:g} s")


def free_port() -> int:
    """Returns a port of this machine on which no process listens now."""
    with socket.socket() as probe:
        probe.bind((HERE, 0))
        return int(probe.getsockname()[1])
