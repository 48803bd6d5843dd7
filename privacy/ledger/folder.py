"""A folder of ledgers that is kept across runs, and the check that each is charged for its records.

A budget belongs to records, not to a name or a position in a list. For each client the folder keeps
a keyed hash of every record that its ledger was kept for. It thus detects that the records come
under another name, that a client's data set has changed, and that a record has moved to another
client:

    NAME.jsonl              a ledger, with a fingerprint of its records: useless without the key
    private/records.key     the key, 32 bytes from the operating system
    private/FINGERPRINT     the hashes of the records with that fingerprint, sorted

The key would allow testing guesses of records, and a file of hashes reveals their number. Therefore
only the owner can read `private` (0700, its files 0600), and it is never published, copied or
printed.

Records are compared by the image's bytes, whatever the label. The same picture with other
preprocessing (cropped, scaled) is another record here.
"""

from __future__ import annotations

import functools
import hashlib
import re
import secrets
import shlex
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fedsynth.privacy.errors import LedgerError
from fedsynth.privacy.files import create_once, lock, open_regular, read_regular
from fedsynth.privacy.ledger import Ledger, read_ledger
from fedsynth.privacy.releases import require

Digests = npt.NDArray[np.uint8]
Records = Counter[bytes]  # hash of a record → how often a client has it
PRIVATE, KEY = "private", "records.key"
DIGEST_BYTES, KEY_BYTES = 16, 32
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
MAX_RECORDS_BYTES = 2**34
"""The size limit of a list of records, with at most 32 bytes each."""


def default_names(clients: int) -> tuple[str, ...]:
    """Returns the names client-000, client-001, …"""
    return tuple(f"client-{k:03d}" for k in range(clients))


def check_names(names: Sequence[str], clients: int) -> tuple[str, ...]:
    """Returns the clients' declared names, if each client has one that can name a separate file.

    Raises:
        PrivacySettingError: names the first that cannot.
    """
    listed = not isinstance(names, str) and len(names) == clients
    require(listed, "names", f"must be a list of {clients} names, one for each client", names)
    letters = (
        "must have 1 to 64 letters, digits, dots, hyphens or underscores, and begin with a "
        "letter or digit"
    )
    folded: set[str] = set()  # some file systems do not distinguish A from a
    for name in names:
        require(isinstance(name, str) and _NAME.fullmatch(name) is not None, "names", letters, name)
        require(name.casefold() not in folded, "names", "must be different for all clients", name)
        folded.add(name.casefold())
    return tuple(names)


