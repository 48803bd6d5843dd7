"""The check of a privacy report: its figures are recomputed and compared.

A report follows from public facts (`fedsynth.results.verification` derives them from a
run folder) and from ledger rows. Every key and figure must equal the derived one; `taken_as_stated`
lists the figures that cannot be derived. The pages are rendered again and compared if the installed
renderers are those that made them.

This checks bookkeeping. It cannot attest that the noise was added.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fedsynth.privacy.audit import epsilon_lower_bound
from fedsynth.privacy.errors import PrivacyError
from fedsynth.privacy.files import read_regular
from fedsynth.privacy.ledger.history import History
from fedsynth.privacy.report.build import NAME, build_report
from fedsynth.privacy.report.figures import ReportFacts, faults
from fedsynth.privacy.report.file import HOSTILE, SHORT, HeldRows
from fedsynth.privacy.report.pages import render_html, render_markdown, renderer_versions

TOLERANCE = 1e-6  # for figures that other versions of the libraries may round differently
_COMMAND = re.compile(r"fedsynth privacy audit( [ -~]{0,2000})?")
_VERSION = re.compile(r"[0-9][0-9A-Za-z.+!_-]{0,63}")


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
    ledger_rows: HeldRows,
    rows_before: Mapping[str, int],
) -> list[str]:
    """Returns all differences between a report and the one that follows from facts and rows.

    Args:
        report: a report of a valid shape (`schema_problems`).
        facts: the public facts.
        ledger_rows: the ledger rows.
        rows_before: client → number of rows in its ledger when the run began.
    """
    histories = []
    for client, rows in ledger_rows.rows.items():
        hashes = ledger_rows.chains(client)  # empty without a file: the stated hash counts then
        known = len(rows) < len(hashes)
        chain = hashes[len(rows)] if known else report["ledger_heads"][client]["chain"]
        histories.append(History(client, rows, chain))
    try:
        expected = build_report(facts, histories, rows_before)
    except (PrivacyError, ArithmeticError) as error:  # ArithmeticError: absurdly large figures
        return [f"no report can be built from this: {error}"]
    except ValidationError as error:  # the same, if they become infinite
        return [f"no report can be built from this: {line}" for line in faults(error)]
    problems = _versions(report, expected)
    if report["audit"] is not None:
        problems += _audit_problems(report["audit"], report)
        expected["audit"] = report["audit"]
    return [*problems, *differences("", expected, report)]


def taken_as_stated(report: Mapping[str, Any]) -> list[str]:
    """Returns the statements in the report that cannot be derived from anything else."""
    names = [name for name in report["provenance"] if name != "config"]
    stated = [name for name, value in report["run"].items() if value]
    facts = {
        f"versions ({', '.join(names)})": names,
        f"the identity of the run ({', '.join(stated)})": stated,
        "the run's warnings, and the results of the test of the clients' steps": True,
        "the counts of the audit": report["audit"] is not None,
    }
    return [fact for fact, present in facts.items() if present]


def page_problems(report: Mapping[str, Any], folder: Path) -> tuple[list[str], list[str]]:
    """Returns the differences between the report and the Markdown and HTML in a folder, and a note
    if they were not compared because other versions of the renderers made them.

    Args:
        report: a report of a valid shape.
        folder: the pages' folder.
    """
    stated = report["provenance"]
    other = [
        f"{name} {SHORT.repr(stated.get(name))[1:-1]}"
        for name, installed in renderer_versions().items()
        if stated.get(name) != installed
    ]
    if other:
        made_by = ", ".join(other)
        return [], [f"{NAME}.md and .html were not compared: they were rendered by {made_by}"]
    problems = []
    for ending, render in (("md", render_markdown), ("html", render_html)):
        file = folder / f"{NAME}.{ending}"
        if not file.exists():  # reported with the folder's files
            continue
        try:
            if read_regular(file) != render(report).encode():
                problems.append(f"{file.name} differs from the JSON report")
        except OSError as error:
            problems.append(f"{file.name} cannot be read: {error.strerror}")
        except PrivacyError as error:
            problems.append(f"{file.name}: {error}")
    return problems, []


def _versions(report: Mapping[str, Any], expected: dict[str, Any]) -> list[str]:
    """Moves the stated versions into `expected`, and returns those that cannot be versions."""
    stated = report["provenance"]
    if set(stated) != set(expected["provenance"]):
        return []
    expected["provenance"] = {**stated, "config": expected["provenance"]["config"]}
    if "dp-accounting" in stated:
        expected["accountant"]["library"] = f"dp-accounting {stated['dp-accounting']}"
    return [
        f"provenance.{name} is not a version: {SHORT.repr(value)}"
        for name, value in stated.items()
        if name != "config" and not _VERSION.fullmatch(value)
    ]


def _audit_problems(stated: Mapping[str, Any], report: Mapping[str, Any]) -> list[str]:
    """Returns why an audit's bound does not follow from its counts, or belongs to another run."""
    same = {name: report[name] for name in ("method", "mechanism", "delta")}
    problems = differences("audit", same, {name: stated[name] for name in same})
    if not (0 < stated["confidence"] < 1 and 0 < stated["delta"] < 1):
        return [*problems, "audit: confidence and delta must be in (0, 1)"]
    counts = (stated["correct"], stated["guesses"], stated["canaries"])
    try:
        bound = epsilon_lower_bound(*counts, stated["delta"], stated["confidence"])
    except (*HOSTILE, PrivacyError) as error:
        return [*problems, f"audit: {error}"]
    promise = report["guarantee"]
    if promise is not None and bound > promise["epsilon"]:
        problems.append(
            f"audit: ε is at least {bound:.6g}, but the report claims {promise['epsilon']:.6g}"
        )
    if not math.isclose(bound, stated["epsilon_lower_bound"], abs_tol=2e-4):
        problems.append(
            f"audit.epsilon_lower_bound is {_short(stated['epsilon_lower_bound'])}, but its "
            f"counts result in {bound:.6g}"
        )
    if not _COMMAND.fullmatch(stated["command"]):
        problems.append(
            f"audit.command is not the command of an audit: {SHORT.repr(stated['command'])}"
        )
    return problems


_MISSING = object()


def differences(location: str, expected: Any, stated: Any) -> list[str]:
    """Returns every leaf in which two JSON values differ; figures may differ by `TOLERANCE`."""
    problems: list[str] = []
    if isinstance(expected, Mapping) and isinstance(stated, Mapping):
        for key in {**expected, **stated}:
            path = f"{location}.{_key(key)}" if location else _key(key)
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
    return [f"{location} is {_short(stated)}, but should be {_short(expected)}"]


def _key(key: Any) -> str:
    text = str(key)
    return text if len(text) <= 80 and text.isprintable() else SHORT.repr(text)


def _same(expected: Any, stated: Any, small: float) -> bool:
    if isinstance(expected, float) and type(stated) in (int, float):
        try:
            return math.isclose(expected, stated, rel_tol=TOLERANCE, abs_tol=small)
        except OverflowError:
            return False
    return type(expected) is type(stated) and bool(expected == stated)


def _short(value: Any) -> str:
    if value is _MISSING:
        return "nothing"
    return f"{value:.6g}" if isinstance(value, float) else SHORT.repr(value)
