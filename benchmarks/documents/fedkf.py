"""FedKF's table in docs/results.md, and its distillation without data."""

from __future__ import annotations

import statistics

from library.pivot import Axis, Table, cross
from library.rows import lines

GENERATOR_RATES = ("0.001", "0.01", "0.2")
METHODS: Axis = [
    (title, {"name": title.replace("⁻", "-")}) for title in ("FedAvg", "FedKF⁻", "FedKF")
]
MODELS = cross(
    METHODS, [(f"({final.upper()})", {"final": final}) for final in ("aca", "oca")], join=" "
)
LOCAL = "rows.-1.models.{final}.local."
TABLES = {
    "fedkf": Table(
        MODELS,
        [
            ("AMP", {"value": f"{LOCAL}amp"}),
            ("FM", {"value": f"{LOCAL}fm", "scale": 1000, "digits": 1}),
            ("WLP", {"value": f"{LOCAL}wlp", "digits": 1}),
        ],
        {"file": "fedkf_table", "key": "{name} alpha=0.1", "seeds": range(5)},
        corner="Dir(0.1)",
    ),
}


def _gaps_without_data() -> list[str]:
    """Returns points between teacher and student: the smallest and the largest over generator
    rates with the sum of the activation loss, then with its mean."""
    rows = lines("generator_scale")
    bounds = []
    for scale in ("sum", "mean"):
        gaps = []
        for rate in GENERATOR_RATES:
            key = f"scale: {scale}, rate = {rate} seed="
            runs = [row for row in rows if row["key"].startswith(key)]
            gaps.append(statistics.mean(100 * (row["teacher"] - row["accuracy"]) for row in runs))
        bounds += [f"{min(gaps):.1f}", f"{max(gaps):.1f}"]
    return bounds


SENTENCES = [
    (
        "docs/results.md",
        "students end {} to {} points behind their teacher with the sum, and {} to {} with the "
        "mean",
        _gaps_without_data,
    ),
]
