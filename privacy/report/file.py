"""Reading of a privacy report, other JSON files of a run folder, and the ledger rows that a report
is about. All of them are untrusted input."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from jinja2 import TemplateError

from fedsynth.privacy.errors import LedgerError, PrivacyError, short_repr
from fedsynth.privacy.files import decode_json, read_text
from fedsynth.privacy.ledger import Ledger, read_ledger
from fedsynth.privacy.releases import Release
from fedsynth.privacy.report.figures import SCHEMA_VERSION, LedgerStart, Part, schema_problems

P = TypeVar("P", bound=Part)
HOSTILE = (
    *(LookupError, TypeError, AttributeError, ValueError),
    *(ArithmeticError, RecursionError, MemoryError),
)
"""The exceptions that unforeseen values may raise in code that expects valid ones."""


def read_report(path: Path) -> dict[str, Any]:
    """Returns the JSON report in a run folder or at its own path; checks only its version.

    Raises:
        PrivacyError: there is none, or it has another schema version.
    """
    file = path / "privacy_report.json" if path.is_dir() else path
    report = read_json(file, "privacy report")
    version = report.get("schema_version")
    if version != SCHEMA_VERSION or type(version) is not int:
        raise PrivacyError(f"{file} has report schema {short_repr(version)}, not {SCHEMA_VERSION}")
    return report


def sound_report(path: Path) -> dict[str, Any]:
    """Returns a report whose shape is valid, so that it can be rendered. Its values are not
    verified.

    Raises:
        PrivacyError: there is none, or it is damaged.
    """
    report = read_report(path)
    problems = schema_problems(report)
    if problems:
        raise PrivacyError(f"the report at {path} is damaged: {'; '.join(problems)}")
    return report


@contextmanager
def damage_as_error(message: str) -> Iterator[None]:
    """Converts the exceptions that the code for sound files raises on damaged ones into
    PrivacyError.

    Args:
        message: the beginning of the error's message.
    """
    try:
        yield
    except (*HOSTILE, TemplateError, RuntimeError) as error:  # torch raises RuntimeErrors
        raise PrivacyError(f"{message}: {short_repr(error)}") from None


def read_json(file: Path, what: str) -> dict[str, Any]:
    """Returns the JSON object in an untrusted file.

    Args:
        file: the file's path.
        what: the file's kind, for errors.

    Raises:
        PrivacyError: it cannot be read, or is not a JSON object.
    """
    try:
        text = read_text(file)
    except OSError as error:
        raise PrivacyError(f"cannot read a {what} at {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise PrivacyError(f"{file} is not a {what}: it is not UTF-8") from None
    return parse_json(text, f"{file} is not a {what}")


def read_part(file: Path, kind: str, shape: type[P]) -> P:
    """Returns the content of an untrusted JSON file with this shape.

    Raises:
        PrivacyError: it cannot be read, or has another shape.
    """
    content = read_json(file, kind)
    for problem in schema_problems(content, shape):
        raise PrivacyError(f"{file.name}: {problem}")
    return shape.model_validate(content)


def parse_json(text: str, complaint: str) -> dict[str, Any]:
    """Returns a JSON object without NaN, infinities, duplicate keys or lone surrogates.

    Raises:
        PrivacyError: the text is not such an object; the message begins with `complaint`.
    """
    try:
        value = decode_json(text)
    except (ValueError, MemoryError) as error:
        raise PrivacyError(f"{complaint}: {error}") from None
    if not isinstance(value, dict):
        raise PrivacyError(f"{complaint}: it is not a JSON object")
    return value


@dataclass(frozen=True)
class LedgerRows:
    """The ledger rows that a report is about.

    Attributes:
        rows: client → its rows.
        ledgers: client → its file's ledger, for clients with a file.
        problems: the differences between files and report.
        note: what was compared; empty: no file.
    """

    rows: dict[str, tuple[Release, ...]]
    ledgers: Mapping[str, Ledger] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    note: str = ""

    def begins_with(self, client: str, start: LedgerStart) -> bool:
        """Returns whether a client's file, if any, has the chain hash that `start` states for its
        first rows."""
        if client not in self.ledgers:
            return True
        chains = self.ledgers[client].chains
        return start.rows >= len(chains) or chains[start.rows] == start.chain


def read_ledger_rows(report: Mapping[str, Any], files: Path | None, *, exact: bool) -> LedgerRows:
    """Returns the rows that the report is about.

    Args:
        report: a report of a valid shape.
        files: the folder of the ledger files; None: there is none, and the report's own rows are
            used.
        exact: the files must hold exactly these rows; otherwise (a ledger that is kept across runs)
            they may have grown since.

    Raises:
        PrivacyError: the report's own ledger section is damaged.
    """
    heads = report["ledger_heads"]
    stated = stated_rows(report)
    rows = {client: tuple(stated.get(client, ())) for client in heads}
    problems = []
    if files is None:
        for client, head in heads.items():
            if len(rows[client]) != head["rows"]:
                other = f"its ledger head states {head['rows']}"
                problems.append(f"{client}: the report has {len(rows[client])} rows, but {other}")
        return LedgerRows(rows, problems=problems)
    ledgers, damaged = _read_ledgers(files)
    if exact or not heads.keys() <= ledgers.keys():
        problems += damaged
    for client in heads:
        if client not in ledgers:
            problems.append(f"{files} has no ledger of {client}")
    for client, ledger in ledgers.items():
        if client in heads:
            count, count_in_file = heads[client]["rows"], len(ledger.releases)
            rows[client] = ledger.releases if exact else ledger.releases[:count]
            if count > count_in_file or (exact and count < count_in_file):
                other = f"the report states {count}"
                problems.append(f"{client}: the ledger file has {count_in_file} rows, but {other}")
            elif ledger.chains[count] != heads[client]["chain"]:
                rows_in_file = f"the ledger file's first {count} rows"
                problems.append(f"{client}: {rows_in_file} differ from the report's chain hash")
        elif exact:
            problems.append(f"{files} has a ledger of {client}, which the report lacks")
    note = f"the report's rows were compared with the ledger files in {files}"
    return LedgerRows(rows, ledgers, problems, note)


def stated_rows(report: Mapping[str, Any]) -> dict[str, list[Release]]:
    """Returns each client's rows, expanded from the report's ledger section.

    Raises:
        PrivacyError: the section is damaged.
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


def _read_ledgers(folder: Path) -> tuple[dict[str, Ledger], list[str]]:
    """Returns the ledgers in a folder by client, and problems with files."""
    ledgers: dict[str, Ledger] = {}
    problems: list[str] = []
    for path in sorted(folder.glob("*.jsonl")):
        try:
            ledger = read_ledger(path)
        except LedgerError as error:
            problems.append(str(error))
            continue
        if path.stem == ledger.client:
            ledgers[ledger.client] = ledger
        else:
            problems.append(f"{path} is the ledger of {short_repr(ledger.client)}")
    return ledgers, problems
