"""FedAF's readings of what its paper leaves open, one changed at a time: Fashion-MNIST at the size of `fedaf_table.py`.

    FEDSYNTH_DATA=... python benchmarks/fedaf_readings.py [--group matching] [--quick] [--json] [--alphas 0.1]
        [--seeds 0 1] [--only 'τ = 4'] [--time-budget 3600]

Groups: `rates` (the image rate at the table's number of steps, of FedAF and of FedDM, which the table takes), `real` (how strong knowledge
matching is, how soft, when, and by which batch norm, and as many server steps as the paper has: on random real images in place of condensed
ones, kept over the rounds, at width 8, so that a row costs a minute), `matching` (the same for few readings with condensed images, at the
table's size), `steps` (with as many server steps as the paper has and four times the condensation steps, at width 8). Accuracy is that on
5,000 training images held out of the run: the test set is not read. Finished runs are lines of results/fedaf_readings.jsonl.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import replace
from typing import Any

from fashion_table import RESULTS, Results, held_out, summarise
from fedaf_table import settings_for

from fedsynth.cli.memory import keep_large_allocations
from fedsynth.data.load import load_dataset
from fedsynth.federation.settings import RunSettings

Changes = dict[str, Any]
OFF: Changes = {"global_weight": 0.0}
SERVER: Changes = {"server_epochs": 500, "server_lr": 1e-3}
LONG: Changes = {**SERVER, "iterations": 200}
REAL: Changes = {
    "iterations": 1, "image_lr": 0.0, "start_average": 1, "restart": False, "local_weight": 0.0, "batch": 8,
}  # fmt: skip
MATCHING: dict[str, Changes] = {
    "without LGKM": OFF,
    "mean": {},
    "sum": {"matching_reduction": "sum"},
    **{f"mean, τ = {t}": {"temperature": float(t)} for t in (4, 8, 16)},
    "mean, once an epoch": {"server_matching": "epoch"},
    "mean, T by running statistics": {"matching_norm": "running"},
    "mean, λ = 0.2": {"global_weight": 0.2},
}
FEW = ("without LGKM", "mean", "mean, τ = 4")
READINGS: dict[str, dict[str, tuple[str, int, Changes]]] = {  # row of the table, rounds, what differs
    "rates": {
        **{f"image rate = {r:g}": ("without LGKM", 5, {"image_lr": r}) for r in (0.2, 1.0, 2.0, 5.0)},
        **{f"FedDM, image rate = {r:g}": ("FedDM", 5, {"image_lr": r}) for r in (0.2, 1.0, 5.0)},
    },
    "real": {
        **{f"real: {name}": ("FedAF", 10, {**REAL, **c}) for name, c in MATCHING.items()},
        **{f"real, long: {name}": ("FedAF", 10, {**REAL, **SERVER, **MATCHING[name]}) for name in FEW},
    },
    "matching": {
        **{
            f"condensed: {name}": ("FedAF", 10, MATCHING[name])
            for name in (*FEW, "mean, once an epoch", "sum", "mean, τ = 16")
        },
        "condensed: mean, V from a first phase": ("FedAF", 10, {"knowledge_from": "first-phase"}),
    },
    "steps": {f"condensed, long: {name}": ("FedAF", 10, {**LONG, **MATCHING[name]}) for name in FEW},
}  # fmt: skip
WIDTH = {"real": 8, "steps": 8}


def reading(
    group: str, name: str, alpha: float, seed: int, device: str, quick: bool
) -> RunSettings:
    row, rounds, changes = READINGS[group][name]
    settings = settings_for("fashion", row, alpha, seed, device, quick)
    model = replace(settings.model, width=WIDTH.get(group, settings.model.width))
    small: Changes = {"iterations": 2, "server_epochs": 1} if quick else {}
    method = replace(settings.method, **{**changes, **small})
    return replace(settings, method=method, model=model, rounds=1 if quick else rounds)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="one round and few steps, to see that it runs"
    )
    parser.add_argument("--json", action="store_true", help="print the table as JSON")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--group", choices=READINGS, nargs="+", default=list(READINGS))
    parser.add_argument("--alphas", type=float, nargs="+", default=[0.1])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--only", default="", help="make only the runs whose name contains this")
    parser.add_argument("--time-budget", type=float, default=math.inf, help="seconds")
    options = parser.parse_args()
    keep_large_allocations()
    data = held_out(load_dataset("fashion-mnist")[0], 5000)
    path = RESULTS / f"fedaf_readings{'_quick' if options.quick else ''}.jsonl"
    results = Results(path, options.only, options.time_budget)
    table: dict[tuple[float, str, str], list[dict[str, Any]]] = {}
    for alpha in options.alphas:
        for seed in options.seeds:  # one seed of every reading before the next seed of any
            for group in options.group:
                for name in READINGS[group]:
                    settings = reading(group, name, alpha, seed, options.device, options.quick)
                    row = results.get(f"{name}, Dir({alpha}) seed={seed}", settings, data)
                    if row is not None:
                        table.setdefault((alpha, group, name), []).append(row)
    shown = {
        f"{name}, Dir({alpha:g})": {
            "last": summarise([100 * row["accuracy"] for row in rows]),
            "best": summarise([100 * max(row["curve"]) for row in rows]),
        }
        for (alpha, _, name), rows in table.items()
    }
    if options.json:
        print(json.dumps(shown, indent=2))
        return
    for title, columns in shown.items():
        last, best = columns["last"], columns["best"]
        print(
            f"{title:48} last {last['mean']:6.2f} ± {last['sd']:.2f}   best {best['mean']:6.2f} ± "
            f"{best['sd']:.2f}   {last['values']}"
        )


if __name__ == "__main__":
    main()
