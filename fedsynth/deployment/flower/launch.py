"""Flower's SuperLink and SuperNode, which end with their parent process: `python -m
fedsynth.deployment.flower.launch superlink|supernode OPTIONS`.

One port of a SuperLink serves the nodes (Fleet API), the users who start and stop runs and register
nodes (Control API), and the processes of a run (Runtime API). The last two must not be reachable
from outside the machine: whoever may start a run runs code on it. Here they answer only the machine
itself; nodes, which authenticate by their keys, have the Fleet API.

Flower checks a node's signature after it has read the whole request. Here Flower's own function
checks it first, so that untrusted input takes no memory.
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
"""Paths of the Fleet API."""
REFUSALS = {403: b"only for this machine\n", 401: b"no node with a known key\n"}

Scope = MutableMapping[str, Any]
App = Callable[[Scope, Any, Any], Awaitable[None]]


class Gate:
    """ASGI middleware: `FOR_NODES` is for nodes with a known key, and everything else for this
    machine.

    A request is refused before its body is read.

    Args:
        app: the rest of the SuperLink.
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
        """Returns the status that refuses a request; None: it is accepted."""
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
    """Returns whether a request's headers carry a recent signature of a registered node's key."""
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
    """Returns whether a request may be answered, by its origin.

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
    """Runs `flower-superlink`, with control limited to its own machine."""
    from flwr.superlink import extensions
    from flwr.superlink.cli.flower_superlink import flower_superlink
    from starlette.middleware import Middleware

    get_middleware = extensions.get_middleware
    extensions.get_middleware = lambda: (Middleware(Gate), *get_middleware())
    flower_superlink()


def supernode() -> None:
    """Runs `flower-supernode`, and ends when it has lost its server."""
    from flwr.supernode.cli.flower_supernode import flower_supernode

    flower_supernode()
    os._exit(1)  # a thread of Flower's keeps the process alive


def end_with_parent() -> None:
    """Ends this process when its parent process has ended, also after a SIGKILL."""
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
