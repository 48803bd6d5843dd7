"""Checks a privacy report: ε and all that follows from it, computed again from its ledger rows, and those rows against ledger files.

This checks arithmetic and bookkeeping. It does not, and cannot, attest that the noise was added.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedsynth.privacy import report_sections as sections
from fedsynth.privacy.accounting import ADJACENCIES, Release
from fedsynth.privacy.errors import PrivacyError
from fedsynth.privacy.ledger import read_ledger
from fedsynth.privacy.report import FORMAL, SCHEMA_VERSION

TOLERANCE = 1e-6  # of figures that another version of the libraries may round differently


def verify_report(path: Path, ledger: Path | None = None) -> list[str]:
    """Everything in which the report differs from what its ledger gives; empty: it holds.

    Args:
        path: a run folder or its privacy_report.json.
        ledger: folder of the clients' ledger files; None takes `ledger/` beside the report, if there is one.

    Raises:
        PrivacyError: no readable report of this schema, or a damaged ledger.
    """
    report = read_report(path)
    rows = unfolded(report)
    problems = _figures(report, rows)
    folder = ledger if ledger is not None else (path if path.is_dir() else path.parent) / "ledger"
    if folder.is_dir():
        problems += _files(rows, folder)
    elif ledger is not None:
        problems.append(f"there is no ledger folder {ledger}")
    return problems


def read_report(path: Path) -> dict[str, Any]:
    """The JSON report of a run folder, or from its own path."""
    file = path / "privacy_report.json" if path.is_dir() else path
    try:
        report: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        version = report["schema_version"]
    except OSError as error:
        raise PrivacyError(f"cannot read a privacy report at {file}: {error.strerror}") from None
    except (ValueError, TypeError, KeyError):
        raise PrivacyError(f"{file} is not a privacy report") from None
    if version != SCHEMA_VERSION:
        raise PrivacyError(f"{file} has report schema {version}, and this fedsynth reads {SCHEMA_VERSION}")
    return report


def unfolded(report: Mapping[str, Any]) -> dict[str, list[Release]]:
    """Each client's rows, from the folded ledger of the report."""
    rows: dict[str, list[Release]] = {}
    try:
        for entry in report["ledger"]:
            fields = {k: v for k, v in entry.items() if k not in ("rounds", "clients", "noise_standard_deviation")}
            for client in entry["clients"]:
                rows.setdefault(client, []).extend(Release.from_json({**fields, "round": n}) for n in entry["rounds"])
    except (KeyError, TypeError, AttributeError) as error:
        raise PrivacyError(f"the report's ledger section is damaged: {error!r}") from None
    return {client: sorted(some, key=lambda row: row.round) for client, some in rows.items()}


def _figures(report: Mapping[str, Any], rows: Mapping[str, list[Release]]) -> list[str]:
    reasons, promise = sections.reasons_in_ledgers(rows), report["guarantee"]
    if promise is None:
        return ["the report calls itself formal, but has no guarantee"] if report["verdict"]["text"] == FORMAL else []
    if reasons:
        return [f"the report claims a guarantee, but the ledger rules it out: {reason}" for reason in reasons]
    adjacency = next((name for name, words in ADJACENCIES.items() if words == report["adjacency"]), None)
    if adjacency is None:
        return [f"the adjacency {report['adjacency']!r} is not one that this accountant knows"]
    quiet = [name for name in promise["epsilon_by_client"] if name not in rows]  # a client that released nothing yet
    expected = sections.guarantee({**rows, **{name: [] for name in quiet}}, promise["delta"], adjacency)
    problems = _differences("guarantee", expected, promise)
    budget = report["budget"]
    if budget is None or not _same(budget["epsilon_spent"], expected["epsilon"]):
        problems.append("budget.epsilon_spent is not the worst client's epsilon")
    cap = None if budget is None else budget["epsilon_cap"]
    if cap is not None and expected["epsilon"] > cap * (1 + TOLERANCE):
        problems.append(f"epsilon {expected['epsilon']:.6g} exceeds the cap {cap:g}")
    for entry in report["ledger"]:
        absolute = entry["noise_multiplier"] * entry["sensitivity"]
        if not _same(entry["noise_standard_deviation"], absolute):
            problems.append(
                f"ledger: {entry['quantity']} has noise {entry['noise_standard_deviation']}, σ·sensitivity is {absolute}"
            )
    return problems


def _differences(where: str, expected: Any, stated: Any) -> list[str]:
    """Every leaf in which two JSON values differ."""
    if isinstance(expected, Mapping) and isinstance(stated, Mapping):
        keys = [*expected, *(key for key in stated if key not in expected)]
        missing = object()
        return [
            text
            for key in keys
            for text in _differences(f"{where}.{key}", expected.get(key, missing), stated.get(key, missing))
            if key != "worst_client"  # of clients that have spent the same, any may be named
        ]
    if isinstance(expected, list) and isinstance(stated, list) and len(expected) == len(stated):
        pairs = enumerate(zip(expected, stated, strict=True))
        return [text for number, (a, b) in pairs for text in _differences(f"{where}[{number}]", a, b)]
    return [] if _same(expected, stated) else [f"{where} says {_short(stated)}, the ledger gives {_short(expected)}"]


def _same(expected: Any, stated: Any) -> bool:
    numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in (expected, stated))
    return math.isclose(expected, stated, rel_tol=TOLERANCE, abs_tol=1e-12) if numbers else bool(expected == stated)


def _short(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else "nothing" if type(value) is object else repr(value)


def _files(rows: Mapping[str, list[Release]], folder: Path) -> list[str]:
    """The report's rows against the files': a later run may have added to a kept ledger, none may be missing."""
    problems = []
    held = {ledger.client: ledger.releases for ledger in map(read_ledger, sorted(folder.glob("*.jsonl")))}
    for client in sorted({*rows, *held}):
        if client not in held:
            problems.append(f"{folder} has no ledger of {client}")
            continue
        missing = Counter(rows.get(client, [])) - Counter(held[client])
        more = Counter(held[client]) - Counter(rows.get(client, []))
        problems += [f"{client}: the ledger file lacks {row.quantity} of round {row.round}" for row in missing]
        problems += [
            f"{client}: the report lacks {row.quantity} of round {row.round}, which the ledger file holds" for row in more
        ]
    return problems
