"""FedDM, REAL and FedAvg on Fashion-MNIST, 10 clients, Dir(0.1): the first table of
docs/results.md, at a size that two CPU cores can do.

    FEDSYNTH_DATA=... python benchmarks/fashion_table.py [--quick] [--json] [--device cuda]

FedAvg's learning rate is chosen from the comparison papers' grid by 5,000 training images held out
of everything else, with a seed that the table does not use and the table's number of rounds. The
test set is read after each round, for the curves; nothing is chosen by it. FedDM and REAL keep the
papers' settings where two cores allow, and start from the same real images. Each finished run is a
line in the results file, under its name and a hash of its settings; a second call goes on from
there, and `--only` shares the work among processes.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from fedsynth.cli.memory import keep_large_allocations
from fedsynth.data.images import ImageData
from fedsynth.data.load import load_dataset
from library.fashion import TUNING_SEED, settings_for
from library.options import table_options
from library.results import Results, held_out, summarise

FEDAVG_GRID = (0.001, 0.01, 0.1)


def main() -> None:
    parser = table_options(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--only",
        default="",
        help="make only the runs whose name contains this, such as 'seed=1' or 'tune'",
    )
    options = parser.parse_args()
    keep_large_allocations()
    train, test = load_dataset("fashion-mnist")
    results = Results.of("fashion_table", options)
    quick = {
        "feddm": {"iterations": 2, "server_epochs": 2},
        "real": {"server_epochs": 2},
        "fedavg": {"local_epochs": 1},
    }

    def run(
        name: str, method: str, seed: int, data: tuple[ImageData, ImageData], **changes: Any
    ) -> dict[str, Any] | None:
        settings = settings_for(
            method, seed, options.device, **changes, **(quick[method] if options.quick else {})
        )
        return results.get(name, replace(settings, rounds=1) if options.quick else settings, data)

    rows: dict[str, list[dict[str, Any] | None]] = {}
    for method in ("feddm", "real"):
        rows[method] = [run(f"{method} seed={s}", method, s, (train, test)) for s in options.seeds]
    tuning = held_out(train, 5000)
    tried = {
        lr: run(f"tune fedavg lr={lr}", "fedavg", TUNING_SEED, tuning, lr=lr) for lr in FEDAVG_GRID
    }
    held = {lr: row["accuracy"] for lr, row in tried.items() if row is not None}
    if len(held) < len(FEDAVG_GRID):
        return
    best = max(held, key=lambda rate: held[rate])
    rows["fedavg"] = [
        run(f"fedavg seed={s}", "fedavg", s, (train, test), lr=best) for s in options.seeds
    ]
    finished = {
        name: [100 * row["accuracy"] for row in made if row is not None]
        for name, made in rows.items()
    }
    if any(len(values) < len(options.seeds) for values in finished.values()):
        return
    finished["feddm - real, same start images"] = [
        a - b for a, b in zip(finished["feddm"], finished["real"], strict=True)
    ]
    finished["feddm - fedavg"] = [
        a - b for a, b in zip(finished["feddm"], finished["fedavg"], strict=True)
    ]
    table = {name: summarise(values) for name, values in finished.items()}
    if options.json:
        print(json.dumps({"held-out accuracy by FedAvg learning rate": held, **table}, indent=2))
        return
    print(f"FedAvg's accuracy on 5,000 held-out training images, by learning rate: {held}")
    for name, row in table.items():
        print(f"{name:35} {row['mean']:6.2f} ± {row['sd']:.2f}   {row['values']}")


if __name__ == "__main__":
    main()
