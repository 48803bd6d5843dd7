"""Robust aggregation and load: docs/reliability.md."""

from __future__ import annotations

from library.pivot import Cell, Fields, Table, axis, cross, figure, spread_of, text

ROBUST: Fields = {"file": "robust_table", "seeds": range(3), "digits": 1}


def _ended(cell: Cell) -> str:
    """Mean ± deviation over seeds, or that runs end."""
    ended = sum("diverged" in row for row in cell.records)
    if ended and ended == len(cell.records):
        return "the run ends"
    runs = f" ({ended} of {len(cell.records)} runs end)" if ended else ""
    return f"{spread_of(cell)}{runs}"


def _robust(alpha: str) -> Table:
    return Table(
        axis(
            "rule",
            {"none": "average", "median": "`median`", "trimmed": "`trimmed`", "clip": "`clip`"},
        ),
        axis(
            "attack",
            {
                "none": "no attack",
                "sign": "sign flipped, scaled by 5",
                "scale": "scaled by 100",
            },
        ),
        {**ROBUST, "key": "{rule}, {attack}, alpha=" + alpha, "show": _ended},
    )


TABLES = {
    "robust-even": _robust("1"),
    "robust-skewed": _robust("0.1"),
    "load-digits": Table(
        cross(
            axis("active", {"10": "10", "all": "all"}),
            [(f"{clients:,}", {"clients": clients}) for clients in (10, 100, 1000)],
            join=None,
        ),
        [
            ("active", text("active")),
            ("peak, MiB", figure("peak_mib", ".0f")),
            (
                "ms per client and round",
                figure(lambda row: row["seconds"] / row["rounds"] / row["active"], ".1f", 1000),
            ),
        ],
        {"file": "load", "key": "digits, {clients} clients, {active} a round"},
        corner=("participation", "clients"),
    ),
}
