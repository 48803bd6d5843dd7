"""How long one owner's private synthetic set takes on one core, by images, pixels, classes and
width: the table of docs/how-long.md.

    OMP_NUM_THREADS=1 python benchmarks/how_long.py [--quick] [--json]

Images of noise, `fedsynth synthesize`'s own settings (ipc 10, sampling rates as it chooses them).
Three runs of a round each tell the seconds of a release and of an epoch on the synthetic images:
one with few of both, one with more releases, one with more epochs. Seconds are the processor's of
this process; cases that are there are not made again.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from fedsynth import DatasetSpec, ImageData, PrivacySettings, from_arrays, owner_settings, simulate
from library.machine import machine, saver, table_options
from library.rows import lines

NAME = "how_long"
FEW, MORE = 2, 6
"""Releases, and epochs."""
CASES: dict[str, dict[str, int]] = {
    "500 images of 32 pixels": {"images": 500, "side": 32, "classes": 3, "width": 32},
    "2,000 images of 32 pixels": {"images": 2000, "side": 32, "classes": 3, "width": 32},
    "20,000 images of 32 pixels": {"images": 20000, "side": 32, "classes": 3, "width": 32},
    "2,000 images of 64 pixels": {"images": 2000, "side": 64, "classes": 3, "width": 32},
    "2,000 images of 128 pixels": {"images": 2000, "side": 128, "classes": 3, "width": 32},
    "2,000 images, ten classes": {"images": 2000, "side": 32, "classes": 10, "width": 32},
    "2,000 images, width 128": {"images": 2000, "side": 32, "classes": 3, "width": 128},
}


def noise(case: dict[str, int]) -> ImageData:
    """Grey images without anything in them."""
    rng = np.random.default_rng(0)
    shape = (case["images"], 1, case["side"], case["side"])
    spec = DatasetSpec(
        name="noise",
        channels=1,
        height=case["side"],
        width=case["side"],
        classes=case["classes"],
        train_size=case["images"],
        test_size=1,
        mean=(0.5,),
        std=(0.25,),
        class_names=tuple(str(number) for number in range(case["classes"])),
        source="noise",
    )
    labels = np.arange(case["images"]) % case["classes"]
    return from_arrays(rng.integers(0, 256, shape, dtype=np.uint8), labels, spec)


def one_round(case: dict[str, int], data: ImageData, releases: int, epochs: int) -> float:
    """The processor's seconds of a round."""
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


def measured(case: dict[str, int]) -> dict[str, Any]:
    """Seconds of a release and of an epoch."""
    data = noise(case)
    one_round(case, data, 1, 1)  # the first call of everything
    few = one_round(case, data, FEW, FEW)
    return {
        "seconds_a_release": (one_round(case, data, MORE, FEW) - few) / (MORE - FEW),
        "seconds_an_epoch": (one_round(case, data, FEW, FEW + 10 * (MORE - FEW)) - few)
        / (10 * (MORE - FEW)),
    }


def main() -> None:
    options = table_options(__doc__, "narrow networks, and the first two cases").parse_args()
    torch.set_num_threads(1)
    save = saver(NAME, options)
    there = set() if options.quick else {row["case"] for row in lines(NAME)}
    for name, case in list(CASES.items())[: 2 if options.quick else None]:
        if name not in there:
            chosen = {**case, "width": 4} if options.quick else case
            save({"case": name, **case, **measured(chosen), **machine()})


if __name__ == "__main__":
    main()
