"""Checks a privacy report: ε and all that follows from it, computed again from its ledger rows, and those rows against ledger files.

This checks arithmetic and bookkeeping. It does not, and cannot, attest that the noise was added.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedsynth.privacy import report_sections as sections
from fedsynth.privacy.errors import PrivacyError, PrivacySettingError
from fedsynth.privacy.ledger import read_ledger
from fedsynth.privacy.releases import ADJACENCIES, Release, check_delta
from fedsynth.privacy.report import (
    FORMAL,
    NO_GUARANTEE,
    NOT_PRIVATE,
    SCHEMA_VERSION,
    protected_unit,
    render_html,
    render_markdown,
)

TOLERANCE = 1e-6  # of figures that another version of the libraries may round differently


@dataclass(frozen=True)
class Verification:
    """What was found.

    Attributes:
        problems: everything in which the report differs from what its ledger gives; empty: it holds.
        files: a sentence on which ledger files were compared, if any.
    """

    problems: list[str]
    files: str


def verify_report(path: Path, ledger: Path | None = None) -> Verification:
    """Checks a report.

    Args:
        path: a run folder or its privacy_report.json.
        ledger: folder of the clients' ledger files; None takes `ledger/` beside the report, where a run without a kept ledger has it.

    Raises:
        PrivacyError: no readable report of this schema, or a damaged ledger.
    """
    report, folder = read_report(path), path if path.is_dir() else path.parent
    try:
        rows = unfolded(report)
        problems = [
            *_consistency(report, rows),
            *_figures(report, rows),
            *_renderings(report, folder),
        ]
        kept = bool(report["ledger_kept"])
    except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
        raise PrivacyError(f"the report at {path} is damaged: {error!r}") from None
    files = ledger if ledger is not None else folder / "ledger"
    if files.is_dir():
        return Verification(
            [*problems, *_files(rows, files, kept)],
            f"its rows were compared with the ledger files in {files}",
        )
    if ledger is not None or not kept:
        problems.append(f"there is no ledger folder {files}")
    return Verification(
        problems, "no ledger file was compared: the ledger is kept elsewhere (--ledger DIR)"
    )


def read_report(path: Path) -> dict[str, Any]:
    """The JSON report of a run folder, or from its own path."""
    file = path / "privacy_report.json" if path.is_dir() else path
    try:
        report: dict[str, Any] = json.loads(
            file.read_text(encoding="utf-8"), parse_constant=_refuse
        )
        version = report["schema_version"]
    except OSError as error:
        raise PrivacyError(f"cannot read a privacy report at {file}: {error.strerror}") from None
    except (ValueError, TypeError, KeyError):
        raise PrivacyError(f"{file} is not a privacy report") from None
    if version != SCHEMA_VERSION:
        raise PrivacyError(
            f"{file} has report schema {version}, and this fedsynth reads {SCHEMA_VERSION}"
        )
    return report


def _refuse(literal: str) -> None:
    raise ValueError(f"{literal} is no number of a report")


def unfolded(report: Mapping[str, Any]) -> dict[str, list[Release]]:
    """Each client's rows, from the folded ledger of the report."""
    rows: dict[str, list[Release]] = {}
    try:
        for entry in report["ledger"]:
            if not entry["rounds"] or not entry["clients"]:
                raise KeyError("a ledger entry without rounds or clients")
            fields = {
                k: v
                for k, v in entry.items()
                if k not in ("rounds", "clients", "noise_standard_deviation")
            }
            for client in entry["clients"]:
                rows.setdefault(client, []).extend(
                    Release.from_json({**fields, "round": n}) for n in entry["rounds"]
                )
    except (KeyError, TypeError, AttributeError) as error:
        raise PrivacyError(f"the report's ledger section is damaged: {error!r}") from None
    return {client: sorted(some, key=lambda row: row.round) for client, some in rows.items()}


def _consistency(report: Mapping[str, Any], rows: Mapping[str, list[Release]]) -> list[str]:
    """Verdict, reasons, scope, mechanism and the presence of a guarantee must say the same."""
    verdict, promise = report["verdict"], report["guarantee"]
    against = [*verdict["reasons"], *sections.reasons_in_ledgers(rows)]
    against += [
        f"{s['access']} is unaccounted" for s in report["scope"] if s["status"] == "unaccounted"
    ]
    against += ["mechanism paper"] if report["mechanism"] == "paper" else []
    if promise is None:
        problems = (
            []
            if verdict["text"] in (NO_GUARANTEE, NOT_PRIVATE)
            else [f"without a guarantee the verdict is {verdict['text']!r}"]
        )
        problems += (
            ["without a guarantee the verdict calls itself formal"] if verdict["formal"] else []
        )
        return problems + (
            ["without a guarantee there is a budget"] if report["budget"] is not None else []
        )
    problems = [
        f"the report claims a guarantee, but this rules it out: {reason}" for reason in against
    ]
    if verdict["text"] != FORMAL or verdict["formal"] is not True:
        problems.append(f"the report has a guarantee, but its verdict is {verdict['text']!r}")
    if report["unit"] != protected_unit(True):
        problems.append("unit does not say what the guarantee protects")
    try:
        check_delta(promise["delta"], report["max_records"])
    except PrivacySettingError as error:
        problems.append(str(error))
    return problems


