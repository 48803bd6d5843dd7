"""A folder that keeps the clients' ledgers across runs.

When a run opens the folder, each client's records must be those for which its ledger was charged.

A privacy budget belongs to records, not to a client's name or number. For each client the folder
keeps a keyed hash of every record for which its ledger was used. From the hashes, the folder
detects that the same records come from a client with another name, that a client's data set has
changed, or that a record has moved to another client. The files are:

    NAME.jsonl              a ledger, which contains a fingerprint: a keyed hash of all its records
    private/records.key     the key, 32 bytes from the operating system
    private/FINGERPRINT     the sorted hashes of the records with this fingerprint
    private/.sequences      noise of releases over several periods (`fedsynth.privacy.periods`)

Whoever has the key can test guesses of records, and a file of hashes reveals the number of records.
Therefore only the owner can read the folder `private` and its files (modes 0700 and 0600). It is
never published, copied or printed. The fingerprint in a ledger is useless without the key.

Two records are equal if their image files, or their values in an array, are equal, whatever the
labels. A picture that was saved again counts as a different record. If the privacy unit is a user,
the file also has a hash of each user's records, so that a record cannot change its user unnoticed.
"""

from __future__ import annotations

import functools
import hashlib
import re
import secrets
import shlex
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from fedsynth.errors import LedgerError
from fedsynth.files import create_once, lock, open_regular, read_regular, sync_folder
from fedsynth.privacy.ledger import Ledger, read_ledger
from fedsynth.privacy.releases import require

if TYPE_CHECKING:
    from fedsynth.privacy.periods import ReleaseSequence

Digests = npt.NDArray[np.uint8]
Records = Counter[bytes]  # hash of a record → how often a client has it
PRIVATE, KEY = "private", "records.key"
DIGEST_BYTES, KEY_BYTES = 16, 32
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_USER = bytes(4)  # the first bytes of a user's hash; a record's has them once in 4·10⁹ records
# The maximum size of a file with the hashes of a client's records, in bytes.
MAX_RECORDS_BYTES = 2**34


def default_names(clients: int) -> tuple[str, ...]:
    """Returns the clients' default names: client-000, client-001, …"""
    return tuple(f"client-{k:03d}" for k in range(clients))


def with_users(records: Digests, users: npt.NDArray[np.int64], key: bytes) -> Digests:
    """Appends a hash of each user's records to the hashes of the records.

    Args:
        records: the hashes of the records, uint8 [N, `DIGEST_BYTES`].
        users: the user of each record [N], as arbitrary integers.
        key: the key of the hashes.

    Returns:
        The hashes, uint8 [N + users, `DIGEST_BYTES`]. They do not depend on the users' numbers.
    """
    order = np.argsort(users, kind="stable")
    starts = np.flatnonzero(np.diff(users[order])) + 1
    rows = [records]
    for positions in np.split(order, starts) if len(order) else ():
        packed = b"".join(sorted(map(bytes, records[positions])))
        size = DIGEST_BYTES - len(_USER)
        digest = hashlib.blake2b(packed, key=key, digest_size=size, person=b"fedsynth user")
        rows.append(np.frombuffer(_USER + digest.digest(), np.uint8)[None])
    return np.concatenate(rows)


