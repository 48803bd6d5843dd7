"""How long a run takes on this machine: from timed rounds of a few steps, before it begins.

A round is taken to be a + Σ_i b_i·n_i: a fixed part, and for each length i of the method (steps of
local training, steps of condensation, epochs or steps of the server, steps of stratification) its
number n_i times the seconds of one. The fixed part and the b_i come from rounds with the run's own
data, partition, network and batches in which the lengths are 1 to 6 (steps that take next to
nothing: some dozens); each length is raised once, and the difference is its steps'. Evaluation is
timed on a part of the test set, apart. Nothing of a probe is kept.

On a CPU seconds are those of its own computing, as what else runs on the machine comes and goes;
the share of the time that the process got of its cores is said beside them, and what that means for
the run if it stays so. It is rough: clients with less data than a batch are taken for as slow as
the others; a recompilation, or a cache that a longer loop leaves, is not seen.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from fedsynth.core.method import Method
from fedsynth.data.images import ImageData
from fedsynth.data.partition import partition
from fedsynth.evaluation.accuracy import accuracy
from fedsynth.federation.observer import Observer
from fedsynth.federation.simulation import simulate
from fedsynth.federation.terms.settings import RunSettings
from fedsynth.methods.shared.local import TrainsLocally

PROBED: Mapping[str, tuple[int, int]] = {
    "local_steps": (2, 4),
    "iterations": (2, 6),
    "server_epochs": (1, 2),
    "server_steps": (2, 6),
    "stratification_steps": (2, 4),
}
"""A length of a method: what it is in the first probe, and in the one that times it."""
LONG_PROBE = 20.0
"""Seconds of a first probe after which it is not made again without its warm-up."""
SHORT_PROBE = 0.3
"""Seconds that tell little of a length's steps."""
MANY = 30
"""How many times as many steps are timed then."""
TEST_IMAGES = 512
QUIET = 0.9
"""A share of its cores from which on a process has them as good as alone."""


@dataclass(frozen=True)
class Estimate:
    """Seconds of a run, and how they were found.

    Args:
        round_seconds: of one round's computing, without evaluation.
        evaluation_seconds: of one evaluation on the test set.
        rounds, evaluations: how many of each the run has.
        share: of the time that the process had its cores for itself, in (0, 1].
        probes: timed rounds.
        took: seconds that finding it took.
    """

    round_seconds: float
    evaluation_seconds: float
    rounds: int
    evaluations: int
    share: float
    probes: int
    took: float

    @property
    def seconds(self) -> float:
        """Of the whole run, if nothing else wants the cores."""
        return self.rounds * self.round_seconds + self.evaluations * self.evaluation_seconds

    @property
    def busy_seconds(self) -> float:
        """Of the whole run, if the process gets no more of them than it did now."""
        return self.seconds / self.share

    @property
    def words(self) -> str:
        """One line: how long, and from what."""
        busy = ""
        if self.share < QUIET:
            busy = f", {duration(self.busy_seconds)} if the machine stays as busy as now"
        return (
            f"about {duration(self.seconds)} on this machine{busy}: {self.rounds} rounds of "
            f"{duration(self.round_seconds)} and {self.evaluations} evaluations of "
            f"{duration(self.evaluation_seconds)} (from {self.probes} rounds of a few steps, timed "
            f"in {duration(self.took)}; rough)"
        )


def duration(seconds: float) -> str:
    """Seconds as people say them."""
    if seconds < 90:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h"


