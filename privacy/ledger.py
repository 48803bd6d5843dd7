"""The append-only record of every release from one client's data set, and the guard that refuses
before the cap.

The ledger is a file of JSON lines: a header, then one line a release. It lives outside checkpoints
and run folders, since a data set's budget is spent over all runs on it. A row is on the disk before
`charge` returns, and noise is drawn only afterwards: a crash can charge for a release that never
left, but never release what was not charged.

The ledger of a folder that is kept over runs also says whose records it is for: its header holds a
keyed fingerprint of them (`fedsynth.privacy.ledger_folder`), and lines with an `entry` say where
they changed.

Each line carries a hash over itself and all lines before it, so that an edit is noticed. This
guards against accidents and hasty repairs: who owns the file can still rebuild it, or cut whole
lines off its end.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shlex
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from io import BytesIO, FileIO
from pathlib import Path
from typing import Any

from fedsynth.privacy.accounting import epsilon
from fedsynth.privacy.errors import BudgetExceededError, LedgerError, PrivacySettingError
from fedsynth.privacy.figures import up
from fedsynth.privacy.files import lock, open_regular, read_regular, sync_folder
from fedsynth.privacy.history import History
from fedsynth.privacy.releases import ADD_REMOVE, RECORD, Release, check_adjacency, check_delta
from fedsynth.privacy.wording import Setting, Text, shown

LEDGER_SCHEMA = 2
READABLE = (1, LEDGER_SCHEMA)  # schema 1 had a header and releases, and no fingerprint
RECORDS, MAY_CHANGE = "records", "carry-over"  # entries that are no release


@dataclass(frozen=True)
class _Facts:
    """What a ledger's lines say beside its releases."""

    dataset: str = ""
    records: tuple[str, ...] = ()
    charged: tuple[str, ...] = ()
    may_change: bool = False


