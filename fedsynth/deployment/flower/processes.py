"""Runs Flower's SuperLink and SuperNode as processes that end with this process.

They send no telemetry, do not check for updates, collect no usage statistics for Ray, and install
no packages that an app names. The module is also the program of these processes: `python -m
fedsynth.deployment.flower.processes superlink|supernode OPTIONS`.

One port of a SuperLink serves three groups: the nodes (Fleet API), the users who start and stop
runs and register nodes (Control API), and the processes of a run (Runtime API). Whoever may start a
run can run code on the machine, so the last two must not be reachable from outside. Here they
answer only requests from the machine itself. Nodes may use only the Fleet API, and authenticate
with their keys.

Flower checks a node's signature only after it has read the whole request. Here Flower's own check
runs first, so that untrusted requests cannot fill the memory.
"""

from __future__ import annotations

import ipaddress
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fedsynth.errors import FedsynthError
from fedsynth.files import last_line, open_regular

LOCALHOST = "127.0.0.1"
# Environment variables of every Flower process.
QUIET: Mapping[str, str] = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",
}
# The number of seconds that a process has to end by itself.
GRACE_SECONDS = 10.0
# The number of seconds that a process has until it must listen on its port.
START_SECONDS = 60.0


class FlowerError(FedsynthError, code="flower.process"):
    """Raised if Flower is missing, or if a Flower process did not start, failed or ended early."""


def require_flower() -> None:
    """Raises a FlowerError with the installation command if Flower is not installed."""
    try:
        import flwr  # noqa: F401
    except ImportError:
        raise FlowerError("Flower is not installed. Run pip install 'fedsynth[flower]'") from None


def start(module: str, arguments: Sequence[str], home: Path, output: Any) -> subprocess.Popen[str]:
    """Starts a Python module as a Flower process, in a new process group.

    Args:
        module: the name of the module.
        arguments: the command-line arguments.
        home: the folder for FLWR_HOME.
        output: receives the standard output and error, as in `subprocess.Popen(stdout=...)`.
    """
    scripts = str(Path(sys.executable).parent)  # where Flower's own commands look for each other
    path = os.pathsep.join([scripts, os.environ.get("PATH", "")])
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        env={**os.environ, **QUIET, "FLWR_HOME": str(home), "PATH": path},
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
    """Runs a SuperLink or SuperNode while the `with` block runs.

    The block begins when the process listens on its port.

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
        process = start("fedsynth.deployment.flower.processes", [name, *arguments], home, file)
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
    if sys.platform == "win32":
        process.kill()
    else:
        with suppress(ProcessLookupError, PermissionError):  # no process of its group is left
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _wait_for_port(name: str, port: int, process: subprocess.Popen[str], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise FlowerError(f"the {name} ended early: {last_line(log)}. See {log}")
        with suppress(OSError), socket.create_connection((LOCALHOST, port), timeout=1):
            return
        time.sleep(0.1)
    raise FlowerError(
        f"the {name} does not listen on port {port} after {START_SECONDS:g} s. See {log}"
    )


def free_port() -> int:
    """Returns a free local port."""
    with socket.socket() as probe:
        probe.bind((LOCALHOST, 0))
        return int(probe.getsockname()[1])


# The paths of the Fleet API.
FOR_NODES = ("/v1/fleet/",)

REFUSALS = {
    403: b"this request must come from the server's machine\n",
    401: b"this request must come from a node with a registered key\n",
}

Scope = MutableMapping[str, Any]
App = Callable[[Scope, Any, Any], Awaitable[None]]


class Gate:
    """ASGI middleware that rejects unauthorised requests to a SuperLink.

    Requests to the Fleet API (`FOR_NODES`) are accepted from nodes with a known key. All other
    requests are accepted only from localhost.

    A request is refused before its body is read.

    Args:
        app: the ASGI app that handles accepted requests.
    """

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        status = await self._refusal(scope)
        if status is None:
            await self._app(scope, receive, send)
            return
        closing = [(b"connection", b"close")]
        await send({"type": "http.response.start", "status": status, "headers": closing})
        await send({"type": "http.response.body", "body": REFUSALS[status]})

    async def _refusal(self, scope: Scope) -> int | None:
        """Returns the HTTP status with which a request is refused, or None if it is accepted."""
        if scope["type"] != "http":
            return None
        if not allowed(scope["path"], scope.get("client")):
            return 403
        if scope["path"].startswith(FOR_NODES) and scope["app"].state.enable_supernode_auth:
            from starlette.concurrency import run_in_threadpool

            if not await run_in_threadpool(_is_known_node, scope):
                return 401
        return None


def _is_known_node(scope: Scope) -> bool:
    """Returns True if a registered node has signed a request recently."""
    from base64 import b64decode
    from binascii import Error

    from flwr.proto.fleet_pb2 import ActivateNodeRequest
    from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER
    from flwr.superlink.dependencies.linkstate import get_linkstate
    from flwr.superlink.routers.fleet.node_auth import authenticate_node
    from starlette.exceptions import HTTPException
    from starlette.requests import Request

    request = Request({**scope, "state": {}})
    try:
        key = b64decode(request.headers.get(FLEET_HTTP_PUBLIC_KEY_HEADER, ""), validate=True)
        request.state.protobuf_request = ActivateNodeRequest(public_key=key)
        authenticate_node(request)
    except (HTTPException, Error, ValueError):
        return False
    return get_linkstate(request).get_node_id_by_public_key(key) is not None


def allowed(path: str, client: tuple[str, int] | None) -> bool:
    """Returns True if a client with this address may send requests to a path.

    >>> allowed("/v1/fleet/pull-messages", ("192.0.2.7", 80))
    True
    >>> allowed("/v1/control/start-run", ("192.0.2.7", 80))
    False
    >>> allowed("/v1/control/start-run", ("127.0.0.1", 80))
    True
    """
    if path.startswith(FOR_NODES) and ".." not in path:
        return True
    try:
        return client is not None and ipaddress.ip_address(client[0]).is_loopback
    except ValueError:
        return False


def superlink() -> None:
    """Runs `flower-superlink`, and accepts control requests only from this machine."""
    from flwr.superlink import extensions
    from flwr.superlink.cli.flower_superlink import flower_superlink
    from starlette.middleware import Middleware

    get_middleware = extensions.get_middleware
    extensions.get_middleware = lambda: (Middleware(Gate), *get_middleware())
    flower_superlink()


def supernode() -> None:
    """Runs `flower-supernode`, and exits the process once the connection to the server is lost."""
    from flwr.supernode.cli.flower_supernode import flower_supernode

    flower_supernode()
    os._exit(1)  # a thread of Flower's keeps the process alive


def end_with_parent() -> None:
    """Ends the current process when its parent ends, even if the parent is killed with SIGKILL."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(GRACE_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


if __name__ == "__main__":
    end_with_parent()
    {"superlink": superlink, "supernode": supernode}[sys.argv.pop(1)]()
