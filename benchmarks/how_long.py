"""Time of one owner's private synthetic set on one core, by images, pixels, classes and width: the
table of docs/how-long.md.

    OMP_NUM_THREADS=1 python benchmarks/how_long.py [--quick]

Images of noise, `fedsynth synthesize`'s own settings (ipc 10, sampling rates as it chooses them).
Three runs of a round each give the seconds of a release and of an epoch on the synthetic images:
one with few of both, one with more releases, one with more epochs. Seconds are the processor's of
this process.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from fedsynth import ImageData, PrivacySettings, from_arrays, owner_settings, simulate
from fedsynth.data.registry import dataset_spec
from library.machine import run_cases, timing_options

FEW, MANY = 2, 6
"""Releases, and epochs."""
SIZES = {  # images, pixels a side, classes, width
    "500 images of 32 pixels": (500, 32, 3, 32),
    "2,000 images of 32 pixels": (2000, 32, 3, 32),
    "20,000 images of 32 pixels": (20000, 32, 3, 32),
    "2,000 images of 64 pixels": (2000, 64, 3, 32),
    "2,000 images of 128 pixels": (2000, 128, 3, 32),
    "2,000 images, ten classes": (2000, 32, 10, 32),
    "2,000 images, width 128": (2000, 32, 3, 128),
}
NAMES = ("images", "side", "classes", "width")
CASES = {name: dict(zip(NAMES, sizes, strict=True)) for name, sizes in SIZES.items()}


def noise(case: dict[str, int]) -> ImageData:
    """Returns grey images of noise."""
    rng = np.random.default_rng(0)
    side, classes = case["side"], case["classes"]
    names = tuple(str(number) for number in range(classes))
    size: dict[str, Any] = {"height": side, "width": side, "train_size": case["images"]}
    spec = replace(dataset_spec("mnist"), classes=classes, class_names=names, **size)
    images = rng.integers(0, 256, (case["images"], 1, side, side), dtype=np.uint8)
    return from_arrays(images, np.arange(case["images"]) % classes, spec)


def one_round(case: dict[str, int], data: ImageData, releases: int, epochs: int) -> float:
    """Returns the processor's seconds of a round."""
    settings = owner_settings(
        {
            "run": {"rounds": 1, "device": "cpu"},
            "model": {"width": case["width"]},
            "method": {"iterations": releases, "server_epochs": epochs},
        }
    )
    privacy = PrivacySettings(
        noise_multiplier=3.0,
        nominal_size=case["images"],
        max_records=min(100_000, 10 * case["images"]),
        ledger="none: this data set is public",
    )
    started = time.process_time()
    simulate(replace(settings, privacy=privacy), data=(data, None), quiet=True)
    return time.process_time() - started


def measure(case: dict[str, int], options: argparse.Namespace) -> dict[str, Any]:
    """Returns the seconds of a release and of an epoch."""
    chosen = {**case, "width": 4, "images": 500} if options.quick else case
    data = noise(chosen)
    one_round(chosen, data, 1, 1)  # the first call of everything
    few = one_round(chosen, data, FEW, FEW)
    releases = one_round(chosen, data, MANY, FEW) - few
    epochs = one_round(chosen, data, FEW, FEW + 10 * (MANY - FEW)) - few
    return {
        **case,
        "seconds_a_release": releases / (MANY - FEW),
        "seconds_an_epoch": epochs / (10 * (MANY - FEW)),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    run_cases("how_long", timing_options(__doc__).parse_args(), CASES, measure)
