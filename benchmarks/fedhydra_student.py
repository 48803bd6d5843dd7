"""FedHydra's student after each epoch of distillation, on 5,000 held-out training images: the
literal loop, and a pool of the best batch of each epoch with momentum and a reset generator.

    FEDSYNTH_DATA=DIR OMP_NUM_THREADS=1 python benchmarks/fedhydra_student.py mnist|fashion-mnist

Images of 14×14, 300 a class, five clients with two classes each or at Dir(0.1), seeds 0 and 1; 40
local epochs, 24 epochs of distillation. FedAvg and DENSE have the same clients. The second network
is that of a public repository of FedHydra's first author, with pixels in [0, 1]. Finished runs are
not repeated.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import product
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from fedsynth import ImageData, from_arrays, load_dataset, resolve, simulate
from library.machine import append, machine, rows_file
from library.rows import lines

SEEDS = (0, 1)
SERVER = {
    **{"start": "server", "server_epochs": 24, "generator_steps": 30, "generator_batch": 64},
    "generator_width": 16,
}
LITERAL = {
    **{"student_images": "all", "replay": False, "server_momentum": 0.0, "generator_reset": False},
}
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "fedavg": ("fedavg", {}),
    "dense": ("dense", SERVER),
    "literal": ("fedhydra", {**SERVER, **LITERAL}),
    "pool": ("fedhydra", SERVER),
}
# The pool with the floor and the rate that stratification had as earlier defaults.
STRATIFICATION: dict[str, tuple[str, dict[str, Any]]] = {
    "floor 0.001": ("fedhydra", {**SERVER, "stratification_floor": 0.001}),
    "rate 0.01": ("fedhydra", {**SERVER, "stratification_lr": 0.01}),
}
PARTITIONS: dict[str, dict[str, Any]] = {
    "2 classes per client": {"kind": "classes", "classes_per_client": 2},
    "dirichlet(0.1)": {"kind": "dirichlet", "alpha": 0.1},
}
NETWORKS = {"public": "cnn3", "cnn1": "cnn1"}
LOCAL = {"local_epochs": 40, "batch": 128, "lr": 0.01, "momentum": 0.9}


def small_images(dataset: str, seed: int, network: str) -> tuple[ImageData, ImageData]:
    """Returns the other training images at 14×14, and 5,000 random ones."""
    train, _ = load_dataset(dataset)
    spec = replace(train.spec, name=f"{dataset}-14", height=14, width=14)
    if network == "public":
        spec = replace(spec, mean=(0.0,), std=(1.0,))
    pixels = functional.avg_pool2d(train.images.float(), 2).round().to(torch.uint8)
    order = np.random.default_rng(1000 + seed).permutation(len(train.labels))
    parts = [np.sort(order[5000:]), np.sort(order[:5000])]
    images, labels = pixels.squeeze(1).numpy(), train.labels.numpy()
    rest, held_out = (from_arrays(images[part], labels[part], spec) for part in parts)
    return rest, held_out


def main() -> None:
    torch.set_num_threads(1)
    (dataset,) = sys.argv[1:]
    methods = {**METHODS, **STRATIFICATION}
    for partition, seed, network, name in product(PARTITIONS, SEEDS, NETWORKS, methods):
        if name in STRATIFICATION and network != "public":
            continue
        key = f"{dataset} {partition}, {network} {name} seed={seed}"
        if key in {row["key"] for row in lines("fedhydra_student")}:
            continue
        method, changes = methods[name]
        settings = resolve(
            {
                "run": {"method": method, "rounds": 1, "seed": seed},
                "partition": {"clients": 5, "subset": 3000 / 55_000, **PARTITIONS[partition]},
                "model": {"name": NETWORKS[network], "norm": "batch"},
                "method": {**LOCAL, **changes},
            }
        )
        with TemporaryDirectory() as folder:
            data = small_images(dataset, seed, network)
            run = simulate(settings, data=data, quiet=True, test="public", output=folder)
        metrics = run.metrics[-1]
        row: dict[str, Any] = {"key": key, "accuracy": metrics["test_accuracy"]}
        if name != "fedavg":
            row["curve"] = metrics["accuracy_by_epoch"]
            row["average"] = metrics["models"]["average"]["test_accuracy"]
        append(rows_file("fedhydra_student", False), {**row, **machine()})


if __name__ == "__main__":
    main()