class LedgerFolder:
    """The ledgers in a folder, for runs on given records.

    Args:
        path: the folder; created with the first ledger.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)

    def open(
        self,
        names: Sequence[str] | None,
        records: Callable[[bytes], Sequence[Digests]],
        dataset: str,
    ) -> list[Ledger]:
        """Returns the ledger of each client of a run; creates missing ones.

        Args:
            names: the clients' declared names; None: `default_names`.
            records: maps the folder's key to each client's hashes, uint8 [N, `DIGEST_BYTES`].
            dataset: an identifier of the data set and its partition.

        Raises:
            LedgerError: a client has other records than its ledger was charged for, or records that
                another ledger was charged for; the message explains what to do. No ledger is
                changed then.
        """
        with self._locked() as index:
            present = [_unpacked(digests.tobytes()) for digests in records(index.key)]
            records_by_client = dict(
                zip(names or default_names(len(present)), present, strict=True)
            )
            for name in records_by_client:
                if name in index.ledgers:
                    self._refuse_unknown(name, index.ledgers[name])
                    index.ledgers[name].check_dataset(dataset)
            for name in records_by_client:
                self._check(name, index, records_by_client)
            opened = []
            for name, client_records in records_by_client.items():
                ledger = self._opened(name, client_records, index, dataset)
                ledger.confirm = functools.partial(self._confirmed, name, records_by_client)
                opened.append(ledger)
        return opened

    @contextmanager
    def _confirmed(self, name: str, records_by_client: Mapping[str, Records]) -> Iterator[None]:
        """Checks again before a ledger's first charge, as another run may have started meanwhile.

        Neither run noticed the other when it opened its ledgers, as no budget had been spent yet.
        """
        with self._locked() as index:
            if name not in index.ledgers or not index.is_current(name, records_by_client[name]):
                raise LedgerError(
                    f"{self._file(name)} was taken by another run for other records in the "
                    "meantime; nothing was charged: start this run again"
                )
            self._check(name, index, records_by_client)
            yield

    def ledgers(self) -> dict[str, Ledger]:
        """Returns all ledgers in the folder, by name."""
        return {path.stem: read_ledger(path) for path in sorted(self.path.glob("*.jsonl"))}

    def check_whole(self) -> None:
        """Refuses if a ledger is missing: its list of records exists, but no ledger names it.

        This needs neither key nor records. Otherwise the remaining ledgers would be charged as if
        the missing one had never existed.

        Raises:
            LedgerError: names the list.
        """
        ledgers = self.ledgers()
        for orphan in sorted(_orphaned_lists(self.path / PRIVATE, ledgers)):
            raise LedgerError(
                f"a ledger in {self.path} is missing, but its list of records exists: "
                f"{_restore_hint(orphan)}"
            )

    def carry_over(self, client: str) -> int:
        """Declares that `client`'s data set has changed.

        The ledger's releases count for all records of the next run: an upper bound for new records,
        and exact for those that it was charged for.

        Returns:
            The number of releases that the ledger holds.

        Raises:
            LedgerError: there is no such ledger.
        """
        ledgers = self.ledgers()
        if client not in ledgers:
            raise LedgerError(
                f"{self.path} has no ledger of {client!r}; existing ledgers: "
                f"{', '.join(ledgers) or 'none'}"
            )
        ledgers[client].carry_over()
        return len(ledgers[client].releases)

    def _file(self, name: str) -> Path:
        return self.path / f"{name}.jsonl"

    def _refuse_unknown(self, name: str, ledger: Ledger) -> None:
        if ledger.bound and not ledger.records:
            raise LedgerError(
                f"ledger {self._file(name)} does not identify its records (it is a copy from "
                f"a run folder): if they are those of client {name!r}, confirm it with "
                f"{self._command(name)}"
            )

    def _command(self, name: str) -> str:
        return f"fedsynth privacy carry-over {shlex.quote(str(self.path))} {name}"

    def _check(
        self, name: str, index: _RecordIndex, records_by_client: Mapping[str, Records]
    ) -> None:
        """Refuses records that differ from the ledger's, or that belong to another ledger."""
        ledger = index.ledgers.get(name)
        bound = ledger is not None and ledger.bound
        present = records_by_client[name]
        if bound and index.is_current(name, present):
            return
        previous: Records = Counter()
        if ledger is not None and ledger.releases:
            previous = index.current(name)
        new = present - previous
        self._refuse_moved(name, new, index, records_by_client)
        for record in new.keys() & index.orphans.keys():
            raise LedgerError(
                f"client {name!r} has records whose ledger in {self.path} is missing: "
                f"{_restore_hint(index.orphans[record])}"
            )
        if bound:
            gone = (previous - present).total()
            raise LedgerError(
                f"the records of client {name!r} differ from those that {self._file(name)} "
                f"was charged for ({new.total()} are new, {gone} are missing): use the same "
                "records, or give each client a separate name (simulate(names=...)); if "
                "this client's data set has changed, keep its earlier costs with "
                f"{self._command(name)}"
            )

    def _refuse_moved(
        self, name: str, new: Records, index: _RecordIndex, records_by_client: Mapping[str, Records]
    ) -> None:
        """Refuses records of `name` that the ledger of another client was charged for."""
        moved: Counter[str] = Counter()
        for record in new:
            for other in index.owners[record] - {name}:
                count = index.current(other)[record]
                # A record that the other client still has, as often as before, is a different
                # record with the same bytes.
                if not 0 < count <= records_by_client.get(other, Counter())[record]:
                    moved[other] += 1
        for other, ledger in index.ledgers.items():
            present = records_by_client.get(other)
            if new and (present is None or not index.is_current(other, present)):
                self._refuse_unknown(other, ledger)
                index.current(other)  # refuses a missing list, which cannot be compared
            if moved[other]:
                raise LedgerError(
                    f"client {name!r} has {moved[other]} records that {self._file(other)} "
                    "was charged for, and the cost of a record stays with it: give the "
                    "clients their earlier names (simulate(names=...)), or leave out those "
                    "records; records of one owner's synthetic set remain with that owner"
                )

    def _opened(self, name: str, present: Records, index: _RecordIndex, dataset: str) -> Ledger:
        fingerprint = index.fingerprint(name, present)
        if not (index.folder / fingerprint).exists():
            create_once(index.folder / fingerprint, _packed(present))
        ledger = index.ledgers.get(name)
        if ledger is None:
            return Ledger(name, self._file(name), dataset=dataset, records=fingerprint)
        if ledger.may_change or not index.is_current(name, present) or ledger.dataset != dataset:
            ledger.take_records(fingerprint, dataset)
        return ledger

    @contextmanager
    def _locked(self) -> Iterator[_RecordIndex]:
        """Yields the folder's knowledge of records; creates a key if there is none.

        Meanwhile no other process opens ledgers here.
        """
        path = self.path / PRIVATE / KEY
        if self.path.name == "ledger" and (self.path.parent / "config.toml").exists():
            raise LedgerError(
                f"{self.path} is part of a run folder, which others may see: copy its "
                "ledgers into a separate folder, and use that folder"
            )
        try:
            if not path.exists():
                self._refuse_a_second_key(path)
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                create_once(path, secrets.token_bytes(KEY_BYTES))
            with open_regular(path) as file:  # closing releases the lock
                lock(file, path)
                key = file.readall()
                if len(key) != KEY_BYTES:
                    raise LedgerError(f"{path} is damaged: restore it from a backup")
                yield _RecordIndex(self.path / PRIVATE, key, self.ledgers())
        except OSError as error:
            raise LedgerError(f"cannot use ledger folder {self.path}: {error}") from error

    def _refuse_a_second_key(self, path: Path) -> None:
        """Refuses to create a second key if a ledger needs the missing one to identify its
        records."""
        for name, ledger in self.ledgers().items():
            self._refuse_unknown(name, ledger)
            if ledger.bound:
                raise LedgerError(
                    f"the key {path} is missing, and without it the ledgers cannot be "
                    "matched with records: restore it from a backup, or confirm for each "
                    f"client that its records are the same with {self._command(name)}"
                )


