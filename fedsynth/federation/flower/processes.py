"""Flower's commands as processes of ours: started with what they must not do switched off, and all
gone when we end.

No telemetry, no look for updates, no usage statistics of Ray, and no packages installed by an app.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fedsynth.errors import FedsynthError
from fedsynth.privacy.files import last_line, open_regular

QUIET: Mapping[str, str] = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",
}
"""Environment of every process of Flower's."""
GRACE = 10.0
"""Seconds that a process has to end by itself."""


class FlowerError(FedsynthError):
    """A process of Flower's did not start, or ended."""


def require_flower() -> None:
    """Says which extra is missing, if Flower is not installed.

    Raises:
        FlowerError: it is not.
    """
    try:
        import flwr  # noqa: F401
    except ImportError:
        raise FlowerError("Flower is not installed: pip install 'fedsynth[flower]'") from None


def environment(home: Path) -> dict[str, str]:
    """Of a process of Flower's, whose settings and apps go into `home`."""
    scripts = str(Path(sys.executable).parent)  # where Flower's own commands look for each other
    path = os.pathsep.join([scripts, os.environ.get("PATH", "")])
    return {**os.environ, **QUIET, "FLWR_HOME": str(home), "PATH": path}


def command(name: str) -> str:
    """The path of one of Flower's commands, of the same environment as this process.

    Raises:
        FlowerError: it is not there.
    """
    require_flower()
    path = Path(sys.executable).parent / name
    if not path.exists():
        raise FlowerError(f"{path} is missing: pip install 'fedsynth[flower]'")
    return str(path)


@contextmanager
def running(arguments: Sequence[str], home: Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process, as long as the block lasts, with all that it starts.

    Args:
        arguments: of the command.
        home: FLWR_HOME.
        log: the file that its output goes to.
    """
    with open_regular(log, writing=True, create=True) as file:
        process = subprocess.Popen(
            list(arguments),
            env=environment(home),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            stop(process)


def stop(process: subprocess.Popen[Any], grace: float = GRACE) -> None:
    """Ends a process and what it has started: first politely."""
    for sent, seconds in ((signal.SIGTERM, grace), (signal.SIGKILL, grace)):
        if process.poll() is None:
            process.send_signal(sent)
            with suppress(subprocess.TimeoutExpired):
                process.wait(seconds)
    with suppress(ProcessLookupError, PermissionError):  # its group, if anything is left of it
        os.killpg(process.pid, signal.SIGKILL)


def end_with_parent(seconds: float = 0.5) -> None:
    """From now on this process ends when the one that has started it is gone, however it went."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(seconds)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(GRACE)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def wait_for_port(
    host: str, port: int, process: subprocess.Popen[bytes], log: Path, seconds: float = 60.0
) -> None:
    """Waits until something listens there.

    Raises:
        FlowerError: the process has ended, or the time is over; with the log's last line.
    """
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        if process.poll() is not None:
            raise FlowerError(f"{_name(process)} has ended: {last_line(log)} ({log})")
        with suppress(OSError), socket.create_connection((host, port), timeout=1):
            return
        time.sleep(0.1)
    raise FlowerError(f"{_name(process)} does not listen on {host}:{port} after {seconds:g} s")


def _name(process: subprocess.Popen[bytes]) -> str:
    arguments = process.args
    if not isinstance(arguments, list):
        return "a process"
    named = arguments[2] if arguments[1:2] == ["-m"] else arguments[0]
    return str(named).rpartition("." if arguments[1:2] == ["-m"] else "/")[2]


def free_port() -> int:
    """A port of this machine that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
