"""Connects a data owner's node to a Flower server, for `fedsynth client`.

The command starts Flower's SuperNode and answers its messages in the owner's process.
"""

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
from fedsynth.files import last_line
from fedsynth.validation import MAX_SECONDS, check_number

# The name of the SuperNode's log file in the owner's folder of ledgers. Each SuperNode overwrites
# it.
LOG = "supernode.log"
# The number of seconds without a connection after which a client gives up.
WAIT_SECONDS = 600.0
# The number of seconds between two attempts to connect.
RETRY_SECONDS = 3.0
# The number of seconds after which a SuperNode ends if its server does not answer.
LOST_SECONDS = 10
# The number of seconds that remain for sending the last answer.
LINGER_SECONDS = 6.0
# Maps a text that a SuperNode logs before it ends to an explanation for the owner.
REASONS = {
    "[code: 2004]": "another process with this key is connected to the server. The server drops "
    "a process that has ended after one minute",
    "SSL/TLS handshake error": "the server's certificate does not match --ca, or has expired",
    "Giving up reconnection": "the server no longer answers",
    "SuperNode terminated gracefully": "the server does not know this client's key, or is still "
    "starting",
}


@dataclass(frozen=True)
class ServerConnection:
    """A node's connection to its server.

    Args:
        server: the address of the SuperLink, HOST:PORT.
        ca: a PEM file with the server's certificate, or with the certificate of the CA that signed
            it. None: no TLS, which is allowed only if the server is on this machine.
        key: the file of the node's private key. The server must know the public key. None: the
            server accepts nodes without keys.

    Raises:
        SettingError: if the address is invalid, if TLS is required but no CA is given, or if a file
            is missing.
    """

    server: str
    ca: Path | None
    key: Path | None = None

    def __post_init__(self) -> None:
        host, _, port = self.server.rpartition(":")
        if not host or not port.isdigit():
            raise SettingError(None, "server", f"must be HOST:PORT, got {self.server!r:.80}")
        if self.ca is None and (host not in (LOCALHOST, "localhost", "[::1]") or self.key):
            raise SettingError(
                None,
                "--ca",
                "is missing, but a remote server or --key requires TLS. Pass the file of the "
                "server's CA certificate",
            )
        for path in (self.ca, self.key):
            if path is not None and not path.is_file():
                error = SettingError(None, f"the file {path}", "does not exist")
                raise error.with_code("files.key")

    def unreachable(self) -> str:
        """Tries to connect to the server, and returns the reason if the connection fails.

        The reason is an empty string if the server listens.
        """
        host, _, port = self.server.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), LOST_SECONDS).close()
        except OSError as error:
            return f"no server listens on {self.server}: {error.strerror or error}"
        return ""

    @property
    def arguments(self) -> list[str]:
        """The SuperNode's command-line arguments."""
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
    """Connects a node to its server, and answers messages until the server has no more work.

    A failed or lost connection is retried. Each reason is reported to the owner once. When the
    function ends, the owner has a report of each private run.

    Args:
        node: the data owner's node.
        connection: the connection to the server.
        once: whether to end after the first completed run.
        wait: the number of seconds without a connection after which the client gives up.

    Raises:
        SettingError: if `wait` is negative, not finite, or more than three years.
        FlowerError: if Flower is not installed, if the server was not reached in time, or if the
            server refuses the client.
    """
    check_number(None, "wait", wait, 0, MAX_SECONDS)
    require_flower()
    try:
        _answer_until_done(node, connection, once, wait)
    finally:
        node.write_reports()


def _answer_until_done(node: Node, connection: ServerConnection, once: bool, wait: float) -> None:
    printed = ""
    deadline = time.monotonic() + wait
    while True:
        reason = connection.unreachable()
        if not reason:
            reason, was_connected = run_supernode(node, connection, once=once)
            if node.refused:
                raise FlowerError(f"the server refused this client: {node.refused}")
            if not reason:
                return
            if was_connected:
                deadline = time.monotonic() + wait
                printed = ""
        if time.monotonic() >= deadline:
            raise FlowerError(
                f"cannot connect to {connection.server} within {wait:g} s: {reason}. Correct "
                "the cause and start the client again"
            )
        if reason != printed:
            node.say(f"{reason}. The client tries to connect for {wait:g} s")
            printed = reason
        time.sleep(min(RETRY_SECONDS, wait))


def run_supernode(node: Node, connection: ServerConnection, *, once: bool) -> tuple[str, bool]:
    """Runs a SuperNode, and answers the messages that it receives.

    The function returns when the SuperNode has ended or the node's work is done.

    Returns:
        The reason why the SuperNode has ended, and whether the server had accepted the SuperNode.
        The reason is empty if the node's work is done.
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
    ended = f"the SuperNode has ended: {last_line(log)}"
    reason = next((reason for mark, reason in REASONS.items() if mark in output), ended)
    return reason, "SuperNode ID" in output
