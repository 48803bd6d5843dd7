"""All methods on Fashion-MNIST, 10 clients, Dir(0.1), at one budget, for one CPU core: accuracy,
bytes and seconds.

    FEDSYNTH_DATA=... python benchmarks/compare.py [--quick] [--device cuda]
        [--methods fedprox moon] [--only 'seed=1'] [--time-budget SECONDS]

A tenth of each class, a ConvNet of width 8. The budget is passes over a client's own data: 5
rounds of 5 for methods that send models, batches of 32, SGD without momentum, as SCAFFOLD and q-FFL
have none. The rate of each is the best on 5,000 held-out training images with seed 0 (rows "rate
…"), of 0.003, 0.01, 0.03, 0.1 and 0.3, and further ones as long as the best is at an end. FedBN and
SOLO take FedAvg's, and so do one-shot methods, whose clients train once, 100 passes, until they fit
their data; their servers are those of `one_shot_table.py`. Methods that condense take 5 rounds of
50 steps, ipc 10; FedDM's and FedAF's image rates are found in the same way, of 0.1, 0.3, 1, 3 and
10. FedAF has the weights that its paper gives for Fashion-MNIST (1e-3 and 2.0). All else that is
not named here is each paper's, but for generators, which are small. FedBN and SOLO have no common
model: their figure is AMP, the average over the clients' own models on the clients' own test
splits, a fifth of their data, which is another, easier question at Dir(0.1). Three seeds, and five
of one-shot methods. Resumes: finished runs are lines of results/compare.jsonl, and `--only` shares
the work among processes; `tables.py` prints the table.
"""

from __future__ import annotations

from typing import Any

import torch

from fedsynth.config.resolve import resolve
from fedsynth.config.settings import RunSettings
from library.compared import METHODS, PERSONAL, SINGLE_ROUND, TAKE_FEDAVGS_RATE
from library.results import Results, best_key, dataset, start, table_parser

LADDER = (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
GRIDS = {"lr": (0.003, 0.01, 0.03, 0.1, 0.3), "image_lr": (0.1, 0.3, 1.0, 3.0, 10.0)}


def knob(name: str) -> str | None:
    """The rate that is tuned: of local training, or of images; None: there is none."""
    _, values = METHODS[name]
    if "local_epochs" in values:
        return "lr"
    return "image_lr" if "iterations" in values else None


def settings_for(name: str, seed: int, device: str, quick: bool, rate: float | None) -> RunSettings:
    method, values = METHODS[name]
    tuned = knob(name)
    if rate is not None and tuned is not None:
        values = {**values, tuned: rate}
    few = {"local_epochs": 1, "server_epochs": 1, "server_steps": 1, "iterations": 2}
    small = {key: number for key, number in few.items() if key in values}
    own = {"local_test": 0.2} if name in PERSONAL else {}
    return resolve(
        {
            "run": {
                "method": method,
                "rounds": 1 if quick or name in SINGLE_ROUND else 5,
                "seed": seed,
                "device": device,
                "evaluate_every": 5,
            },
            "data": {"dataset": "fashion-mnist"},
            "partition": {"kind": "dirichlet", "alpha": 0.1, "clients": 10, "subset": 0.1, **own},
            "model": {"width": 8, "norm": "batch" if name == "fedbn" else "instance"},
            "method": {**values, **(small if quick else {})},
        }
    )


def best_rate(name: str, results: Results, device: str, quick: bool) -> float | None:
    """Returns the best rate on held-out training images; None: another call has yet to find it."""
    chosen = "fedavg" if name in TAKE_FEDAVGS_RATE else name
    grid = GRIDS[knob(chosen) or "lr"]
    order = torch.randperm(60_000, generator=torch.Generator().manual_seed(0))
    train = dataset("fashion-mnist")[0]
    tuning = train.subset(order[5000:]), train.subset(order[:5000])
    first = LADDER.index(grid[0])
    last = LADDER.index(grid[-1])
    rows: dict[int, dict[str, Any] | None] = {}
    while True:
        for step in range(first, last + 1):
            if step not in rows:
                rate = LADDER[step]
                settings = settings_for(chosen, 0, device, quick, rate)
                rows[step] = results.get(f"rate {chosen} {rate:g}", settings, tuning)
        best = best_key(rows)
        if best is None:
            return None
        if best == first > 0:
            first -= 1
        elif best == last < len(LADDER) - 1:
            last += 1
        else:
            return LADDER[best]


def main() -> None:
    parser = table_parser(__doc__)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.set_defaults(seeds=None)
    options, results = start("compare", parser)
    torch.set_num_threads(1)
    for name in options.methods:
        rate = None
        if knob(name) is not None:
            rate = best_rate(name, results, options.device, options.quick)
            if rate is None:
                continue
        for seed in options.seeds or range(5 if name in SINGLE_ROUND else 3):
            settings = settings_for(name, seed, options.device, options.quick, rate)
            results.get(f"{name} seed={seed}", settings)
    results.show()


if __name__ == "__main__":
    main()
