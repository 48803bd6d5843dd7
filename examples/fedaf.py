"""Runs FedAF on the embedded digits, first without privacy and then with a budget of ε = 10.

The private run prints the privacy cost of the shared logits and of the images.
"""

from __future__ import annotations

from typing import Any

from fedsynth import FedAF, ModelSettings, PartitionSettings, PrivacySettings, RunSettings, simulate


def settings(privacy: PrivacySettings | None) -> RunSettings:
    """Returns the settings of a short run.

    λ_loc and λ_glob have the paper's values for CIFAR-10. With the value for Fashion-MNIST, λ_glob
    = 2, the predictions of a model that is trained for so few rounds stay nearly uniform.
    """
    return RunSettings(
        method=FedAF(
            ipc=10,
            iterations=10,
            image_lr=5.0,
            image_momentum=0.0,
            server_epochs=60,
            server_lr=0.01,
        ),
        rounds=3,
        partition=PartitionSettings(kind="dirichlet", clients=5, alpha=0.5),
        model=ModelSettings(width=32, depth=2),
        privacy=privacy,
    )


if __name__ == "__main__":
    for privacy in (None, PrivacySettings(epsilon=10.0, delta=1e-5)):
        result = simulate(settings(privacy))
        print(
            f"{'private' if privacy else 'open   '}: test accuracy "
            f"{100 * result.summary['test_accuracy']:.1f} %"
        )
        if result.privacy is not None:
            guarantee: Any = result.privacy["guarantee"]
            for release in guarantee["epsilon_of_each_release_alone"]:
                print(
                    f"  {release['quantity']}: ε = {release['epsilon']:.2f} if it were the only "
                    "release"
                )
