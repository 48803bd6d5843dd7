"""FedStats' classifier on CIFAR-10 at ε = 1: what was tried, on 5,000 held-out training images.

`CHANGES` repeat the releases of `FedStats` on kept feature vectors: a clipped centre, then 32
clipped gradients with momentum (δ = 1e-5; the noise of ten clients, or of one, while the method's
aggregated noise is 5 % larger, since one of ten clients may be the attacker). Trials that use the
true covariance, or less noise than ε = 1 needs, are not private: they bound what better statistics
or less noise can give. `dictionary of 512` compares patches with 512 instead of 96 vectors, learned
in the same way. `RUNS` are runs of the method itself; `product` has the settings of `none`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F

from fedsynth import FedStats, RunSettings
from fedsynth.core.feature_cache import feature_table, keep_on_disk
from fedsynth.features import random_process
from fedsynth.features.feature_map import FeatureMap
from fedsynth.federation.context import plan_of
from fedsynth.methods.statistics.moments import step_rate, target_norm
from fedsynth.seeding import torch_generator
from fedsynth.simulation.simulate import simulate
from grids import fedstats_table
from library.dictionary import learn_dictionary
from library.grid import Cell, Grid, Row
from library.runs import tuning_data

CLIENTS, ROUNDS = 10, 32
DEFAULT = FedStats()


@dataclass(frozen=True)
class Change:
    """A trial.

    Args:
        settings: settings of `FedStats`.
        rounds: the number of gradients.
        noise: factor of the noise of all releases. The step rate follows from the noise.
        early: the share of the budget for step t is in proportion to t^−early. The step rate is
            that of equal shares.
        power: z is multiplied by the true covariance to the power −`power`, with eigenvalues of at
            least 1e-4 of the largest one, and keeps its median norm.
        directions: z keeps this many leading directions of the true covariance. 0 keeps all.
        atoms: the number of vectors in the dictionary. 0 keeps the package's dictionary.
    """

    settings: FedStats = DEFAULT
    rounds: int = ROUNDS
    noise: float = 1.0
    early: float = 0.0
    power: float = 0.0
    directions: int = 0
    atoms: int = 0


CHANGES = {
    "none": Change(),
    "no noise": Change(noise=0.0),
    "noise / 1.33": Change(noise=1 / 1.33),
    "logit noise 0.6": Change(FedStats(logit_noise=0.6)),
    "logit noise 1.2": Change(FedStats(logit_noise=1.2)),
    "momentum 0": Change(FedStats(momentum=0.0)),
    "momentum 0.8": Change(FedStats(momentum=0.8)),
    "step clip 0.35": Change(FedStats(step_clip=0.35)),
    "step clip 0.7": Change(FedStats(step_clip=0.7)),
    "16 rounds": Change(rounds=16),
    "64 rounds": Change(rounds=64),
    "more budget early": Change(early=0.5),
    "more budget late": Change(early=-0.5),
    "true covariance ^ -0.1": Change(power=0.1),
    "true covariance ^ -0.2": Change(power=0.2),
    "true covariance ^ -0.3": Change(power=0.3),
    "300 true directions": Change(directions=300),
    "800 true directions": Change(directions=800),
    "dictionary of 512": Change(atoms=512),
    "dictionary of 512, no noise": Change(atoms=512, noise=0.0),
}
# Runs of the method itself, with these settings.
RUNS: dict[str, dict[str, str]] = {
    "product": {},
    "product, second moments": {"second_moments": "yes"},
    "product, whitening": {"whitening": "yes"},
}


@contextmanager
def dictionary(atoms: int) -> Iterator[None]:
    """Replaces the package's dictionary by one of `atoms` vectors, unless this is 0."""
    if not atoms:
        yield
        return
    larger = learn_dictionary(atoms=atoms)
    with mock.patch.object(random_process, "shipped", return_value=larger):
        yield


@lru_cache(maxsize=1)  # one dictionary's vectors at a time
def vectors(atoms: int, cache: Any) -> tuple[FeatureMap, list[tuple[Tensor, Tensor]]]:
    """Returns the feature map, and vectors [N, d] and labels [N] of both parts."""
    with dictionary(atoms):
        features = random_process.mirrored_pair((3, 32, 32))
    features = replace(features, name=f"{features.name} of {atoms or 96}")
    found = []
    for images in tuning_data("cifar10"):
        records = torch.arange(len(images))
        keep_on_disk(cache, images, features, records)
        found.append((feature_table(images, features, records)(records), images.labels))
    return features, found


