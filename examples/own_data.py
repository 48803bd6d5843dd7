"""Runs a private federation on your own images and your own clients, and shows what you must
declare.

First, choose the privacy unit. By default, ε holds for ONE IMAGE. A patient with five images then
has only the much weaker guarantee of a group of five. In this example, `groups` names the patient
of each image, and `unit="user"` protects all images of a patient at a hospital together.
`nominal_size` is then the public number of patients that a hospital is supposed to have.

Then declare four things:

- `DatasetSpec` is public. Sampling rates, normalisation and the privacy report use it. Therefore
  `train_size` is a round number that may be published (here "about 600"), not the true number of
  records, and `mean` and `std` are constants that are not computed from the data.
- `ledger` is a folder that records the spent budget. Name the same folder in every run on these
  data, because the budget adds up over the runs. If you run this example a second time, almost no
  budget is left, and far more noise is needed. `ledgers/private` must stay secret.
- `names` are the public names of the clients. The ledgers identify clients by these names, and
  detect if the records belong to a different client.
- `test="public"` declares that the test images are public, so the accuracy on them is published.
  Otherwise the test images are private, and results on them are only in the run's `simulation_only`
  folder. `data=(train, None)` runs without test images.
"""

from pathlib import Path
from typing import Any

import numpy as np

from fedsynth import (
    DatasetSpec,
    FedDM,
    ModelSettings,
    PrivacySettings,
    RunSettings,
    from_arrays,
    simulate,
)

SPEC = DatasetSpec(
    name="scans",
    channels=1,
    height=16,
    width=16,
    classes=3,
    train_size=600,
    test_size=90,
    mean=(0.5,),
    std=(0.25,),
    class_names=("left", "right", "both"),
    source="made by examples/own_data.py",
)


IMAGES_OF_A_PATIENT = 3


def scans(n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns noisy images [n, 1, 16, 16] (uint8) and their labels [n].

    Each image has a bright bar on the left, on the right, or on both sides.
    """
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 120, (n, 1, 16, 16))
    labels = rng.integers(0, 3, n)
    images[labels != 1, :, :, 2:5] += 120
    images[labels != 0, :, :, 11:14] += 120
    return images.astype(np.uint8), labels


def main(output: Path | None = None, ledger: Path = Path("ledgers")) -> float:
    """Runs three hospitals of different sizes with ε = 8 each, and returns the accuracy on public
    test images.
    """
    train = from_arrays(*scans(570, 0), SPEC, groups=np.arange(570) // IMAGES_OF_A_PATIENT)
    test = from_arrays(*scans(90, 1), SPEC)
    hospitals = np.split(np.arange(570), [120, 300])
    settings = RunSettings(
        method=FedDM(ipc=5, iterations=10, image_lr=5.0, server_epochs=60),
        rounds=2,
        model=ModelSettings(width=16, depth=2),
        privacy=PrivacySettings(
            epsilon=8.0, unit="user", nominal_size=60, max_records=1000, ledger=ledger
        ),
    )
    result = simulate(
        settings,
        data=(train, test),
        parts=hospitals,
        names=["north", "south", "university"],
        test="public",
        output=output,
    )
    accuracy: float = result.summary["test_accuracy"]
    report: Any = result.privacy  # the content of privacy_report.json
    promise = report["guarantee"]
    groups = {group["units"]: group["epsilon"] for group in promise["groups"]}
    print(f"{100 * accuracy:.1f} % at ε = {promise['epsilon']:.2f} for one patient")
    print(f"a family of 2 patients: ε = {groups[2]:.1f}")
    return accuracy


if __name__ == "__main__":
    main()
