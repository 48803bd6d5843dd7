"""The attacker knows all records but one, chooses that record, and sees all releases.

It must not move any sum by more than the clip, and nothing else at all, in whole private runs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fedsynth import ImageData, resolve, simulate
from fedsynth.data.load import load_dataset
from fedsynth.data.partition import hold_out
from tests.attacks.replay import recorded

pytestmark = pytest.mark.slow

TRAIN, TEST = load_dataset("digits")
IMAGES, LABELS = TRAIN.images[:560], TRAIN.labels[:560]
PARTS = [*np.split(np.arange(560), [300, 555]), np.arange(0)]
# An image, its label, the client that gets it, and its position among the client's records.
RECORDS: dict[str, tuple[Any, int, int, int]] = {
    "white": (np.full((8, 8), 255), 0, 0, 300),
    "a single pixel, for a client without records": (255 * np.eye(1, 64).reshape(8, 8), 5, 3, 0),
    "a copy, before all others": (IMAGES[3, 0].numpy(), int(LABELS[3]), 0, 0),
    "a chessboard, before five others": (np.indices((8, 8)).sum(0) % 2 * 255, 9, 2, 0),
}
CONDENSED = {"iterations": 3, "ipc": 2, "server_epochs": 1, "batch": 8}
# The method, its settings, and those of privacy and of the run.
RUNS: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "residual": ("feddm", CONDENSED, {"mechanism": "residual"}, {}),
    "residual, sampled, bf16": (
        "feddm",
        CONDENSED,
        {"mechanism": "residual", "sample_rate": 0.4, "clip": 0.05},
        {"precision": "bf16"},
    ),
    "residual, short passes": (
        *("feddm", CONDENSED, {"mechanism": "residual", "clip": 0.05}),
        {"memory_gb": 1e-4},
    ),
    "gradient, bf16": (
        *("feddm", CONDENSED, {"mechanism": "gradient", "clip": 0.01}),
        {"precision": "bf16"},
    ),
    "features": ("feddm", CONDENSED, {"mechanism": "features", "clip": 0.05}, {}),
    "fedaf": ("fedaf", CONDENSED, {}, {}),
    **{
        name: (name, {"local_epochs": 1, "batch": 128}, {}, {})
        for name in (
            *("fedavg", "fedfm", "fedfm-lite", "moon", "fedgen", "fedkf", "scaffold", "feddyn"),
            *("fedgkd", "fednova", "fedcvae-ens", "fpl", "fedsr", "fedmgda-plus", "feddc", "ccvr"),
        )
    },
}


@pytest.mark.parametrize("name", RUNS)
def test_record_moves_sums_by_at_most_clip_and_nothing_else(name: str) -> None:
    method, own, privacy, run = RUNS[name]
    settings = resolve(
        {
            "run": {"method": method, "rounds": 2, "device": "cpu", **run},
            "model": {"width": 8, "depth": 2},
            "partition": {"clients": 4},
            "method": own,
            "privacy": {"noise_multiplier": 3.0, **privacy},
        }
    )
    for image, label, client, position in RECORDS.values():
        images = torch.cat([IMAGES, torch.from_numpy(image.astype(np.uint8))[None, None]])
        data = ImageData(images, torch.cat([LABELS, torch.tensor([label])]), TRAIN.spec)
        more = list(PARTS)
        more[client] = np.insert(PARTS[client], position, 560)
        with recorded() as tape:
            first = simulate(settings, data=(data, TEST), parts=PARTS, quiet=True)
        with recorded(tape, {f"client-{client:03d}": position}) as other:
            second = simulate(settings, data=(data, TEST), parts=more, quiet=True)
        assert tape.largest_influence(other) <= 1 + 1e-6
        for number, upload in first.uploads.items():
            for (key, x), (_, y) in zip(
                upload.arrays(), second.uploads[number].arrays(), strict=True
            ):
                assert torch.equal(x, y), (number, key)


def test_record_moves_no_other_into_local_test_split() -> None:
    """The first record of a thousand is removed, which gives all others another index."""
    fewer = ImageData(TRAIN.images[1:], TRAIN.labels[1:], TRAIN.spec)
    (before,), _ = hold_out([np.arange(1000)], 0.2, 0, TRAIN)
    (after,), _ = hold_out([np.arange(999)], 0.2, 0, fewer)
    assert set(before.tolist()) - {0} == {index + 1 for index in after.tolist()}
