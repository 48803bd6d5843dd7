"""Starts Flower's SuperLink or SuperNode, which ends when its parent process ends: `python -m
fedsynth.deployment.flower.launch superlink|supernode OPTIONS`.

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
import sys
import threading
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from fedsynth.deployment.flower.processes import GRACE_SECONDS

FOR_NODES = ("/v1/fleet/",)
"""The paths of the Fleet API."""
REFUSALS = {
    403: b"only processes on the server's machine may send this request\n",
    401: b"only nodes with a registered key may send this request\n",
}

Scope = MutableMapping[str, Any]
App = Callable[[Scope, Any, Any], Awaitable[None]]


class Gate:
    """ASGI middleware that accepts requests to the Fleet API (`FOR_NODES`) from nodes with a known
    key, and all other requests only from this machine.

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
    """Returns True if the headers of a request have a recent signature with a registered node's
    key.
    """
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
    """Returns True if a request with this path may be answered, given the address that it comes
    from.

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
    """Runs `flower-superlink`, which only the machine itself can control."""
    from flwr.superlink import extensions
    from flwr.superlink.cli.flower_superlink import flower_superlink
    from starlette.middleware import Middleware

    get_middleware = extensions.get_middleware
    extensions.get_middleware = lambda: (Middleware(Gate), *get_middleware())
    flower_superlink()


def supernode() -> None:
    """Runs `flower-supernode`, and ends the process when the connection to the server is lost."""
    from flwr.supernode.cli.flower_supernode import flower_supernode

    flower_supernode()
    os._exit(1)  # a thread of Flower's keeps the process alive


def end_with_parent() -> None:
    """Ends this process when its parent process has ended, even if the parent was killed with
    SIGKILL.
    """
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
    program = sys.argv.pop(1)
    {"superlink": superlink, "supernode": supernode}[program]()
