"""Builds the privacy report of a run, and writes it.

The report is itself a release, so it is built only from public settings and ledger rows: no
counts, no losses. Without a guarantee it states why, and no ε.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedsynth.privacy import report_sections as sections
from fedsynth.privacy.disclosure import UNACCOUNTED
from fedsynth.privacy.errors import PrivacyError, PrivacySettingError
from fedsynth.privacy.files import sync_folder, write_durably
from fedsynth.privacy.history import History
from fedsynth.privacy.report_figures import SCHEMA_VERSION, LedgerHead, Report, ReportFacts, Verdict
from fedsynth.privacy.report_pages import render_html, render_markdown

NAME = "privacy_report"


def build_report(
    facts: ReportFacts, histories: Sequence[History], rows_before: Mapping[str, int] | None = None
) -> dict[str, Any]:
    """Returns the report as a JSON-able mapping (`Report`), without NaN or infinity.

    Args:
        facts: what is public beside the ledgers.
        histories: what each client's ledger holds.
        rows_before: client → the rows that its ledger held when the run began; 0 if not named.

    `guarantee` is None where nothing is guaranteed, or where test-only randomness was used.

    Raises:
        PrivacySettingError: δ or the adjacency is out of range, or a guarantee is claimed without
            any ledger.
    """
    facts.check()
    rows = {one.client: one.releases for one in histories}
    reasons = [*facts.verdict.reasons, *sections.reasons_in_ledgers(rows)]
    reasons += [f"{one.access}: {one.note}" for one in facts.scope if one.status == UNACCOUNTED]
    formal = not reasons and not facts.test_only_randomness
    if formal and not rows:
        raise PrivacySettingError(
            None, "ledgers", "must hold at least one client's for a privacy report"
        )
    promise = sections.guarantee(rows, facts.delta, facts.adjacency) if formal else None
    worst = None if promise is None else promise.worst_client
    before = rows_before or {}
    heads = {
        one.client: LedgerHead(
            rows=len(one.releases), chain=one.chain, rows_before=before.get(one.client, 0)
        )
        for one in histories
    }
    counted = [facts.shares, *(row.shares for some in rows.values() for row in some)]
    stated = {name: getattr(facts, name) for name in ReportFacts.model_fields}
    stated["verdict"] = Verdict(formal=formal, reasons=reasons, warnings=facts.verdict.warnings)
    stated["published"] = facts.published if formal else []
    return Report(
        **stated,
        schema_version=SCHEMA_VERSION,
        guarantee=promise,
        ledger=sections.folded_ledger(rows),
        ledger_heads=heads,
        accountant=sections.accountant(rows, worst, facts.delta, facts.adjacency),
        counted_shares=max(counted),
        audit=None,
    ).to_json()


def write_report(report: Mapping[str, Any], folder: Path) -> tuple[Path, Path, Path]:
    """Writes privacy_report.json, .md and .html into `folder`; each appears whole, and on the disk,
    or not at all.

    Raises:
        PrivacyError: the folder cannot be written to.
    """
    text = json.dumps(report, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    stem = Path(folder) / NAME
    paths = (stem.with_suffix(".json"), stem.with_suffix(".md"), stem.with_suffix(".html"))
    contents = (text, render_markdown(report), render_html(report))
    for path, content in zip(paths, contents, strict=True):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_durably(path, content.encode())
            sync_folder(path.parent)
        except OSError as error:
            raise PrivacyError(f"cannot write {path}: {error}") from error
    return paths
