"""Building and writing the privacy report of a run.

The report is itself a release, so it is built only from public settings and ledger rows: no
counts, no losses. Without a guarantee, it states the reasons and no ε.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedsynth.privacy.accounting import (
    delta_of,
    describe_accountant,
    epsilon,
    epsilon_by_round,
    epsilon_rdp,
    merge,
    totals,
)
from fedsynth.privacy.attacks import attack_success, best_guess
from fedsynth.privacy.disclosure import UNACCOUNTED
from fedsynth.privacy.errors import PrivacyError
from fedsynth.privacy.files import write_whole
from fedsynth.privacy.ledger.history import History
from fedsynth.privacy.releases import Release, require
from fedsynth.privacy.report.figures import (
    SCHEMA_VERSION,
    Accountant,
    AfterRound,
    Attack,
    CurvePoint,
    Group,
    Guarantee,
    LedgerEntry,
    LedgerHead,
    ReleaseKind,
    Report,
    ReportFacts,
    Verdict,
)
from fedsynth.privacy.report.pages import render_html, render_markdown

NAME = "privacy_report"
Rows = Sequence[Release]
CURVE_DELTAS = (1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8, 1e-9)
GROUPS = (2, 5)


def build_report(
    facts: ReportFacts, histories: Sequence[History], rows_before: Mapping[str, int] | None = None
) -> dict[str, Any]:
    """Returns the report as a JSON-able mapping (`Report`), without NaN or infinity.

    Args:
        facts: the public facts that are not in the ledgers.
        histories: each client's ledger rows.
        rows_before: client → number of rows in its ledger when the run began; 0 if missing.

    `guarantee` is None if there is no guarantee or if test-only randomness was used.

    Raises:
        PrivacySettingError: δ or the adjacency is out of range, or a guarantee is claimed without a
            ledger.
    """
    facts.check()
    rows = {history.client: history.releases for history in histories}
    reasons = [*facts.verdict.reasons, *reasons_in_ledgers(rows)]
    reasons += [
        f"{history.access}: {history.note}"
        for history in facts.scope
        if history.status == UNACCOUNTED
    ]
    formal = not reasons and not facts.test_only_randomness
    has_rows = bool(rows) or not formal
    require(has_rows, "ledgers", "must hold at least one client's for a privacy report", rows)
    promise = guarantee(rows, facts.delta, facts.adjacency) if formal else None
    worst = None if promise is None else promise.worst_client
    previous_rows = rows_before or {}
    heads = {
        history.client: LedgerHead(
            rows=len(history.releases),
            chain=history.chain,
            rows_before=previous_rows.get(history.client, 0),
        )
        for history in histories
    }
    counted = [facts.shares, *(row.shares for releases in rows.values() for row in releases)]
    stated = {name: getattr(facts, name) for name in ReportFacts.model_fields}
    stated["verdict"] = Verdict(formal=formal, reasons=reasons, warnings=facts.verdict.warnings)
    stated["published"] = facts.published if formal else []
    return Report(
        **stated,
        schema_version=SCHEMA_VERSION,
        guarantee=promise,
        ledger=folded_ledger(rows),
        ledger_heads=heads,
        accountant=accountant(rows, worst, facts.delta, facts.adjacency),
        counted_shares=max(counted),
        audit=None,
    ).to_json()


def write_report(report: Mapping[str, Any], folder: Path) -> tuple[Path, Path, Path]:
    """Writes privacy_report.json, .md and .html into `folder`, each atomically and durably.

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
            write_whole(path, content.encode())
        except OSError as error:
            raise PrivacyError(f"cannot write {path}: {error}") from error
    return paths


def reasons_in_ledgers(ledgers: Mapping[str, Rows]) -> list[str]:
    """Returns the reasons in the ledgers that rule out a guarantee: unaccounted rows and rows
    without noise."""
    reasons: dict[str, None] = {}
    for rows in ledgers.values():
        for row in rows:
            if row.unaccounted is not None:
                reasons[f"{row.quantity} ({row.mechanism}): {row.unaccounted}"] = None
            elif row.noise_multiplier == 0:
                reasons[f"{row.quantity} ({row.mechanism}): released without noise"] = None
    return list(reasons)


def guarantee(ledgers: Mapping[str, Rows], delta: float, adjacency: str) -> Guarantee:
    """Returns (ε, δ) of the worst client, ε by client and by round, ε(δ), and the bounds on
    attacks; each figure is the largest over the clients."""
    by_client = {name: epsilon(rows, delta, adjacency) for name, rows in ledgers.items()}
    worst = max(by_client, key=lambda name: by_client[name])
    histories = {
        name: epsilon_by_round(client_rows, delta, adjacency)
        for name, client_rows in ledgers.items()
    }
    # the worst client may depend on δ, on the attack and on the group size
    different = list(
        {totals(client_rows): client_rows for client_rows in ledgers.values()}.values()
    )
    curve = []
    for point in sorted({*CURVE_DELTAS, delta}, reverse=True):
        highest = max(epsilon(rows, point, adjacency) for rows in different)
        curve.append(CurvePoint(delta=point, epsilon=highest))
    success_rates = [attack_success(rows, adjacency=adjacency) for rows in different]
    attacks = []
    for rate in success_rates[0]:
        power = max(attack[rate] for attack in success_rates)
        attacks.append(Attack(false_positive_rate=rate, true_positive_rate_at_most=power))
    groups = []
    for size in GROUPS:
        size_groups = [group(rows, delta, size, adjacency) for rows in different]
        groups.append(
            max(
                size_groups,
                key=lambda size_group: (
                    math.inf if size_group.epsilon is None else size_group.epsilon
                ),
            )
        )
    return Guarantee(
        epsilon=by_client[worst],
        delta=delta,
        worst_client=worst,
        epsilon_by_client=by_client,
        epsilon_by_round=over_clients(histories),
        epsilon_of_each_release_alone=alone(ledgers[worst], delta, adjacency),
        epsilon_of_delta=curve,
        attack_success=attacks,
        best_guess_at_most=max(best_guess(rows, adjacency) for rows in different),
        groups=groups,
    )


