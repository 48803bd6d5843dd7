"""Flower's SuperLink, whose control stays on its own machine: `python -m` this, with its options.

One port of a SuperLink serves the nodes (Fleet API), whoever starts and stops runs and registers
nodes (Control API), and the processes of a run (Runtime API). The last two have no business outside
of the machine: whoever may start a run runs code on it. Here they answer the machine itself alone;
nodes, who authenticate by their keys, have the Fleet API.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from fedsynth.federation.flower.processes import end_with_parent

FOR_NODES = ("/v1/fleet/",)
"""What a SuperLink answers everybody."""

Scope = MutableMapping[str, Any]
App = Callable[[Scope, Any, Any], Awaitable[None]]


class ControlAtHome:
    """ASGI middleware: all but `FOR_NODES` is for this machine alone.

    Args:
        app: the rest of the SuperLink.
    """

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and not allowed(scope["path"], scope.get("client")):
            start = {"type": "http.response.start", "status": 403, "headers": []}
            await send(start)
            await send({"type": "http.response.body", "body": b"for this machine alone\n"})
            return
        await self._app(scope, receive, send)


def allowed(path: str, client: tuple[str, int] | None) -> bool:
    """Whether a request is answered.

    >>> allowed("/v1/fleet/pull-messages", ("192.0.2.7", 80))
    True
    >>> allowed("/v1/control/start-run", ("192.0.2.7", 80))
    False
    >>> allowed("/v1/control/start-run", ("127.0.0.1", 80))
    True
    """
    if path.startswith(FOR_NODES) and ".." not in path:
        return True
    if client is None:
        return False
    try:
        return ipaddress.ip_address(client[0]).is_loopback
    except ValueError:
        return False


def main() -> None:
    """`flower-superlink`, with its options."""
    from flwr.superlink import extensions
    from flwr.superlink.cli.flower_superlink import flower_superlink
    from starlette.middleware import Middleware

    end_with_parent()
    others = extensions.get_middleware
    extensions.get_middleware = lambda: (Middleware(ControlAtHome), *others())
    flower_superlink()


if __name__ == "__main__":
    main()
