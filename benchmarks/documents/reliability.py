"""Robust aggregation and load: docs/reliability.md."""

from __future__ import annotations

import statistics
from functools import partial
from itertools import product

from library.pages import markdown, pivot, table
from library.rows import lines, spread_of

RULES = {"average": "none", "`median`": "median", "`trimmed`": "trimmed", "`clip`": "clip"}
ATTACKS = {"no attack": "none", "sign flipped, scaled by 5": "sign"}


def _robust(alpha: str) -> str:
    def cell(rule: str, attack: str) -> str:
        return spread_of("robust_table", f"{rule}, {attack}, alpha={alpha}", range(3), digits=1)

    return pivot("", RULES, ATTACKS, cell)


table("robust-even")(partial(_robust, "1"))
table("robust-skewed")(partial(_robust, "0.1"))


@table("load-digits")
def _load() -> str:
    body = []
    for share, clients in product(("10", "all"), (10, 100, 1000)):
        title = f"digits, {clients} clients, {share} a round"
        rows = [row for row in lines("load") if row["case"] == title]
        active = rows[-1]["active"]
        peak = statistics.mean(row["peak_mib"] for row in rows)
        seconds = statistics.mean(row["seconds"] / row["rounds"] / active for row in rows)
        body.append([share, f"{clients:,}", f"{peak:.0f}", f"{1000 * seconds:.1f}"])
    return markdown(["active", "clients", "peak, MiB", "ms per client and round"], body)