def check_names(names: Sequence[str], clients: int) -> tuple[str, ...]:
    """Checks the declared names of clients. Each ledger file has the name of its client.

    Returns:
        The names as a tuple.

    Raises:
        PrivacySettingError: the number of names is wrong, a name has a character that is not
            allowed or is too long, or two names are equal apart from upper and lower case.
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
    """A folder that keeps the ledgers of several clients across runs.

    Args:
        path: the folder. It is created together with the first ledger.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)

    def open(
        self,
        names: Sequence[str] | None,
        records: Callable[[bytes], Sequence[Digests]],
        dataset: str,
        sequences: Mapping[str, ReleaseSequence] = MappingProxyType({}),
    ) -> list[Ledger]:
        """Opens the ledgers of a run's clients, and creates missing ones.

        Args:
            names: the declared names of the clients. None uses `default_names`.
            records: a function of the folder's key that returns the hashes of each client's
                records, uint8 [N, `DIGEST_BYTES`].
            dataset: an identifier of the data set and its partition.
            sequences: the sequences of clients that release running sums over several periods. From
                the second period on, all of such a client's records must be new.

        Returns:
            The ledgers, in the order of the clients.

        Raises:
            LedgerError: the records of a client differ from those for which its ledger was charged,
                or another ledger was charged for some of them. No ledger is changed. The message
                explains what to do.
        """
        with self._locked() as index:
            present = [_unpacked(digests.tobytes()) for digests in records(index.key)]
            records_by_client = dict(
                zip(names or default_names(len(present)), present, strict=True)
            )
            for name in records_by_client:
                if name in index.ledgers and _period(sequences.get(name)) == 1:
                    self._refuse_unknown(name, index.ledgers[name])
                    index.ledgers[name].check_dataset(dataset)
            for name in records_by_client:
                self._check(name, index, records_by_client, sequences.get(name))
            opened = []
            for name, client_records in records_by_client.items():
                ledger = self._opened(name, client_records, index, dataset)
                ledger.confirm = functools.partial(
                    self._confirmed, name, records_by_client, sequences.get(name)
                )
                opened.append(ledger)
        return opened

    @contextmanager
    def _confirmed(
        self,
        name: str,
        records_by_client: Mapping[str, Records],
        sequence: ReleaseSequence | None,
    ) -> Iterator[None]:
        """Checks the client's records again, immediately before the first charge of its ledger.

        Another run may have opened the ledger for other records in the meantime. When the runs
        opened it, neither could notice the other, because nothing had been charged yet.
        """
        with self._locked() as index:
            if name not in index.ledgers or not index.is_current(name, records_by_client[name]):
                raise LedgerError(
                    f"another run has opened ledger {self._file(name)} with different records "
                    "since this run began. Start this run again"
                ).with_code("ledger.lock")
            self._check(name, index, records_by_client, sequence)
            if sequence is not None:
                sequence.begin(index.fingerprint(name, records_by_client[name]))
            yield

    def ledgers(self) -> dict[str, Ledger]:
        """Opens all ledgers in the folder and returns them by client name."""
        return {path.stem: read_ledger(path) for path in sorted(self.path.glob("*.jsonl"))}

    def check_whole(self) -> None:
        """Checks that no ledger is missing from the folder.

        A ledger is missing if there is a file with the hashes of its records but no ledger that
        refers to this file. If this were not checked, the remaining ledgers would be charged as if
        the missing one had never existed. The check needs neither the key nor the records.

        Raises:
            LedgerError: a ledger is missing. The message names the file with the hashes.
        """
        for orphan in sorted(_orphaned_lists(self.path / PRIVATE, self.ledgers())):
            raise LedgerError(
                f"folder {self.path} contains the record hashes of a missing ledger. "
                f"{_restore_hint(orphan)}"
            ).with_code("ledger.missing")

    def carry_over(self, client: str) -> int:
        """Declares that a client's data set has changed.

        The releases in the ledger then count for all records of the client's next run. The ledger's
        ε is exact for records charged before, and too large for new ones.

        Returns:
            The number of releases in the ledger.

        Raises:
            LedgerError: the folder has no ledger of this client.
        """
        ledgers = self.ledgers()
        if client not in ledgers:
            raise LedgerError(
                f"folder {self.path} contains no ledger of client {client!r}, only of "
                f"{', '.join(ledgers) or 'no client'}. Check the name"
            ).with_code("ledger.client")
        ledgers[client].carry_over()
        return len(ledgers[client].releases)

    def _file(self, name: str) -> Path:
        return self.path / f"{name}.jsonl"

    def _refuse_unknown(self, name: str, ledger: Ledger) -> None:
        if ledger.bound and not ledger.lines.records:
            raise LedgerError(
                f"ledger {self._file(name)} has no record list, because it was copied from a run "
                f"folder. To use the ledger for client {name!r}, run {self._command(name)}"
            ).with_code("ledger.rows")

    def _command(self, name: str) -> str:
        return f"fedsynth privacy carry-over {shlex.quote(str(self.path))} {name}"

    def _check(
        self,
        name: str,
        index: _RecordIndex,
        records_by_client: Mapping[str, Records],
        sequence: ReleaseSequence | None = None,
    ) -> None:
        """Checks that a client's records match its own ledger and are in no other ledger.

        Raises:
            LedgerError: the records differ from those for which the ledger was charged, or another
                ledger was charged for some of them, or some are of an earlier period.
        """
        if sequence is not None:
            self._check_period(name, index, records_by_client[name], sequence)
        ledger = index.ledgers.get(name)
        bound = ledger is not None and ledger.bound and _period(sequence) == 1
        present = records_by_client[name]
        if bound and index.is_current(name, present):
            return
        previous: Records = Counter()
        if ledger is not None and ledger.releases and _period(sequence) == 1:
            previous = index.current(name)
        new = present - previous
        self._refuse_moved(name, new, index, records_by_client)
        for record in new.keys() & index.orphans.keys():
            raise LedgerError(
                f"folder {self.path} does not contain the ledger of client {name!r}'s records. "
                f"{_restore_hint(index.orphans[record])}"
            ).with_code("ledger.missing")
        if bound:
            added, gone = _record_count(new), _record_count(previous - present)
            if added == gone == 0 and _has_users(present) != _has_users(previous):
                unit = "user" if _has_users(previous) else "record"
                raise LedgerError(
                    f"ledger {self._file(name)} was opened with the privacy unit {unit}. Set "
                    f"privacy.unit={unit}"
                ).with_code("ledger.unit")
            difference = f"{added} are new and {gone} are missing"
            if added == gone == 0:
                difference = "they belong to other users"
            raise LedgerError(
                f"the records of client {name!r} do not match ledger {self._file(name)}: "
                f"{difference}. Restore the earlier records or, if the data set has changed, run "
                f"{self._command(name)}"
            ).with_code("ledger.new_records")

    def _refuse_moved(
        self, name: str, new: Records, index: _RecordIndex, records_by_client: Mapping[str, Records]
    ) -> None:
        """Checks that none of a client's new records is in another client's ledger.

        Raises:
            LedgerError: another ledger was charged for some of the records, or the records of
                another ledger are unknown.
        """
        moved: Counter[str] = Counter()
        for record in filter(_is_record, new):
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
                    f"{moved[other]} records of client {name!r} are already in ledger "
                    f"{self._file(other)}. Remove the records, or divide the data among the "
                    "same clients as in the earlier run"
                ).with_code("ledger.moved_records")

    def _check_period(
        self, name: str, index: _RecordIndex, present: Records, sequence: ReleaseSequence
    ) -> None:
        """Checks that all earlier periods are finished and share no record with this period.

        Raises:
            LedgerError: the period was released before, an earlier period is missing, or a record
                is in an earlier period.
        """
        number, stored = sequence.period, sequence.stored_facts(sequence.period)
        ledger = index.ledgers.get(name)
        rows = () if ledger is None else ledger.releases
        sequence.rows = len(rows) if stored is None else stored.rows
        if stored is not None and stored.finished:
            raise LedgerError(
                f"period {number} of client {name!r} is already complete. Start the next period, "
                "or export the period's run folder with fedsynth export"
            ).with_code("sequence.finished")
        is_current = ledger is not None and index.is_current(name, present)
        if sequence.has_releases and (stored is None or not is_current):
            raise LedgerError(
                f"period {number} of client {name!r} has already made a release from other "
                "records. Repeat the period with its first records"
            ).with_code("sequence.records")
        for period in range(1, number):
            earlier_facts = sequence.stored_facts(period)
            records = None if earlier_facts is None else index.records_of(earlier_facts.records)
            if (
                earlier_facts is None
                or not earlier_facts.finished
                or ledger is None
                or records is None
            ):
                raise LedgerError(
                    f"folder {self.path} does not contain the finished period {period} of client "
                    f"{name!r}. Complete that period, or restore the folder from a backup"
                ).with_code("sequence.missing")
            if repeated := len([*filter(_is_record, present.keys() & records.keys())]):
                raise LedgerError(
                    f"{repeated} records of client {name!r} are already in period {period}, but a "
                    "record may be in one period only. Remove them from the new data"
                ).with_code("sequence.repeated")
            if stored is None and sequence.is_charged(rows[earlier_facts.rows :]):
                raise LedgerError(
                    f"the ledger of client {name!r} was charged for period {number}, but "
                    f"{sequence.folder} does not contain the period's noise. Restore the folder "
                    "from a backup"
                ).with_code("sequence.missing")

    def _opened(self, name: str, present: Records, index: _RecordIndex, dataset: str) -> Ledger:
        fingerprint = index.fingerprint(name, present)
        listed, pending = index.folder / fingerprint, index.folder / f".{fingerprint}"
        # Until the ledger refers to it, the list has a hidden name. If the process ends before, the
        # list is thus not taken for that of a missing ledger.
        if not listed.exists():
            create_once(pending, _packed(present))
        ledger = index.ledgers.get(name)
        if ledger is None:
            ledger = Ledger(name, self._file(name), dataset=dataset, records=fingerprint)
        elif (
            ledger.lines.may_change
            or not index.is_current(name, present)
            or ledger.dataset != dataset
        ):
            ledger.take_records(fingerprint, dataset)
        if pending.exists():
            pending.replace(listed)
            sync_folder(index.folder)
        return ledger

    @contextmanager
    def _locked(self) -> Iterator[_RecordIndex]:
        """Locks the folder and yields the records of its ledgers.

        No other process can open ledgers in this folder in the meantime. A key is created if there
        is none.

        Raises:
            LedgerError: the folder cannot be used.
        """
        path = self.path / PRIVATE / KEY
        if self.path.name == "ledger" and (self.path.parent / "config.toml").exists():
            raise LedgerError(
                f"folder {self.path} is part of a run folder, so it cannot keep ledgers for "
                "later runs. Copy the ledgers to a separate folder, and use that folder"
            ).with_code("ledger.run_folder")
        try:
            if not path.exists():
                self._refuse_a_second_key(path)
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                create_once(path, secrets.token_bytes(KEY_BYTES))
            with open_regular(path) as file:  # closing releases the lock
                lock(file, path)
                key = file.readall()
                if len(key) != KEY_BYTES:
                    raise LedgerError(
                        f"key {path} must have {KEY_BYTES} bytes, got {len(key)}. Restore the key "
                        "from a backup"
                    ).with_code("ledger.key")
                yield _RecordIndex(self.path / PRIVATE, key, self.ledgers())
        except OSError as error:
            raise LedgerError(f"cannot use ledger folder {self.path}: {error}").with_code(
                "ledger.folder"
            ) from error

    def _refuse_a_second_key(self, path: Path) -> None:
        """Refuses to create a new key after a ledger in the folder has been charged.

        The key with which the records of such a ledger were hashed is missing.

        Raises:
            LedgerError: the records of a ledger cannot be identified without the missing key.
        """
        for name, ledger in self.ledgers().items():
            self._refuse_unknown(name, ledger)
            if ledger.bound:
                raise LedgerError(
                    f"key {path} is missing. Restore the key from a backup, or run "
                    f"{self._command(name)} to confirm that the client's records are unchanged"
                ).with_code("ledger.key")


