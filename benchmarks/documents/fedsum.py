"""The tables of docs/fedsum.md."""

from __future__ import annotations

from library.pivot import Axis, Table, axis, figure

SEEDS = range(3)


def _columns(rounds: int, digits: str) -> Axis:
    """Accuracy by round, and what the run took."""
    return [
        *((f"round {number + 1}", {"value": f"curve.{number}"}) for number in range(rounds)),
        ("CPU seconds", figure("cpu_seconds.-1", f".{digits[0]}f")),
        ("MB up", figure("bytes", f".{digits[1]}f", 1e-6)),
    ]


TABLES = {
    "fedsum-digits": Table(
        axis(
            "name",
            {
                "feddm, Dir(0.05)": "FedDM, Dir(0.05)",
                "feddm, Dir(100)": "FedDM, Dir(100)",
                "fedsum, Dir(0.05)": "FedSum, Dir(0.05)",
                "fedsum, Dir(100)": "FedSum, Dir(100)",
                "fedsum with 50 images, Dir(0.05)": "FedSum, ipc 50, Dir(0.05)",
            },
        ),
        _columns(3, "12"),
        {"file": "fedsum_table", "key": "digits: {name}", "seeds": SEEDS, "digits": 1},
        corner="method",
        min_cells=1,
    ),
    # FedSum's runs with the same seed differ by their noise
    "fedsum-private": Table(
        axis("epsilon", ("1",)),
        [
            (
                "FedDM, `features`",
                {
                    "file": "dp_utility",
                    "key": "fashion-mnist features, ε = {epsilon}",
                    "seeds": SEEDS,
                },
            ),
            *axis("noise", {"own": "FedSum, own noise"}),
        ],
        {
            "file": "fedsum_table",
            "key": "private: fedsum, ε = {epsilon}, {noise} noise seed=0",
            "digits": 1,
        },
        corner="ε",
    ),
}