def _figures(report: Mapping[str, Any], rows: Mapping[str, list[Release]]) -> list[str]:
    promise, budget = report["guarantee"], report["budget"]
    if promise is None or sections.reasons_in_ledgers(rows):
        return []
    adjacency = next(
        (name for name, words in ADJACENCIES.items() if words == report["adjacency"]), None
    )
    if adjacency is None:
        return [f"the adjacency {report['adjacency']!r} is not one that this accountant knows"]
    quiet = [
        name for name in promise["epsilon_by_client"] if name not in rows
    ]  # a client that released nothing yet
    everybody: dict[str, list[Release]] = {**rows, **{name: [] for name in quiet}}
    expected = sections.guarantee(everybody, promise["delta"], adjacency)
    problems = _differences("guarantee", expected, promise)
    worst = promise.get("worst_client")
    if not _same(expected["epsilon"], expected["epsilon_by_client"].get(worst)):
        problems.append(f"guarantee.worst_client {worst!r} has not spent the most")
    rounds = (budget["planned_rounds"], budget["rounds_done"]) if budget is not None else (0, 0)
    cap = None if budget is None else budget["epsilon_cap"]
    problems += _differences("budget", sections.budget(expected["epsilon"], cap, *rounds), budget)
    if cap is not None and expected["epsilon"] > cap * (1 + TOLERANCE):
        problems.append(f"epsilon {expected['epsilon']:.6g} exceeds the cap {cap:g}")
    described = sections.accountant(
        everybody, expected["worst_client"], promise["delta"], adjacency
    )
    problems += _differences(
        "accountant.cross_check", described["cross_check"], report["accountant"].get("cross_check")
    )
    for entry in report["ledger"]:
        absolute = entry["noise_multiplier"] * entry["sensitivity"]
        if not _same(entry["noise_standard_deviation"], absolute):
            problems.append(
                f"ledger: {entry['quantity']} has noise {entry['noise_standard_deviation']}, σ·sensitivity is {absolute}"
            )
    return problems


def _renderings(report: Mapping[str, Any], folder: Path) -> list[str]:
    """The Markdown and HTML beside the report, where they are, must be made of it."""
    problems = []
    for ending, render in (("md", render_markdown), ("html", render_html)):
        file = folder / f"privacy_report.{ending}"
        if file.exists() and file.read_text(encoding="utf-8") != render(report):
            problems.append(f"{file.name} does not say what the JSON report says")
    return problems


def _differences(where: str, expected: Any, stated: Any) -> list[str]:
    """Every leaf in which two JSON values differ."""
    if isinstance(expected, Mapping) and isinstance(stated, Mapping):
        keys = [*expected, *(key for key in stated if key not in expected)]
        missing = object()
        return [
            text
            for key in keys
            for text in _differences(
                f"{where}.{key}", expected.get(key, missing), stated.get(key, missing)
            )
            if key
            != "worst_client"  # of clients that have spent the same, any may be named: checked apart
        ]
    if isinstance(expected, list) and isinstance(stated, list) and len(expected) == len(stated):
        pairs = enumerate(zip(expected, stated, strict=True))
        return [
            text for number, (a, b) in pairs for text in _differences(f"{where}[{number}]", a, b)
        ]
    return (
        []
        if _same(expected, stated)
        else [f"{where} says {_short(stated)}, the ledger gives {_short(expected)}"]
    )


def _same(expected: Any, stated: Any) -> bool:
    numbers = all(
        isinstance(v, int | float) and not isinstance(v, bool) for v in (expected, stated)
    )
    return (
        math.isclose(expected, stated, rel_tol=TOLERANCE, abs_tol=1e-12)
        if numbers
        else bool(expected == stated)
    )


def _short(value: Any) -> str:
    return (
        f"{value:.6g}"
        if isinstance(value, float)
        else "nothing"
        if type(value) is object
        else repr(value)
    )


def _files(rows: Mapping[str, list[Release]], folder: Path, kept: bool) -> list[str]:
    """The report's rows against the files'. A kept ledger may have grown since: its first rows count, as many as the report has."""
    problems: list[str] = []
    held: dict[str, tuple[Release, ...]] = {}
    for ledger in map(read_ledger, sorted(folder.glob("*.jsonl"))):
        if ledger.client in held:
            problems.append(f"{folder} has two ledgers of {ledger.client}")
        held[ledger.client] = ledger.releases
    for client in sorted({*rows, *held}):
        stated = rows.get(client, [])
        if client not in held:
            problems.append(f"{folder} has no ledger of {client}")
            continue
        file = held[client][: len(stated)] if kept else held[client]
        missing, more = Counter(stated) - Counter(file), Counter(file) - Counter(stated)
        problems += [
            f"{client}: the ledger file lacks {row.quantity} of round {row.round}"
            for row in missing
        ]
        problems += [
            f"{client}: the report lacks {row.quantity} of round {row.round}, which the ledger file holds"
            for row in more
        ]
    return problems
