"""The clients of a networked run, and the server's file of them, which persists across restarts.

A client that does not come back after a restart cannot state its ledger. So before the server asks
a client for a step, it records the client's last stated ledger and the request.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedsynth.deployment.frames import history_to_json, parse_history
from fedsynth.errors import CheckpointError, MessageError, OutputError
from fedsynth.privacy.files import load_json, write_whole
from fedsynth.privacy.ledger.history import History

FILE = "clients.json"
"""In the folder of the run's checkpoint."""


@dataclass
class JoinedClient:
    """A client that has joined the run, in this process of the server or in an earlier one.

    Attributes:
        size: n_k; None with differential privacy.
        history: its last stated ledger; None: it has none.
        unstated: (round, exchange) of each step that was requested since that statement.
        node: the transport's number of its node; None: it has not joined this process.
    """

    size: int | None
    history: History | None
    unstated: list[tuple[int, str]] = field(default_factory=list)
    node: int | None = None

    def update(self, history: History | None) -> None:
        """Accepts a new statement of its ledger, which may only add rows to the previous one.

        Raises:
            MessageError: it does not continue the ledger that the client stated before.
        """
        previous = self.history
        if previous is not None and (history is None or not _continues(previous, history)):
            rows = len(previous.releases)
            raise MessageError(f"its ledger does not continue the {rows} rows that it had stated")
        self.history = history
        self.unstated = []


def _continues(previous: History, history: History) -> bool:
    rows = len(previous.releases)
    if history.client != previous.client or history.releases[:rows] != previous.releases:
        return False
    return len(history.releases) > rows or previous.chain in (None, history.chain)


def read_clients(file: Path) -> dict[int, JoinedClient]:
    """Returns the clients by number, none of them connected; empty without a file.

    Raises:
        CheckpointError: the file is damaged.
    """
    if not file.exists():
        return {}
    clients: dict[int, JoinedClient] = {}
    try:
        stated = load_json(file)
        if stated["sha256"] != _digest(stated["clients"]):
            raise ValueError("its hash differs")
        for number, facts in stated["clients"].items():
            unstated = [(int(requested), str(phase)) for requested, phase in facts["unstated"]]
            history = parse_history(facts["history"])
            clients[int(number)] = JoinedClient(facts["size"], history, unstated)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, MessageError) as error:
        raise CheckpointError(f"{file} is damaged: {error!r:.120}") from None
    return clients


def write_clients(file: Path, clients: Mapping[int, JoinedClient]) -> None:
    """Replaces the file and flushes it to the disk.

    Raises:
        OutputError: it cannot be written.
    """
    stated: dict[str, Any] = {}
    for number, client in sorted(clients.items()):
        facts = {"size": client.size, "unstated": client.unstated}
        stated[str(number)] = {**facts, "history": history_to_json(client.history)}
    content = json.dumps({"clients": stated, "sha256": _digest(stated)}).encode()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, content)
    except OSError as error:
        raise OutputError(f"cannot write {file}: {error.strerror or error}") from None


def _digest(clients: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(clients, sort_keys=True).encode()).hexdigest()
