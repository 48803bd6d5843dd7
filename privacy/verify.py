"""Checks a privacy report: what it must say is built again, by the functions that build reports,
and compared as a whole.

A report follows from a context (public settings: `fedsynth.federation.outputs.verification` makes
it from a run folder's config.toml) and from ledger rows. So nothing here lists what to look at:
every key, figure and sentence must be the one that follows. What does not follow from anything is
named in `taken_as_stated`.

This checks bookkeeping. It does not, and cannot, attest that the noise was added.
"""

from __future__ import annotations

import json
import math
import re
import reprlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fedsynth.privacy import audit as audits
from fedsynth.privacy.errors import LedgerError, PrivacyError
from fedsynth.privacy.files import read_regular, read_text
from fedsynth.privacy.history import History
from fedsynth.privacy.ledger import Ledger, chain_hashes, read_ledger
from fedsynth.privacy.releases import Release
from fedsynth.privacy.report import (
    SCHEMA_VERSION,
    ReportContext,
    build_report,
    render_html,
    render_markdown,
)
from fedsynth.privacy.report_schema import faults, schema_problems
from fedsynth.privacy.wording import Setting, Text

TOLERANCE = 1e-6  # of figures that another version of the libraries may round differently
HOSTILE = (
    KeyError,
    TypeError,
    AttributeError,
    ValueError,
    IndexError,
    ArithmeticError,
    RecursionError,
    MemoryError,
)
"""What values that nobody foresaw may raise in code that is written for sound ones."""
HYPER_PARAMETERS = "public_items.hyper-parameters"
EARLIER_WORDS = {"--dp-ledger": "privacy.ledger", "--dp-unit user": "privacy.unit=user"}
"""How reports of earlier versions name a setting: by the command line's option."""
_COMMAND = re.compile(r"fedsynth privacy audit( [ -~]{0,2000})?")
_VERSION = re.compile(r"[0-9][0-9A-Za-z.+!_-]{0,63}")
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 120


@dataclass(frozen=True)
class Verification:
    """What was found.

    Attributes:
        problems: everything in which the report differs from what it must say; empty: it holds.
        notes: what was compared with what, and what had to be taken as stated.
    """

    problems: list[str]
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Held:
    """The ledger rows that a report speaks of.

    Attributes:
        rows: of each client, in the order of the file where there is one.
        chains: client → the chain hash over them, for the clients whose file is the one that the
            report speaks of.
        starts: client → the chain hash over the rows from before the run.
        data_sets: client → what its file says that it is of.
        problems: where files and report differ.
        note: which files were compared.
    """

    rows: dict[str, tuple[Release, ...]]
    chains: dict[str, str | None]
    starts: dict[str, str | None]
    data_sets: dict[str, str]
    problems: list[str]
    note: str


# ------------------------------------------------------------------------------------------ reading


def read_report(path: Path) -> dict[str, Any]:
    """The JSON report of a run folder, or from its own path; only its version is looked at.

    Raises:
        PrivacyError: there is none, or it is of another schema.
    """
    file = path / "privacy_report.json" if path.is_dir() else path
    report = read_json(file, "privacy report")
    version = report.get("schema_version")
    if version != SCHEMA_VERSION or type(version) is not int:
        raise PrivacyError(
            f"{file} has report schema {_SHORT.repr(version)}, and this fedsynth reads "
            f"{SCHEMA_VERSION}"
        )
    return report


def sound_report(path: Path) -> dict[str, Any]:
    """A report whose shape is right, so that it can be rendered; whether what it says is true is
    another matter.

    Raises:
        PrivacyError: there is none, or it is damaged.
    """
    report = read_report(path)
    problems = schema_problems(report)
    if problems:
        raise PrivacyError(f"the report at {path} is damaged: {'; '.join(problems)}")
    return report


