"""`fedsynth client`: Flower's SuperNode, and the data owner's own process that answers for it."""

from __future__ import annotations

import secrets
import socket
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fedsynth.deployment.flower.processes import (
    HERE,
    FlowerError,
    free_port,
    listening,
    require_flower,
)
from fedsynth.deployment.node import Node
from fedsynth.errors import SettingError
from fedsynth.privacy.files import last_line, open_regular
from fedsynth.validation import MAX_SECONDS, check_number

LOG = "supernode.log"
"""The SuperNode's log, in the owner's folder of ledgers."""
WAIT = 600.0
"""Seconds without a connection after which a client gives up."""
AGAIN = 3.0
"""Seconds between two attempts to connect."""
LOST_SECONDS = 10
"""Seconds after which a SuperNode without its server ends."""
REASONS = {
    "[code: 2004]": "a client with this key is connected to the server: an earlier process of "
    "this client, which the server drops after a minute, or another client with "
    "the same key",
    "SSL/TLS handshake error": "the server's certificate is not one of the CA's, or has expired",
    "Giving up reconnection": "the server no longer answers",
    "SuperNode terminated gracefully": "the server does not know this client's key: it was "
    "restarted, or was given other keys",
}
"""What a SuperNode logs before it ends -> its meaning."""
LINGER = 6.0
"""Seconds for sending the last answer, after the only run."""


@dataclass(frozen=True)
class Door:
    """The connection of a node to its server.

    Args:
        server: the SuperLink's HOST:PORT.
        authority: the CA certificate that signed the server's, PEM; None: no TLS, which is allowed
            only for a server on this machine.
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
                f"is required for a server on another machine ({host}): set its CA's certificate",
            )
        if self.authority is None and self.key is not None:
            raise SettingError(None, "key", "of a node needs TLS: set the CA's certificate")
        for path in (self.authority, self.key):
            if path is not None and not path.is_file():
                raise SettingError(None, str(path), "is not a file")

    def unreachable(self) -> str:
        """Returns why nothing can be sent to the server; "" if it listens."""
        host, _, port = self.server.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), LOST_SECONDS).close()
        except OSError as error:
            return f"no server listens on {self.server} ({error.strerror or error})"
        return ""

    @property
    def arguments(self) -> list[str]:
        """Arguments of the SuperNode's command."""
        options = ["--superlink", self.server, "--max-wait-time", str(LOST_SECONDS)]
        if self.authority is None:
            return [*options, "--insecure"]
        options += ["--root-certificates", str(self.authority)]
        if self.key is not None:
            options += ["--auth-supernode-private-key", str(self.key)]
        return options


def join(
    node: Node,
    door: Door,
    going: Callable[[], bool] = lambda: True,
    *,
    once: bool = False,
    wait: float = WAIT,
) -> None:
    """Connects a node, and answers messages until it has to end.

    A failed or lost connection is retried. The node's owner gets each reason once.

    Args:
        node: the data owner's.
        door: to its server.
        going: called between messages; False ends the loop.
        once: whether to end after the first completed run.
        wait: the seconds without a connection to the server after which it gives up.

    Raises:
        SettingError: `wait` is negative, not finite or more than three years.
        FlowerError: Flower is missing, the server was not reached in time, or it refuses the
            client.
    """
    check_number(None, "wait", wait, 0, MAX_SECONDS)
    require_flower()
    reason = ""
    ends = time.monotonic() + wait
    with tempfile.TemporaryDirectory(prefix="fedsynth-client-") as folder:
        while going():
            error = door.unreachable()
            if not error:
                connection = _Connection(node, door, Path(folder))
                error = connection.serve(going, once=once)
                if node.refused:
                    raise FlowerError(f"the server refuses this client: {node.refused}")
                if not error:
                    return
                if connection.was_made:
                    ends = time.monotonic() + wait
                    reason = ""
            if time.monotonic() >= ends:
                raise FlowerError(f"no connection to {door.server} for {wait:g} s: {error}")
            if error != reason:
                node.say(f"{error}; trying again for {wait:g} s")
                reason = error
            time.sleep(min(AGAIN, wait))


class _Connection:
    """One SuperNode, until it ends, and the answers to its messages.

    Args:
        node: the data owner's.
        door: to its server.
        home: FLWR_HOME.

    Attributes:
        was_made: whether the server accepted the SuperNode.
    """

    def __init__(self, node: Node, door: Door, home: Path) -> None:
        self._node = node
        self._door = door
        self._home = home
        self.was_made = False

    def serve(self, going: Callable[[], bool], *, once: bool) -> str:
        """Answers messages until the SuperNode or the node's work ends.

        Returns:
            The reason why the SuperNode has ended; "": the node's work has.
        """
        from fedsynth.deployment.flower.executor import Executor

        node = self._node
        secret = secrets.token_bytes(32)
        shared = self._home / "secret"
        shared.touch(0o600)
        shared.write_bytes(secret)
        port = free_port()
        node.home.mkdir(parents=True, exist_ok=True)
        log = node.home / LOG
        offset = log.stat().st_size if log.exists() else 0
        arguments = [
            *self._door.arguments,
            *("--isolation", "process", "--superexec-auth-secret-file", str(shared)),
            *("--host", HERE, "--port", str(port)),
        ]
        with listening("supernode", arguments, port, self._home, log) as process:

            def alive() -> bool:
                over = node.refused or (once and node.ended)
                return going() and not over and process.poll() is None

            Executor(f"{HERE}:{port}", secret, node.answer).serve(alive)
            ended = process.poll() is not None
            if not ended and (node.refused or node.ended):
                time.sleep(LINGER)
        with open_regular(log) as file:
            file.seek(offset)
            output = file.readall().decode(errors="replace")
        self.was_made = "SuperNode ID" in output
        return _reason(output, log) if ended else ""


def _reason(output: str, log: Path) -> str:
    """Returns why a SuperNode has ended, from its log."""
    for mark, reason in REASONS.items():
        if mark in output:
            return reason
    return f"the SuperNode has ended: {last_line(log)}"
