"""FedKF on the embedded digits, 4 of 10 clients a round, without privacy and with a budget of ε =
10: both final models, and fairness.
"""

from __future__ import annotations

from fedsynth import FedKF, ModelSettings, PartitionSettings, PrivacySettings, RunSettings, simulate


def settings(privacy: PrivacySettings | None) -> RunSettings:
    """Returns the settings of a run. Clients hold out a fifth of their data, on which AMP (mean
    accuracy), FM (variance) and WLP (worst client) are measured.
    """
    return RunSettings(
        method=FedKF(local_epochs=5, batch=32, lr=0.2, generator_width=8, generator_batch=32),
        rounds=5,
        participation=0.4,
        partition=PartitionSettings(kind="dirichlet", clients=10, alpha=0.5, local_test=0.2),
        model=ModelSettings(width=16, depth=2),
        privacy=privacy,
    )


if __name__ == "__main__":
    for privacy in (None, PrivacySettings(epsilon=10.0, delta=1e-5)):
        result = simulate(settings(privacy))
        print("with ε = 10" if privacy else "without privacy")
        for name, row in result.metrics[-1]["models"].items():
            # only a simulation may show this: with privacy it is outside the guarantee
            local = row["local"]
            print(
                f"  {name}: AMP {100 * local['amp']:.1f} %, FM {local['fm']:.4f}, WLP "
                f"{100 * local['wlp']:.1f} %"
            )