def read_json(file: Path, what: str) -> dict[str, Any]:
    """A JSON object from a file that may come from anybody."""
    try:
        text = read_text(file)
    except OSError as error:
        raise PrivacyError(f"cannot read a {what} at {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise PrivacyError(f"{file} is not a {what}: it is not UTF-8") from None
    return parse_json(text, f"{file} is not a {what}")


def parse_json(text: str, complaint: str) -> dict[str, Any]:
    """A JSON object without NaN, infinities, a key twice, or half a character.

    Raises:
        PrivacyError: it is none; begins with `complaint`.
    """
    try:
        value = json.loads(
            text, parse_constant=_refuse, parse_float=_finite, object_pairs_hook=_distinct
        )
        json.dumps(value, ensure_ascii=False).encode()  # a lone surrogate cannot be written
    except (ValueError, RecursionError, MemoryError) as error:
        raise PrivacyError(f"{complaint}: {error}") from None
    if not isinstance(value, dict):
        raise PrivacyError(f"{complaint}: it is no JSON object")
    return value


def _refuse(literal: str) -> None:
    raise ValueError(f"{literal} is no number")


def _finite(literal: str) -> float:
    value = float(literal)
    if not math.isfinite(value):
        raise ValueError("a number is too large")
    return value


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key stands twice in one object")
    return found


# -------------------------------------------------------------------------------------- ledger rows


def unfolded(report: Mapping[str, Any]) -> dict[str, list[Release]]:
    """Each client's rows, from the folded ledger of the report, by round."""
    rows = _stated_rows(report)
    return {client: sorted(some, key=lambda row: row.round) for client, some in rows.items()}


def _stated_rows(report: Mapping[str, Any]) -> dict[str, list[Release]]:
    """The same in the order of the entries, which fold to the same entries again."""
    rows: dict[str, list[Release]] = {}
    apart = ("rounds", "clients", "noise_standard_deviation")
    try:
        for entry in report["ledger"]:
            if not entry["rounds"] or not entry["clients"]:
                raise KeyError("a ledger entry without rounds or clients")
            fields = {key: value for key, value in entry.items() if key not in apart}
            some = [Release.from_json({**fields, "round": number}) for number in entry["rounds"]]
            for client in entry["clients"]:
                rows.setdefault(client, []).extend(some)
    except (*HOSTILE, PrivacyError) as error:
        raise PrivacyError(f"the report's ledger section is damaged: {error}") from None
    return rows


def held_rows(report: Mapping[str, Any], files: Path | None, *, exact: bool) -> Held:
    """The rows that the report speaks of, from its ledger files.

    Args:
        files: folder of the ledger files; None: there is none to compare with, and the report's own
            rows are taken.
        exact: the files hold these rows and no others; else (a ledger that is kept over runs) they
            may have grown since.

    Raises:
        PrivacyError: the report's own ledger section is damaged.
    """
    heads = report["ledger_heads"]
    stated = _stated_rows(report)
    problems = [
        f"the report's ledger names {client}, its ledger_heads do not"
        for client in stated
        if client not in heads
    ]
    if files is None:
        note = Text(
            "no ledger file was compared: the ledger is kept elsewhere (",
            Setting(None, "ledger", "DIR"),
            ")",
        )
        rows = {client: tuple(stated.get(client, ())) for client in heads}
        problems += [
            f"{client}: the report has {len(rows[client])} rows, and its ledger head {head['rows']}"
            for client, head in heads.items()
            if head["rows"] != len(rows[client])
        ]
        chains = {client: head["chain"] for client, head in heads.items()}
        return Held(rows, chains, {}, {}, problems, note)
    found, bad = _ledgers_in(files)
    if exact or not set(heads) <= set(found):
        problems += bad
    if exact:
        problems += [
            f"{files} has a ledger of {client}, whom the report does not name"
            for client in found
            if client not in heads
        ]
    held = Held(
        {}, {}, {}, {}, problems, f"its rows were compared with the ledger files in {files}"
    )
    for client, head in heads.items():
        own = tuple(stated.get(client, ()))
        if client in found:
            ledger, hashes = found[client]
            held.data_sets[client] = ledger.dataset
            _compare_file(held, client, head, own, ledger.releases, hashes, exact)
        else:
            problems.append(f"{files} has no ledger of {client}")
            held.rows[client] = own
    return held


def _ledgers_in(folder: Path) -> tuple[dict[str, tuple[Ledger, list[str]]], list[str]]:
    """Ledgers and their chain hashes by client, and what is wrong with files."""
    found: dict[str, tuple[Ledger, list[str]]] = {}
    problems: list[str] = []
    for path in sorted(folder.glob("*.jsonl")):
        try:
            ledger = read_ledger(path)
            hashes = chain_hashes(path)
        except LedgerError as error:
            problems.append(str(error))
            continue
        if path.stem == ledger.client:
            found[ledger.client] = ledger, hashes
        else:
            problems.append(f"{path} is the ledger of {_SHORT.repr(ledger.client)}")
    return found, problems


def _compare_file(
    held: Held,
    client: str,
    head: Mapping[str, Any],
    stated: tuple[Release, ...],
    file: tuple[Release, ...],
    hashes: list[str],
    exact: bool,
) -> None:
    """One client's file against the report's rows and head; fills in `held`."""
    count = head["rows"]
    before = head["rows_before"]
    held.rows[client] = stated
    if count > len(file) or (exact and count != len(file)):
        held.problems.append(
            f"{client}: the ledger file has {len(file)} rows, the report speaks of {count}"
        )
    elif hashes[count] != head["chain"]:
        held.problems.append(
            f"{client}: the chain hash of the ledger file's first {count} rows is not the "
            "report's: they are other rows"
        )
    else:
        held.chains[client] = hashes[count]
    if before <= min(count, len(file)):
        held.starts[client] = hashes[before]
    own = file if exact else file[:count]
    missing = Counter(stated) - Counter(own)
    more = Counter(own) - Counter(stated)
    held.problems.extend(
        f"{client}: the ledger file lacks {_row(row)}" for row in missing.elements()
    )
    held.problems.extend(
        f"{client}: the report lacks {_row(row)}, which the ledger file holds"
        for row in more.elements()
    )
    if not missing and not more:
        held.rows[client] = own


def _row(row: Release) -> str:
    return f"{_SHORT.repr(row.quantity)[1:-1]} of round {row.round}"


# ---------------------------------------------------------------------------------------- comparing


def report_problems(
    report: Mapping[str, Any], context: ReportContext, held: Held, folder: Path | None = None
) -> list[str]:
    """Everything in which a report differs from the one that follows from `context` and the rows.

    Args:
        report: of a sound shape (`schema_problems`).
        folder: holds its Markdown and HTML.
    """
    try:
        histories = [History(client, tuple(rows)) for client, rows in held.rows.items()]
        expected = build_report(context, histories)
    except (PrivacyError, ArithmeticError) as error:  # ArithmeticError: of absurdly large figures
        return [f"no report follows from this: {error}"]
    except ValidationError as error:  # the same, where they come out infinite
        return [f"no report follows from this: {line}" for line in faults(error)]
    for client, head in expected["ledger_heads"].items():  # type: ignore[attr-defined]
        head["chain"] = held.chains.get(client, report["ledger_heads"][client]["chain"])
    problems = [*_as_stated(report, expected), *differences("", expected, report)]
    problems += _worst_client(report)
    return problems + (_renderings(report, folder) if folder is not None else [])


def taken_as_stated(report: Mapping[str, Any]) -> list[str]:
    """What this report says that follows from nothing else."""
    names = [name for name in report["provenance"] if name != "config"]
    facts = [f"versions ({', '.join(names)})"] if names else []
    facts += _said_by_the_user(report)
    facts += ["the counts of the audit"] if isinstance(report["audit"], dict) else []
    return facts


def _said_by_the_user(report: Mapping[str, Any]) -> list[str]:
    run = report.get("run")
    if run is None:
        return []
    said = [name for name in ("id", "date", "responsible", "purpose", "sites") if run[name]]
    return [f"which run it is ({', '.join(said)})"] if said else []


def _as_stated(report: Mapping[str, Any], expected: dict[str, Any]) -> list[str]:
    """Moves into `expected` what can only be stated, and says where that is not what such a thing
    may be."""
    problems = []
    versions = dict(report["provenance"])
    if set(versions) == set(expected["provenance"]):
        for name, value in versions.items():
            if name != "config" and not _VERSION.fullmatch(value):
                problems.append(f"provenance.{name} is no version: {_SHORT.repr(value)}")
        own = expected["provenance"].get("config")
        expected["provenance"] = versions if own is None else {**versions, "config": own}
        if "dp-accounting" in versions:
            expected["accountant"]["library"] = f"dp-accounting {versions['dp-accounting']}"
    if isinstance(report["audit"], dict):
        problems += _audit(report["audit"], report)
        expected["audit"] = report["audit"]
    return problems


def _audit(stated: Mapping[str, Any], report: Mapping[str, Any]) -> list[str]:
    """An audit's bound must follow from its counts, and be of this method, mechanism and δ."""
    promise = report["guarantee"]
    same = {"method": report["method"], "mechanism": report["mechanism"]}
    same |= {} if promise is None else {"delta": promise["delta"]}
    problems = [
        text
        for key, value in same.items()
        for text in differences(f"audit.{key}", value, stated[key])
    ]
    counts = (stated["correct"], stated["guesses"], stated["canaries"])
    if not (0 < stated["confidence"] < 1 and 0 < stated["delta"] < 1):
        return [*problems, "audit: confidence and delta must be in (0, 1)"]
    try:
        bound = audits.epsilon_lower_bound(*counts, stated["delta"], stated["confidence"])
    except (*HOSTILE, PrivacyError) as error:
        return [*problems, f"audit: {error}"]
    if promise is not None and bound > promise["epsilon"]:
        problems.append(
            f"audit: ε is at least {bound:.6g}, and the report claims {promise['epsilon']:.6g}"
        )
    if not math.isclose(bound, stated["epsilon_lower_bound"], abs_tol=2e-4):
        problems.append(
            f"audit.epsilon_lower_bound says {_short(stated['epsilon_lower_bound'])}, its counts "
            f"give {bound:.6g}"
        )
    if not _COMMAND.fullmatch(stated["command"]):
        problems.append(f"audit.command is no audit's command: {_SHORT.repr(stated['command'])}")
    return [*problems, *differences("audit.text", audits.audit_text(stated), stated["text"])]


def _worst_client(report: Mapping[str, Any]) -> list[str]:
    """Of clients that have spent the same, any may be named the worst."""
    promise = report["guarantee"]
    if promise is None:
        return []
    spent = promise["epsilon_by_client"].get(promise["worst_client"])
    if spent is not None and _same(promise["epsilon"], spent):
        return []
    return [f"guarantee.worst_client {_SHORT.repr(promise['worst_client'])} has not spent the most"]


def _renderings(report: Mapping[str, Any], folder: Path) -> list[str]:
    """The Markdown and HTML beside the report must be made of it."""
    problems = []
    for ending, render in (("md", render_markdown), ("html", render_html)):
        file = folder / f"privacy_report.{ending}"
        try:
            if read_regular(file) != render(report).encode():
                problems.append(f"{file.name} does not say what the JSON report says")
        except OSError as error:
            problems.append(f"{file.name} cannot be read: {error.strerror}")
        except HOSTILE as error:
            problems.append(f"{file.name} cannot be made of the JSON report: {error}")
    return problems


def differences(where: str, expected: Any, stated: Any) -> list[str]:
    """Every leaf in which two JSON values differ; figures may differ by `TOLERANCE`.

    Hyper-parameters are a JSON object in a string: an earlier version may give them in another
    order.
    """
    if where == HYPER_PARAMETERS and isinstance(expected, str) and isinstance(stated, str):
        try:
            expected, stated = parse_json(expected, where), parse_json(stated, where)
        except PrivacyError as error:
            return [str(error)]
    if isinstance(expected, Mapping) and isinstance(stated, Mapping):
        keys = [*expected, *(key for key in stated if key not in expected)]
        missing = object()
        return [
            text
            for key in keys
            if f"{where}.{key}" != "guarantee.worst_client"  # checked apart
            for text in differences(
                f"{where}.{_key(key)}" if where else _key(key),
                expected.get(key, missing),
                stated.get(key, missing),
            )
        ]
    if isinstance(expected, list) and isinstance(stated, list):
        if len(expected) != len(stated):
            return [f"{where} has {len(stated)} entries, and should have {len(expected)}"]
        pairs = enumerate(zip(expected, stated, strict=True))
        return [
            text for number, (a, b) in pairs for text in differences(f"{where}[{number}]", a, b)
        ]
    small = 0.0 if where.rpartition(".")[2] == "delta" else 1e-12  # δ may be that small itself
    if _same(expected, stated, small):
        return []
    return [f"{where} says {_short(stated)}, and should say {_short(expected)}"]


def _key(key: Any) -> str:
    text = str(key)
    return text if len(text) <= 80 and text.isprintable() else _SHORT.repr(text)


def _same(expected: Any, stated: Any, small: float = 1e-12) -> bool:
    if isinstance(expected, float) and type(stated) in (int, float):
        try:
            return math.isclose(expected, stated, rel_tol=TOLERANCE, abs_tol=small)
        except OverflowError:
            return False
    if isinstance(stated, str):
        for earlier, now in EARLIER_WORDS.items():
            stated = stated.replace(earlier, now)
    return type(expected) is type(stated) and bool(expected == stated)


def _short(value: Any) -> str:
    if type(value) is object:
        return "nothing"
    return f"{value:.6g}" if isinstance(value, float) else _SHORT.repr(value)
