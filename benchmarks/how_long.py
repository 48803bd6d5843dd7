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
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from fedsynth import ImageData, PrivacySettings, from_arrays, owner_settings, simulate
from fedsynth.data.registry import custom_spec
from library.machine import run_cases, timing_options

# Releases, and epochs.
FEW, MANY = 2, 6


class Size(NamedTuple):
    """An owner's images, and the width of the ConvNet."""

    images: int = 2000
    side: int = 32
    classes: int = 3
    width: int = 32


CASES = {
    "500 images of 32 pixels": Size(images=500),
    "2,000 images of 32 pixels": Size(),
    "20,000 images of 32 pixels": Size(images=20_000),
    "2,000 images of 64 pixels": Size(side=64),
    "2,000 images of 128 pixels": Size(side=128),
    "2,000 images, ten classes": Size(classes=10),
    "2,000 images, width 128": Size(width=128),
}


def noise(size: Size) -> ImageData:
    """Returns grey images of noise."""
    names = map(str, range(size.classes))
    facts = {"train_size": size.images, "source": "noise"}
    spec = custom_spec("noise", (1, size.side, size.side), names, **facts)
    shape = (size.images, *spec.image_shape)
    images = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    return from_arrays(images, np.arange(size.images) % size.classes, spec)


def one_round(size: Size, data: ImageData, releases: int, epochs: int) -> float:
    """Returns the processor's seconds of a round."""
    settings = owner_settings(
        {
            "run": {"rounds": 1, "device": "cpu"},
            "model": {"width": size.width},
            "method": {"iterations": releases, "server_epochs": epochs},
        }
    )
    privacy = PrivacySettings(
        noise_multiplier=3.0,
        nominal_size=size.images,
        max_records=min(100_000, 10 * size.images),
        ledger="none: this data set is public",
    )
    started = time.process_time()
    simulate(replace(settings, privacy=privacy), data=(data, None), quiet=True)
    return time.process_time() - started


def measure(size: Size, options: argparse.Namespace) -> dict[str, Any]:
    """Returns the seconds of a release and of an epoch."""
    size = size._replace(width=4, images=500) if options.quick else size
    seconds = partial(one_round, size, noise(size))
    seconds(1, 1)  # the first call of everything
    few = seconds(FEW, FEW)
    releases = seconds(MANY, FEW) - few
    epochs = seconds(FEW, FEW + 10 * (MANY - FEW)) - few
    return {
        **size._asdict(),
        "seconds_a_release": releases / (MANY - FEW),
        "seconds_an_epoch": epochs / (10 * (MANY - FEW)),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    run_cases("how_long", timing_options(__doc__).parse_args(), CASES, measure)
