"""The clients of a run over nodes as their server knows them, in a file that outlives its process.

A client that does not come back after a restart cannot state its ledger. So the server writes down,
before it asks a client for a step, what that client last stated and that it is asked.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedsynth.errors import CheckpointError, MessageError, OutputError
from fedsynth.federation.outputs.checkpoint import write_whole
from fedsynth.privacy.errors import PrivacyError
from fedsynth.privacy.files import load_json
from fedsynth.privacy.history import History

FILE = "clients.json"


@dataclass
class JoinedClient:
    """A client that has joined the run, in this process of the server or in an earlier one.

    Attributes:
        size: n_k; None with differential privacy.
        history: its ledger, as it was last stated; None: it has none.
        unstated: (round, exchange) of each step that it was asked for since that statement.
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
        """Takes a new statement of its ledger, to which rows are only ever added.

        Raises:
            MessageError: it does not continue the ledger that the client stated before.
        """
        before = self.history
        if before is not None and (history is None or not _continues(before, history)):
            raise MessageError(
                f"its ledger does not continue the {len(before.releases)} rows that it stated "
                "before: another client has this number or key, or the ledger was replaced"
            )
        self.history = history
        self.unstated = []


def _continues(before: History, after: History) -> bool:
    rows = len(before.releases)
    if after.client != before.client or after.releases[:rows] != before.releases:
        return False
    if len(after.releases) > rows or before.chain is None:
        return True
    return after.chain == before.chain


class ClientRecords:
    """The file of a run's clients.

    Args:
        folder: of the run's checkpoint; made when the file is.
    """

    def __init__(self, folder: Path) -> None:
        self._file = folder / FILE

    @property
    def exists(self) -> bool:
        """Whether the file was written."""
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
            return {int(number): _client(one) for number, one in stated["clients"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, PrivacyError) as error:
            raise CheckpointError(f"{self._file} is damaged: {error!r:.120}") from None

    def write(self, clients: Mapping[int, JoinedClient]) -> None:
        """Replaces the file; it is on the disk when this returns.

        Raises:
            OutputError: it cannot be written.
        """
        stated = {
            str(number): {
                "size": one.size,
                "history": None if one.history is None else one.history.to_json(),
                "unstated": one.unstated,
            }
            for number, one in sorted(clients.items())
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
