"""Makes the `random-process` dictionary that the package ships, and measures what it adds.

    python benchmarks/random_process_prior.py --write
    FEDSYNTH_DATA=... python benchmarks/random_process_prior.py [--quick]
        [--features scattering ...]

`--write` learns the dictionary from random-process images (no data are read; half a minute) and
puts it beside `fedsynth/features/random_process.py`. Else: accuracy of a ridge classifier on
features of 4,500 CIFAR-10 training images, on 1,500 others; each coordinate standardised, the ridge
the best of three for each map. No test image is read. Finished rows are lines of
results/random_process_prior.jsonl.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from fedsynth.data.images import ImageData
from fedsynth.data.load import load_dataset
from fedsynth.features import feature_map
from fedsynth.features.random_process import WEIGHTS
from library.machine import machine, rows_file, table_options
from library.random_process_training import Recipe, learn_dictionary

MAPS = ("pixels", "scattering", "random-process", "scattering+random-process")
FIT, HELD = 4500, 1500
RIDGES = (0.1, 0.3, 1.0)
AT_ONCE = 50


def vectors(name: str, data: ImageData) -> Tensor:
    """Features of all images, [N, d]."""
    features = feature_map(name, data.spec.image_shape)
    with torch.no_grad():
        return torch.cat([features(images) for images in data.images.split(AT_ONCE)])


def ridge_accuracy(
    fit_Nd: Tensor, fit_labels: Tensor, held_Nd: Tensor, held_labels: Tensor
) -> list[float]:
    """Held-out accuracy for each of `RIDGES`."""
    mean = fit_Nd.mean(dim=0)
    deviation = fit_Nd.std(dim=0).clamp_min(1e-6)
    fit = (fit_Nd - mean) / deviation
    held = (held_Nd - mean) / deviation
    targets = torch.nn.functional.one_hot(fit_labels, 10).float() - 0.1
    moments = (fit.T @ fit / len(fit)).double()
    products = (fit.T @ targets / len(fit)).double()
    found = []
    for ridge in RIDGES:
        root = torch.linalg.cholesky(moments + ridge * torch.eye(len(moments)))
        weights = torch.cholesky_solve(products, root).float()
        found.append(float(((held @ weights).argmax(dim=1) == held_labels).double().mean()))
    return found


def measure(name: str, data: ImageData, quick: bool) -> dict[str, Any]:
    order = np.random.default_rng(3).permutation(len(data))
    fit = data.subset(np.sort(order[: 200 if quick else FIT]))
    held = data.subset(np.sort(order[-(100 if quick else HELD) :]))
    made = vectors(name, fit)
    found = ridge_accuracy(made, fit.labels, vectors(name, held), held.labels)
    return {"key": name, "dimension": made.shape[1], "accuracy": max(found), "by_ridge": found}


def main() -> None:
    parser = table_options(__doc__)
    parser.add_argument("--write", action="store_true", help="make the shipped dictionary anew")
    parser.add_argument("--features", nargs="+", default=list(MAPS), help="maps to measure")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.write:
        made = learn_dictionary(Recipe())
        save_file({"mean": made.mean, "atoms": made.atoms.contiguous()}, WEIGHTS)
        return
    path = rows_file("random_process_prior", options)
    data, _ = load_dataset("cifar10")
    lines = path.read_text().splitlines() if path.exists() else []
    rows = {row["key"]: row for row in map(json.loads, lines)}
    for name in options.features:
        if name not in rows:
            rows[name] = {**measure(name, data, options.quick), **machine()}
            with path.open("a") as file:
                file.write(json.dumps(rows[name]) + "\n")
    for name, row in rows.items():
        print(json.dumps(row) if options.json else f"{name:30} {100 * row['accuracy']:.2f}")


if __name__ == "__main__":
    main()
