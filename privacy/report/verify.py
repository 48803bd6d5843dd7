"""The check of a privacy report: its figures are recomputed and compared.

A report follows from public facts (`fedsynth.results.verification` derives them from a
run folder) and from ledger rows. Every key and figure must equal the derived one; what cannot be
derived is taken as stated. The pages are rendered again and compared if the installed
renderers are those that made them.

This checks bookkeeping. It cannot attest that the noise was added.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fedsynth.privacy.audit import epsilon_lower_bound
from fedsynth.privacy.errors import PrivacyError, short_repr
from fedsynth.privacy.files import read_regular
from fedsynth.privacy.ledger.ledger import History
from fedsynth.privacy.report.build import NAME, build_report
from fedsynth.privacy.report.figures import LedgerStart, ReportFacts, faults, short_key
from fedsynth.privacy.report.file import HOSTILE, LedgerRows
from fedsynth.privacy.report.pages import render_html, render_markdown, renderer_versions

TOLERANCE = 1e-6  # for figures that other versions of the libraries may round differently
AUDIT_TOLERANCE = 2e-4  # twice the precision to which an audit's bound is computed


@dataclass(frozen=True)
class Verification:
    """The result of a verification.

    Attributes:
        problems: every difference; empty: the report is correct.
        notes: what was compared, and what could only be taken as stated.
    """

    problems: list[str]
    notes: list[str] = field(default_factory=list)


def report_problems(
    report: Mapping[str, Any],
    facts: ReportFacts,
    ledger_rows: LedgerRows,
    initial: Mapping[str, LedgerStart],
) -> list[str]:
    """Returns all differences between a report and the one that follows from facts and rows.

    Args:
        report: a report of a valid shape (`schema_problems`).
        facts: the public facts.
        ledger_rows: the ledger rows.
        initial: client → its ledger when the run began.
    """
    histories = []
    for client, rows in ledger_rows.rows.items():  # their chain hashes have been compared
        histories.append(History(client, rows, report["ledger_heads"][client]["chain"]))
    try:
        expected = build_report(facts, histories, initial)
    except (PrivacyError, ArithmeticError) as error:  # ArithmeticError: absurdly large figures
        return [f"no report can be built from this: {error}"]
    except ValidationError as error:  # the same, if they become infinite
        return [f"no report can be built from this: {line}" for line in faults(error)]
    stated = report["provenance"]
    if stated.keys() == expected["provenance"].keys():  # versions are taken as stated
        expected["provenance"] = {**stated, "config": expected["provenance"]["config"]}
        if "dp-accounting" in stated:
            expected["accountant"]["library"] = f"dp-accounting {stated['dp-accounting']}"
    problems = []
    if report["audit"] is not None:
        try:
            expected["audit"] = _expected_audit(report["audit"], report)
        except (*HOSTILE, PrivacyError) as error:
            return [f"audit: {error}"]
        bound = expected["audit"]["epsilon_lower_bound"]
        if report["guarantee"] is not None and bound > report["guarantee"]["epsilon"]:
            problems.append(f"audit: ε is at least {bound:.6g}, which is above the report's ε")
    return [*problems, *differences("", expected, report)]


def _expected_audit(stated: Mapping[str, Any], report: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what the audit of this report must state, given its counts."""
    counts = (stated["correct"], stated["guesses"], stated["canaries"])
    bound = epsilon_lower_bound(*counts, stated["delta"], stated["confidence"])
    if math.isclose(bound, stated["epsilon_lower_bound"], abs_tol=AUDIT_TOLERANCE):
        bound = stated["epsilon_lower_bound"]
    same = {name: report[name] for name in ("method", "mechanism", "delta")}
    return {**stated, **same, "epsilon_lower_bound": bound}


def page_problems(report: Mapping[str, Any], folder: Path) -> tuple[list[str], list[str]]:
    """Returns the differences between the report and the Markdown and HTML in a folder, and a note
    if they were not compared because other versions of the renderers made them.

    Args:
        report: a report of a valid shape.
        folder: the pages' folder; missing pages are ignored.
    """
    for name, installed in renderer_versions().items():
        version = report["provenance"].get(name)
        if version != installed:
            return [], [f"{NAME}.md and .html were not compared: they are of {name} {version}"]
    problems = []
    for ending, render in (("md", render_markdown), ("html", render_html)):
        file = folder / f"{NAME}.{ending}"
        try:
            if file.exists() and read_regular(file) != render(report).encode():
                problems.append(f"{file.name} differs from the JSON report")
        except OSError as error:
            problems.append(f"{file.name} cannot be read: {error.strerror}")
        except PrivacyError as error:
            problems.append(f"{file.name}: {error}")
    return problems, []


_MISSING = object()


def differences(location: str, expected: Any, stated: Any) -> list[str]:
    """Returns every leaf in which two JSON values differ; figures may differ by `TOLERANCE`."""
    problems: list[str] = []
    if isinstance(expected, Mapping) and isinstance(stated, Mapping):
        for key in {**expected, **stated}:
            path = ".".join(filter(None, (location, short_key(str(key)))))
            problems += differences(path, expected.get(key, _MISSING), stated.get(key, _MISSING))
        return problems
    if isinstance(expected, list) and isinstance(stated, list):
        if len(expected) != len(stated):
            return [f"{location} has {len(stated)} entries, but should have {len(expected)}"]
        for number, (entry, other) in enumerate(zip(expected, stated, strict=True)):
            problems += differences(f"{location}[{number}]", entry, other)
        return problems
    small = 0.0 if location.rpartition(".")[2] == "delta" else 1e-12  # δ may be that small itself
    if _same(expected, stated, small):
        return []
    return [f"{location} is {_text(stated)}, but should be {_text(expected)}"]


def _same(expected: Any, stated: Any, small: float) -> bool:
    if isinstance(expected, float) and type(stated) in (int, float):
        try:
            return math.isclose(expected, stated, rel_tol=TOLERANCE, abs_tol=small)
        except OverflowError:
            return False
    return type(expected) is type(stated) and bool(expected == stated)


def _text(value: Any) -> str:
    if value is _MISSING:
        return "nothing"
    if isinstance(value, float):
        return f"{value:.6g}"
    return short_repr(value)
