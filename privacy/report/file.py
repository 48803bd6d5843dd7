"""Functions that read privacy reports, other JSON files in run folders, and ledger rows.

All of these files are untrusted input.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from jinja2 import TemplateError

from fedsynth.errors import HOSTILE, LedgerError, PrivacyError, faults_as, short_repr
from fedsynth.files import load_json
from fedsynth.privacy.ledger import Ledger, read_ledger
from fedsynth.privacy.releases import Release
from fedsynth.privacy.report.figures import LedgerStart, Part, schema_problems

# The name of a file that only a guard's folder contains.
GUARD_SETTINGS = "guard.toml"

P = TypeVar("P", bound=Part)


class Problem(NamedTuple):
    """A contradiction found while verifying a report.

    Attributes:
        code: the place in the report or in the run folder, such as `guarantee.epsilon`,
            `ledger.rows` or `files.model.safetensors`. It is stable, unlike the text.
        text: the contradiction, as a sentence.
    """

    code: str
    text: str

    def __str__(self) -> str:
        return self.text


def read_report(path: Path) -> dict[str, Any]:
    """Reads a JSON report without checking its keys.

    Args:
        path: the report's file, or a run folder that contains it.

    Raises:
        PrivacyError: there is no report, or it cannot be read.
    """
    file = path / "privacy_report.json" if path.is_dir() else path
    return read_json(file, "privacy report")


def sound_report(path: Path) -> dict[str, Any]:
    """Reads a report, and checks that all keys are present and have the right types.

    Such a report can be rendered. Its values are not verified.

    Raises:
        PrivacyError: there is no report, or it is damaged.
    """
    report = read_report(path)
    problems = schema_problems(report)
    if problems:
        raise PrivacyError(f"the report at {path} is damaged: {'; '.join(problems)}")
    return report


@contextmanager
def damage_as_error(message: str) -> Iterator[None]:
    """Converts exceptions caused by damaged files to a PrivacyError.

    Args:
        message: the beginning of the message of the PrivacyError.
    """
    try:
        yield
    except (*HOSTILE, TemplateError, RuntimeError) as error:  # torch raises RuntimeErrors
        raise PrivacyError(f"{message}: {short_repr(error)}") from None


def read_json(file: Path, what: str) -> dict[str, Any]:
    """Reads a JSON object from an untrusted file.

    NaN, infinities, duplicate keys and halves of surrogate pairs are refused.

    Args:
        file: the path of the file.
        what: the kind of file, for error messages, such as "privacy report".

    Raises:
        PrivacyError: the file cannot be read or does not contain a JSON object.
    """
    fault = "the content must be a JSON object"
    try:
        value = load_json(file)
        if isinstance(value, dict):
            return value
    except OSError as error:
        raise damaged(file, f"cannot read the {what} {file}: {error.strerror}") from None
    except (ValueError, MemoryError) as error:
        fault = str(error)
    raise damaged(file, f"{file} is not a valid {what}: {fault}")


def damaged(file: Path, text: str) -> PrivacyError:
    """Returns the error for a damaged file. Its code names the file."""
    return PrivacyError(text).with_code(f"files.{file.name}")


def read_part(file: Path, kind: str, shape: type[P]) -> P:
    """Reads an untrusted JSON file and checks its keys and types.

    Args:
        file: the path of the file.
        kind: the kind of file, for error messages.
        shape: the data model with the expected keys and types.

    Raises:
        PrivacyError: the file cannot be read, or a key or type is wrong.
    """
    with faults_as(partial(damaged, file), file.name):
        return shape.model_validate(read_json(file, kind))


@dataclass(frozen=True)
class LedgerRows:
    """The ledger rows from which a report was computed.

    Attributes:
        rows: a mapping from each client to its rows.
        ledgers: a mapping from each client that has a ledger file to its ledger.
        problems: the differences between the ledger files and the report.
        note: a sentence that states which files were compared. Empty if there are no files.
    """

    rows: dict[str, tuple[Release, ...]]
    ledgers: Mapping[str, Ledger] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    note: str = ""

    def begins_with(self, client: str, start: LedgerStart) -> bool:
        """Checks that a client's ledger file begins with the rows identified by `start`.

        Returns:
            True if the chain hash after these rows is the one in `start`. Also True if the client
            has no ledger file or the file has fewer rows, because nothing can be compared then.
        """
        if client not in self.ledgers:
            return True
        chains = self.ledgers[client].lines.chains
        return start.rows >= len(chains) or chains[start.rows] == start.chain


def read_ledger_rows(report: Mapping[str, Any], files: Path | None, *, exact: bool) -> LedgerRows:
    """Reads a report's ledger rows, and compares them with the report.

    Args:
        report: a report that `schema_problems` has found valid.
        files: the folder of the ledger files. None uses the rows that the report itself contains.
        exact: True if the files must contain exactly the rows of the report. False if they may
            contain later rows, because the ledgers are kept across runs.

    Raises:
        PrivacyError: the ledger section of the report is damaged.
    """
    heads = report["ledger_heads"]
    stated = stated_rows(report)
    rows = {client: tuple(stated.get(client, ())) for client in heads}
    problems = []
    if files is None:
        for client, head in heads.items():
            if len(rows[client]) != head["rows"]:
                text = (
                    f"client {client}: the report's ledger section contains {len(rows[client])} "
                    f"rows, but ledger_heads states {head['rows']}"
                )
                problems.append(Problem("ledger.rows", text))
        return LedgerRows(rows, problems=problems)
    ledgers, damaged = _read_ledgers(files)
    if exact or not heads.keys() <= ledgers.keys():
        problems += damaged
    for client in heads:
        if client not in ledgers:
            problems.append(Problem("ledger.clients", f"{files} contains no ledger of {client}"))
    for client, ledger in ledgers.items():
        if client in heads:
            count, count_in_file = heads[client]["rows"], len(ledger.releases)
            rows[client] = ledger.releases[:count]
            if count > count_in_file or (exact and count < count_in_file):
                text = f"{client}'s ledger file contains {count_in_file} rows instead of {count}"
                problems.append(Problem("ledger.rows", text))
            elif ledger.lines.chains[count] != heads[client]["chain"]:
                text = f"the chain hash at row {count} of {client}'s ledger does not match"
                problems.append(Problem("ledger.chain", text))
        elif exact:
            text = f"{files} contains a ledger of {client}, but the report does not"
            problems.append(Problem("ledger.clients", text))
    note = f"the report's rows were compared with the ledger files in {files}"
    return LedgerRows(rows, ledgers, problems, note)


def stated_rows(report: Mapping[str, Any]) -> dict[str, list[Release]]:
    """Returns each client's ledger rows in the report.

    Raises:
        PrivacyError: the ledger section of the report is damaged.
    """
    rows: dict[str, list[Release]] = {}
    try:
        for entry in report["ledger"]:
            fields = dict(entry)
            rounds, clients = fields.pop("rounds"), fields.pop("clients")
            releases = [Release.from_json({**fields, "round": number}) for number in rounds]
            for client in clients:
                rows.setdefault(client, []).extend(releases)
    except (*HOSTILE, PrivacyError) as error:
        raise PrivacyError(f"the report's ledger section is damaged: {error}") from None
    return rows


def hash_of_files(files: Mapping[str, str]) -> str:
    """Returns a hash of several files' names and SHA-256 hashes."""
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def _read_ledgers(folder: Path) -> tuple[dict[str, Ledger], list[Problem]]:
    """Reads all ledgers in a folder.

    Returns:
        The ledgers by client, and a problem for each file that is damaged or has the wrong name.
    """
    ledgers: dict[str, Ledger] = {}
    problems: list[Problem] = []
    for path in sorted(folder.glob("*.jsonl")):
        try:
            ledger = read_ledger(path)
        except LedgerError as error:
            problems.append(Problem("ledger.file", str(error)))
            continue
        if path.stem == ledger.client:
            ledgers[ledger.client] = ledger
        else:
            text = (
                f"{path} contains the ledger of client {short_repr(ledger.client)}. Rename the "
                "file to the client's name"
            )
            problems.append(Problem("ledger.file", text))
    return ledgers, problems