def accuracy_of(change: Change, cell: Cell) -> float:
    """Returns the held-out accuracy of the classifier that the releases give."""
    features, ((train_Nd, labels_N), (held_out_Nd, answers)) = vectors(change.atoms, cell.cache)
    generator = torch_generator(cell.seed, "noise of classifier trials")
    classes, n, method = 10, len(labels_N), change.settings
    sigma = plan_of(settings(cell)).sigma * change.noise
    if cell.noise == "own":
        sigma *= math.sqrt(CLIENTS)

    def noisy(sums: Tensor, clip: float, share: float) -> Tensor:
        noise = torch.randn(sums.shape, generator=generator)
        return (sums + sigma * clip / math.sqrt(share) * noise) / n

    norms_N = torch.linalg.vector_norm(train_Nd, dim=1)
    shrunk_N = (features.norm_bound / norms_N).clamp(max=1)
    centre_d = noisy(shrunk_N @ train_Nd, features.norm_bound, method.centre_share)
    train_Nd, held_out_Nd = changed(change, [train_Nd - centre_d, held_out_Nd - centre_d])
    train_Nd, held_out_Nd = (clipped(z / features.radius) for z in (train_Nd, held_out_Nd))

    rounds = change.rounds
    shares = torch.arange(1, rounds + 1) ** -change.early
    shares *= (1 - method.centre_share) / shares.sum()
    targets_NC = F.one_hot(labels_N, classes).float()
    size = method.step_size / method.curvature
    noise = sigma / math.sqrt(1 - method.centre_share) * method.step_clip / n
    rate = step_rate(noise, rounds, method.logit_noise, size, method.momentum)
    weight_Cd = torch.zeros(classes, train_Nd.shape[1])
    velocity_Cd = torch.zeros_like(weight_Cd)
    for t, share in enumerate(shares.tolist()):
        wrong_NC = torch.softmax(train_Nd @ weight_Cd.T, dim=1) - targets_NC
        bound = method.step_clip
        if t == 0:
            bound = target_norm(classes)  # of 1/C − e_y, which is not clipped further
        gradient_Cd = noisy(clipped(wrong_NC, bound).T @ train_Nd, bound, share)
        velocity_Cd = method.momentum * velocity_Cd + gradient_Cd
        weight_Cd = weight_Cd - rate * velocity_Cd
    return float(((held_out_Nd @ weight_Cd.T).argmax(dim=1) == answers).float().mean())


def clipped(rows_Nd: Tensor, bound: float = 1.0) -> Tensor:
    """Returns the rows, of norm at most `bound`."""
    norms_N1 = torch.linalg.vector_norm(rows_Nd, dim=1, keepdim=True)
    return rows_Nd * (bound / norms_N1).clamp(max=1)


def changed(change: Change, parts: list[Tensor]) -> list[Tensor]:
    """Returns centred vectors, changed by the true covariance, with their median norm."""
    if not change.power and not change.directions:
        return parts
    train_Nd = parts[0]
    values_d, vectors_dd = torch.linalg.eigh(train_Nd.T @ train_Nd / len(train_Nd))
    roots_d = (values_d / values_d[-1]).clamp_min(1e-4) ** -change.power
    if change.directions:
        roots_d[: -change.directions] = 0
    found = [part @ (vectors_dd * roots_d) @ vectors_dd.T for part in parts]
    median, before = (rows.norm(dim=1).median() for rows in (found[0], train_Nd))
    return [part * (before / median) for part in found]


def settings(cell: Cell) -> RunSettings:
    """Returns the settings of a run of the method itself."""
    same = Cell(**vars(cell), dataset="cifar10", clients=CLIENTS, alpha=0.5)
    return fedstats_table.settings_for(same, **RUNS.get(cell.change, {}))


def work(cell: Cell) -> Row:
    """Returns the accuracy of one trial."""
    if cell.change in CHANGES:
        return {"accuracy": accuracy_of(CHANGES[cell.change], cell)}
    return {"accuracy": simulate(settings(cell), data=tuning_data("cifar10"), quiet=True).accuracy}


def include(cell: Cell) -> bool:
    """Leaves out a second row without noise."""
    return not (cell.change.endswith("no noise") and cell.noise == "secure")


GRID = Grid(
    axes={
        "change": (*RUNS, *CHANGES),
        "seed": range(5),
        "noise": ("own", "secure"),
        "epsilon": ("1",),
    },
    key="{change} eps={epsilon} {noise} seed={seed}",
    work=work,
    include=include,
)
