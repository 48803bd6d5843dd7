"""Compares FedProx with FedAvg on the dataset of its paper, Synthetic(1, 1), where 90 % of the
devices in a round do not finish.

This is a small version of Fig. 1 of the paper (arXiv 1812.06127). FedAvg drops the devices that do
not finish. FedProx uses their partial work, with a proximal term (μ = 1) and without one (μ = 0).
The model is softmax regression. In each round, 10 of 30 devices train for up to 20 passes. The
example prints the test accuracy after 20 rounds. It also prints the inexactness γ with which the
devices of the first round solve their local problems, where 0 is an exact solution and 1 is no
progress.
"""

from __future__ import annotations

from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from fedsynth import (
    FedAvg,
    FedProx,
    ModelSettings,
    PartitionSettings,
    RunSettings,
    load_dataset,
    simulate,
)
from fedsynth.methods.kit import (
    Method,
    ModelParameters,
    build_model,
    flatten,
    normalise,
    partition,
)

DATASET = "synthetic(1,1)"


def settings(method: Method, rounds: int) -> RunSettings:
    return RunSettings(
        method=method,
        dataset=DATASET,
        rounds=rounds,
        evaluate_every=rounds,
        participation=1 / 3,
        partition=PartitionSettings(kind="natural", clients=30),
        model=ModelSettings("linear"),
    )


def gradient(model: nn.Module, images_NCHW: Tensor, labels_N: Tensor) -> Tensor:
    """Returns the gradient ∇F of a device's mean cross-entropy, as a vector."""
    loss = nn.functional.cross_entropy(model(images_NCHW), labels_N)
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])


def gammas(run: RunSettings, mu: float) -> list[float]:
    """Returns γ of each device that takes part in a single round from the initial model."""
    train, _ = load_dataset(DATASET)
    start = build_model(run.model, train.spec.image_shape, train.spec.classes, run.seed)
    parts = partition(
        train.labels.numpy(), run.resolved_partition, train.spec.classes, *train.origins()
    )
    values = []
    for client, upload in simulate(run).uploads.items():
        if not isinstance(upload, ModelParameters) or upload.weight == 0:
            continue
        model = build_model(run.model, train.spec.image_shape, train.spec.classes, run.seed)
        model.load_state_dict(dict(upload.parameters))
        images = normalise(train.images[parts[client]], train.spec)
        labels = train.labels[parts[client]]
        moved = flatten(model) - flatten(start)
        residual = gradient(model, images, labels) + mu * moved
        values.append(float(residual.norm() / gradient(start, images, labels).norm()))
    return values


def main(rounds: int = 20, passes: int = 20) -> dict[str, float]:
    """Returns the test accuracy of each method."""
    local: dict[str, Any] = {
        "local_epochs": passes,
        "batch": 10,
        "lr": 0.01,
        "momentum": 0.0,
        "stragglers": 0.9,
    }
    methods: dict[str, Method] = {
        "FedAvg, which drops stragglers": FedAvg(**local, drop_stragglers=True),
        "FedProx, μ = 0": FedProx(**local, mu=0.0),
        "FedProx, μ = 1": FedProx(**local, mu=1.0),
    }
    accuracy = {}
    for name, method in methods.items():
        accuracy[name] = simulate(settings(method, rounds)).summary["test_accuracy"]
        mu = method.mu if isinstance(method, FedProx) else 0.0
        near = gammas(settings(method, 1), mu)
        print(
            f"{name:32} {100 * accuracy[name]:.1f} %, γ of round 1: median {median(near):.2f}, "
            f"largest {max(near):.2f}"
        )
    return accuracy


if __name__ == "__main__":
    main()
