"""Seconds of a round in pfl-research's simulated backend, on the work of `ranks.py`.

    python benchmarks/pfl_rounds.py [--quick] [--only 100]

Needs `pip install pfl`. The clients, images, network, epochs and batches are those of FedAvg in
`ranks.py`; pfl-research gets the images as tensors, and only counts examples as metrics. Rows are appended to
those of `ranks.py`, for one process with one thread and for two.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedsynth import ModelSettings
from fedsynth.models.registry import build_model
from fedsynth.rank import this_rank
from library.machine import peak_mib, run_cases, timing_options
from ranks import FOLDER, WORKS, Work, launched, noise

CASES = {
    f"{title}, pfl-research; {ranks} × 1": (work, ranks)
    for title, work in WORKS.items()
    for ranks in (1, 2)
    if work.method == "fedavg" and work.privacy is None
}


class Network(nn.Module):
    """A network with the two methods that pfl-research calls."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        settings = ModelSettings(**work.model)
        self.network = build_model(settings, (1, 28, 28), 10, 0)

    def loss(self, x: Tensor, y: Tensor, eval: bool = False) -> Tensor:
        return nn.functional.cross_entropy(self.network(x), y)

    def metrics(self, x: Tensor, y: Tensor, eval: bool = False) -> dict[str, Any]:
        from pfl.metrics import Weighted

        return {"examples": Weighted(len(y), 1)}


def measure(case: tuple[Work, int], options: argparse.Namespace) -> dict[str, Any]:
    """Measures one case in this process, or on processes that it starts."""
    work, ranks = case
    if ranks > 1 and "RANK" not in os.environ:
        return launched(ranks)
    torch.set_num_threads(1)
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel

    clients = min(work.clients, 4) if options.quick else work.clients
    data = noise(clients * work.images)
    pixels, labels = data.images.float() / 255, data.labels
    rows = torch.arange(len(labels)).view(clients, work.images)

    def user(number: int) -> Any:
        return Dataset([pixels[rows[number]], labels[rows[number]]], user_id=number)

    times: list[float] = []

    class Clock(TrainingProcessCallback):  # type: ignore[misc]
        def after_central_iteration(self, *arguments: Any, **named: Any) -> tuple[bool, Any]:
            times.append(time.perf_counter())
            return False, Metrics()

    network = Network(work)
    server = torch.optim.SGD(network.parameters(), lr=1.0)
    model = PyTorchModel(network, torch.optim.SGD, server)
    users = FederatedDataset(user, get_user_sampler("minimize_reuse", list(range(clients))))
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=2 if options.quick else work.rounds + 1,
            evaluation_frequency=1000,
            train_cohort_size=clients,
            val_cohort_size=clients,
        ),
        SimulatedBackend(users, users),
        model,
        NNTrainHyperParams(
            local_learning_rate=0.01,
            local_num_epochs=work.settings["local_epochs"],
            local_batch_size=work.settings["batch"],
        ),
        NNEvalHyperParams(local_batch_size=None),
        callbacks=[Clock()],
    )
    if FOLDER in os.environ:
        (Path(os.environ[FOLDER]) / str(this_rank())).write_text(str(peak_mib()))
    if this_rank():
        sys.exit(0)
    seconds = statistics.median(b - a for a, b in pairwise(times))
    return {"clients": clients, "seconds a round": seconds, "peak_mib": [round(peak_mib(), 1)]}


if __name__ == "__main__":
    arguments = timing_options(__doc__).parse_args()
    run_cases("ranks", arguments, CASES, measure, separate_processes=True)
