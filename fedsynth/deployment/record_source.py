"""The source of a data owner's records, and the server's file of the clients that have joined.

The records come from a folder with one subfolder per class. For trials, they can also be a part of
a published data set.

The server's file persists across restarts. A client that does not come back after a restart cannot
state its ledger any more. Therefore, before the server asks a client for a step, it writes the
client's last stated ledger and the request to this file.
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
"""The name of the file of joined clients, in the folder of the run's checkpoint."""


@dataclass
class JoinedClient:
    """A client that has joined the run, either in this server process or in an earlier one.

    Attributes:
        size: the number of examples n_k. None with differential privacy.
        history: the ledger as the client last stated it. None: the client has no ledger.
        unstated: the (round, exchange) pairs of all steps that were requested since that statement.
        node: the transport's number of the client's node. None: the node has not joined this server
            process.
    """

    size: int | None
    history: History | None
    unstated: list[tuple[int, str]] = field(default_factory=list)
    node: int | None = None

    def update(self, history: History | None) -> None:
        """Accepts a new statement of the client's ledger. The statement may only add entries to the
        previous one.

        Raises:
            MessageError: if the new statement does not continue the previous one.
        """
        previous = self.history
        if previous is not None and (history is None or not _continues(previous, history)):
            rows = len(previous.releases)
            raise MessageError(
                f"the client's ledger does not continue the {rows} entries that it stated before"
            )
        self.history = history
        self.unstated = []


def _continues(previous: History, history: History) -> bool:
    rows = len(previous.releases)
    if history.client != previous.client or history.releases[:rows] != previous.releases:
        return False
    return len(history.releases) > rows or previous.chain in (None, history.chain)


def read_clients(file: Path) -> dict[int, JoinedClient]:
    """Reads the joined clients, by index. None of them is connected yet. Returns an empty
    dictionary if the file does not exist.

    Raises:
        CheckpointError: if the file is damaged.
    """
    if not file.exists():
        return {}
    clients: dict[int, JoinedClient] = {}
    try:
        stated = load_json(file)
        if stated["sha256"] != _digest(stated["clients"]):
            raise ValueError("the stored hash does not match the content")
        for number, facts in stated["clients"].items():
            unstated = [(int(requested), str(phase)) for requested, phase in facts["unstated"]]
            history = parse_history(facts["history"])
            clients[int(number)] = JoinedClient(facts["size"], history, unstated)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, MessageError) as error:
        raise CheckpointError(f"{file} is damaged: {error!r:.120}") from None
    return clients


def write_clients(file: Path, clients: Mapping[int, JoinedClient]) -> None:
    """Replaces the file of joined clients and flushes it to the disk.

    Raises:
        OutputError: if the file cannot be written.
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
    """An owner's images, in the folder layout of `fedsynth.load_folder`.

    The folder contains CLASS/files, or a manifest whose sites are ignored here. The images are read
    at the image size of the run. Folders of classes that the owner does not have may be missing.
    Names that a server sends are only compared with the names of the folders and never used as
    paths.

    Args:
        folder: the owner's folder.
    """

    folder: Path

    def objections(self, proposal: Proposal, identified: bool) -> list[str]:
        """Returns an objection unless the owner has stated the classes and the image size.

        If a server could choose these freely, it would learn from the clients that join which
        folders and images exist.

        Args:
            proposal: the server's proposal.
            identified: whether the owner's policy states the classes and the size of the images.
        """
        file = self.folder / DECLARATION
        if file.is_file():
            declared = read_declaration(file)
            if declared.signed_by:
                spec = declared.spec
                stated = (spec.class_names, spec.image_shape)
                if stated == (proposal.spec.class_names, proposal.spec.image_shape):
                    return []
                return ["the run's classes or image size differ from the owner's declaration"]
        if proposal.settings.privacy is None or identified:
            return []
        return [
            "the owner has not declared the classes and the image size: put a signed "
            f"{DECLARATION} next to the images, or set classes, height, width and channels in the "
            "policy"
        ]

    def read(self, proposal: Proposal, number: int) -> ImageData:
        """Reads the client's records for a run.

        Raises:
            DataError: if the records do not exist, or do not fit the specification in the proposal.
        """
        privacy = proposal.settings.privacy
        if privacy is None:
            return read_as(self.folder, proposal.spec, print)
        by_user = privacy.unit == USER
        return read_records(self.folder, proposal.spec, print, by_user=by_user)

    def identifier(self, proposal: Proposal) -> str:
        """Returns the name of the records in their ledger. It is the same in all runs on these
        records.
        """
        return f"{proposal.spec.name}-{EXPLICIT}"


class DatasetPart:
    """A part of a published data set for trials. The partition is that of a simulation."""

    def objections(self, proposal: Proposal, identified: bool) -> list[str]:
        """Returns no objection, because the data set is published."""
        return []

    def read(self, proposal: Proposal, number: int) -> ImageData:
        settings = proposal.settings
        train, _ = load_dataset(settings.dataset, None)
        spec = train.spec
        if spec != proposal.spec:
            raise DataError(
                f"the server's specification of {spec.name} differs from the one on this machine"
            )
        labels = train.labels.cpu().numpy()
        parts = partition(labels, settings.resolved_partition, spec.classes, *train.origins())
        data = replace(train, may_be_empty=True)
        return data.subset(np.asarray(parts[number], np.int64))

    def identifier(self, proposal: Proposal) -> str:
        return data_set_id(proposal.settings)


Source = ClassFolders | DatasetPart
"""The source of a node's records."""
