"""FedAvg: clients train the global model on their data, and the server averages the results
(McMahan et al. 2017).

Without differential privacy, the average is weighted by n_k, the number of examples of each client.
With differential privacy, each client trains by DP-SGD (`fedsynth.privacy.dpsgd`) for
ceil(local_epochs / q) steps in a round, where q is the sampling rate. The number of steps does not
depend on the true number of examples. Because n_k is private, all clients then have equal weight.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedsynth.methods.shared.local import TrainsLocally


@dataclass(frozen=True)
class FedAvg(TrainsLocally):
    """Local training of the global model, followed by an average on the server.

    The settings are documented in `TrainsLocally`. The papers that compare with FedAvg tune lr in
    {0.001, 0.01, 0.1} and the number of local epochs in {10, 15, 20} (FedDM, Sec. 4.1). The
    momentum of 0.9 is that of NIID-Bench, which FedDM's comparison uses. With `final="oca"`, the
    method is FedAvg (OCA) of FedKF's Table XII.

    >>> from fedsynth import FedAvg, ModelSettings, RunSettings, simulate
    >>> method = FedAvg(local_epochs=2, batch=32, lr=0.1)
    >>> result = simulate(RunSettings(method, rounds=3, model=ModelSettings("linear")))
    >>> result.accuracy > 0.8
    True
    """

    name = "fedavg"
    summary = "clients train the global model locally, and the server averages"
    reference = "McMahan et al. 2017, arXiv 1602.05629"
    one_pass = True
