"""FedAvg (McMahan et al. 2017): clients train the global model on their data, the server averages
the results.

Without DP the average is weighted by n_k. With DP each client trains by DP-SGD
(`fedsynth.privacy.dpsgd`) for ceil(local_epochs / q) steps a round, independent of its true size,
and the average is uniform, as n_k is private.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedsynth.methods.shared.local import TrainsLocally


@dataclass(frozen=True)
class FedAvg(TrainsLocally):
    """Settings: see `TrainsLocally`.

    The comparison papers tune lr in {0.001, 0.01, 0.1} and local epochs in {10, 15, 20} (FedDM,
    Sec. 4.1); momentum 0.9 is NIID-Bench's, which FedDM's comparison uses. `final="oca"` is the
    FedAvg (OCA) of FedKF's Table XII.

    >>> from fedsynth import FedAvg, ModelSettings, RunSettings, simulate
    >>> method = FedAvg(local_epochs=2, batch=32, lr=0.1)
    >>> result = simulate(RunSettings(method, rounds=3, model=ModelSettings("linear")))
    >>> result.accuracy > 0.8
    True
    """

    name: ClassVar[str] = "fedavg"
    summary: ClassVar[str] = "clients train the global model locally, the server averages"
    reference: ClassVar[str] = "McMahan et al. 2017, arXiv 1602.05629"
    one_pass: ClassVar[bool] = True
