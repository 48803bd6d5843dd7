"""The server's training on synthetic images, beside a DataLoader with torch's SGD
(library/reference.py), alternately in one run.

    python benchmarks/server_step.py [--quick] [--device cuda]

FedDM's shape: 810 images (81 client classes of 10, as in the paper's Table 3 for MNIST at alpha
0.5), batch 256, ConvNet-128, projection after every step. Random images: only time is measured. The
floor is operations over the measured matrix-product peak in fp32.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from typing import Any

import torch

from fedsynth.cli.process import keep_large_allocations
from fedsynth.data.registry import dataset_spec
from fedsynth.models.registry import ModelSettings, build_model
from fedsynth.training.optimisers import MomentumSgd
from fedsynth.training.sgd import SgdSettings, train_on
from library.cases import forward_flops, peak_flops
from library.machine import medians, run_cases, timing_options
from library.reference import server_step

IMAGES, BATCH = 810, 256


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    device = torch.device(options.device)
    width = 8 if options.quick else 128
    spec = dataset_spec(name)
    model = build_model(ModelSettings(width=width), spec.image_shape, spec.classes, 0).to(device)
    x = torch.randn(IMAGES, *spec.image_shape, device=device)
    y = torch.arange(IMAGES, device=device) % spec.classes
    epochs = 1 if options.quick else options.epochs
    sgd = SgdSettings(epochs, BATCH, MomentumSgd(0.01, 0.9, 5e-4), radius=5.0)
    plain: dict[str, Any] = {"epochs": epochs, "batch": BATCH, "learning_rate": 0.01, "radius": 5.0}
    runs: dict[str, Callable[[], object]] = {
        "reference": lambda: server_step(copy.deepcopy(model), x, y, **plain),
        "engine": lambda: train_on(
            copy.deepcopy(model), lambda where: x[where], y, sgd, torch.Generator()
        ),
    }
    times = {key: value / epochs for key, value in medians(runs, options).items()}
    flops = 3 * IMAGES * forward_flops(model, spec.image_shape)  # type: ignore[arg-type]
    floor = flops / peak_flops(torch.float32, device)
    return {
        "images": IMAGES,
        "seconds per epoch": times,
        "ratio": times["reference"] / times["engine"],
        "floor": floor,
        "share of the floor": floor / times["engine"],
    }


def main() -> None:
    parser = timing_options(__doc__)
    parser.add_argument("--epochs", type=int, default=2)
    keep_large_allocations()
    cases = {name: name for name in ("mnist", "cifar10")}
    run_cases("server_step", parser.parse_args(), cases, measure)


if __name__ == "__main__":
    main()
