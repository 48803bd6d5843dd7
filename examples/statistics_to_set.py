"""Generates a synthetic dataset from private sums, and trains a custom torch model on it.

Three owners of the embedded digits release noisy class statistics of fixed features (FedStats), and
the server generates images from the releases. The exported folder contains the images and the
released classifier. Anyone who receives the folder can train any network on it, without the data
and without further privacy cost. The digits are a small dataset, so ε is large here.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from torch import nn

from fedsynth import (
    FedStats,
    PartitionSettings,
    PrivacySettings,
    RunSettings,
    export_run,
    load_dataset,
    load_model,
    load_synthetic,
    simulate,
    train_student,
)
from fedsynth.methods.kit import accuracy


def network() -> nn.Module:
    """Returns a small network for normalised images [N, 1, 8, 8] and ten classes."""
    layers = [nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(32 * 4 * 4, 10))


def main(folder: Path, epsilon: float = 30.0) -> tuple[float, float]:
    """Returns the test accuracy of the released classifier, and of a model trained on the images."""
    settings = RunSettings(
        FedStats(ipc=10),
        rounds=4,
        partition=PartitionSettings(clients=3),
        privacy=PrivacySettings(epsilon=epsilon),
    )
    run = simulate(settings, output=folder / "runs", quiet=True)
    share = export_run(str(run.folder), folder / "share", with_model=True)
    synthetic = load_synthetic(share)
    labels = synthetic.labels if synthetic.soft_labels is None else synthetic.soft_labels
    model = network()
    train_student(model, synthetic.normalised(), labels, teacher=load_model(share))
    test = load_dataset("digits")[1]
    teacher, student = accuracy(run.model, test), accuracy(model, test)
    print(f"{synthetic}: classifier {teacher:.3f}, model trained on the images {student:.3f}")
    return teacher, student


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        main(Path(place))
