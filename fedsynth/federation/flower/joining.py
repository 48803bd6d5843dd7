"""`fedsynth client`: Flower's SuperNode, and the data owner's own process that answers for it."""

from __future__ import annotations

import secrets
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fedsynth.errors import SettingError
from fedsynth.federation.flower.processes import (
    FlowerError,
    free_port,
    require_flower,
    running,
    wait_for_port,
)
from fedsynth.federation.nodes.node import Node
from fedsynth.privacy.files import last_line
from fedsynth.validation import MAX_SECONDS, check_number

HERE = "127.0.0.1"
LOG = "supernode.log"
"""In the owner's folder of ledgers: what the SuperNode has said."""
AGAIN = 3.0
"""Seconds between two attempts to reach a server that does not know the node yet."""
LINGER = 6.0
"""Seconds in which the last answer leaves, after a run that was to be the only one."""


@dataclass(frozen=True)
class Door:
    """How a node reaches its server.

    Args:
        server: the SuperLink's HOST:PORT.
        authority: the certificate of who has signed the server's, PEM; None: without TLS, which
            only a server on this machine may be.
        key: the node's own private key; the server knows its public one.
    """

    server: str
    authority: Path | None
    key: Path | None = None

    def __post_init__(self) -> None:
        host, _, port = self.server.rpartition(":")
        if not host or not port.isdigit():
            raise SettingError(None, "server", f"must be HOST:PORT, got {self.server!r:.80}")
        if self.authority is None and host not in (HERE, "localhost", "[::1]"):
            raise SettingError(
                None,
                "TLS",
                f"is needed for a server elsewhere ({host}): give its CA's certificate",
            )
        if self.authority is None and self.key is not None:
            raise SettingError(None, "key", "of a node needs TLS: give the CA's certificate")
        for path in (self.authority, self.key):
            if path is not None and not path.is_file():
                raise SettingError(None, str(path), "is no file")

    @property
    def arguments(self) -> list[str]:
        """Of the SuperNode's command."""
        found = ["--superlink", self.server]
        if self.authority is None:
            return [*found, "--insecure"]
        found += ["--root-certificates", str(self.authority)]
        if self.key is not None:
            found += ["--auth-supernode-private-key", str(self.key)]
        return found


def join(
    node: Node,
    door: Door,
    going: Callable[[], bool] = lambda: True,
    *,
    once: bool = False,
    wait: float = 0.0,
) -> None:
    """Connects a node, and answers until it is told to end.

    Args:
        node: the data owner's.
        door: to its server.
        going: asked between messages; when it says no, this ends.
        once: end after the first run that has ended.
        wait: so many seconds a server that does not know the node yet is asked again.

    Raises:
        SettingError: `wait` is negative, not finite or more than three years.
        FlowerError: Flower is missing, or the SuperNode has ended: its server does not know it.
    """
    check_number(None, "wait", wait, 0, MAX_SECONDS)
    require_flower()
    ends = time.monotonic() + wait
    with tempfile.TemporaryDirectory(prefix="fedsynth-client-") as folder:
        while True:
            try:
                _connected(node, door, going, Path(folder), once=once)
                return
            except FlowerError:
                if time.monotonic() >= ends or not going():
                    raise
                time.sleep(AGAIN)


def _connected(
    node: Node, door: Door, going: Callable[[], bool], home: Path, *, once: bool
) -> None:
    """One SuperNode, as long as it lasts, and the answers to its messages."""
    from fedsynth.federation.flower.executor import Executor

    secret = secrets.token_bytes(32)
    shared = home / "secret"
    shared.touch(0o600)
    shared.write_bytes(secret)
    port = free_port()
    node.home.mkdir(parents=True, exist_ok=True)
    log = node.home / LOG
    arguments = [
        *(sys.executable, "-m", "fedsynth.federation.flower.supernode"),
        *door.arguments,
        *("--isolation", "process", "--superexec-auth-secret-file", str(shared)),
        *("--host", HERE, "--port", str(port)),
    ]
    with running(arguments, home, log) as process:
        wait_for_port(HERE, port, process, log)

        def alive() -> bool:
            over = once and node.ended > 0
            return going() and not over and process.poll() is None

        Executor(f"{HERE}:{port}", secret, node.answer).serve(alive)
        if process.poll() is not None:
            raise FlowerError(f"the SuperNode has ended: {last_line(log)}")
        if once and node.ended:
            time.sleep(LINGER)
