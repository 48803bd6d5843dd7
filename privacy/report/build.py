"""Functions that build and write a run's privacy report.

The report is published, so it is built only from public settings and the rows of the ledgers. It
contains no numbers of records and no losses. If the run has no privacy guarantee, the report states
the reasons and no ε.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from itertools import chain
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fedsynth.files import write_whole
from fedsynth.privacy import accounting
from fedsynth.privacy.audit_bounds import FALSE_POSITIVE_RATES, attack_success, best_guess
from fedsynth.privacy.disclosure import UNACCOUNTED
from fedsynth.privacy.ledger.ledger import History
from fedsynth.privacy.releases import CLIENT, Release, check_adjacency, check_delta, require
from fedsynth.privacy.report import figures
from fedsynth.privacy.report.figures import LedgerHead, LedgerStart, Report, ReportFacts
from fedsynth.privacy.report.pages import render_html, render_markdown

NAME = "privacy_report"
Rows = Sequence[Release]
CURVE_DELTAS = (1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8, 1e-9)
GROUPS = (2, 5)
EMPTY_LEDGER = LedgerStart(rows=0, chain=None)


def build_report(
    facts: ReportFacts,
    histories: Sequence[History],
    initial: Mapping[str, LedgerStart] = MappingProxyType({}),
) -> dict[str, Any]:
    """Builds a run's privacy report as a JSON-serialisable dict.

    The class `Report` defines the keys. The entry `guarantee` is None if the run has no guarantee
    or used test-only randomness. The report contains no NaN or infinity.

    Args:
        facts: the public facts that are not in the ledgers.
        histories: the ledger rows of each client.
        initial: a mapping from each client to the state of its ledger when the run began. Clients
            that are missing began with an empty ledger.

    Raises:
        PrivacySettingError: δ or the adjacency is out of range, or a run with a guarantee has no
            ledger.
    """
    check_delta(facts.delta, facts.max_records)
    check_adjacency(facts.adjacency)
    rows = {history.client: history.releases for history in histories}
    reasons = [*facts.verdict.reasons, *reasons_in_ledgers(histories)]
    for access in facts.scope:
        if access.status == UNACCOUNTED:
            reasons.append(f"{access.access}: {access.note}")
    formal = not reasons and not facts.test_only_randomness
    promise = worst = None
    published: list[dict[str, str]] = []
    if formal:
        require(bool(rows), "ledgers", "must include at least one client", rows)
        promise = guarantee(rows, facts.delta, facts.adjacency)
        worst = promise.worst_client
        published = facts.published
    heads = {}
    shares = facts.shares
    for history in histories:
        count = len(history.releases)
        start = initial.get(history.client, EMPTY_LEDGER).rows
        heads[history.client] = LedgerHead(rows=count, chain=history.chain, rows_before=start)
        for row in history.releases:
            shares = max(shares, row.shares)
    stated = dict(facts)
    stated["verdict"] = figures.Verdict(
        formal=formal, reasons=reasons, warnings=facts.verdict.warnings
    )
    stated["published"] = published
    return Report(
        **stated,
        guarantee=promise,
        ledger=folded_ledger(rows),
        ledger_heads=heads,
        accountant=accountant(rows, worst, facts.delta, facts.adjacency),
        counted_shares=shares,
        audit=None,
    ).to_json()


def write_report(report: Mapping[str, Any], folder: Path) -> None:
    """Writes privacy_report.json, .md and .html into `folder`.

    Each file is written atomically and is on the disk when this function returns.

    Raises:
        OSError: a file cannot be written.
    """
    text = json.dumps(report, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    contents = {"json": text, "md": render_markdown(report), "html": render_html(report)}
    folder.mkdir(parents=True, exist_ok=True)
    for ending, content in contents.items():
        write_whole(folder / f"{NAME}.{ending}", content.encode())


def reasons_in_ledgers(histories: Iterable[History]) -> list[str]:
    """Returns the reasons why the ledger rows give no guarantee.

    A guarantee is impossible if a row is marked as unaccounted or has no noise. The result is empty
    if there is no such row.
    """
    reasons = []
    for row in chain.from_iterable(map(attrgetter("releases"), histories)):
        reason = row.unaccounted
        if reason is None and row.noise_multiplier == 0:
            reason = "released without noise"
        if reason is not None:
            reasons.append(f"{row.quantity} ({row.mechanism}): {reason}")
    return list(dict.fromkeys(reasons))


def guarantee(ledgers: Mapping[str, Rows], delta: float, adjacency: str) -> figures.Guarantee:
    """Computes the figures of the report's privacy guarantee.

    The figures are the (ε, δ) of the worst client, ε by client and by round, ε for other δ, and
    bounds on attacks. ε for other δ and the bounds are the largest over all clients.
    """
    by_client, by_round = {}, {}
    different = {}  # clients with equal totals have equal figures
    for client, rows in ledgers.items():
        by_client[client] = accounting.epsilon(rows, delta, adjacency)
        by_round[client] = accounting.epsilon_by_round(rows, delta, adjacency)
        different[accounting.totals(rows)] = rows
    worst = max(by_client, key=lambda client: by_client[client])

    # the worst client may depend on δ, on the attack and on the group size
    def largest(figure: Callable[[Rows], Any]) -> Any:
        return max(map(figure, different.values()))

    curve = []
    for point in sorted({*CURVE_DELTAS, delta}, reverse=True):
        highest = largest(partial(accounting.epsilon, delta=point, adjacency=adjacency))
        curve.append(figures.CurvePoint(delta=point, epsilon=highest))
    attacks = []
    for rate in FALSE_POSITIVE_RATES:
        power = largest(partial(attack_success, alpha=rate, adjacency=adjacency))
        attacks.append(figures.Attack(false_positive_rate=rate, true_positive_rate_at_most=power))
    groups = []
    for size in GROUPS:
        bound, exact = largest(partial(group_epsilon, delta=delta, size=size, adjacency=adjacency))
        groups.append(
            figures.Group(units=size, epsilon=None if math.isinf(bound) else bound, exact=exact)
        )
    return figures.Guarantee(
        epsilon=by_client[worst],
        delta=delta,
        worst_client=worst,
        epsilon_by_client=by_client,
        epsilon_by_round=[
            figures.AfterRound(round=number, worst=spent)
            for number, spent in worst_by_round(by_round).items()
        ],
        epsilon_of_each_release_alone=by_kind(ledgers[worst], delta, adjacency),
        epsilon_of_delta=curve,
        attack_success=attacks,
        best_guess_at_most=largest(partial(best_guess, adjacency=adjacency)),
        groups=groups,
    )


def worst_by_round(by_client: Mapping[str, Mapping[int, float]]) -> dict[int, float]:
    """Returns the largest ε of all clients after each round.

    A client that makes no release in a round keeps its ε.

    Args:
        by_client: for each client, a mapping from rounds to ε after the round.
    """
    worst: dict[int, float] = {}
    current = dict.fromkeys(by_client, 0.0)
    for number in sorted(set().union(*by_client.values())):
        for client, by_round in by_client.items():
            current[client] = by_round.get(number, current[client])
        worst[number] = max(current.values())
    return worst


def by_kind(rows: Rows, delta: float, adjacency: str) -> list[figures.ReleaseKind]:
    """Computes one ε per kind of release, as if the client made only releases of that kind.

    These values do not add up to the total ε, which is usually smaller than their sum.
    """
    kinds: dict[tuple[str, str], list[Release]] = defaultdict(list)
    for row in rows:
        kinds[row.quantity, row.mechanism].append(row)
    table = []
    for (quantity, mechanism), releases in sorted(kinds.items()):
        spent = accounting.epsilon(releases, delta, adjacency)
        table.append(figures.ReleaseKind(quantity=quantity, mechanism=mechanism, epsilon=spent))
    return table


def group_epsilon(rows: Rows, delta: float, size: int, adjacency: str) -> tuple[float, bool]:
    """Computes the ε of a group of privacy units.

    A group is several examples or users of one client, or several clients.

    Without subsampling, `size` units change each sum by at most size·clip, so ε is exactly that of
    the noise multiplier σ/size. Clients change one sum each, which gives σ/√size. With subsampling,
    group privacy is used (the chain of neighbours in Theorem 2.2 of Dwork & Roth 2014). If (ε', δ')
    holds for one unit, then size·ε' holds for `size` units at δ'·(1 + e^ε' + … + e^{(size−1)ε'}).
    The smallest such ε' on a grid is used. Often δ' would have to be so small that the accountant
    cannot compute it.

    Args:
        rows: the ledger rows of the client.
        delta: δ, the same as for one unit.
        size: the number of units.
        adjacency: one of `ADJACENCIES`.

    Returns:
        ε, and True if it is exact. ε is infinite if it cannot be computed.
    """
    if all(row.sample_rate == 1 and row.selection is None for row in rows):
        # several clients have separate releases: their μ² add up
        factor = math.sqrt(size) if any(row.unit == CLIENT for row in rows) else size
        scaled = [replace(row, noise_multiplier=row.noise_multiplier / factor) for row in rows]
        return accounting.epsilon(scaled, delta, adjacency), True
    unit_epsilon = accounting.epsilon(rows, delta, adjacency)
    merged = accounting.merge(rows, adjacency)
    for factor in range(40):
        larger = unit_epsilon * (1 + factor / 10)
        spread = math.fsum(math.exp(min(i * larger, 700.0)) for i in range(size))
        if merged is None or spread * merged.slack > delta:  # beyond the accountant's accuracy
            break
        if accounting.delta_of(merged, larger) * spread <= delta:
            return size * larger, False
    return math.inf, False


def folded_ledger(ledgers: Mapping[str, Rows]) -> list[figures.LedgerEntry]:
    """Merges ledger rows that differ only in the client or the round, for the report.

    Each merged entry lists its rounds and clients. A round is listed twice if it was charged twice,
    because it was repeated or the run was resumed. ε can be computed again from the entries.
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
        folded.append(figures.LedgerEntry(rounds=list(numbers), clients=clients, **fields))
    return folded


