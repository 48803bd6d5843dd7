"""Checks a privacy report: what it must say is built again, by the functions that build reports,
and compared as a whole.

A report follows from a context (public settings: `fedsynth.federation.outputs.verification` makes
it from a run folder's config.toml) and from ledger rows. So nothing here lists what to look at:
every key, figure and sentence must be the one that follows. What does not follow from anything is
named in `taken_as_stated`.

This checks bookkeeping. It does not, and cannot, attest that the noise was added.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fedsynth.privacy import audit as audits
from fedsynth.privacy.errors import PrivacyError
from fedsynth.privacy.files import read_regular
from fedsynth.privacy.held_rows import Held
from fedsynth.privacy.history import History
from fedsynth.privacy.report import build_report, render_html, render_markdown
from fedsynth.privacy.report_file import HOSTILE, SHORT
from fedsynth.privacy.report_inputs import ReportContext
from fedsynth.privacy.report_schema import faults

TOLERANCE = 1e-6  # of figures that another version of the libraries may round differently
_COMMAND = re.compile(r"fedsynth privacy audit( [ -~]{0,2000})?")
_VERSION = re.compile(r"[0-9][0-9A-Za-z.+!_-]{0,63}")


@dataclass(frozen=True)
class Verification:
    """What was found.

    Attributes:
        problems: everything in which the report differs from what it must say; empty: it holds.
        notes: what was compared with what, and what had to be taken as stated.
    """

    problems: list[str]
    notes: list[str] = field(default_factory=list)


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
    facts += ["what a trial of the clients' steps found (verdict.warnings)"]
    return facts


def _said_by_the_user(report: Mapping[str, Any]) -> list[str]:
    run = report["run"]
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
                problems.append(f"provenance.{name} is no version: {SHORT.repr(value)}")
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
        problems.append(f"audit.command is no audit's command: {SHORT.repr(stated['command'])}")
    return [*problems, *differences("audit.text", audits.audit_text(stated), stated["text"])]


def _worst_client(report: Mapping[str, Any]) -> list[str]:
    """Of clients that have spent the same, any may be named the worst."""
    promise = report["guarantee"]
    if promise is None:
        return []
    spent = promise["epsilon_by_client"].get(promise["worst_client"])
    if spent is not None and _same(promise["epsilon"], spent):
        return []
    return [f"guarantee.worst_client {SHORT.repr(promise['worst_client'])} has not spent the most"]


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
    """Every leaf in which two JSON values differ; figures may differ by `TOLERANCE`."""
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
    return text if len(text) <= 80 and text.isprintable() else SHORT.repr(text)


def _same(expected: Any, stated: Any, small: float = 1e-12) -> bool:
    if isinstance(expected, float) and type(stated) in (int, float):
        try:
            return math.isclose(expected, stated, rel_tol=TOLERANCE, abs_tol=small)
        except OverflowError:
            return False
    return type(expected) is type(stated) and bool(expected == stated)


def _short(value: Any) -> str:
    if type(value) is object:
        return "nothing"
    return f"{value:.6g}" if isinstance(value, float) else SHORT.repr(value)
