"""Runs FedDM privately on the embedded digits with a budget of ε = 8 for each client."""

from fedsynth import FedDM, ModelSettings, PartitionSettings, PrivacySettings, RunSettings, simulate

settings = RunSettings(
    method=FedDM(ipc=10, iterations=10, image_lr=5.0, server_epochs=60),
    rounds=3,
    partition=PartitionSettings(kind="dirichlet", clients=5, alpha=0.5),
    model=ModelSettings(width=32, depth=2),
    privacy=PrivacySettings(epsilon=8.0, delta=1e-5),
)

if __name__ == "__main__":
    result = simulate(settings)
    spent = result.summary["differential_privacy"]["epsilon"]
    print(
        f"test accuracy {100 * result.summary['test_accuracy']:.1f} % at ε = {spent:.2f}, "
        f"{result.summary['upload_bytes'] / 1e6:.2f} MB uploaded"
    )