def accountant(
    ledgers: Mapping[str, Rows], worst: str | None, delta: float, adjacency: str
) -> figures.Accountant:
    """Describes how ε was computed. Adds the worst client's Rényi DP ε as a check.

    Args:
        ledgers: the ledger rows of each client.
        worst: the worst client. None if the run has no guarantee.
        delta: δ.
        adjacency: one of `ADJACENCIES`.
    """
    rows: Rows = ()
    rdp = None
    if worst is not None:
        rows = ledgers[worst]
        rdp = accounting.epsilon_rdp(rows, delta, adjacency)
    if rdp is not None and not math.isfinite(rdp):
        rdp = None
    merged = accounting.merge(rows, adjacency) or accounting.Merged()
    computation = "exact Gaussian composition (nothing is subsampled)"
    if worst is None:
        computation = "none: no guarantee to compute"
    elif merged.selections:
        computation = "Rényi differential privacy, which covers private selections"
    elif merged.interval is not None:
        computation = "discretised PLD, connect-the-dots"
    elif merged.sampled:
        computation = "upper bound that ignores the subsampling (the tight one takes too long)"
    return figures.Accountant(
        name="privacy loss distributions (PLD), pessimistic rounding; exact where nothing is "
        "subsampled",
        library=f"dp-accounting {version('dp-accounting')}",
        computation=computation,
        discretisation_interval=merged.interval,
        rdp_epsilon=rdp,
    )