def estimate(settings: RunSettings, data: tuple[ImageData, ImageData]) -> Estimate:
    """How long this run takes here.

    Args:
        settings: the run's, without differential privacy.
        data: training and test examples, on the CPU.

    Raises:
        FedsynthError: the run itself would not begin.
    """
    started = time.perf_counter()
    train, test = data
    probes = _Probes(settings, train)
    lengths = run_lengths(settings, train)
    least = {name: PROBED[name][0] for name in lengths}
    first = probes.seconds(least)
    if first < LONG_PROBE:  # without what is made once: caches, kernels, plans
        first = min(first, probes.seconds(least))
    seconds = first
    for name, count in lengths.items():
        low, high = PROBED[name]
        longer = probes.seconds({**least, name: high})
        if longer - first < SHORT_PROBE and count > low + MANY * (high - low):
            high = low + MANY * (high - low)  # what takes a millisecond is timed over more of it
            longer = probes.seconds({**least, name: high})
        seconds += max(0.0, longer - first) / (high - low) * (count - low)
    return Estimate(
        max(seconds, 0.0),
        probes.evaluation(test),
        settings.rounds,
        -(-settings.rounds // settings.evaluate_every),
        probes.share,
        probes.made,
        time.perf_counter() - started,
    )


def run_lengths(settings: RunSettings, train: ImageData) -> dict[str, float]:
    """The lengths of one round of the run: local steps are those of a client, on average."""
    method: Any = settings.method
    names = {field.name for field in fields(method)}
    found = {
        name: float(getattr(method, name)) for name in PROBED if name in names - {"local_steps"}
    }
    found = {name: count for name, count in found.items() if count >= PROBED[name][0]}
    if isinstance(method, TrainsLocally):
        found["local_steps"] = _mean_steps(settings, method, train)
    return found


def _mean_steps(settings: RunSettings, method: TrainsLocally, train: ImageData) -> float:
    """Steps of an average client in a round, stragglers counted by what they do on average."""
    if method.local_steps:
        return float(method.local_steps)
    labels = train.labels.cpu().numpy()
    parts = partition(labels, settings.resolved_partition, train.spec.classes, *train.origins())
    sizes = [(1 - settings.partition.local_test) * len(part) for part in parts]
    epoch = sum(-(-size // method.batch) for size in sizes) / len(sizes)
    if method.equal_steps:
        epoch = max(1, int(sum(sizes) / len(sizes) / method.batch))
    late = method.stragglers * (1 - (1 + 1 / method.local_epochs) / 2)
    return epoch * method.local_epochs * (1 - late)


class _Probes:
    """Rounds of a run with a few steps.

    Args:
        settings: the run's.
        train: its training examples.
    """

    def __init__(self, settings: RunSettings, train: ImageData) -> None:
        self._settings = settings
        self._train = train
        self._model: nn.Module | None = None
        self._wall = 0.0
        self._own = 0.0
        self.made = 0

    def seconds(self, lengths: Mapping[str, int]) -> float:
        """Of one round of the run with these lengths."""
        settings = self._settings
        changes: dict[str, Any] = dict(lengths)
        names = {field.name for field in fields(settings.method)}
        if "local_steps" in lengths:  # every client takes them all, and the last model counts
            changes.update({"equal_steps": False, "stragglers": 0.0, "drop_stragglers": False})
        if "plain_rounds" in names:  # the first round is not like the others
            changes["plain_rounds"] = 0
        method: Method = replace(settings.method, **changes)
        one = replace(settings, method=method, rounds=1, evaluate_every=1)
        before = time.perf_counter(), time.process_time()
        result = simulate(one, data=(self._train, None), observer=Observer())
        wall = time.perf_counter() - before[0]
        own = (time.process_time() - before[1]) / torch.get_num_threads()
        self._model = result.model
        self._wall += wall
        self._own += own
        self.made += 1
        return wall if self._on_gpu else own

    @property
    def _on_gpu(self) -> bool:
        return self._model is not None and next(self._model.parameters()).is_cuda

    @property
    def share(self) -> float:
        """Of the time that the process had its cores for itself."""
        return 1.0 if self._on_gpu or not self._wall else min(1.0, self._own / self._wall)

    def evaluation(self, test: ImageData) -> float:
        """Seconds of one evaluation on the whole test set."""
        if self._model is None:
            return 0.0
        some = test.subset(_spread(len(test))).to(next(self._model.parameters()).device)
        before = time.perf_counter(), time.process_time()
        accuracy(self._model, some)
        wall = time.perf_counter() - before[0]
        own = (time.process_time() - before[1]) / torch.get_num_threads()
        models = 2 if getattr(self._settings.method, "final", "") == "oca" else 1
        return models * (wall if self._on_gpu else own) * len(test) / len(some)


def _spread(examples: int) -> Tensor:
    """Positions of at most `TEST_IMAGES` examples, from all of the test set."""
    step = max(1, examples // TEST_IMAGES)
    return torch.arange(0, examples, step)[:TEST_IMAGES]
