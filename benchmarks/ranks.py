"""Time and memory of simulations on several ranks: the table of docs/speed.md.

    python benchmarks/ranks.py [--quick] [--only FedDM]

Each case runs in one process with one thread, in one with two threads, and on two ranks with one
thread each. Images of noise, 28×28. Seconds are the wall's, the median of the rounds after the
first, or of a second run if the method has one round, so that imports do not count. MiB are the
peak of each rank, with libraries. Linux only.

With `pip install pfl`, FedAvg also runs in pfl-research's simulated backend, which gets the images
as tensors and only counts examples as metrics.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedsynth import ImageData, ModelSettings, RunSettings, from_arrays, simulate
from fedsynth.cli.application import keep_large_allocations
from fedsynth.config.resolve import resolve
from fedsynth.data.registry import custom_spec
from fedsynth.models.registry import build_model
from fedsynth.privacy.settings import NO_LEDGER
from fedsynth.rank import this_rank
from library.machine import peak_mib, run_cases, timing_options

FOLDER = "RANKS_FOLDER"  # of the ranks' peaks
LENET = {"name": "lenet5"}
CONVNET = {"width": 64, "depth": 3}
ONE_SHOT = {"server_epochs": 2, "generator_steps": 10, "generator_batch": 64, "local_epochs": 1}
PRIVATE = {"noise_multiplier": 1.0, "sample_rate": 0.1, "ledger": NO_LEDGER}


@dataclass(frozen=True)
class Work:
    """The settings of a case. Clients have `images` records each.

    With an encoder, the time is that of encoding the images and of one round.
    """

    method: str
    clients: int
    model: Mapping[str, Any]
    settings: Mapping[str, Any]
    images: int = 60
    rounds: int = 4
    privacy: Mapping[str, Any] | None = None
    encoder: str = ""


WORKS = {
    "FedAvg, LeNet-5, 100 clients": Work("fedavg", 100, LENET, {"local_epochs": 2, "batch": 20}),
    "FedDM, ConvNet-64, 10 clients": Work(
        "feddm", 10, CONVNET, {"iterations": 5, "batch": 64, "server_epochs": 1}, images=200
    ),
    "FedKF, LeNet-5, 20 clients": Work(
        "fedkf", 20, LENET, {"local_epochs": 5, "generator_batch": 32}, images=300
    ),
    "FedHydra, LeNet-5, 10 clients": Work(
        "fedhydra", 10, LENET, {**ONE_SHOT, "stratification_steps": 10}, images=300, rounds=1
    ),
    "DP-SGD, LeNet-5, 20 clients": Work(
        "fedavg", 20, LENET, {"local_steps": 5}, images=600, privacy=PRIVATE
    ),
    "FedAvg, linear, 10,000 clients": Work(
        "fedavg", 10_000, {"name": "linear"}, {"local_epochs": 1, "batch": 20}, images=20
    ),
    "encoding, 20,000 images": Work(
        "fedavg", 10, {"name": "linear"}, {"local_epochs": 1}, images=2000, encoder="scattering"
    ),
}
ARRANGEMENTS = ((1, 1), (1, 2), (2, 1))  # ranks, and threads of each
CASES = {}
for title, work in WORKS.items():
    for ranks, threads in ARRANGEMENTS:
        CASES[f"{title}; {ranks} × {threads}"] = (work, ranks, threads, False)
        if work.method == "fedavg" and not work.privacy and threads == 1 and find_spec("pfl"):
            CASES[f"{title}, pfl-research; {ranks} × 1"] = (work, ranks, 1, True)


def noise(images: int) -> ImageData:
    """Returns grey images of noise in ten classes."""
    facts: dict[str, Any] = {"train_size": images, "source": "noise"}
    spec = custom_spec("noise", (1, 28, 28), map(str, range(10)), **facts)
    pixels = np.random.default_rng(0).integers(0, 256, (images, 1, 28, 28), dtype=np.uint8)
    return from_arrays(pixels, np.arange(images) % 10, spec)


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


def pfl_times(work: Work, clients: int, rounds: int) -> list[float]:
    """Returns the seconds of pfl-research's rounds after the first."""
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
            central_num_iterations=rounds + 1,
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
    if torch.distributed.is_initialized():  # or a process aborts at its end
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    return [later - earlier for earlier, later in pairwise(times)]


def settings_of(work: Work, clients: int, options: argparse.Namespace) -> RunSettings:
    """Returns the settings of a run; fewer clients and steps with --quick."""
    rounds = min(work.rounds, 2) if options.quick else work.rounds
    sections: dict[str, Mapping[str, Any]] = {
        "run": {"method": work.method, "rounds": rounds, "device": "cpu", "evaluate_every": 100},
        "partition": {"kind": "iid", "clients": clients},
        "model": dict(work.model),
        "method": dict(work.settings),
        "privacy": dict(work.privacy or {}),
        "data": {"encoder": work.encoder},
    }
    return resolve(sections)


def measure(case: tuple[Work, int, int, bool], options: argparse.Namespace) -> dict[str, Any]:
    """Measures one case in this process, or on ranks that it starts."""
    work, ranks, threads, is_pfl = case
    if ranks > 1 and "RANK" not in os.environ:
        return launched(ranks)
    torch.set_num_threads(threads)
    keep_large_allocations()
    clients = min(work.clients, 4) if options.quick else work.clients
    if is_pfl:
        times = pfl_times(work, clients, 2 if options.quick else work.rounds)
    else:
        settings = settings_of(work, clients, options)
        data = noise(clients * work.images)
        times = []
        while len(times) < 2:
            begun = time.perf_counter()
            metrics = simulate(settings, data=(data, None), quiet=True).metrics
            rounds = [row["seconds"] for row in metrics]
            times += [time.perf_counter() - begun] if work.encoder else rounds
        times = times[1:]
    if FOLDER in os.environ:
        (Path(os.environ[FOLDER]) / str(this_rank())).write_text(str(peak_mib()))
    if this_rank():
        sys.exit(0)
    return {
        "clients": clients,
        "seconds a round": statistics.median(times),
        "peak_mib": [round(peak_mib(), 1)],
    }


def launched(ranks: int) -> dict[str, Any]:
    """Starts this script's case on ranks, and returns its row."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={ranks}", *sys.argv]
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, FOLDER: folder, "OMP_NUM_THREADS": "1"}
        output = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, check=True, env=environment
        ).stdout
        peaks = [float((Path(folder) / str(rank)).read_text()) for rank in range(ranks)]
    row: dict[str, Any] = json.loads(output.splitlines()[-1])
    return {**row, "peak_mib": [round(peak, 1) for peak in peaks]}


if __name__ == "__main__":
    arguments = timing_options(__doc__).parse_args()
    run_cases("ranks", arguments, CASES, measure, separate_processes=True)
