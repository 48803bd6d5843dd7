"""The clients of a networked run: the mapping of nodes to clients, and the server's file of
clients, which persists across restarts.

A client that does not come back after a restart cannot state its ledger. So before the server asks
a client for a step, it records the client's last stated ledger and the request.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedsynth.config.settings import RunSettings
from fedsynth.deployment.frames import LONGEST_HEADER, Frame, parse_nonnegative_int
from fedsynth.deployment.messages import parse_history, unpack
from fedsynth.errors import CheckpointError, MessageError, OutputError
from fedsynth.federation.protocol import Joined
from fedsynth.privacy.errors import PrivacyError
from fedsynth.privacy.files import load_json, write_whole
from fedsynth.privacy.ledger.history import History

FILE = "clients.json"


@dataclass
class JoinedClient:
    """A client that has joined the run, in this process of the server or in an earlier one.

    Attributes:
        size: n_k; None with differential privacy.
        history: its last stated ledger; None: it has none.
        unstated: (round, exchange) of each step that was requested since that statement.
        node: the carrier's number of its node; None: it has not joined this process.
        facts: its facts for the round's metrics.
        started: whether it has received the terms.
    """

    size: int | None
    history: History | None
    unstated: list[tuple[int, str]] = field(default_factory=list)
    node: int | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    started: bool = False

    def state(self, history: History | None) -> None:
        """Accepts a new statement of its ledger, which may only add rows to the previous one.

        Raises:
            MessageError: it does not continue the ledger that the client stated before.
        """
        previous = self.history
        if previous is not None and (history is None or not _continues(previous, history)):
            raise MessageError(
                f"its ledger does not continue the {len(previous.releases)} rows that it stated "
                "before: another client has this number or key, or the ledger was replaced"
            )
        self.history = history
        self.unstated = []


def _continues(previous: History, current: History) -> bool:
    rows = len(previous.releases)
    if current.client != previous.client or current.releases[:rows] != previous.releases:
        return False
    if len(current.releases) > rows or previous.chain is None:
        return True
    return current.chain == previous.chain


class ClientRecords:
    """The file of a run's clients.

    Args:
        folder: the folder of the run's checkpoint; created with the file.
    """

    def __init__(self, folder: Path) -> None:
        self._file = folder / FILE

    @property
    def exists(self) -> bool:
        """Returns whether the file exists."""
        return self._file.exists()

    def read(self) -> dict[int, JoinedClient]:
        """Returns the clients by number, none of them connected; empty without a file.

        Raises:
            CheckpointError: the file is damaged.
        """
        if not self.exists:
            return {}
        try:
            stated = load_json(self._file)
            if stated["sha256"] != _digest(stated["clients"]):
                raise ValueError("its hash differs")
            return {int(number): _client(record) for number, record in stated["clients"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, PrivacyError) as error:
            raise CheckpointError(f"{self._file} is damaged: {error!r:.120}") from None

    def write(self, clients: Mapping[int, JoinedClient]) -> None:
        """Replaces the file and flushes it to the disk.

        Raises:
            OutputError: it cannot be written.
        """
        stated = {
            str(number): {
                "size": client.size,
                "history": None if client.history is None else client.history.to_json(),
                "unstated": client.unstated,
            }
            for number, client in sorted(clients.items())
        }
        content = json.dumps({"clients": stated, "sha256": _digest(stated)}).encode()
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self._file, content)
        except OSError as error:
            raise OutputError(f"cannot write {self._file}: {error.strerror or error}") from None

    def discard(self) -> None:
        """Removes the file."""
        self._file.unlink(missing_ok=True)


def _client(stated: Mapping[str, Any]) -> JoinedClient:
    history = stated["history"]
    return JoinedClient(
        stated["size"],
        None if history is None else History.from_json(history),
        [(int(number), str(phase)) for number, phase in stated["unstated"]],
    )


def _digest(clients: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(clients, sort_keys=True).encode()).hexdigest()


class Admission:
    """Processes nodes' answers to the request to join.

    Args:
        settings: the run's.
        clients: the clients that have joined; new ones are added here.
        out: client -> its reason for declining; new ones are added here, too.
        numbers: node -> client, where the server knows it; otherwise empty.
        names: the clients' names when a private run began, in their order; otherwise empty.
    """

    def __init__(
        self,
        settings: RunSettings,
        clients: dict[int, JoinedClient],
        out: dict[int, str],
        numbers: Mapping[int, int],
        names: Sequence[str],
    ) -> None:
        self._private = settings.privacy is not None
        self._everybody = range(settings.partition.clients)
        self._clients = clients
        self._out = out
        self._numbers = numbers
        self._names = names or [f"client-{number:03d}" for number in self._everybody]
        self._named = bool(names)

    @property
    def present(self) -> list[int]:
        """Clients that have joined this process of the server."""
        return sorted(k for k, client in self._clients.items() if client.node is not None)

    def joined(self, client: int) -> Joined:
        """Returns what a client has stated about itself; a client that never joined has no
        records.
        """
        if client not in self._clients:
            return Joined(client, 0, History(self._names[client]))
        record = self._clients[client]
        return Joined(client, record.size, record.history)

    def admit(self, node: int, answer: bytes | str) -> None:
        """Processes a node's answer.

        Raises:
            MessageError: it is not the answer of a client that may join.
        """
        if isinstance(answer, str):
            raise MessageError(answer)
        if len(answer) > LONGEST_HEADER:
            raise MessageError(f"sends {len(answer)} bytes")
        frame = Frame.from_bytes(unpack(answer)[0])
        client = self._client(node, frame)
        if frame.kind != "answer":
            why = frame.facts.get("reason", frame.facts.get("text"))
            self._out[client] = f"{why!s:.500}"
            return
        size = frame.facts.get("size")
        num_examples = None if size is None else parse_nonnegative_int(size, "size")
        history = parse_history(frame.facts.get("history"))
        self._check_history(client, history)
        record = self._clients.setdefault(client, JoinedClient(num_examples, history))
        if record.size != num_examples:
            raise MessageError(f"it had {record.size} examples, and joins with {num_examples}")
        record.state(history)
        record.node = node
        self._out.pop(client, None)

    def _client(self, node: int, frame: Frame) -> int:
        """Returns the index of the client that answers.

        Raises:
            MessageError: it is not a client of this run, or is connected already.
        """
        client = parse_nonnegative_int(frame.facts.get("client"), "client")
        if client not in self._everybody:
            raise MessageError(f"there is no client {client} in this run")
        if self._numbers and self._numbers.get(node) != client:
            raise MessageError(f"says that it is client {client}, which its key is not for")
        if client in self.present:
            raise MessageError(f"says that it is client {client}, which another one is")
        return client

    def _check_history(self, client: int, history: History | None) -> None:
        """Checks that a client states a ledger, under its own name.

        Raises:
            MessageError: it states none, or one under another name.
        """
        if history is None:
            if self._private:
                raise MessageError("it does not state its ledger")
            return
        name = self._names[client]
        if self._named and history.client != name:
            raise MessageError(
                f"its name is {history.client!r:.80}, and it was {name!r} when the run began"
            )
        other_names = {other for number, other in enumerate(self._names) if number != client}
        for number, record in self._clients.items():
            if number != client and record.history is not None:
                other_names.add(record.history.client)
        if history.client in other_names:
            raise MessageError(f"its name {history.client!r:.80} is another client's")
