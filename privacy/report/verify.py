"""Verification of a privacy report, by recomputing its figures.

A report is computed from public facts and from ledger rows. `fedsynth.results.verification` reads
the public facts from a run folder. Every key and figure of the report must equal the recomputed
one. Statements that cannot be recomputed are accepted as they are. The pages are rendered again and
compared, if the packages that rendered them are installed in the same versions.

The verification checks only the bookkeeping. It cannot show that the noise was really added.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fedsynth.errors import HOSTILE, PrivacyError, faults, short_key, short_repr
from fedsynth.files import read_regular
from fedsynth.privacy.audit_bounds import epsilon_lower_bound
from fedsynth.privacy.ledger.ledger import History
from fedsynth.privacy.report.build import NAME, build_report
from fedsynth.privacy.report.figures import LedgerStart, ReportFacts
from fedsynth.privacy.report.file import LedgerRows, Problem
from fedsynth.privacy.report.pages import render_html, render_markdown, renderer_versions

TOLERANCE = 1e-6  # for figures that other versions of the libraries may round differently
UNBUILDABLE = "the report cannot be rebuilt from its facts and ledger rows"
AUDIT_TOLERANCE = 2e-4  # twice the precision to which an audit's bound is computed


@dataclass(frozen=True)
class Verification:
    """The result of verifying a report.

    Attributes:
        problems: all differences that were found. Empty if the report is correct.
        notes: sentences that state which files were compared, and which statements of the report
            could not be checked.
    """

    problems: list[Problem]
    notes: list[str] = field(default_factory=list)


def report_problems(
    report: Mapping[str, Any],
    facts: ReportFacts,
    ledger_rows: LedgerRows,
    initial: Mapping[str, LedgerStart],
) -> list[Problem]:
    """Rebuilds a report from its facts and ledger rows, and lists the differences.

    Args:
        report: a report that `schema_problems` has found valid.
        facts: the public facts.
        ledger_rows: the ledger rows.
        initial: a mapping from each client to the state of its ledger when the run began.

    Returns:
        All differences.
    """
    histories = []
    for client, rows in ledger_rows.rows.items():  # their chain hashes have been compared
        histories.append(History(client, rows, report["ledger_heads"][client]["chain"]))
    try:
        expected = build_report(facts, histories, initial)
    except (PrivacyError, ArithmeticError) as error:  # ArithmeticError: absurdly large figures
        return [Problem("report", f"{UNBUILDABLE}: {error}")]
    except ValidationError as error:  # the same, if they become infinite
        return [Problem("report", f"{UNBUILDABLE}: {line}") for line in faults(error)]
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
            return [Problem("audit", f"the audit section is damaged: {error}")]
        bound = expected["audit"]["epsilon_lower_bound"]
        if report["guarantee"] is not None and bound > report["guarantee"]["epsilon"]:
            text = f"the audit's lower bound on ε is {bound:.6g}, above the stated ε"
            problems.append(Problem("audit", text))
    return [*problems, *differences("", expected, report)]


def _expected_audit(stated: Mapping[str, Any], report: Mapping[str, Any]) -> dict[str, Any]:
    """Computes the expected audit section from the report's counts."""
    counts = (stated["correct"], stated["guesses"], stated["canaries"])
    bound = epsilon_lower_bound(*counts, stated["delta"], stated["confidence"])
    if math.isclose(bound, stated["epsilon_lower_bound"], abs_tol=AUDIT_TOLERANCE):
        bound = stated["epsilon_lower_bound"]
    same = {name: report[name] for name in ("method", "mechanism", "delta")}
    return {**stated, **same, "epsilon_lower_bound": bound}


def page_problems(report: Mapping[str, Any], folder: Path) -> tuple[list[Problem], list[str]]:
    """Compares the Markdown and HTML pages in a folder with the report.

    The pages are not compared if other versions of jinja2 or markdown-it-py rendered them.

    Args:
        report: a report that `schema_problems` has found valid.
        folder: the folder of the pages. Missing pages are ignored.

    Returns:
        The differences, and a note if the pages were not compared.
    """
    for name, installed in renderer_versions().items():
        version = report["provenance"].get(name)
        if version != installed:
            reason = f"{name} {version} rendered the pages, but {installed} is installed"
            return [], [f"{NAME}.md and {NAME}.html were not compared: {reason}"]
    problems = []
    for ending, render in (("md", render_markdown), ("html", render_html)):
        file = folder / f"{NAME}.{ending}"
        try:
            if file.exists() and read_regular(file) != render(report).encode():
                problems.append(Problem(file.name, f"{file.name} does not match the JSON report"))
        except OSError as error:
            problems.append(Problem(file.name, f"{file.name} cannot be read: {error.strerror}"))
        except PrivacyError as error:
            problems.append(Problem(file.name, f"{file.name}: {error}"))
    return problems, []


_MISSING = object()


def differences(location: str, expected: Any, stated: Any) -> list[Problem]:
    """Lists all differences between two JSON values.

    Args:
        location: the path of the values within the report, which is the code of the problem.
        expected: the recomputed value.
        stated: the value in the report. A figure may differ by the relative error `TOLERANCE`.
    """
    problems: list[Problem] = []
    if isinstance(expected, Mapping) and isinstance(stated, Mapping):
        for key in {**expected, **stated}:
            path = ".".join(filter(None, (location, short_key(str(key)))))
            problems += differences(path, expected.get(key, _MISSING), stated.get(key, _MISSING))
        return problems
    if isinstance(expected, list) and isinstance(stated, list):
        if len(expected) != len(stated):
            text = f"{location} has {len(stated)} entries, but {len(expected)} are expected"
            return [Problem(location, text)]
        for number, (entry, other) in enumerate(zip(expected, stated, strict=True)):
            problems += differences(f"{location}[{number}]", entry, other)
        return problems
    small = 0.0 if location.rpartition(".")[2] == "delta" else 1e-12  # δ may be that small itself
    if _same(expected, stated, small):
        return []
    text = f"{location} is {_text(stated)}, but {_text(expected)} is expected"
    return [Problem(location, text)]


def _same(expected: Any, stated: Any, small: float) -> bool:
    if isinstance(expected, float) and type(stated) in (int, float):
        try:
            return math.isclose(expected, stated, rel_tol=TOLERANCE, abs_tol=small)
        except OverflowError:
            return False
    return type(expected) is type(stated) and bool(expected == stated)


def _text(value: Any) -> str:
    if value is _MISSING:
        return "missing"
    if isinstance(value, float):
        return f"{value:.6g}"
    return short_repr(value)
