"""Compares one-shot federated learning by FedHydra, DENSE and FedDF on the embedded digits.

The server distils the models of five clients, each of which has examples of two digits. All methods
run without privacy and with ε = 10. FedDF distils on public images. This example uses random
pixels, because no public dataset is included; prefer a dataset that is similar to the clients' data
(`proxy="emnist-letters"`). For the run without privacy, the example also prints FedHydra's matrix
U, which measures how well each client can teach each class.
"""

from __future__ import annotations

from typing import Any

from fedsynth import (
    Dense,
    FedDF,
    FedHydra,
    ModelSettings,
    PartitionSettings,
    PrivacySettings,
    RunSettings,
    simulate,
)
from fedsynth.methods.kit import Method, share_of_clients

LOCAL: dict[str, Any] = {"local_epochs": 10, "batch": 32}
SERVER: dict[str, Any] = {
    "server_epochs": 10,
    "generator_steps": 5,
    "generator_batch": 64,
    "generator_width": 8,
    "generator_lr": 0.01,
    "start": "average",
}


def methods() -> list[Method]:
    """Returns the three methods with settings for a short demonstration."""
    return [
        FedHydra(**LOCAL, **SERVER, stratification_steps=15, stratification_batch=16),
        Dense(**LOCAL, **SERVER),
        FedDF(**LOCAL, proxy="noise", server_steps=100),
    ]


def settings(method: Method, privacy: PrivacySettings | None) -> RunSettings:
    """Returns the settings of a run in which each of five clients has two digits that no other
    client has.

    The private run uses group norm instead of batch norm, because batch norm is refused with
    differential privacy.
    """
    return RunSettings(
        method=method,
        rounds=1,
        partition=PartitionSettings(kind="classes", clients=5, classes_per_client=2),
        model=ModelSettings(width=16, depth=2, norm="group" if privacy else "batch"),
        privacy=privacy,
    )


if __name__ == "__main__":
    for privacy in (None, PrivacySettings(epsilon=10.0, delta=1e-5)):
        for method in methods():
            result = simulate(settings(method, privacy))
            print(
                f"{method.name:9} {'ε = 10' if privacy else 'open  '}  test accuracy "
                f"{100 * result.summary['test_accuracy']:.1f} %"
            )
            if result.artefacts and not privacy:
                print("  share of each client in teaching each digit:")
                for digit, row in enumerate(share_of_clients(result.artefacts["stratification"])):
                    print(f"    {digit}: " + "  ".join(f"{share:.2f}" for share in row.tolist()))
