"""A client's ledger, the append-only record of every release from the client's data set.

A ledger is a file of JSON lines, with a header and then one line per release. All runs on a data
set share its budget, so the ledger is not part of checkpoints and run folders. `charge` returns
only when the new line is on the disk, and noise is drawn only afterwards. After a crash, the ledger
may therefore contain a release that was not made, but every release that was made is in the ledger.

If the ledger is in a folder that is kept across runs, its header also contains a keyed hash of the
client's records (`fedsynth.privacy.ledger.folder`). Lines with the key `entry` are notes, for
example that the records have changed.

Each line contains a hash over itself and all lines before it, so that edits are detected. The chain
protects against accidents and careless repairs. It does not detect that whole lines at the end are
missing, as in an old copy, or that the owner of the file has computed all hashes again. Reports of
earlier runs state how many rows the ledger had, and the hash over them, which differs if rows were
cut and charged again.

`fedsynth.privacy.mechanisms` refuses releases that would exceed the budget. `History` is the
content of a ledger that a client sends to the server when it joins a run, and from which reports
are computed.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shlex
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path
from typing import Any, NoReturn

from fedsynth.errors import LedgerError, PrivacySettingError, short_repr
from fedsynth.files import (
    MAX_TEXT_BYTES,
    create_once,
    decode_json,
    lock,
    open_regular,
    this_process,
)
from fedsynth.privacy.releases import Release

LEDGER_SCHEMA = 4
# entries that are not releases
RECORDS, MAY_CHANGE, RESUMED, FILES = "records", "carry-over", "resumed", "files"


@dataclass(frozen=True)
class Lines:
    """The parsed content of a ledger file, up to the last line that was read.

    Attributes:
        client: the client's name. Empty before the header is read.
        releases: the rows, oldest first.
        runs: the identifier of the run that charged each row (`Ledger.charge_id`).
        dataset: the identifier of the data set.
        records: a keyed hash of each set of records for which the ledger was used. The last hash is
            that of the current records.
        charged: `records` without the sets that were replaced before the first charge.
        may_change: True if the owner has declared that the client's records may change.
        resumptions: a pair for each time that a run was resumed: the identifier of the run, and the
            number of finished rounds.
        files: a pair for each run that has finished: the identifier of the run, and the hash of its
            files (`Ledger.note_files`).
        size: the number of bytes that have been read.
        chain: the chain hash over all lines that have been read.
        chains: the chain hashes after the header and after each release. Entry n, counted from 0,
            identifies the first n releases, whatever has been added since.
    """

    client: str = ""
    releases: tuple[Release, ...] = ()
    runs: tuple[str, ...] = ()
    dataset: str = ""
    records: tuple[str, ...] = ()
    charged: tuple[str, ...] = ()
    may_change: bool = False
    resumptions: tuple[tuple[str, int], ...] = ()
    files: tuple[tuple[str, str], ...] = ()
    size: int = 0
    chain: str = ""
    chains: tuple[str, ...] = ()


def encode(entry: dict[str, Any], chain: str) -> tuple[bytes, str]:
    """Encodes an entry as a ledger line with the chain hash.

    Args:
        entry: the content of the line.
        chain: the chain hash over all lines before it.

    Returns:
        The line, and the chain hash over this line and all lines before it.
    """
    digest = hashlib.sha256((chain + json.dumps(entry, sort_keys=True)).encode()).hexdigest()[:32]
    return json.dumps({**entry, "chain": digest}, allow_nan=False).encode() + b"\n", digest


def read_on(lines: Lines, data: bytes, client: str | None, path: Path | None) -> Lines:
    """Reads and checks a ledger file's lines after the read position.

    Args:
        lines: the content that has been read so far.
        data: the bytes of the file that follow.
        client: the client to which the ledger must belong. None accepts any client.
        path: the path of the file, for error messages.

    Returns:
        The content including the new lines.

    Raises:
        LedgerError: a line is incomplete, damaged or of an unknown kind, or the ledger belongs to
            another client.
    """
    if lines.size + len(data) == 0:
        raise LedgerError(f"ledger {path} is empty. Restore the ledger from a backup")
    if data and not data.endswith(b"\n"):
        raise LedgerError(
            f"the last line of ledger {path} is incomplete, because a charge was interrupted. Run "
            f"fedsynth privacy repair {shlex.quote(str(path))}"
        ).with_code("ledger.incomplete")
    releases = list(lines.releases)
    runs = list(lines.runs)
    chains = list(lines.chains)
    for number, line in enumerate(data.splitlines()):
        entry, chain = _decode(line, lines.chain, len(releases), path)
        run = sys.intern(str(entry.pop("run", "")))
        if lines.size == 0 and number == 0:
            lines = _header(entry, client, path)
            chains.append(chain)
        elif "entry" in entry:
            lines = _noted(lines, entry, run, len(releases), path)
        else:
            releases.append(_release(entry, len(releases) + 2, path))
            runs.append(run)
            chains.append(chain)
        lines = replace(lines, chain=chain)
    size = lines.size + len(data)
    return replace(
        lines, releases=tuple(releases), runs=tuple(runs), chains=tuple(chains), size=size
    )


def _decode(line: bytes, chain: str, rows: int, path: Path | None) -> tuple[dict[str, Any], str]:
    """Decodes a line and checks its hash.

    Returns:
        The content of the line, and the chain hash over this line and all lines before it.
    """
    try:
        entry = decode_json(line)
        if not isinstance(entry, dict):
            raise ValueError("the line is not a JSON object")
    except ValueError as error:
        raise LedgerError(f"ledger {path} is damaged after release {rows}: {error}") from error
    stated = entry.pop("chain", None)
    expected = encode(entry, chain)[1]
    if stated != expected:
        raise LedgerError(
            f"ledger {path} was edited: the hash after release {rows} does not match. Restore the "
            "ledger from a backup"
        ).with_code("ledger.edited")
    entry.pop("random", None)
    return entry, expected


def _header(header: dict[str, Any], client: str | None, path: Path | None) -> Lines:
    dataset: Any = header.get("dataset")
    owner: Any = header.get("client")
    valid = isinstance(dataset, str) and isinstance(owner, str)
    if header.get("fedsynth_ledger") != LEDGER_SCHEMA or not valid:
        reason = f"ledger {path} does not begin with a header of schema {LEDGER_SCHEMA}"
        raise LedgerError(f"{reason}. Restore the ledger from a backup")
    if client is not None and owner != client:
        names = f"{short_repr(owner)}, not of {short_repr(client)}"
        raise LedgerError(f"{path} is the ledger of {names}. Use the client's own ledger")
    records = (str(header["records"]),) if "records" in header else ()
    return Lines(owner, dataset=dataset, records=records, charged=records)


def _noted(lines: Lines, entry: dict[str, Any], run: str, rows: int, path: Path | None) -> Lines:
    """Adds a note (a ledger line that is not a release) to the content read so far.

    Args:
        lines: the content before the line.
        entry: the content of the line.
        run: the identifier of the run that wrote the line.
        rows: the number of releases before the line.
        path: the path of the file, for error messages.
    """
    if entry["entry"] == RESUMED and type(entry.get("after")) is int:
        return replace(lines, resumptions=(*lines.resumptions, (run, entry["after"])))
    if entry["entry"] == FILES and isinstance(entry.get("sha256"), str):
        return replace(lines, files=(*lines.files, (run, entry["sha256"])))
    if entry["entry"] == MAY_CHANGE:
        return replace(lines, may_change=True)
    if entry["entry"] == RECORDS and {"records", "dataset"} <= entry.keys():
        new = str(entry["records"])
        return replace(
            lines,
            dataset=str(entry["dataset"]),
            records=(*lines.records, new),
            charged=(*lines.charged, new) if rows else (new,),
            may_change=False,
        )
    raise LedgerError(
        f"ledger {path} contains an unknown line after release {rows}. Update fedsynth"
    )


def _release(entry: dict[str, Any], number: int, path: Path | None) -> Release:
    try:
        return Release.from_json(entry)
    except PrivacySettingError as error:
        raise LedgerError(
            f"line {number} of ledger {path} is not a valid release: {error}"
        ) from error


def _allow(_rows: Sequence[Release], _planned: Sequence[Release]) -> None:
    """Allows every release: the default check of `Ledger.charge`."""


class Ledger:
    """All releases from one client's data set, in the order in which they were charged.

    Releases are only ever added. An existing file is read and continued. Several processes or
    threads may use the same ledger. The file is locked (`flock`) during each operation, and an
    operation first reads the lines that others have appended. On a network file system, the lock is
    only as reliable as that system's `flock`.

    Args:
        client: the client's name, which the header of the file states. If None, the file must exist
            and may belong to any client.
        path: the file. None keeps the ledger in memory, for tests and simulations on published
            data.
        dataset: an identifier of the data set, which the header of the file states. It ensures that
            releases from one data set are not charged to another. If None, the data set of an
            existing file is not checked.
        records: a keyed hash of the client's records, for the header of a new file.

    Attributes:
        lines: the content of the ledger, up to the last line that was read.
        charge_id: the random identifier of the run that uses this object. It marks the lines that
            the run adds, so that a report is compared with this run's lines only. Empty without a
            run folder.
        confirm: a function that returns a context manager. The first charge is made inside this
            context, which may refuse it (`fedsynth.privacy.ledger.folder`).

    Raises:
        LedgerError: the file cannot be read or written, belongs to another client or data set, has
            an unknown schema, or is damaged. A damaged file is never reset or repaired silently.
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
        self._process = this_process()
        self._in_memory = threading.Lock()  # of threads; a file's own lock is for processes, too
        self.lines = Lines()
        self.charge_id = ""
        if self.path is None:
            return
        if client is not None and not self.path.exists():
            self._start(self.path, records)
        with self._locked(self.path, writing=False) as file:
            self._catch_up(file, client)
        self.client = self.lines.client
        if dataset is not None:
            self.check_dataset(dataset)
        self.dataset = self.lines.dataset

    def __reduce__(self) -> NoReturn:
        raise TypeError("a ledger cannot be copied, because a copy would not see later charges")

    def check_dataset(self, dataset: str) -> None:
        """Checks that the ledger belongs to the given data set and partition.

        Raises:
            LedgerError: the ledger belongs to another data set, releases were already charged, and
                the owner has not declared that the records may change.
        """
        if self.bound and self.lines.dataset != dataset:
            raise LedgerError(
                f"ledger {self.path} belongs to data set and partition "
                f"{short_repr(self.lines.dataset)}, but this run uses {dataset!r}. Use the "
                "ledger's data set, number of clients, partition settings and seed, or another "
                "ledger folder"
            ).with_code("ledger.dataset")

    @property
    def bound(self) -> bool:
        """True if the client must use the same records as for its earlier releases.

        This is the case once a release was charged, unless the owner has declared that the records
        may change.
        """
        return bool(self.lines.releases) and not self.lines.may_change

    @property
    def releases(self) -> tuple[Release, ...]:
        """All ledger rows, oldest first, including rows added by other processes."""
        return self._read().releases

    def history(self) -> History:
        """Returns the ledger's current rows, with their hash."""
        lines = self._read()  # once: a thread may charge in between
        return History(self.client, lines.releases, lines.chains[-1] if lines.chains else None)

    def _read(self) -> Lines:
        if self.path is not None:
            with self._locked(self.path, writing=False) as file:
                self._catch_up(file, self.client)
        return self.lines

    def charge(
        self,
        release: Release,
        check: Callable[[Sequence[Release], Sequence[Release]], None] = _allow,
    ) -> None:
        """Appends one row to the ledger.

        The row is on the disk when this method returns. Draw the noise only afterwards.

        Args:
            release: the row.
            check: a function of the existing rows and the new rows that raises an error to refuse
                the new ones. It is called under the same lock as the charge, so that two processes
                cannot both spend the same remaining budget.

        Raises:
            LedgerError: the ledger cannot be written.
        """
        if self.path is None:
            if self._process != this_process():
                raise LedgerError(
                    f"the ledger of client {self.client!r} is only in another process's memory. "
                    "Set privacy.ledger to keep it in a folder"
                ).with_code("ledger.process")
            with self._in_memory:
                check(self.lines.releases, [release])
                self.lines = replace(self.lines, releases=(*self.lines.releases, release))
            return
        with self.confirm(), self._locked(self.path) as file:
            self._catch_up(file, self.client)
            check(self.lines.releases, [release])
            self._append(file, release.to_json())
        self.confirm = nullcontext

    def check_writable(self) -> None:
        """Checks that the ledger can be written.

        It is called for all clients before a round, so that no client is charged for a round that
        fails because another client's ledger cannot be written.

        Raises:
            LedgerError: the file cannot be opened for writing.
        """
        if self.path is None:
            return
        try:
            open_regular(self.path, writing=True).close()
        except OSError as error:
            raise LedgerError(f"cannot write to ledger {self.path}: {error}").with_code(
                "ledger.write"
            ) from error

    def carry_over(self) -> None:
        """Declares that the client's records may change for the next run.

        The releases in the ledger then count for the changed records, too.
        """
        self._note({"entry": MAY_CHANGE})

    def note_resumption(self, finished_rounds: int) -> None:
        """Notes in the ledger that a run was resumed after a number of rounds.

        A report is checked against the note, so a run folder cannot claim a resumption that did not
        happen.
        """
        self._note({"entry": RESUMED, "after": finished_rounds})

    def note_files(self, sha256: str, *, repeated: bool = False) -> None:
        """Notes the hash of a finished run's files in the ledger.

        The run's files are checked against the note, so a file cannot be replaced together with its
        hash in the report. A run that has a note writes none.

        Args:
            sha256: the hash of the files' hashes (`fedsynth.privacy.report.file.hash_of_files`).
            repeated: True writes a note unless the last one has the same hash. A guard notes its
                settings at each update, and a run may repeat a killed period that was noted before.
        """
        noted = dict(self._read().files).get(self.charge_id)
        if noted is None or (repeated and noted != sha256):
            self._note({"entry": FILES, "sha256": sha256})

    def take_records(self, records: str, dataset: str) -> None:
        """Notes in the ledger that the client's records have changed.

        Args:
            records: the keyed hash of the new records.
            dataset: the identifier of the new data set.
        """
        self._note({"entry": RECORDS, "records": records, "dataset": dataset})
        self.dataset = dataset

    def _note(self, entry: dict[str, Any]) -> None:
        if self.path is None:
            raise LedgerError(
                f"client {self.client!r}'s ledger is only in memory. Set privacy.ledger to keep it"
            )
        with self._locked(self.path) as file:
            self._catch_up(file, self.client)
            self._append(file, entry)

    def _append(self, file: FileIO, entry: dict[str, Any]) -> None:
        """Appends a line to the file and waits until it is on the disk.

        The file must be locked, and all its lines must have been read.
        """
        # without the random number, a ledger that was cut and charged again would have equal hashes
        marked = {**entry, "run": self.charge_id, "random": secrets.token_hex(8)}
        line, _ = encode(marked, self.lines.chain)
        complete = False
        try:
            complete = file.write(line) == len(line)
            if not complete:
                raise OSError("the disk stored only part of the new line. Free disk space")
            os.fsync(file.fileno())
        except OSError as error:
            if not complete:  # a part of a line would block the ledger; a whole line counts
                with suppress(OSError):  # then `privacy repair` removes it
                    os.ftruncate(file.fileno(), self.lines.size)
                    os.fsync(file.fileno())
            raise LedgerError(f"cannot write to ledger {self.path}: {error}").with_code(
                "ledger.write"
            ) from error
        self._catch_up(file, self.client)

    def _start(self, path: Path, records: str | None) -> None:
        """Creates the file with its header.

        The file is created atomically and is therefore never empty. An empty file is damaged.
        """
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
        """Opens the file and locks it, shared for reading or exclusively for appending.

        Raises:
            LedgerError: the file cannot be opened. If it is missing, no new file is created.
        """
        try:
            file = open_regular(path, writing=writing, max_bytes=MAX_TEXT_BYTES)
        except OSError as error:
            raise LedgerError(f"cannot open ledger {path}: {error.strerror or error}") from error
        with file:  # closing releases the lock
            lock(file, path, shared=not writing)
            yield file

    def _catch_up(self, file: FileIO, client: str | None) -> None:
        """Reads and checks the lines appended since the last call."""
        lines = self.lines  # other threads may read, too: readers share the file's lock
        if file.seek(0, os.SEEK_END) < lines.size:
            raise LedgerError(f"ledger {self.path} was truncated. Restore it from a backup")
        file.seek(lines.size)
        self.lines = read_on(lines, file.read(), client, self.path)


