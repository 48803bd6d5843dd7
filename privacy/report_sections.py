"""The parts of the privacy report that are computed from the ledgers; nothing here sees data."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from fedsynth.privacy.accounting import (
    deltas_at,
    describe_accountant,
    epsilon,
    epsilon_by_round,
    epsilon_rdp,
    merge,
    totals,
)
from fedsynth.privacy.attacks import attack_success, best_guess
from fedsynth.privacy.releases import Release
from fedsynth.privacy.report_figures import (
    Accountant,
    AfterRound,
    Attack,
    CurvePoint,
    Group,
    Guarantee,
    LedgerEntry,
    ReleaseKind,
)

Rows = Sequence[Release]
CURVE_DELTAS = (1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8, 1e-9)
GROUPS = (2, 5)


def reasons_in_ledgers(ledgers: Mapping[str, Rows]) -> list[str]:
    """Why the ledgers alone rule a guarantee out: unaccounted rows and rows without noise."""
    reasons: dict[str, None] = {}
    for rows in ledgers.values():
        for row in rows:
            if row.unaccounted is not None:
                reasons[f"{row.quantity} ({row.mechanism}): {row.unaccounted}"] = None
            elif row.noise_multiplier == 0:
                reasons[f"{row.quantity} ({row.mechanism}): released without noise"] = None
    return list(reasons)


def guarantee(ledgers: Mapping[str, Rows], delta: float, adjacency: str) -> Guarantee:
    """Returns (ε, δ) of the worst client, ε by client and by round, ε(δ), and what an attacker can
    gain; each figure is the largest over the clients."""
    by_client = {name: epsilon(rows, delta, adjacency) for name, rows in ledgers.items()}
    worst = max(by_client, key=lambda name: by_client[name])
    rows = ledgers[worst]
    histories = {name: epsilon_by_round(each, delta, adjacency) for name, each in ledgers.items()}
    # which client is worst may depend on δ, on the attack and on the group
    different = list({totals(each): each for each in ledgers.values()}.values())
    return Guarantee(
        epsilon=by_client[worst],
        delta=delta,
        worst_client=worst,
        epsilon_by_client=by_client,
        epsilon_by_round=over_clients(histories),
        epsilon_of_each_release_alone=alone(rows, delta, adjacency),
        epsilon_of_delta=_curve(different, delta, adjacency),
        attack_success=_attacks(different, adjacency),
        best_guess_at_most=max(best_guess(rows, adjacency) for rows in different),
        groups=[_worst_group(different, delta, size, adjacency) for size in GROUPS],
    )


def _worst_group(ledgers: Sequence[Rows], delta: float, size: int, adjacency: str) -> Group:
    """Returns the largest ε of a group over the clients; none where one client's is not known."""
    groups = [group(rows, delta, size, adjacency) for rows in ledgers]
    return max(groups, key=lambda one: math.inf if one.epsilon is None else one.epsilon)


def _curve(ledgers: Sequence[Rows], delta: float, adjacency: str) -> list[CurvePoint]:
    """The worst client's ε at some δ, and at the run's own."""
    deltas = sorted({*CURVE_DELTAS, delta}, reverse=True)
    return [
        CurvePoint(delta=d, epsilon=max(epsilon(rows, d, adjacency) for rows in ledgers))
        for d in deltas
    ]


def _attacks(ledgers: Sequence[Rows], adjacency: str) -> list[Attack]:
    """The most that a membership test finds of any client's records."""
    found = [attack_success(rows, adjacency=adjacency) for rows in ledgers]
    return [
        Attack(
            false_positive_rate=rate,
            true_positive_rate_at_most=max(attack[rate] for attack in found),
        )
        for rate in found[0]
    ]


def over_clients(histories: Mapping[str, Mapping[int, float]]) -> list[AfterRound]:
    """After each round: the worst client's ε, the median's, and every client's; one without a
    release since keeps its own."""
    table: list[AfterRound] = []
    now = dict.fromkeys(histories, 0.0)
    for number in sorted({number for history in histories.values() for number in history}):
        now = {name: history.get(number, now[name]) for name, history in histories.items()}
        worst = max(now.values())
        median = statistics.median(now.values())
        table.append(AfterRound(round=number, worst=worst, median=median, clients=now))
    return table