class Ledger:
    """All releases from one client's data set, in order; rows are only ever added.

    An existing file is read and continued. The file is locked (`flock`) during each operation and
    not between them: two processes, or threads, may hold the same ledger; each first reads what the
    other has appended, and rows never interleave. On a network file system the lock is only as good
    as that system's `flock`.

    Args:
        client: the client's name; stands in the header, like `dataset`.
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
        client: str,
        path: Path | None = None,
        *,
        dataset: str | None = "",
        records: str | None = None,
    ) -> None:
        self.client = client
        self.dataset = dataset or ""
        self.path = None if path is None else Path(path)
        self.confirm: Callable[[], AbstractContextManager[None]] = nullcontext
        self._process = os.getpid()
        self._rows: list[Release] = []
        self._facts = _Facts()
        self._size = 0  # bytes of the file that have been read
        self._chain = ""  # hash over those bytes' lines
        if self.path is None:
            return
        if not self.path.exists():
            self._start(self.path, records)
        with self._locked(self.path, writing=False) as file:
            self._catch_up(file)
        if dataset is not None:
            self.check_dataset(dataset)
        self.dataset = self._facts.dataset

    def check_dataset(self, dataset: str) -> None:
        """Refuse, where something was spent, another data set or another partition of it."""
        if self.bound and self._facts.dataset != dataset:
            raise LedgerError(
                f"ledger {self.path} belongs to dataset {shown(self._facts.dataset)}, not {dataset!r} "
                "(another data set, or another partition of it: seed, clients, alpha): take the "
                "same again, or another folder, where nothing of this one is counted"
            )

    @property
    def records(self) -> tuple[str, ...]:
        """Fingerprints of the records that the ledger was and is for, the present ones last.

        None where nobody has said.
        """
        return self._facts.records

    @property
    def charged_records(self) -> tuple[str, ...]:
        """`records` without those that were replaced before anything was spent."""
        return self._facts.charged if self._rows else ()

    @property
    def bound(self) -> bool:
        """Whether something was spent, and nobody has declared that it counts for others too."""
        return bool(self._rows) and not self.may_change

    @property
    def may_change(self) -> bool:
        """Whether somebody has declared that the next run brings other records of the client."""
        return self._facts.may_change

    @property
    def releases(self) -> tuple[Release, ...]:
        """The rows, oldest first, with those that other processes have added to the file
        meanwhile."""
        if self.path is not None:
            with self._locked(self.path, writing=False) as file:
                self._catch_up(file)
        return tuple(self._rows)

    def history(self) -> History:
        """What stands in the ledger now, with the chain hash over it."""
        releases = self.releases
        chain = None if self.path is None else chain_hashes(self.path)[len(releases)]
        return History(self.client, releases, chain)

    def charge(self, release: Release) -> None:
        """Append one row; it is written and fsync'ed when this returns. Draw the noise only
        afterwards."""
        self.charge_within(release, None)

    def charge_within(self, release: Release, guard: Guard | None) -> None:
        """Check and charge under one lock, so that two processes cannot both use the same last bit
        of budget."""
        if self.path is None:
            if self._process != os.getpid():
                raise LedgerError(
                    f"the ledger of client {self.client!r} is in the memory of another process, "
                    "which would not see this charge: "
                    "keep ledgers in a folder"
                )
            if guard is not None:
                guard.refuse_beyond(self._rows, [release])
            self._rows.append(release)
            return
        with self.confirm(), self._locked(self.path) as file:
            self._catch_up(file)
            if guard is not None:
                guard.refuse_beyond(self._rows, [release])
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

    def take_records(self, records: str, dataset: str) -> None:
        """From here on the ledger is for the records with this fingerprint, of this data set."""
        self._note({"entry": RECORDS, "records": records, "dataset": dataset})
        self.dataset = dataset

    def _note(self, entry: dict[str, Any]) -> None:
        if self.path is None:
            raise LedgerError("a ledger in memory is for the records of one run")
        with self._locked(self.path) as file:
            self._catch_up(file)
            self._append(file, entry)

    def _append(self, file: FileIO, entry: dict[str, Any]) -> None:
        """Write a line and make it durable; the file must be locked and caught up with."""
        line, _ = _encode(entry, self._chain)
        try:
            if file.write(line) != len(line):
                raise OSError("the disk took only part of the line")
        except OSError as error:
            self._take_back(file)
            raise LedgerError(f"cannot write to ledger {self.path}: {error}") from error
        try:
            os.fsync(file.fileno())
        except OSError as error:  # the line stands in the file, and counts
            raise LedgerError(f"cannot write to ledger {self.path}: {error}") from error
        self._catch_up(file)

    def _take_back(self, file: FileIO) -> None:
        """Cut off what was written of a line, which would block the ledger; the lock is still
        held."""
        try:
            os.ftruncate(file.fileno(), self._size)
            os.fsync(file.fileno())
        except OSError as error:
            raise LedgerError(
                f"part of a line was written to ledger {self.path}, and cannot be taken back: "
                f"{error}; no release "
                f"was made for it: {_repair_command(self.path)}"
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
                file.write(_encode(header, "")[0])
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
            file = open_regular(path, writing=writing)
        except OSError as error:
            raise LedgerError(f"cannot open ledger {path}: {error}") from error
        with file:  # closing releases the lock
            lock(file, path, shared=not writing)
            yield file

    def _catch_up(self, file: FileIO | BytesIO) -> None:
        """Read and check the lines that were appended since the last look."""
        if file.seek(0, os.SEEK_END) < max(1, self._size):
            raise LedgerError(
                f"ledger {self.path} has lost lines, or is empty: an append-only file was edited"
            )
        file.seek(self._size)
        data = file.read()
        if data and not data.endswith(b"\n"):
            raise LedgerError(
                f"the last line of ledger {self.path} is torn, so that a charge was under way: "
                f"{_repair_command(self.path)} takes it out"
            )
        # Kept aside until all is read, so that an error leaves this object as it was.
        chain = self._chain
        rows = list(self._rows)
        facts = self._facts
        lines = data.splitlines()
        for number, line in enumerate(lines):
            entry, chain = self._decode(line, chain)
            if self._size == 0 and number == 0:
                facts = self._header(entry)
            elif "entry" in entry:
                facts = self._with(facts, entry, spent=bool(rows))
            else:
                rows.append(self._row(entry, len(rows) + 2))
        self._chain = chain
        self._rows = rows
        self._facts = facts
        self._size += len(data)

    def _header(self, header: dict[str, Any]) -> _Facts:
        dataset = header.get("dataset")
        if header.get("fedsynth_ledger") not in READABLE or not isinstance(dataset, str):
            raise LedgerError(f"{self.path} is no fedsynth ledger of schema {LEDGER_SCHEMA}")
        if header.get("client") != self.client:
            raise LedgerError(
                f"ledger {self.path} belongs to client {shown(header.get('client'))}, not "
                f"{shown(self.client)}"
            )
        records = (str(header["records"]),) if "records" in header else ()
        return _Facts(dataset, records, records)

    def _with(self, facts: _Facts, entry: dict[str, Any], *, spent: bool) -> _Facts:
        """What is known after a line that is no release."""
        if entry["entry"] == MAY_CHANGE:
            return replace(facts, may_change=True)
        if entry["entry"] == RECORDS and {"records", "dataset"} <= entry.keys():
            new = str(entry["records"])
            charged = (*facts.charged, new) if spent else (new,)
            return _Facts(str(entry["dataset"]), (*facts.records, new), charged)
        raise LedgerError(f"ledger {self.path} has an entry that this fedsynth does not know")

    def _row(self, entry: dict[str, Any], number: int) -> Release:
        try:
            return Release.from_json(entry)
        except PrivacySettingError as error:
            raise LedgerError(
                f"line {number} of ledger {self.path} is not a valid release: {error}"
            ) from error

    def _decode(self, line: bytes, chain: str) -> tuple[dict[str, Any], str]:
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise LedgerError(f"ledger {self.path} has a line that is not JSON: {error}") from error
        if not isinstance(entry, dict):
            raise LedgerError(f"ledger {self.path} has a line that is not a JSON object")
        stated = entry.pop("chain", None)
        expected = _encode(entry, chain)[1]
        if stated != expected:
            raise LedgerError(
                f"ledger {self.path} was edited, or is no fedsynth ledger: a line's hash does not "
                "match"
            )
        return entry, expected


def read_ledger(path: Path) -> Ledger:
    """An existing ledger file, whoever it belongs to.

    Raises:
        LedgerError: it cannot be read, or is damaged.
    """
    try:
        header = json.loads(read_regular(path).split(b"\n", 1)[0])
        return Ledger(str(header["client"]), path, dataset=None)
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise LedgerError(f"{path} is not a fedsynth ledger: {error}") from None


def check_content(path: Path, content: bytes) -> None:
    """Refuse what is no whole ledger.

    Args:
        path: of the ledger, for errors.
        content: what may be its bytes.

    Raises:
        LedgerError: it is damaged, or no ledger.
    """
    try:
        ledger = Ledger(str(json.loads(content.split(b"\n", 1)[0])["client"]))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise LedgerError(f"{path} is not a fedsynth ledger: {error}") from None
    ledger.path = path  # for messages
    ledger._catch_up(BytesIO(content))


def chain_hashes(path: Path) -> list[str]:
    """The chain hash on the header's line, and on each release's, of a ledger file that
    `read_ledger` accepts.

    Lines are only ever appended, so the hash on the n-th release's line names the first n, whatever
    has been added since.

    Raises:
        LedgerError: the file cannot be read.
    """
    try:
        lines = [json.loads(line) for line in read_regular(path).splitlines()]
        rows = [line for line in lines[1:] if "quantity" in line]  # a line may be no release
        return [str(line["chain"]) for line in (*lines[:1], *rows)]
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise LedgerError(f"{path} is not a fedsynth ledger: {error}") from None


def _repair_command(path: Path | None) -> str:
    return f"fedsynth privacy repair {shlex.quote(str(path))}"


def _encode(entry: dict[str, Any], chain: str) -> tuple[bytes, str]:
    """One line, and the hash over it and all lines before it."""
    digest = hashlib.sha256((chain + json.dumps(entry, sort_keys=True)).encode()).hexdigest()[:32]
    return json.dumps({**entry, "chain": digest}, allow_nan=False).encode() + b"\n", digest


@dataclass(frozen=True)
class Cap:
    """An owner's: so much ε at this δ, whatever a run's δ is."""

    epsilon: float
    delta: float


class Guard:
    """Refuses, before it happens, a release with which ε at `delta` would exceed `cap` (None: no
    cap), or ε at the owner's δ the owner's cap.

    It also knows the unit that is protected, which it writes into every row.

    Raises:
        PrivacySettingError: δ, the cap or the adjacency is out of range.
        LedgerError: the ledger holds releases of another unit.
    """

    def __init__(
        self,
        ledger: Ledger,
        delta: float,
        cap: float | None,
        adjacency: str = ADD_REMOVE,
        unit: str = RECORD,
        owner: Cap | None = None,
    ) -> None:
        check_delta(delta, None)
        check_adjacency(adjacency)
        own = [] if cap is None else [Cap(cap, delta)]
        self._caps = (*own, *([] if owner is None else [owner]))
        for one in self._caps:
            check_delta(one.delta, None)
            if not (one.epsilon > 0 and math.isfinite(one.epsilon)):
                raise PrivacySettingError(
                    "privacy",
                    "epsilon",
                    f"as a cap must be a finite number above 0, got {one.epsilon!r}",
                )
        self.ledger = ledger
        self.adjacency = adjacency
        self.unit = unit
        self.check_unit(ledger.releases)

    def check(self, planned: Sequence[Release]) -> None:
        """Raise BudgetExceededError if `planned`, on top of the ledger, exceeds the cap. Charges
        nothing."""
        self.refuse_beyond(self.ledger.releases, planned)

    def charge(self, release: Release) -> None:
        """Check and charge in one step (under one lock, where the ledger is a file)."""
        self.ledger.charge_within(replace(release, unit=self.unit), self)

    def refuse_beyond(self, rows: Sequence[Release], planned: Sequence[Release]) -> None:
        """`check`, against `rows` in place of the ledger's own."""
        self.check_unit(rows)
        for cap in self._caps:
            after = epsilon([*rows, *planned], cap.delta, self.adjacency)
            if after > cap.epsilon:
                now = epsilon(rows, cap.delta, self.adjacency)
                raise BudgetExceededError(
                    f"client {self.ledger.client!r}: epsilon is {up(now)} now and would be "
                    f"{up(after)} with the planned "
                    f"release, above the cap {cap.epsilon:g} (delta {cap.delta:g})"
                )

    def check_unit(self, rows: Sequence[Release]) -> None:
        """Refuse rows of another unit: a clip bounds one record's influence or one user's, and rows
        of both do not compose into one ε."""
        protecting = (row.unit for row in rows if row.unaccounted is None)
        other = next((unit for unit in protecting if unit != self.unit), None)
        if other is not None:
            raise LedgerError(
                Text(
                    f"the ledger of client {self.ledger.client!r} holds releases that protect a "
                    f"{other}, and this run would protect a {self.unit}: their costs do not add "
                    "up; protect the same unit (",
                    Setting("privacy", "unit", other),
                    ")",
                )
            )
