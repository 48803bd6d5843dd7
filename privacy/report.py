"""The privacy budget report: what was promised, on which assumptions, and what was left out.

The report is itself a release, so it is built from public settings and ledger rows alone: no
counts, no losses. Where there is no guarantee it says so and why, and states no ε at all.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedsynth.privacy import report_sections as sections
from fedsynth.privacy.assumptions import (
    NOT_COVERED,
    assumptions,
    protected_unit,
    sums_alone,
    trust_model,
)
from fedsynth.privacy.audit import NOT_RUN
from fedsynth.privacy.disclosure import UNACCOUNTED
from fedsynth.privacy.errors import PrivacyError, PrivacySettingError
from fedsynth.privacy.files import sync_folder, write_durably
from fedsynth.privacy.history import History
from fedsynth.privacy.releases import adjacency_words
from fedsynth.privacy.report_html import render_html
from fedsynth.privacy.report_inputs import ReportContext
from fedsynth.privacy.report_schema import Access, Budget, Guarantee, LedgerHead, Report, Verdict
from fedsynth.privacy.report_text import render_markdown, summary_rows

__all__ = [
    "SCHEMA_VERSION",
    "build_report",
    "render_html",
    "render_markdown",
    "summary_rows",
    "write_report",
]

SCHEMA_VERSION = 3
ABANDONED = (
    "This run did not finish: the report was built from what it left. Every charged release "
    "counts, whether or not it left the client; a run that is still going spends more."
)
FORMAL = "formal differential privacy, under the assumptions below"
NO_GUARANTEE = "no differential privacy guarantee"
NOT_PRIVATE = "not private: a test-only source of randomness was used"


def build_report(context: ReportContext, histories: Sequence[History]) -> dict[str, object]:
    """The report as a JSON-able dict (no NaN or infinity), schema version `SCHEMA_VERSION`.

    Args:
        context: what is public beside the ledgers.
        histories: what each client's ledger holds.

    `guarantee` and `budget` are None where there is no guarantee, or where test-only randomness was
    used.

    Raises:
        PrivacySettingError: a guarantee is claimed without any ledger.
    """
    rows = {one.client: one.releases for one in histories}
    reasons = [*context.no_guarantee, *sections.reasons_in_ledgers(rows)]
    reasons += [f"{one.what}: {one.note}" for one in context.accesses if one.status == UNACCOUNTED]
    private = not reasons and not context.test_only_randomness
    if private and not rows:
        raise PrivacySettingError(
            None, "ledgers", "must hold at least one client's for a privacy report"
        )
    promise = sections.guarantee(rows, context.delta, context.adjacency) if private else None
    worst = None if promise is None else promise.worst_client
    shares = max([context.shares, *(row.shares for some in rows.values() for row in some)])
    return Report(
        schema_version=SCHEMA_VERSION,
        verdict=_verdict(context, reasons, promise, shares),
        method=context.method,
        mechanism=context.mechanism,
        noise_multiplier=context.noise_multiplier,
        guarantee=promise,
        unit=protected_unit(private, context.unit, context.user_records),
        adjacency=adjacency_words(context.adjacency, context.unit),
        max_records=context.max_records,
        data_set=as_lists(context.data_set),
        trust_model=trust_model(private, context, shares),
        public_items=dict(context.public_items),
        scope=[
            Access(access=one.what, status=one.status, note=one.note) for one in context.accesses
        ],
        ledger=sections.folded_ledger(rows),
        ledger_kept=not context.fresh_ledger,
        ledger_heads={one.client: _head(context, one) for one in histories},
        accountant=sections.accountant(rows, worst, context.delta, context.adjacency),
        budget=_budget(context, promise),
        published=[dict(row) for row in context.published] if private else [],
        randomness=context.randomness,
        deviations=[*_abandoned(context), *context.deviations],
        not_covered=NOT_COVERED,
        audit=NOT_RUN,
        provenance=dict(context.provenance),
        run=context.run,
        files=dict(context.files),
    ).to_json()


def as_lists(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The same mapping as JSON has it: with lists in place of tuples."""
    found: dict[str, Any] = json.loads(json.dumps(dict(facts)))
    return found


def _head(context: ReportContext, held: History) -> LedgerHead:
    """Where a client's ledger stands."""
    before = context.rows_before.get(held.client, 0)
    return LedgerHead(rows=len(held.releases), chain=held.chain, rows_before=before)


def _budget(context: ReportContext, promise: Guarantee | None) -> Budget | None:
    if promise is None:
        return None
    return sections.budget(
        promise.epsilon, context.epsilon_cap, context.planned_rounds, context.rounds_done
    )


def _abandoned(context: ReportContext) -> list[str]:
    if not context.abandoned:
        return []
    return [
        f"abandoned after {context.rounds_done} of {context.planned_rounds} rounds; what was "
        "charged for a round under way is counted"
    ]


def _verdict(
    context: ReportContext, reasons: list[str], promise: Guarantee | None, shares: int
) -> Verdict:
    abandoned = [ABANDONED] if context.abandoned else []
    if promise is None:
        text = NO_GUARANTEE if reasons else NOT_PRIVATE
        if context.test_only_randomness:
            injected = "noise or sampling masks were injected by a test, so they are known"
            reasons = [*reasons, injected]
        warnings = [*abandoned, *context.warnings]
        return Verdict(text=text, formal=False, reasons=reasons, assumptions=[], warnings=warnings)
    warnings = [
        *abandoned,
        *context.warnings,
        *sums_alone(context, shares),
        *sections.weakness(promise.epsilon),
    ]
    if context.max_records is None:
        warnings.append(
            "No public bound on the number of records was declared, so delta was not checked "
            "against it."
        )
    return Verdict(
        text=FORMAL,
        formal=True,
        reasons=[],
        assumptions=assumptions(context, shares),
        warnings=warnings,
    )


def write_report(report: Mapping[str, object], folder: Path) -> tuple[Path, Path, Path]:
    """Write privacy_report.json, .md and .html into `folder`; each appears whole, and on the disk,
    or not at all.

    Raises:
        PrivacyError: the folder cannot be written to.
    """
    text = json.dumps(report, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    stem = Path(folder) / "privacy_report"
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
