"""What a canary audit shows of an honest run: the bound beside ε for each mechanism, on the digits.

    python benchmarks/audit_table.py [--quick] [--device cuda] [--kinds vectors images]
        [--mechanisms residual features] [--repeats 3]

Each audit is what `fedsynth privacy audit --method METHOD --dp-epsilon ε` makes (for FedFM with
`--set weight=0.5`), with its own coins, masks and noise, which are secret: the bounds differ from
call to call. Resumes: finished audits are lines of results/audit_table.jsonl, and `--repeats`
counts them.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict
from itertools import product
from typing import Any

from fedsynth.config.resolve import resolve
from fedsynth.simulation.audit.auditing import audit_run
from library.results import start, table_parser

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
    figures = asdict(found)
    del figures["method"], figures["mechanism"]
    figures["seconds"] = round(time.perf_counter() - started, 1)
    return figures


def main() -> None:
    parser = table_parser(__doc__, "one round, 100 canaries: a test")
    parser.add_argument("--kinds", nargs="+", default=["vectors", "images"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--mechanisms", nargs="+", default=list(MECHANISMS), choices=MECHANISMS)
    options, results = start("audit_table", parser)
    keys = [row["key"] for row in results.lines()]
    for kind, name, epsilon in product(options.kinds, options.mechanisms, EPSILONS):
        key = f"{name}, {kind}, ε = {epsilon:g}"
        for _ in range(keys.count(key), options.repeats):
            results.append({"key": key, **one_audit(name, epsilon, kind, options)})


if __name__ == "__main__":
    main()
