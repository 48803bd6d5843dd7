"""FedDM, REAL and FedAvg on Fashion-MNIST, 10 clients, Dir(0.1): the first table of
docs/results.md, at a size that two CPU cores can do.

    FEDSYNTH_DATA=... python benchmarks/fashion_table.py [--quick] [--device cuda]

FedAvg's learning rate is chosen from the comparison papers' grid by 5,000 training images held out
of everything else, with a seed that the table does not use and the table's number of rounds. The
test set is read after each round, for the curves; nothing is chosen by it. FedDM and REAL keep the
papers' settings where two cores allow, and start from the same real images. Each finished run is a
line in the results file, under its name and a hash of its settings; a second call goes on from
there, and `--only` shares the work among processes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from library.fashion import TUNING_SEED, settings_for
from library.results import best_key, start, table_parser, tuning_data

FEDAVG_GRID = (0.001, 0.01, 0.1)
QUICK: dict[str, dict[str, int]] = {
    "feddm": {"iterations": 2, "server_epochs": 2},
    "real": {"server_epochs": 2},
    "fedavg": {"local_epochs": 1},
}


def main() -> None:
    options, results = start("fashion_table", table_parser(__doc__))

    def run(name: str, method: str, seed: int, data: Any = None, **changes: Any) -> Any:
        if options.quick:
            changes.update(QUICK[method])
        settings = settings_for(method, seed, options.device, **changes)
        return results.get(name, replace(settings, rounds=1) if options.quick else settings, data)

    tuning = tuning_data("fashion-mnist")
    rates = {
        lr: run(f"tune fedavg lr={lr}", "fedavg", TUNING_SEED, tuning, lr=lr) for lr in FEDAVG_GRID
    }
    best = best_key(rates)
    for seed in options.seeds:
        for method in ("feddm", "real"):
            run(f"{method} seed={seed}", method, seed)
        if best is not None:
            run(f"fedavg seed={seed}", "fedavg", seed, lr=best)
    results.show()


if __name__ == "__main__":
    main()