def read_ledger(path: Path) -> Ledger:
    """Opens the ledger in an existing file. The ledger may belong to any client.

    Raises:
        LedgerError: the file cannot be read or is damaged.
    """
    return Ledger(None, path, dataset=None)


@dataclass(frozen=True)
class History:
    """The releases in a client's ledger, from which reports are computed.

    They are public, like all contents of a ledger.

    Attributes:
        client: the client's name.
        releases: the rows, oldest first.
        chain: the chain hash in the ledger's file after these rows. It identifies exactly these
            rows, even if the file has more rows now. None if the ledger is in memory.
    """

    client: str
    releases: tuple[Release, ...] = ()
    chain: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Returns the history as a JSON-serialisable dict. `from_json` is the inverse."""
        return {**vars(self), "releases": list(map(Release.to_json, self.releases))}

    @classmethod
    def from_json(cls, stated: Mapping[str, Any]) -> History:
        """Creates a history from the dict that `to_json` returned.

        Raises:
            PrivacySettingError: a row is invalid.
        """
        rows = tuple(map(Release.from_json, stated["releases"]))
        return cls(str(stated["client"]), rows, stated["chain"] and str(stated["chain"]))


# The type of the contents of several clients' ledgers.
Histories = Sequence[History]


@dataclass(frozen=True)
class Repair:
    """The result of `repair_ledger`.

    Attributes:
        line: the incomplete line.
        counts: True if only the line break was missing. The line was then kept, and its release
            counts.
        copy: the path of a copy of the file as it was before the repair.
    """

    line: str
    counts: bool
    copy: Path


def repair_ledger(path: Path) -> Repair | None:
    """Repairs a ledger whose last line is incomplete because a charge was interrupted.

    The incomplete line is removed. Its release was never made, because noise is drawn only after
    the complete line is on the disk. If only the line break is missing, the line break is added
    instead, because the line may have been read as complete. A copy of the original file is kept in
    the same folder.

    Returns:
        The repair. None if the last line is complete.

    Raises:
        LedgerError: the file has other damage, which is not repaired.
        OSError: the file cannot be read or written.
    """
    with open_regular(path, writing=True, max_bytes=MAX_TEXT_BYTES) as file:
        lock(file, path)
        data = file.readall()
        complete_size = data.rfind(b"\n") + 1
        if complete_size == len(data):
            read_on(Lines(), data, None, path)
            return None
        try:
            read_on(Lines(), data + b"\n", None, path)
            counts = True
        except LedgerError:
            read_on(Lines(), data[:complete_size], None, path)
            counts = False
        timestamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S%f")
        copy = path.with_name(f"{path.name}.torn-{timestamp}")
        create_once(copy, data)
        if counts:
            file.write(b"\n")
        else:
            file.truncate(complete_size)
        os.fsync(file.fileno())
        return Repair(data[complete_size:].decode(errors="replace"), counts, copy)
