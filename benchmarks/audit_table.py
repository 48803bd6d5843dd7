"""What a canary audit shows of an honest run: the bound beside ε for each mechanism, on the digits.

    python benchmarks/audit_table.py [--quick] [--json] [--device cuda] [--kinds vectors images]
        [--mechanisms residual features] [--repeats 3]

Each audit is what `fedsynth privacy audit --method METHOD --dp-epsilon ε` makes (for FedFM with
`--set weight=0.5`), with its own coins, masks and noise, which are secret: the bounds differ from
call to call. Resumes: finished audits are lines of results/audit_table.jsonl, and `--repeats`
counts them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

from fedsynth.cli.memory import keep_large_allocations
from fedsynth.federation.audit.auditing import audit_run
from fedsynth.federation.terms.resolve import resolve
from library.machine import machine
from library.options import rows_file, table_options

EPSILONS = (1.0, 3.0, 10.0)
MECHANISMS: dict[str, dict[str, dict[str, Any]]] = {
    "residual": {"run": {"method": "feddm"}, "privacy": {"mechanism": "residual"}},
    "gradient": {"run": {"method": "feddm"}, "privacy": {"mechanism": "gradient"}},
    "features": {"run": {"method": "feddm"}, "privacy": {"mechanism": "features"}},
    "FedAF": {"run": {"method": "fedaf"}},
    "DP-SGD (FedAvg)": {"run": {"method": "fedavg"}},
    "FedFM": {"run": {"method": "fedfm"}, "method": {"weight": 0.5}},
}


def one_audit(name: str, epsilon: float, kind: str, options: argparse.Namespace) -> dict[str, Any]:
    """A row of the results file."""
    sections = MECHANISMS[name]
    run = {**sections["run"], "device": options.device}
    privacy = {**sections.get("privacy", {}), "epsilon": epsilon}
    given = {**sections, "run": {**run, **({"rounds": 1} if options.quick else {})}}
    started = time.perf_counter()
    canaries = 100 if options.quick else 1000
    found = audit_run(resolve({**given, "privacy": privacy}), canaries=canaries, canaries_as=kind)
    return {
        "epsilon": found.epsilon,
        "epsilon_lower_bound": found.epsilon_lower_bound,
        "canaries": found.canaries,
        "guesses": found.guesses,
        "correct": found.correct,
        "confidence": found.confidence,
        "delta": found.delta,
        "seconds": round(time.perf_counter() - started, 1),
        **machine(),
    }


def audits(name: str, epsilon: float, kind: str, options: argparse.Namespace) -> dict[str, Any]:
    """What all audits of one cell say together; those that are missing are made."""
    path = rows_file("audit_table", options)
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    key = f"{name}, {kind}, ε = {epsilon:g}"
    rows = [row for row in map(json.loads, lines) if row["key"] == key]
    while len(rows) < options.repeats:
        rows.append({"key": key, **one_audit(name, epsilon, kind, options)})
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(rows[-1], ensure_ascii=False) + "\n")
    bounds = [row["epsilon_lower_bound"] for row in rows]
    return {
        "mean": statistics.mean(bounds),
        "least": min(bounds),
        "most": max(bounds),
        "audits": len(bounds),
        "seconds": statistics.median(row["seconds"] for row in rows),
    }


def main() -> None:
    parser = table_options(__doc__, "one round, 100 canaries")
    parser.add_argument("--kinds", nargs="+", default=["vectors", "images"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--mechanisms", nargs="+", default=list(MECHANISMS), choices=MECHANISMS)
    options = parser.parse_args()
    keep_large_allocations()
    table = {
        f"{name}, {kind}, ε = {epsilon:g}": audits(name, epsilon, kind, options)
        for kind in options.kinds
        for name in options.mechanisms
        for epsilon in EPSILONS
    }
    if options.json:
        print(json.dumps(table, indent=2, ensure_ascii=False))
        return
    for key, row in table.items():
        print(
            f"{key:34} {row['mean']:.2f} ({row['least']:.2f} to {row['most']:.2f}) of "
            f"{row['audits']}, {row['seconds']:.0f} s each"
        )


if __name__ == "__main__":
    main()
