"""Whose data a run is on: clients' names and records, and their ledgers, kept over runs or not."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from fedsynth.data.arrays import IntArray
from fedsynth.data.fingerprints import record_digests
from fedsynth.data.images import ImageData
from fedsynth.data.partition_settings import GIVEN
from fedsynth.federation.terms.settings import RunSettings
from fedsynth.privacy.ledger import Ledger
from fedsynth.privacy.ledger_folder import Digests, LedgerFolder, default_names


@dataclass(frozen=True, eq=False)
class Clients:
    """The clients of a run.

    Attributes:
        data: the training data of all.
        parts: of each client, the positions of its records.
        names: as they were declared (`check_names`), None if they were not.
    """

    data: ImageData
    parts: Sequence[IntArray]
    names: tuple[str, ...] | None = None

    def digests(self, key: bytes) -> list[Digests]:
        """The keyed hashes of each client's images, uint8 [N, 16].

        Without their labels: an image that is labelled anew, for another study, is the same record.
        """
        return [record_digests(self.data, part, key, labels=False) for part in self.parts]

    def kept_ledgers(self, folder: Path, run: RunSettings) -> list[Ledger]:
        """The clients' ledgers in a folder that is kept over runs.

        Raises:
            LedgerError: one is for other records.
        """
        return LedgerFolder(folder).open(self.names, self.digests, data_set_id(run))

    def ledgers(self, folder: Path | None, run: RunSettings) -> list[Ledger]:
        """Those kept in `folder`; None: empty ones in memory.

        Raises:
            LedgerError: one is for other records.
        """
        return self.fresh_ledgers(None, run) if folder is None else self.kept_ledgers(folder, run)

    def fresh_ledgers(self, folder: Path | None, run: RunSettings) -> list[Ledger]:
        """Empty ledgers, in memory or in a run folder: public, so without any fingerprint."""
        return [
            Ledger(name, folder / f"{name}.jsonl" if folder else None, dataset=data_set_id(run))
            for name in self.fresh_names
        ]

    @property
    def fresh_names(self) -> tuple[str, ...]:
        """What fresh ledgers are called."""
        return self.names or default_names(len(self.parts))


def planned_ledgers(
    run: RunSettings, folder: Path | None, names: Sequence[str] | None = None
) -> list[Ledger]:
    """For a plan, which reads no data and makes no file: ledgers that are there, else empty ones.

    They go by these names, or by default ones.

    Raises:
        LedgerError: one is damaged or another data set's, or one that was there is gone.
    """
    if folder is not None:
        LedgerFolder(folder).check_whole()
    names = names or default_names(run.partition.clients)
    dataset = data_set_id(run)
    files = {name: folder / f"{name}.jsonl" if folder else None for name in names}
    return [
        Ledger(name, file if file is not None and file.exists() else None, dataset=dataset)
        for name, file in files.items()
    ]


def data_set_id(run: RunSettings) -> str:
    """Names the clients' data sets, by data set and partition.

    Not the local test split: the records are the same. Clients that the user brings along are known
    by their records.
    """
    if run.partition.kind == GIVEN:
        return f"{run.dataset}-{GIVEN}"
    parts = asdict(run.resolved_partition)
    del parts["local_test"]
    if parts["subset"] == 1:
        del parts["subset"]
    for kind in ("missing", "dominant"):  # settings of one rule name nothing under another
        for name in [
            name for name in parts if name.startswith(kind) and run.partition.kind != kind
        ]:
            del parts[name]
    partition = json.dumps(parts, sort_keys=True)
    return f"{run.dataset}-{hashlib.blake2b(partition.encode(), digest_size=6).hexdigest()}"
