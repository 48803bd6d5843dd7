"""Your own images and your own clients: what to declare, and what it means for privacy.

First of all, say whom ε is to hold for. By default that is ONE IMAGE, and a patient with five
images has the much weaker guarantee of a group of five. Here `groups` say whose each image is, and
`unit="user"` protects each patient with all images of theirs at a hospital; `nominal_size` is then
the public number of patients that a hospital is supposed to have.

Then four things are yours to say:

- `DatasetSpec` is public: it goes into divisors, sampling rates and the privacy report. So
  `train_size` is a round number that you would tell anybody (here "about 600"), not the number of
  records at hand, and `mean` and `std` are constants and not computed from the data.
- `ledger` is a folder that you keep, and name in every run on these data: what is spent adds up
  there. A second call of this example has next to nothing left of its budget, and so needs far more
  noise. `ledgers/private` is for nobody else's eyes.
- `names` are the clients', and public. The ledgers know them by these, and notice if the records
  are not theirs.
- `test`: images that you call public are tested on in the open. Without that word they are private,
  and what is measured on them stands in the run's `simulation_only` folder; `data=(train, None)`
  has none.
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
    """Noisy images [n, 1, 16, 16] (uint8) with a bright bar on the left, on the right, or on both
    sides; labels [n].
    """
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 120, (n, 1, 16, 16))
    labels = rng.integers(0, 3, n)
    images[labels != 1, :, :, 2:5] += 120
    images[labels != 0, :, :, 11:14] += 120
    return images.astype(np.uint8), labels


def main(output: Path | None = None, ledger: Path = Path("ledgers")) -> float:
    """Three hospitals of different sizes, ε = 8 for each; returns the accuracy on public test
    images.
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
    report: Any = result.privacy  # what privacy_report.json holds
    promise = report["guarantee"]
    groups = {group["units"]: group["epsilon"] for group in promise["groups"]}
    print(f"{100 * accuracy:.1f} % at ε = {promise['epsilon']:.2f} for one patient")
    print(f"a family of 2 patients: ε = {groups[2]:.1f}")
    return accuracy


if __name__ == "__main__":
    main()