class _RecordIndex:
    """The hashes of all current and earlier records in a folder's ledgers.

    Attributes:
        folder: the private folder, which has a file with the hashes of each record set.
        key: the key of the hashes.
        ledgers: the ledgers by client name.
        orphans: the hashes in files to which no ledger refers, each with its file. There are some
            if a ledger was deleted.
        owners: the hashes of records for which releases were charged, each with the names of the
            ledgers that were charged. Record sets whose file is missing are not included.
    """

    def __init__(self, folder: Path, key: bytes, ledgers: Mapping[str, Ledger]) -> None:
        self.folder = folder
        self.key = key
        self.ledgers = ledgers
        self._current: dict[str, Records] = {}
        self.orphans: dict[bytes, Path] = {}
        for path in _orphaned_lists(folder, ledgers):
            self.orphans.update(dict.fromkeys(self.records_of(path.name) or (), path))
        self.owners: defaultdict[bytes, set[str]] = defaultdict(set)
        for name, ledger in ledgers.items():
            charged = ledger.lines.charged if ledger.lines.releases else ()
            for fingerprint in charged:
                for record in self.records_of(fingerprint) or ():
                    self.owners[record].add(name)

    def fingerprint(self, name: str, records: Records) -> str:
        """Computes a keyed hash of a client's name and its records, in any order.

        The hash includes the name, so that hashes do not reveal that two clients have the same
        records or that both have none.
        """
        hashed = name.encode() + b"\0" + _packed(records)
        digest = hashlib.blake2b(hashed, key=self.key, digest_size=32, person=b"fedsynth ledger")
        return digest.hexdigest()

    def is_current(self, name: str, records: Records) -> bool:
        """Returns True if `records` are exactly the current records of the client's ledger."""
        return self.ledgers[name].lines.records[-1:] == (self.fingerprint(name, records),)

    def current(self, name: str) -> Records:
        """Returns the current records of a client's ledger.

        Each record comes with the number of times that the client has it.

        Raises:
            LedgerError: the file with the hashes of these records is missing or damaged.
        """
        if name not in self._current:
            ledger = self.ledgers[name]
            records = self.records_of(ledger.lines.records[-1]) if ledger.lines.records else None
            if ledger.bound and (records is None or not self.is_current(name, records)):
                raise LedgerError(
                    f"the record list of client {name!r} is missing or damaged. Restore "
                    f"{self.folder / ledger.lines.records[-1]} from a backup"
                ).with_code("ledger.missing")
            self._current[name] = records or Counter()
        return self._current[name]

    def records_of(self, fingerprint: str) -> Records | None:
        """Returns the records with the given fingerprint, or None if their file is missing."""
        for name in (fingerprint, f".{fingerprint}"):
            with suppress(FileNotFoundError):
                return _unpacked(read_regular(self.folder / name, MAX_RECORDS_BYTES))
        return None


def _period(sequence: ReleaseSequence | None) -> int:
    return 1 if sequence is None else sequence.period


def _orphaned_lists(folder: Path, ledgers: Mapping[str, Ledger]) -> list[Path]:
    """Returns the files of record hashes whose ledger is missing in the folder."""
    expected = {KEY}
    for ledger in ledgers.values():
        expected.update(ledger.lines.records)
    return [path for path in folder.glob("[!.]*") if path.name not in expected]


def _restore_hint(path: Path) -> str:
    return f"Restore the ledger from a backup. If the run ended before round 1, delete {path}"


def _is_record(digest: bytes) -> bool:
    """Returns False for the hash of a user."""
    return not digest.startswith(_USER)


def _has_users(hashes: Records) -> bool:
    return not all(map(_is_record, hashes))


def _record_count(hashes: Records) -> int:
    return sum(count for digest, count in hashes.items() if _is_record(digest))


def _packed(records: Records) -> bytes:
    return b"".join(sorted(records.elements()))


def _unpacked(packed: bytes) -> Records:
    return Counter(packed[at : at + DIGEST_BYTES] for at in range(0, len(packed), DIGEST_BYTES))
