"""A data owner's records: a folder of images by class, or, for trials, a part of a data set.

The clients of a networked run, and the server's file of them, which persists across restarts.

A client that does not come back after a restart cannot state its ledger. So before the server asks
a client for a step, it records the client's last stated ledger and the request.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedsynth.data.declaration import read_declaration
from fedsynth.data.folder_files import DECLARATION
from fedsynth.data.images import ImageData
from fedsynth.data.load import load_dataset
from fedsynth.data.load_folder import read_as, read_records
from fedsynth.data.partition import partition
from fedsynth.data.partition_settings import EXPLICIT
from fedsynth.deployment.frames import history_to_json, parse_history
from fedsynth.deployment.proposal import Proposal
from fedsynth.errors import CheckpointError, DataError, MessageError, OutputError
from fedsynth.federation.run_data import data_set_id
from fedsynth.privacy.files import load_json, write_whole
from fedsynth.privacy.ledger.ledger import History
from fedsynth.privacy.releases import USER

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


@dataclass(frozen=True)
class ClassFolders:
    """An owner's images, in the layout of `fedsynth.load_folder` (CLASS/files, or a manifest, whose
    sites are ignored here), at the run's size. Classes that the owner does not have may be missing.
    Names from a server are compared with the folders' names, and never used as paths.

    Args:
        folder: the owner's.
    """

    folder: Path

    def objections(self, proposal: Proposal, identified: bool) -> list[str]:
        """Returns an objection unless the owner has stated the classes and image size. A server
        that could choose them freely would learn from the clients that join which folders and
        images exist.

        Args:
            proposal: the server's.
            identified: whether the owner's policy states which images fit.
        """
        file = self.folder / DECLARATION
        if file.is_file():
            declared = read_declaration(file)
            if declared.signed_by:
                spec = declared.spec
                stated = (spec.class_names, spec.image_shape)
                if stated == (proposal.spec.class_names, proposal.spec.image_shape):
                    return []
                return ["classes or image size differ from its owner's declaration"]
        if proposal.settings.privacy is None or identified:
            return []
        return [
            f"its owner declares no classes and image size (put a signed {DECLARATION} next "
            "to the images, or classes, height, width and channels into the policy)"
        ]

    def read(self, proposal: Proposal, number: int) -> ImageData:
        """Returns the records of the client with this index, in a run.

        Raises:
            DataError: they do not exist, or do not fit the run's specification.
        """
        privacy = proposal.settings.privacy
        if privacy is None:
            return read_as(self.folder, proposal.spec, print)
        by_user = privacy.unit == USER
        return read_records(self.folder, proposal.spec, print, by_user=by_user)

    def identifier(self, proposal: Proposal) -> str:
        """Returns the name of the records for their ledger, the same in all runs on them."""
        return f"{proposal.spec.name}-{EXPLICIT}"


class DatasetPart:
    """A part of a published data set, partitioned as in a simulation: for trials."""

    def objections(self, proposal: Proposal, identified: bool) -> list[str]:
        """Returns no objection, because the data set is published."""
        return []

    def read(self, proposal: Proposal, number: int) -> ImageData:
        settings = proposal.settings
        train, _ = load_dataset(settings.dataset, None)
        spec = train.spec
        if spec != proposal.spec:
            raise DataError(f"the server has another specification of {spec.name}")
        labels = train.labels.cpu().numpy()
        parts = partition(labels, settings.resolved_partition, spec.classes, *train.origins())
        data = replace(train, may_be_empty=True)
        return data.subset(np.asarray(parts[number], np.int64))

    def identifier(self, proposal: Proposal) -> str:
        return data_set_id(proposal.settings)


Source = ClassFolders | DatasetPart
"""The source of a node's records."""
