"""The append-only record of every release from one client's data set.

The ledger is a file of JSON lines: a header, then one line a release. It lives outside checkpoints
and run folders, since a data set's budget is spent over all runs on it. A row is on the disk before
`charge` returns, and noise is drawn only afterwards: a crash can charge for a release that never
left, but never release what was not charged.

The ledger of a folder that is kept over runs also says whose records it is for: its header holds a
keyed fingerprint of them (`fedsynth.privacy.ledger_folder`), and lines with an `entry` say where
they changed.

What its lines say, and how an edit is noticed: `fedsynth.privacy.ledger_lines`. What refuses a
release that would cost too much: `fedsynth.privacy.guard`.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path
from typing import Any

from fedsynth.privacy.errors import LedgerError, shown
from fedsynth.privacy.files import MAX_TEXT_BYTES, lock, open_regular, sync_folder
from fedsynth.privacy.history import History
from fedsynth.privacy.ledger_lines import (
    LEDGER_SCHEMA,
    MAY_CHANGE,
    RECORDS,
    RESUMED,
    Lines,
    encode,
    read_on,
    repair_command,
)
from fedsynth.privacy.releases import Release


def _allow(_rows: Sequence[Release], _planned: Sequence[Release]) -> None:
    """No cap."""


class Ledger:
    """All releases from one client's data set, in order; rows are only ever added.

    An existing file is read and continued. The file is locked (`flock`) during each operation and
    not between them: two processes, or threads, may hold the same ledger; each first reads what the
    other has appended, and rows never interleave. On a network file system the lock is only as good
    as that system's `flock`.

    Args:
        client: the client's name, which the header has, like `dataset`. None: the file exists, and
            may be anyone's.
        path: the file; None keeps the ledger in memory (tests, simulations on published data).
        dataset: an identifier of the data set, so that one data set's budget is not charged to
            another; None takes an existing file as it is.
        records: the fingerprint that the header of a new file gets.

    Attributes:
        confirm: entered around the first charge; it may refuse (`fedsynth.privacy.ledger_folder`).

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
        """Refuse, where something was spent, another data set or another partition of it."""
        if self.bound and self._read.dataset != dataset:
            raise LedgerError(
                f"ledger {self.path} belongs to dataset {shown(self._read.dataset)}, not "
                f"{dataset!r} (another data set, or another partition of it: seed, clients, alpha): "
                "take the same again, or another folder, where nothing of this one is counted"
            )

    @property
    def records(self) -> tuple[str, ...]:
        """Fingerprints of the records that the ledger was and is for, the present ones last."""
        return self._read.records

    @property
    def charged_records(self) -> tuple[str, ...]:
        """`records` without those that were replaced before anything was spent."""
        return self._read.charged if self._read.releases else ()

    @property
    def bound(self) -> bool:
        """Whether something was spent, and nobody has declared that it counts for others too."""
        return bool(self._read.releases) and not self.may_change

    @property
    def may_change(self) -> bool:
        """Whether somebody has declared that the next run brings other records of the client."""
        return self._read.may_change

    @property
    def releases(self) -> tuple[Release, ...]:
        """The rows, oldest first, with those that other processes have added to the file
        meanwhile."""
        if self.path is not None:
            with self._locked(self.path, writing=False) as file:
                self._catch_up(file, self.client)
        return self._read.releases

    def history(self) -> History:
        """Returns what the ledger holds now, with the chain hash over it."""
        releases = self.releases
        return History(self.client, releases, self.chains[-1] if self.chains else None)

    @property
    def chains(self) -> tuple[str, ...]:
        """The chain hashes on the header's line, and on each release's, as far as they were read.

        Lines are only ever appended, so the n-th names the first n releases.
        """
        return self._read.chains

    def charge(
        self,
        release: Release,
        check: Callable[[Sequence[Release], Sequence[Release]], None] = _allow,
    ) -> None:
        """Append one row; it is written and fsync'ed when this returns. Draw the noise only
        afterwards.

        Args:
            release: the row.
            check: told of the rows and the new one under the same lock, so that two processes
                cannot both use the same last bit of budget; it raises where the row is refused.
        """
        if self.path is None:
            if self._process != os.getpid():
                raise LedgerError(
                    f"the ledger of client {self.client!r} is in the memory of another process, "
                    "which would not see this charge: keep ledgers in a folder"
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
        """Refuse where a row could not be charged now; before a round, so that no other client is
        charged in vain.

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
        """Declare that the next run may bring other records of this client.

        What was spent counts for them too.
        """
        self._note({"entry": MAY_CHANGE})

    def note_resumption(self, after: int) -> None:
        """Notes that a run is resumed after so many rounds, so that its folder cannot claim a
        resumption that never was."""
        self._note({"entry": RESUMED, "after": after})

    @property
    def resumptions(self) -> tuple[tuple[int, int], ...]:
        """Of each resumption of a run the number of rows before it, and the rounds that had
        ended."""
        return self._read.resumptions

    def take_records(self, records: str, dataset: str) -> None:
        """From here on the ledger is for the records with this fingerprint, of this data set."""
        self._note({"entry": RECORDS, "records": records, "dataset": dataset})
        self.dataset = dataset

    def _note(self, entry: dict[str, Any]) -> None:
        if self.path is None:
            raise LedgerError("a ledger in memory is for the records of one run")
        with self._locked(self.path) as file:
            self._catch_up(file, self.client)
            self._append(file, entry)

    def _append(self, file: FileIO, entry: dict[str, Any]) -> None:
        """Write a line and make it durable; the file must be locked and caught up with."""
        line, _ = encode(entry, self._read.chain)
        whole = False
        try:
            whole = file.write(line) == len(line)
            if not whole:
                raise OSError("the disk took only part of the line")
            os.fsync(file.fileno())
        except OSError as error:
            if not whole:  # else the line is in the file, and counts
                self._take_back(file)
            raise LedgerError(f"cannot write to ledger {self.path}: {error}") from error
        self._catch_up(file, self.client)

    def _take_back(self, file: FileIO) -> None:
        """Cut off what was written of a line, which would block the ledger; the lock is still
        held."""
        try:
            os.ftruncate(file.fileno(), self._read.size)
            os.fsync(file.fileno())
        except OSError as error:
            raise LedgerError(
                f"part of a line was written to ledger {self.path}, and cannot be taken back: "
                f"{error}; no release was made for it: {repair_command(self.path)}"
            ) from error

    def _start(self, path: Path, records: str | None) -> None:
        """Make the file with its header in one step: nobody ever sees it empty, so an empty file
        means damage."""
        created = datetime.now(UTC).isoformat(timespec="seconds")
        header = {
            "fedsynth_ledger": LEDGER_SCHEMA,
            "client": self.client,
            "dataset": self.dataset,
            "created": created,
        }
        if records is not None:
            header["records"] = records
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.") as file:
                file.write(encode(header, "")[0])
                file.flush()
                os.fsync(file.fileno())
                with suppress(FileExistsError):  # another process was faster: continue its file
                    os.link(file.name, path)
            sync_folder(path.parent)
        except OSError as error:
            raise LedgerError(f"cannot create ledger {path}: {error}") from error

    @contextmanager
    def _locked(self, path: Path, *, writing: bool = True) -> Iterator[FileIO]:
        """The existing file, for reading, or for appending too; one that vanished must not start
        again from nothing."""
        try:
            file = open_regular(path, writing=writing, max_bytes=MAX_TEXT_BYTES)
        except OSError as error:
            raise LedgerError(f"cannot open ledger {path}: {error.strerror or error}") from error
        with file:  # closing releases the lock
            lock(file, path, shared=not writing)
            yield file

    def _catch_up(self, file: FileIO, client: str | None) -> None:
        """Reads and checks the lines that were appended since the last look."""
        if file.seek(0, os.SEEK_END) < self._read.size:
            raise LedgerError(f"ledger {self.path} has lost lines: an append-only file was edited")
        file.seek(self._read.size)
        self._read = read_on(self._read, file.read(), client, self.path)


def read_ledger(path: Path) -> Ledger:
    """Returns an existing ledger file, whoever it belongs to.

    Raises:
        LedgerError: it cannot be read, or is damaged.
    """
    return Ledger(None, path, dataset=None)
