"""One-shot federated learning on the embedded digits: FedHydra, DENSE and FedDF distil the models
of five clients with two digits each.

Without privacy, and with ε = 10. FedDF distils on public images: here random pixels, as there is no
better choice; prefer a data set similar to the clients' (`proxy="emnist-letters"`). For the run
without privacy, FedHydra's U is printed: how well each client can teach each class.
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
from fedsynth.core.method import Method
from fedsynth.synthesizer.distillation.stratification import share_of_clients

LOCAL: dict[str, Any] = {"local_epochs": 10, "batch": 32}
SERVER: dict[str, Any] = {
    "server_epochs": 10,
    "generator_steps": 5,
    "generator_batch": 64,
    "generator_width": 8,
    "generator_lr": 0.01,
    "replay": True,
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
    """Returns the settings of a run on 2c/c: two disjoint digits at each of five clients. Privacy
    refuses batch norm, so group norm replaces it.
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
