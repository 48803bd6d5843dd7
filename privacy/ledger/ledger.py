"""The append-only record of every release from one client's data set.

The ledger is a file of JSON lines: a header, then one line per release. It is kept outside
checkpoints and run folders, since all runs on a data set share its budget. A row is on the disk
before `charge` returns, and noise is drawn only afterwards: after a crash, a charged release may be
missing, but no release is uncharged.

A ledger in a folder that is kept across runs also identifies its records: its header holds a keyed
fingerprint of them (`fedsynth.privacy.ledger.folder`), and lines with an `entry` record changes.

`fedsynth.privacy.ledger.lines` defines the lines and detects edits. `fedsynth.privacy.guard`
refuses a release that would exceed the budget.

The ledger contents that a client sends to the server when it joins, and that reports use.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path
from typing import Any

from fedsynth.privacy.errors import LedgerError, short_repr
from fedsynth.privacy.files import MAX_TEXT_BYTES, create_once, lock, open_regular
from fedsynth.privacy.ledger.lines import (
    LEDGER_SCHEMA,
    MAY_CHANGE,
    RECORDS,
    RESUMED,
    Lines,
    encode,
    read_on,
)
from fedsynth.privacy.releases import Release


def _allow(_rows: Sequence[Release], _planned: Sequence[Release]) -> None:
    """Allows every release."""


class Ledger:
    """All releases from one client's data set, in order; rows are only ever added.

    An existing file is read and continued. The file is locked (`flock`) only during each operation.
    Several processes or threads may use the same ledger: each first reads what the others appended,
    and rows never interleave. On a network file system the lock is only as reliable as that
    system's `flock`.

    Args:
        client: the client's name, which is in the header, like `dataset`. None: the file must
            exist, and may belong to any client.
        path: the file; None keeps the ledger in memory (tests, simulations on published data).
        dataset: an identifier of the data set, so that one data set's budget is not charged to
            another; None: an existing file is not checked.
        records: the fingerprint that the header of a new file gets.

    Attributes:
        confirm: a context that is entered around the first charge; it may refuse
            (`fedsynth.privacy.ledger.folder`).

    Raises:
        LedgerError: the file cannot be read or written, belongs to another client or data set, has
            an unknown schema, or is damaged. It is never reset or repaired silently.
    """

    def __init__(
        self,
        client: str | None,
        path: Path | None = None,
        *,
        dataset: str | None = "",
        records: str | None = None,
    ) -> None:
        self.client = client or ""
        self.dataset = dataset or ""
        self.path = None if path is None else Path(path)
        self.confirm: Callable[[], AbstractContextManager[None]] = nullcontext
        self._process = os.getpid()
        self._in_memory = threading.Lock()  # of threads; a file's own lock is for processes, too
        self._read = Lines()
        if self.path is None:
            return
        if client is not None and not self.path.exists():
            self._start(self.path, records)
        with self._locked(self.path, writing=False) as file:
            self._catch_up(file, client)
        self.client = self._read.client
        if dataset is not None:
            self.check_dataset(dataset)
        self.dataset = self._read.dataset

    def check_dataset(self, dataset: str) -> None:
        """Refuses another data set, or another partition of it, if some budget was spent."""
        if self.bound and self._read.dataset != dataset:
            raise LedgerError(
                f"ledger {self.path} belongs to dataset {short_repr(self._read.dataset)}, not "
                f"{dataset!r} (another data set, or another partition of it: seed, clients, "
                "alpha): use the same one, or another folder, which does not count the "
                "releases in this one"
            )

    @property
    def records(self) -> tuple[str, ...]:
        """Fingerprints of all record sets that the ledger was kept for, the current one last."""
        return self._read.records

    @property
    def charged_records(self) -> tuple[str, ...]:
        """`records` without those that were replaced before any budget was spent."""
        return self._read.charged if self._read.releases else ()

    @property
    def bound(self) -> bool:
        """True if budget was spent and the owner has not declared that it counts for other records
        too."""
        return bool(self._read.releases) and not self.may_change

    @property
    def may_change(self) -> bool:
        """True if the owner has declared that the next run uses other records of the client."""
        return self._read.may_change

    @property
    def releases(self) -> tuple[Release, ...]:
        """The rows, oldest first, including those that other processes have appended since."""
        if self.path is not None:
            with self._locked(self.path, writing=False) as file:
                self._catch_up(file, self.client)
        return self._read.releases

    def history(self) -> History:
        """Returns the rows that the ledger holds now, with their chain hash."""
        releases = self.releases
        return History(self.client, releases, self.chains[-1] if self.chains else None)

    @property
    def chains(self) -> tuple[str, ...]:
        """The chain hashes of the header and of each release that was read.

        Lines are only appended, so the n-th hash identifies the first n releases.
        """
        return self._read.chains

    def charge(
        self,
        release: Release,
        check: Callable[[Sequence[Release], Sequence[Release]], None] = _allow,
    ) -> None:
        """Appends one row; it is written and fsync'ed when this returns. Draw the noise only
        afterwards.

        Args:
            release: the row.
            check: called with the existing rows and the new one under the same lock, so that two
                processes cannot both spend the same remaining budget; it raises to refuse the row.
        """
        if self.path is None:
            if self._process != os.getpid():
                raise LedgerError(
                    f"the ledger of client {self.client!r} is in the memory of another "
                    "process, which would not see this charge: use a ledger folder"
                )
            with self._in_memory:
                check(self._read.releases, [release])
                self._read = replace(self._read, releases=(*self._read.releases, release))
            return
        with self.confirm(), self._locked(self.path) as file:
            self._catch_up(file, self.client)
            check(self._read.releases, [release])
            self._append(file, release.to_json())
        self.confirm = nullcontext

    def check_writable(self) -> None:
        """Refuses if a row could not be charged now. It is called before a round, so that no other
        client is charged in vain.

        Raises:
            LedgerError: the file cannot be opened for writing.
        """
        if self.path is None:
            return
        try:
            open_regular(self.path, writing=True).close()
        except OSError as error:
            raise LedgerError(f"cannot write to ledger {self.path}: {error}") from error

    def carry_over(self) -> None:
        """Declares that the next run may use other records of this client.

        The spent budget counts for them too.
        """
        self._note({"entry": MAY_CHANGE})

    def note_resumption(self, finished_rounds: int) -> None:
        """Records that a run was resumed after this many rounds, so that its folder cannot claim a
        resumption that did not happen."""
        self._note({"entry": RESUMED, "after": finished_rounds})

    @property
    def resumptions(self) -> tuple[tuple[int, int], ...]:
        """For each resumption of a run, the number of rows before it and the number of finished
        rounds."""
        return self._read.resumptions

    def take_records(self, records: str, dataset: str) -> None:
        """Binds the ledger to the records with this fingerprint, of this data set, from now on."""
        self._note({"entry": RECORDS, "records": records, "dataset": dataset})
        self.dataset = dataset

    def _note(self, entry: dict[str, Any]) -> None:
        if self.path is None:
            raise LedgerError("a ledger in memory can be used by only one run")
        with self._locked(self.path) as file:
            self._catch_up(file, self.client)
            self._append(file, entry)

    def _append(self, file: FileIO, entry: dict[str, Any]) -> None:
        """Writes a line durably; the file must be locked, and all its lines read."""
        line, _ = encode(entry, self._read.chain)
        complete = False
        try:
            complete = file.write(line) == len(line)
            if not complete:
                raise OSError("only a part of the line was written to disk")
            os.fsync(file.fileno())
        except OSError as error:
            if not complete:  # a part of a line would block the ledger; a whole line counts
                with suppress(OSError):  # then `privacy repair` removes it
                    os.ftruncate(file.fileno(), self._read.size)
                    os.fsync(file.fileno())
            raise LedgerError(f"cannot write to ledger {self.path}: {error}") from error
        self._catch_up(file, self.client)

    def _start(self, path: Path, records: str | None) -> None:
        """Creates the file with its header atomically: it is never empty, so an empty file means
        damage."""
        header = {
            "fedsynth_ledger": LEDGER_SCHEMA,
            "client": self.client,
            "dataset": self.dataset,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        if records is not None:
            header["records"] = records
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            create_once(path, encode(header, "")[0])  # another process may be faster
        except OSError as error:
            raise LedgerError(f"cannot create ledger {path}: {error}") from error

    @contextmanager
    def _locked(self, path: Path, *, writing: bool = True) -> Iterator[FileIO]:
        """Opens and locks the existing file for reading, or also for appending. A file that has
        vanished is an error, not a new ledger."""
        try:
            file = open_regular(path, writing=writing, max_bytes=MAX_TEXT_BYTES)
        except OSError as error:
            raise LedgerError(f"cannot open ledger {path}: {error.strerror or error}") from error
        with file:  # closing releases the lock
            lock(file, path, shared=not writing)
            yield file

    def _catch_up(self, file: FileIO, client: str | None) -> None:
        """Reads and checks the lines that were appended since the last read."""
        if file.seek(0, os.SEEK_END) < self._read.size:
            raise LedgerError(f"ledger {self.path} has lost lines: an append-only file was edited")
        file.seek(self._read.size)
        self._read = read_on(self._read, file.read(), client, self.path)


def read_ledger(path: Path) -> Ledger:
    """Returns the ledger in an existing file of any client.

    Raises:
        LedgerError: it cannot be read, or is damaged.
    """
    return Ledger(None, path, dataset=None)


@dataclass(frozen=True)
class History:
    """The releases in a client's ledger. They are public, like everything in a ledger.

    Attributes:
        client: the client's name.
        releases: the rows, oldest first.
        chain: the chain hash over them in the ledger's file, which identifies exactly these rows
            even if the file has grown since; None if the ledger is in memory.
    """

    client: str
    releases: tuple[Release, ...] = ()
    chain: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Returns a JSON-able mapping; `from_json` is the inverse."""
        return {**vars(self), "releases": [row.to_json() for row in self.releases]}

    @classmethod
    def from_json(cls, stated: Mapping[str, Any]) -> History:
        """Returns the history that `to_json` encoded.

        Raises:
            PrivacySettingError: a row is invalid.
        """
        rows = tuple(map(Release.from_json, stated["releases"]))
        return cls(str(stated["client"]), rows, stated["chain"] and str(stated["chain"]))
