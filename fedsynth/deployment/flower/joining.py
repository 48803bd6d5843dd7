"""`fedsynth client`: Flower's SuperNode, and the data owner's own process that answers for it."""

from __future__ import annotations

import secrets
import socket
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from fedsynth.deployment.flower.processes import (
    LOCALHOST,
    FlowerError,
    free_port,
    listening,
    require_flower,
)
from fedsynth.deployment.node import Node
from fedsynth.errors import SettingError
from fedsynth.privacy.files import last_line
from fedsynth.validation import MAX_SECONDS, check_number

LOG = "supernode.log"
"""The log of the last SuperNode, in the owner's folder of ledgers."""
WAIT_SECONDS = 600.0
"""Seconds without a connection after which a client gives up."""
RETRY_SECONDS = 3.0
"""Seconds between two attempts to connect."""
LOST_SECONDS = 10
"""Seconds after which a SuperNode without its server ends."""
LINGER_SECONDS = 6.0
"""Seconds for sending the last answer."""
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


@dataclass(frozen=True)
class ServerConnection:
    """The connection of a node to its server.

    Args:
        server: the SuperLink's HOST:PORT.
        ca: the CA certificate that signed the server's, PEM; None: no TLS, which is allowed only
            for a server on this machine.
        key: the node's own private key; the server knows its public one.

    Raises:
        SettingError: an invalid address, TLS is missing, or a file is.
    """

    server: str
    ca: Path | None
    key: Path | None = None

    def __post_init__(self) -> None:
        host, _, port = self.server.rpartition(":")
        if not host or not port.isdigit():
            raise SettingError(None, "server", f"must be HOST:PORT, got {self.server!r:.80}")
        if self.ca is None and (host not in (LOCALHOST, "localhost", "[::1]") or self.key):
            reason = "is required for a key, and for another machine: set the CA's certificate"
            raise SettingError(None, "TLS", reason)
        for path in (self.ca, self.key):
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
        if self.ca is None:
            return [*options, "--insecure"]
        options += ["--root-certificates", str(self.ca)]
        if self.key is not None:
            options += ["--auth-supernode-private-key", str(self.key)]
        return options


def join(
    node: Node, connection: ServerConnection, *, once: bool = False, wait: float = WAIT_SECONDS
) -> None:
    """Connects a node, and answers messages until it has to end.

    A failed or lost connection is retried. The node's owner gets each reason once.

    Args:
        node: the data owner's.
        connection: to its server.
        once: whether to end after the first completed run.
        wait: the seconds without a connection to the server after which it gives up.

    Raises:
        SettingError: `wait` is negative, not finite or more than three years.
        FlowerError: Flower is missing, the server was not reached in time, or it refuses the
            client.
    """
    check_number(None, "wait", wait, 0, MAX_SECONDS)
    require_flower()
    printed = ""
    deadline = time.monotonic() + wait
    while True:
        reason = connection.unreachable()
        if not reason:
            reason, was_connected = run_supernode(node, connection, once=once)
            if node.refused:
                raise FlowerError(f"the server refuses this client: {node.refused}")
            if not reason:
                return
            if was_connected:
                deadline = time.monotonic() + wait
                printed = ""
        if time.monotonic() >= deadline:
            raise FlowerError(f"no connection to {connection.server} for {wait:g} s: {reason}")
        if reason != printed:
            node.say(f"{reason}; trying again for {wait:g} s")
            printed = reason
        time.sleep(min(RETRY_SECONDS, wait))


def run_supernode(node: Node, connection: ServerConnection, *, once: bool) -> tuple[str, bool]:
    """Answers messages until the SuperNode or the node's work ends.

    Returns:
        The reason why the SuperNode has ended ("": the node's work has), and whether the server
        has accepted it.
    """
    from fedsynth.deployment.flower.executor import serve_tasks

    secret = secrets.token_bytes(32)
    port = free_port()
    node.home.mkdir(parents=True, exist_ok=True)
    log = node.home / LOG
    log.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="fedsynth-client-") as folder:
        secret_file = Path(folder) / "secret"
        secret_file.write_bytes(secret)  # the folder is readable only by its owner
        arguments = [
            *connection.arguments,
            *("--isolation", "process", "--superexec-auth-secret-file", str(secret_file)),
            *("--host", LOCALHOST, "--port", str(port)),
        ]
        with listening("supernode", arguments, port, Path(folder), log) as process:

            def is_running() -> bool:
                finished = node.refused or (once and node.ended)
                return not finished and process.poll() is None

            serve_tasks(f"{LOCALHOST}:{port}", secret, node.answer, is_running)
            finished = process.poll() is None
            if finished:
                time.sleep(LINGER_SECONDS)
    if finished:
        return "", True
    output = log.read_text(errors="replace")
    reasons = [reason for mark, reason in REASONS.items() if mark in output]
    reasons.append(f"the SuperNode has ended: {last_line(log)}")
    return reasons[0], "SuperNode ID" in output
