"""Runs FedStats and FedDM privately on the embeddings of a public encoder.

    python examples/embeddings.py

`bounds` states the range of an embedding's values. It is public: take it from the encoder, and not
from the private data. Values outside are clipped. FedStats releases class statistics of the
embeddings, scaled to norm 1. FedDM releases a few synthetic embeddings per class.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedsynth import (
    DatasetSpec,
    FedDM,
    FedStats,
    ModelSettings,
    PartitionSettings,
    PrivacySettings,
    RunSettings,
    export_run,
    from_arrays,
    load_synthetic,
    simulate,
)

DIMENSION = 64
SPEC = DatasetSpec(
    name="embeddings",
    channels=1,
    height=1,
    width=DIMENSION,
    classes=2,
    train_size=3000,
    test_size=600,
    mean=(0.5,),  # of the values after scaling by the bounds
    std=(0.25,),
    class_names=("healthy", "ill"),
    source="made by examples/embeddings.py",
    bounds=(-4.0, 4.0),
)


def embeddings(number: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns synthetic embeddings [N, DIMENSION] and labels [N], which replace the outputs of a
    real encoder.
    """
    labels = np.arange(number) % 2
    noise = np.random.default_rng(seed).normal(size=(number, DIMENSION))
    return noise + 0.5 * labels[:, None], labels


def main(folder: Path = Path("embeddings-run")) -> dict[str, float | None]:
    """Returns the test accuracy of each method with ε = 3, and exports the synthetic embeddings."""
    train = from_arrays(*embeddings(3000, seed=0), SPEC)
    test = from_arrays(*embeddings(600, seed=1), SPEC)
    settings = {
        "FedStats": (FedStats(), ModelSettings()),
        "FedDM": (FedDM(ipc=10, iterations=10, image_lr=1.0), ModelSettings("mlp", width=32)),
    }
    accuracy = {}
    for name, (method, model) in settings.items():
        run = RunSettings(
            method,
            rounds=2,
            model=model,
            partition=PartitionSettings(clients=3),
            privacy=PrivacySettings(epsilon=3.0, ledger=folder / f"ledgers-{name}"),
        )
        # the test data are public here. Leave out test="public" if yours are private
        result = simulate(run, data=(train, test), test="public", output=folder / "runs")
        accuracy[name] = result.accuracy
        print(f"{name}: test accuracy {result.accuracy:.3f}")
    share = export_run(str(result.folder), folder / "share")
    print(f"a synthetic embedding: {load_synthetic(share).values()[0, 0, 0, :3].tolist()} …")
    return accuracy


if __name__ == "__main__":
    main()