def over_clients(histories: Mapping[str, Mapping[int, float]]) -> list[AfterRound]:
    """Returns the worst, the median and every client's ε after each round; a client without a new
    release keeps its ε."""
    table: list[AfterRound] = []
    current = dict.fromkeys(histories, 0.0)
    for number in sorted({number for history in histories.values() for number in history}):
        current = {name: history.get(number, current[name]) for name, history in histories.items()}
        worst = max(current.values())
        median = statistics.median(current.values())
        table.append(AfterRound(round=number, worst=worst, median=median, clients=current))
    return table


def alone(rows: Rows, delta: float, adjacency: str) -> list[ReleaseKind]:
    """Returns the ε of each kind of release if it were the only one. These do not add up to the
    total ε, which is smaller."""
    kinds: dict[tuple[str, str], list[Release]] = defaultdict(list)
    for row in rows:
        kinds[row.quantity, row.mechanism].append(row)
    return [
        ReleaseKind(
            quantity=quantity, mechanism=mechanism, epsilon=epsilon(releases, delta, adjacency)
        )
        for (quantity, mechanism), releases in sorted(kinds.items())
    ]


def group(rows: Rows, delta: float, size: int, adjacency: str) -> Group:
    """Returns the ε that holds for `size` units (examples or users) of one client together, at the
    same δ; its `epsilon` is None if it cannot be computed.

    Without subsampling, `size` units change each sum by at most size·clip, so ε is exactly that of
    noise multiplier σ/size. With subsampling, an (ε', δ') guarantee for one unit gives size·ε' at
    δ'·(1 + e^ε' + … + e^{(size−1)ε'}) (Dwork & Roth 2014, Theorem 2.2's chain of neighbours); the
    smallest such ε' on a grid is used. It is often beyond the accountant's numerical accuracy,
    since δ' must be tiny.
    """
    if all(row.sample_rate == 1 for row in rows):
        scaled = [replace(row, noise_multiplier=row.noise_multiplier / size) for row in rows]
        exact = epsilon(scaled, delta, adjacency)
        return Group(units=size, epsilon=exact, exact=True)
    single_epsilon = epsilon(rows, delta, adjacency)
    merged = merge(rows, adjacency)
    for factor in range(40):
        group_epsilon = single_epsilon * (1 + factor / 10)
        spread = math.fsum(math.exp(min(i * group_epsilon, 700.0)) for i in range(size))
        if merged is None or spread * merged.slack > delta:  # beyond the accountant's accuracy
            break
        if delta_of(merged, group_epsilon) * spread <= delta:
            return Group(units=size, epsilon=size * group_epsilon, exact=False)
    return Group(units=size, epsilon=None, exact=False)


def folded_ledger(ledgers: Mapping[str, Rows]) -> list[LedgerEntry]:
    """Merges rows that differ only in the round into one entry with its rounds, and clients with
    equal entries.

    A round that appears twice in `rounds` was charged twice (a resumed or repeated round). The list
    suffices to compute ε again.
    """
    entries: dict[tuple[Release, tuple[int, ...]], list[str]] = defaultdict(list)
    for client, rows in ledgers.items():
        rounds: dict[Release, list[int]] = defaultdict(list)
        for row in rows:
            rounds[replace(row, round=0)].append(row.round)
        for row, charged in rounds.items():
            entries[row, tuple(sorted(charged))].append(client)
    folded = []
    for (row, numbers), clients in entries.items():
        fields = row.to_json()
        del fields["round"]
        folded.append(LedgerEntry(rounds=list(numbers), clients=clients, **fields))
    return folded


def accountant(
    ledgers: Mapping[str, Rows], worst: str | None, delta: float, adjacency: str
) -> Accountant:
    """Returns the accountant's name, version and discretisation, with Rényi DP's ε of the worst
    client.

    Args:
        worst: the worst client; None without a guarantee.
    """
    if worst is None:
        described = describe_accountant((), adjacency)
        return Accountant(**{**described, "computation": "none: no guarantee to compute"})
    rows = ledgers[worst]
    rdp = epsilon_rdp(rows, delta, adjacency)
    finite = rdp is not None and math.isfinite(rdp)
    return Accountant(**describe_accountant(rows, adjacency), rdp_epsilon=rdp if finite else None)