def alone(rows: Rows, delta: float, adjacency: str) -> list[ReleaseKind]:
    """The ε of each kind of release if it were the only one: they do not add up to the whole, which
    is less."""
    kinds: dict[tuple[str, str], list[Release]] = defaultdict(list)
    for row in rows:
        kinds[row.quantity, row.mechanism].append(row)
    return [
        ReleaseKind(quantity=quantity, mechanism=mechanism, epsilon=epsilon(some, delta, adjacency))
        for (quantity, mechanism), some in sorted(kinds.items())
    ]


def group(rows: Rows, delta: float, size: int, adjacency: str) -> Group:
    """ε that holds for `size` units (examples, or users) of one client together, at the same δ;
    `epsilon` is None where not computed.

    Without subsampling, `size` units move each sum by at most size·clip, so ε is that of noise
    multiplier σ/size: exact. With subsampling, an (ε', δ') guarantee for one unit gives size·ε' at
    δ'·(1 + e^ε' + … + e^{(size−1)ε'}) (Dwork & Roth 2014, Theorem 2.2's chain of neighbours); the
    smallest such ε' on a grid is used. It is often out of the accountant's numerical reach, since
    δ' must be tiny.
    """
    if all(row.sample_rate == 1 for row in rows):
        scaled = [replace(row, noise_multiplier=row.noise_multiplier / size) for row in rows]
        exact = epsilon(scaled, delta, adjacency)
        return Group(units=size, epsilon=exact, exact=True)
    least = epsilon(rows, delta, adjacency)
    merged = merge(rows, adjacency)
    slack = math.inf if merged is None else merged.slack
    for factor in range(40):
        each = least * (1 + factor / 10)
        spread = math.fsum(math.exp(min(i * each, 700.0)) for i in range(size))
        if spread * slack > delta:  # below the accountant's accuracy from here on
            break
        if deltas_at(rows, [each], adjacency)[0] * spread <= delta:
            return Group(units=size, epsilon=size * each, exact=False)
    return Group(units=size, epsilon=None, exact=False)


def folded_ledger(ledgers: Mapping[str, Rows]) -> list[LedgerEntry]:
    """Rows equal but for the round are one entry with its rounds; clients with the same entries
    share it.

    A round that stands twice in `rounds` was charged twice (a resumed or repeated round). The list
    holds all that is needed to compute ε again.
    """
    entries: dict[tuple[Release, tuple[int, ...]], list[str]] = defaultdict(list)
    for client, rows in ledgers.items():
        rounds: dict[Release, list[int]] = defaultdict(list)
        for row in rows:
            rounds[replace(row, round=0)].append(row.round)
        for row, charged in rounds.items():
            entries[row, tuple(sorted(charged))].append(client)
    return [_entry(row, numbers, clients) for (row, numbers), clients in entries.items()]


def _entry(row: Release, numbers: Sequence[int], clients: list[str]) -> LedgerEntry:
    fields = row.to_json()
    del fields["round"]
    return LedgerEntry(rounds=list(numbers), clients=clients, **fields)


def accountant(
    ledgers: Mapping[str, Rows], worst: str | None, delta: float, adjacency: str
) -> Accountant:
    """Returns which accountant, version and discretisation, with Rényi DP's ε of the worst client.

    Args:
        worst: None where nothing is guaranteed.
    """
    if worst is None:
        described = describe_accountant((), adjacency)
        return Accountant(**{**described, "computation": "none: no guarantee to compute"})
    rows = ledgers[worst]
    rdp = epsilon_rdp(rows, delta, adjacency)
    finite = rdp is not None and math.isfinite(rdp)
    return Accountant(**describe_accountant(rows, adjacency), rdp_epsilon=rdp if finite else None)
