"""Runs FedStats on embeddings of a public encoder, which are stored as images of one row.

    python examples/embeddings.py

The embeddings are clipped to [-4, 4] and stored as bytes. A registered feature map converts the
bytes back to embeddings. The clipping range, the norm bound and the radius are public constants.
Take them from the encoder's paper, and not from the private data.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from torch import Tensor

from fedsynth import (
    DatasetSpec,
    FedStats,
    PartitionSettings,
    PrivacySettings,
    RunSettings,
    from_arrays,
    simulate,
)
from fedsynth.features import FeatureMap, register_features

DIMENSION = 64
RECORDS, HELD_OUT = 3000, 600
CLASSES = ("healthy", "ill")


def embeddings(number: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns synthetic embeddings [N, DIMENSION] and labels [N], which replace the outputs of a
    real encoder.
    """
    labels = np.arange(number) % len(CLASSES)
    noise = np.random.default_rng(seed).normal(size=(number, DIMENSION))
    return noise + 0.5 * labels[:, None], labels


def as_images(vectors: np.ndarray) -> np.ndarray:
    """Converts vectors to byte images [N, 1, 1, DIMENSION]."""
    scaled = (np.clip(vectors, -4, 4) + 4) / 8 * 255
    pixels: np.ndarray = scaled.round().astype(np.uint8)
    return pixels.reshape(-1, 1, 1, DIMENSION)


def restore(pixels: Tensor) -> Tensor:
    """Converts pixels in [0, 1] back to embeddings [N, DIMENSION]."""
    return 8 * pixels.flatten(1) - 4


def encoder_map(image_shape: tuple[int, int, int]) -> FeatureMap:
    """Returns the feature map with its public constants."""
    return FeatureMap(
        "encoder",
        image_shape,
        dimension=DIMENSION,
        norm_bound=8.0,
        radius=8.0,
        source="the encoder's paper",
        function=restore,
    )


def main(ledgers: Path = Path("ledgers")) -> float | None:
    spec = DatasetSpec(
        "scans",
        1,
        1,
        DIMENSION,
        len(CLASSES),
        RECORDS,
        HELD_OUT,
        (0.5,),
        (0.5,),
        CLASSES,
        "our own",
    )
    register_features("encoder", encoder_map)
    train_vectors, train_labels = embeddings(RECORDS, seed=0)
    test_vectors, test_labels = embeddings(HELD_OUT, seed=1)
    settings = RunSettings(
        FedStats(features="encoder"),
        rounds=4,
        partition=PartitionSettings(clients=3),
        privacy=PrivacySettings(epsilon=1.0, ledger=str(ledgers)),
    )
    result = simulate(
        settings,
        data=(
            from_arrays(as_images(train_vectors), train_labels, spec),
            from_arrays(as_images(test_vectors), test_labels, spec),
        ),
        test="private",
    )
    print(f"accuracy {result.accuracy:.2f}")
    return result.accuracy


if __name__ == "__main__":
    main()