class _RecordIndex:
    """The records of each ledger in a folder, current and former.

    Attributes:
        folder: the private folder with the lists of records.
        key: of the records' hashes.
        ledgers: the ledgers by name.
        orphans: records in lists that no ledger names, with the list: a ledger was deleted.
        owners: records that budget was spent on, with the names of the ledgers that recorded it, if
            their lists exist.
    """

    def __init__(self, folder: Path, key: bytes, ledgers: Mapping[str, Ledger]) -> None:
        self.folder = folder
        self.key = key
        self.ledgers = ledgers
        self._current: dict[str, Records] = {}
        self.orphans: dict[bytes, Path] = {}
        for path in _orphaned_lists(folder, ledgers):
            self.orphans.update(dict.fromkeys(self._list(path.name) or (), path))
        self.owners: defaultdict[bytes, set[str]] = defaultdict(set)
        for name, ledger in ledgers.items():
            for fingerprint in ledger.charged_records:
                for record in self._list(fingerprint) or ():
                    self.owners[record].add(name)

    def fingerprint(self, name: str, records: Records) -> str:
        """Returns a keyed hash of a client's name and of its records, independent of their order.

        It includes the name, so that it does not reveal that two clients have the same records,
        such as none.
        """
        hashed = name.encode() + b"\0" + _packed(records)
        digest = hashlib.blake2b(hashed, key=self.key, digest_size=32, person=b"fedsynth ledger")
        return digest.hexdigest()

    def is_current(self, name: str, records: Records) -> bool:
        """Returns whether these are exactly the records that the ledger is for."""
        return self.ledgers[name].records[-1:] == (self.fingerprint(name, records),)

    def current(self, name: str) -> Records:
        """Returns the records that a ledger is for, each with the number of times its client has
        it."""
        if name not in self._current:
            ledger = self.ledgers[name]
            records = self._list(ledger.records[-1]) if ledger.records else None
            if ledger.bound and (records is None or not self.is_current(name, records)):
                raise LedgerError(
                    f"{self.folder / ledger.records[-1]}, which lists the records of client "
                    f"{name!r}, is missing or damaged: restore it from a backup"
                )
            self._current[name] = records or Counter()
        return self._current[name]

    def _list(self, fingerprint: str) -> Records | None:
        try:
            return _unpacked(read_regular(self.folder / fingerprint, MAX_RECORDS_BYTES))
        except FileNotFoundError:
            return None


def _orphaned_lists(folder: Path, ledgers: Mapping[str, Ledger]) -> list[Path]:
    """Returns the lists of records in a private folder that no ledger names."""
    expected = {KEY}
    for ledger in ledgers.values():
        expected.update(ledger.records)
    return [path for path in folder.glob("[!.]*") if path.name not in expected]


def _restore_hint(path: Path) -> str:
    return (
        f"restore it from a backup (or delete {path}, if its run was interrupted before the "
        "first round)"
    )


def _packed(records: Records) -> bytes:
    return b"".join(sorted(records.elements()))


def _unpacked(packed: bytes) -> Records:
    return Counter(packed[at : at + DIGEST_BYTES] for at in range(0, len(packed), DIGEST_BYTES))
