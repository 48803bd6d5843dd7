"""Which faults a canary audit finds: broken twins of mechanisms, each with a claim of ε = 3.

    python benchmarks/audit_twins.py [--quick] [--kinds vectors images] [--twins "no clip"]
        [--mechanisms gradient] [--repeats 3]

Two rounds on the digits' shape, networks of width 8 (DP-SGD: 48), one client, 1000 canaries. A twin
is the product with one fault planted. Coins, masks and noise differ from call to call. Resumes:
finished audits are lines of results/audit_twins.jsonl, and `--repeats` counts them.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict
from functools import cache
from itertools import product
from typing import Any
from unittest.mock import patch

import torch

from fedsynth.config.resolve import resolve
from fedsynth.config.settings import RunSettings
from fedsynth.privacy.randomness import SecretGenerator
from fedsynth.simulation.audit.auditing import audit_run
from library.results import start, table_parser

CONDENSE = {"iterations": 2, "ipc": 2, "server_epochs": 1}
TRAIN = {"local_steps": 2, "batch": 20}
MECHANISMS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "residual": ("feddm", CONDENSE, {"mechanism": "residual"}),
    "gradient": ("feddm", CONDENSE, {"mechanism": "gradient"}),
    "DP-SGD (FedAvg)": ("fedavg", TRAIN, {"sample_rate": 1.0}),
    "DP-SGD (FedAvg), q = 0.1": ("fedavg", TRAIN, {"sample_rate": 0.1}),
    "FedSum": ("fedsum", {"networks": 4, "ipc": 2, "iterations": 2}, {}),
    "FedStats": ("fedstats", {"features": "pixels", "second_moments": "yes"}, {}),
}
normal = SecretGenerator.normal


def less_noise(factor: float) -> dict[str, Any]:
    def scaled(self: SecretGenerator, shape: Any, deviation: float, device: Any = "cpu") -> Any:
        return normal(self, shape, deviation / factor, device)

    return {"fedsynth.privacy.randomness.SecretGenerator.normal": scaled}


def public_mask(self: SecretGenerator, count: int, rate: float) -> torch.Tensor:
    drawn = torch.rand(count, generator=torch.Generator().manual_seed(0)) < rate
    return torch.nonzero(drawn).flatten()


TWINS: dict[str, dict[str, Any]] = {
    "honest": {},
    "no clip": {
        "fedsynth.privacy.mechanisms.clip_rows": lambda rows, clip: rows.double(),
        "fedsynth.privacy.products.Outer._clipped": lambda self: (self.left, self.right),
    },
    "half the noise": less_noise(2.0),
    "a quarter of the noise": less_noise(4.0),
    "public mask": {"fedsynth.privacy.randomness.SecretGenerator.poisson_sample": public_mask},
}


@cache
def settings_of(name: str, quick: bool) -> RunSettings:
    method, options, privacy = MECHANISMS[name]
    sections: dict[str, dict[str, Any]] = {
        "run": {"method": method, "rounds": 1 if quick else 2, "device": "cpu"},
        "partition": {"clients": 1},
        "model": {"width": 48 if method == "fedavg" else 8},
        "method": options,
        "privacy": {"nominal_size": 100, "epsilon": 3.0, **privacy},
    }
    return resolve(sections)


def one_audit(name: str, twin: str, kind: str, quick: bool) -> dict[str, Any]:
    """Returns a row of the results file."""
    with ExitStack() as planted:
        for target, fault in TWINS[twin].items():
            planted.enter_context(patch(target, fault))
        found = audit_run(
            settings_of(name, quick), canaries=100 if quick else 1000, canaries_as=kind
        )
    figures = asdict(found)
    del figures["method"], figures["mechanism"]
    return figures


def main() -> None:
    parser = table_parser(__doc__, "one round, 100 canaries: a test")
    parser.add_argument("--kinds", nargs="+", default=["vectors", "images"])
    parser.add_argument("--mechanisms", nargs="+", default=list(MECHANISMS), choices=MECHANISMS)
    parser.add_argument("--twins", nargs="+", default=list(TWINS), choices=TWINS)
    parser.add_argument("--repeats", type=int, default=3)
    options, results = start("audit_twins", parser)
    keys = [row["key"] for row in results.lines()]
    for name, kind, twin in product(options.mechanisms, options.kinds, options.twins):
        if twin == "public mask" and "q = 0.1" not in name:
            continue  # nothing is sampled
        key = f"{name}, {kind}, {twin}"
        for _ in range(keys.count(key), options.repeats):
            results.append({"key": key, **one_audit(name, twin, kind, options.quick)})


if __name__ == "__main__":
    main()
