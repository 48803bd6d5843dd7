"""Audits the privacy of a method with canaries, which are test records in one client's data.

An audit is a real run of the method, but it reads no private record. The clients have public random
images with the shape of the data set's images, and about as many as the data set declares. The
audit therefore costs no privacy, and no ledger that is kept across runs is charged. The noise and
the sampling are those of a real run. The result is a lower bound on ε
(`fedsynth.privacy.audit_bounds`). If it is above the ε that the audited client's ledger states, the
implementation has a fault. An audit can find a fault, but it cannot prove privacy.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from fedsynth.config.settings import RunSettings
from fedsynth.core.context import RoundContext
from fedsynth.data.images import ImageData, IntArray, to_stored
from fedsynth.data.registry import DatasetSpec
from fedsynth.errors import PrivacyError, PrivacySettingError, SettingError
from fedsynth.federation.client_runtime import ClientBudget
from fedsynth.federation.context import plan_of, public_context, resolve_device
from fedsynth.federation.protocol import Observer
from fedsynth.federation.run_data import PUBLIC, Clients, declared, specification, with_declared
from fedsynth.privacy.accounting import Totals, epsilon
from fedsynth.privacy.audit_bounds import epsilon_lower_bound, guesses_for, right_guesses
from fedsynth.privacy.disclosure import mechanism_facts
from fedsynth.privacy.randomness import SecretGenerator
from fedsynth.privacy.releases import USER
from fedsynth.privacy.report.build import write_report
from fedsynth.privacy.report.file import sound_report
from fedsynth.privacy.score_bounds import (
    Bound,
    count_bounds,
    gaussian_pair,
    pair_epsilon,
    step_bound,
)
from fedsynth.results.finished import RunFolderError, read_summary, value_at
from fedsynth.results.report_facts import provenance
from fedsynth.seeding import numpy_generator, torch_generator
from fedsynth.simulation.canaries import AuditedSums, Canaries
from fedsynth.simulation.run import Simulation
from fedsynth.validation import check_number

MAX_CANARIES = 10**7

# The maximum number of random records of the audited client (without the canaries), and of each
# other client.
MAX_RECORDS, MAX_OTHER_RECORDS = 1000, 100


@dataclass(frozen=True)
class AuditResult:
    """The result of one audit.

    Attributes:
        method: the name of the method.
        mechanism: the name of the mechanism.
        canaries: the number of canaries.
        guesses: the number of guesses that the auditor made. It was fixed before the run.
        correct: the number of correct guesses.
        confidence: the probability that the bound is at most the true ε.
        delta: δ.
        epsilon_lower_bound: the lower bound on ε that the guesses prove.
        epsilon: the ε that the audited client's ledger states.
        bounds: the other lower bounds, which assume more. Each has the same confidence.
    """

    method: str
    mechanism: str
    canaries: int
    guesses: int
    correct: int
    confidence: float
    delta: float
    epsilon_lower_bound: float
    epsilon: float
    bounds: tuple[Bound, ...] = ()

    @property
    def highest(self) -> float:
        """The highest lower bound."""
        return max([self.epsilon_lower_bound, *(bound.epsilon for bound in self.bounds)])

    @property
    def fault(self) -> bool:
        """True if a lower bound is larger than the stated ε.

        The audit has then refuted this ε. With k bounds, a correct run is refuted with a
        probability of at most k·(1 − confidence).
        """
        return self.highest > self.epsilon

    def entry(self, command: str) -> dict[str, Any]:
        """Returns the audit section of a privacy report.

        Args:
            command: the command that repeats the audit with new random choices.
        """
        entry = {"command": command, **asdict(self)}
        del entry["epsilon"]  # the report states the run's own
        del entry["bounds"]  # a report has only what can be computed from its figures
        return entry


def audit_run(
    settings: RunSettings,
    *,
    canaries: int = 1000,
    guesses: int | None = None,
    confidence: float = 0.999,
    repeats: int = 1,
    spec: DatasetSpec | None = None,
    observer: Observer | None = None,
    test_only: np.random.Generator | None = None,
) -> AuditResult:
    """Runs a method with canaries in one client's data, and computes a lower bound on its ε.

    The audited client takes part in as many rounds as any other client. The audit uses new ledgers,
    so the stated ε is the cost of this run only.

    Args:
        settings: the settings of the run to audit.
        canaries: the number of canaries. Each canary is included with probability 1/2. Bounds that
            need independent scores use only releases with as many coordinates.
        guesses: the number of guesses, which must be even. None uses two fifths of the canaries.
        confidence: the probability that a bound of this audit is at most the true ε.
        repeats: the number of runs, each with new coins. The canaries of all runs are audited
            together. `canaries` and `guesses` are those of one run.
        spec: the specification of custom data. None uses that of `settings.dataset`.
        observer: an observer that receives the progress. None reports no progress.
        test_only: a seeded generator for tests, from which random choices and noise are drawn.

    Raises:
        SettingError, PrivacyError: the settings have no differential privacy, the mechanism states
            no ε, or a number is out of range.
    """
    if guesses is None:
        guesses = guesses_for(canaries)
    _check_numbers(canaries, guesses, confidence)
    if settings.folder is not None and spec is None:
        settings = with_declared(settings, declared(settings))
    if spec is None:
        spec = specification(settings)
    check_number(None, "repeats", repeats, 1, MAX_CANARIES, integer=True)
    audited = _audited(settings, spec)
    runs = []
    for _ in range(repeats):
        run = AuditedRun(audited, spec, canaries, observer or Observer(), test_only)
        plan = run.budget.plan
        if plan.chief.shares > 1:
            reason = (
                "must be 'own' for an audit, because otherwise each upload has only a part of the "
                "noise. Set method.aggregation=own"
            )
            raise SettingError(None, "aggregation", reason)
        run.watch()
        runs.append(run)
    correct = 0
    for run in runs:
        seen = run.canaries
        correct += right_guesses(seen.scores.numpy(), seen.included.numpy(), guesses)
    delta = plan.privacy.delta
    counts = (correct, repeats * guesses, repeats * canaries)
    return AuditResult(
        method=run.method.name,
        mechanism=plan.chief.mechanism,
        canaries=repeats * canaries,
        guesses=repeats * guesses,
        correct=correct,
        confidence=confidence,
        delta=delta,
        epsilon_lower_bound=epsilon_lower_bound(*counts, delta, confidence),
        epsilon=run.claimed(),
        bounds=tuple(independent_bounds(runs, guesses, confidence)),
    )


def independent_bounds(
    runs: Sequence[AuditedRun], guesses: int, confidence: float
) -> Iterator[Bound]:
    """Yields the lower bounds on ε that assume independent canary scores.

    There are none if no release has as many coordinates as canaries. With replace-one adjacency,
    a canary is at most half of a step, and the bounds remain valid.

    Args:
        runs: the finished runs, which have the same settings.
        guesses: the number of guesses for each run.
        confidence: the confidence of each bound.
    """
    all_canaries = [run.canaries for run in runs]
    delta = runs[0].budget.plan.privacy.delta
    steps = Counter(all_canaries[0].steps)
    if not steps:
        return
    included = torch.cat([seen.included for seen in all_canaries]).numpy()
    scores = torch.cat([seen.independent for seen in all_canaries]).numpy()
    if all(q == 1 for _, q in steps):
        correct = 0
        for seen in all_canaries:
            correct += right_guesses(seen.independent.numpy(), seen.included.numpy(), guesses)
        counts = (correct, len(runs) * guesses, len(scores))
        yield from count_bounds(*counts, delta, confidence)[1:]
    rows = [(*step, count) for step, count in steps.items()]
    law = "independent Gaussian scores"
    variance = sum(count / σ**2 for (σ, _), count in steps.items())
    sampling = sum(count * q * (1 - q) / σ**4 for (σ, q), count in steps.items())
    mean = sum(count * q / σ**2 for (σ, q), count in steps.items())
    expected = pair_epsilon(mean / math.sqrt(variance), 1 + sampling / variance, delta)
    # with few sampled steps, the scores are far from Gaussian, and a correct run could be refuted
    if sampling == 0 or expected <= epsilon(Totals.of(rows), delta):
        exact = "" if sampling == 0 else " (with sampling: only asymptotically)"
        unused = torch.cat([seen.unused for seen in all_canaries]).numpy()
        absent = np.concatenate([scores[~included], unused])
        pair = gaussian_pair(scores[included], absent, delta, confidence)
        yield Bound("Gaussian pair", law + exact, pair)
    if len({σ for σ, q in steps if q < 1}) == 1:
        sampled = torch.cat([part for seen in all_canaries for part in seen.sampled]).numpy()
        absent = torch.cat([part for seen in all_canaries for part in seen.absent]).numpy()
        single = step_bound(sampled, absent, rows, delta, confidence)
        yield Bound("Gaussian pair of each step", f"{law}, the charged sampling", single)


def _check_numbers(canaries: int, guesses: int, confidence: float) -> None:
    check_number(None, "canaries", canaries, 2, MAX_CANARIES, integer=True)
    if not 2 <= guesses <= canaries or guesses % 2:
        raise SettingError(None, "guesses", f"must be even, from 2 to {canaries}, got {guesses}")
    if not 0.5 <= confidence < 1:
        raise SettingError(None, "confidence", f"must be in [0.5, 1), got {confidence}")


def _audited(settings: RunSettings, spec: DatasetSpec) -> RunSettings:
    """Converts a run's settings to the settings for its audit.

    The audit uses new ledgers, and no local test splits or client failures. It uses the nominal
    size of the original run.
    """
    if settings.privacy is None:
        reason = (
            "or privacy.epsilon must be set, because an audit tests a stated ε. Set one of them"
        )
        raise SettingError("privacy", "noise_multiplier", reason)
    mechanism = settings.privacy.mechanism
    if mechanism is not None and not mechanism_facts(mechanism).guaranteed:
        raise PrivacySettingError(
            "privacy", "mechanism", "has no ε to test. Use another mechanism", value=mechanism
        )
    privacy = settings.privacy
    if privacy.ledger is not None:  # σ for what is left in the kept ledger, which is only read
        privacy = replace(plan_of(settings).privacy, epsilon=None, ledger=None)
    nominal = public_context(settings, spec, torch.device("cpu")).nominal_size
    return replace(
        settings,
        partition=replace(settings.partition, local_test=0.0),
        privacy=replace(privacy, nominal_size=nominal),
        client_failures=0.0,  # the audited client releases all that the plan has for it
    )


class AuditedRun(Simulation):
    """A run that computes canary scores from the releases of one audited client.

    It writes no files.

    Attributes:
        canaries: the canaries with their scores.
    """

    def __init__(
        self,
        settings: RunSettings,
        spec: DatasetSpec,
        canaries: int,
        observer: Observer,
        test_only: np.random.Generator | None,
    ) -> None:
        self._client = _busiest(settings)
        train, test, parts = _random_federation(settings, spec, self._client, canaries)
        coins = test_only or np.random.default_rng()
        self.canaries = Canaries(
            train.labels[-canaries:],
            included=torch.from_numpy(coins.random(canaries) < 0.5),
            rest=len(parts[self._client]),
            generator=torch_generator(settings.seed, "canaries"),
        )
        among = len(train) - canaries + self.canaries.among_records()
        parts[self._client] = torch.cat([parts[self._client], among])
        device = resolve_device(settings.device)
        if settings.privacy is not None and settings.privacy.unit == USER:
            train = replace(train, groups=torch.arange(len(train)))  # each canary is a user
        super().__init__(
            settings,
            Clients(train, list(map(Tensor.numpy, parts))),
            train.to(device),
            (test.to(device), PUBLIC),
            observer,
        )
        for client in self.backend.clients:
            if client.budget is not None and test_only is not None:
                client.budget.secret = SecretGenerator(test_only=test_only)
            if client.number == self._client:
                self.budget = cast(ClientBudget, client.budget)  # the run is private
        self.budget.make_mechanism = partial(AuditedSums, self.canaries)

    def watch(self) -> None:
        """Runs all rounds that the privacy budget allows, and scores the canaries."""
        for number in range(1, self.settings.rounds + 1):
            refusal = self.play(self.round_context(number))
            if refusal is not None:
                self.observer.note(f"the run ends after {number - 1} rounds: {refusal.reason}")
                return

    def _warn_of_missing_classes(self, context: RoundContext) -> None:
        """Omits the warning about missing classes, because the images are random."""

    def claimed(self) -> float:
        """Returns the claimed ε, computed from the audited client's ledger."""
        return self.budget.plan.epsilon([self.budget.ledger.history()])


def _busiest(settings: RunSettings) -> int:
    """Returns the index of a client that takes part in the most rounds."""
    schedule = settings.schedule()
    rounds = range(1, settings.rounds + 1)
    participants = np.concatenate(list(map(schedule.in_round, rounds)))
    return int(np.bincount(participants).argmax())


def _random_federation(
    settings: RunSettings, spec: DatasetSpec, client: int, canaries: int
) -> tuple[ImageData, ImageData, list[Tensor]]:
    """Creates random images to replace a federation's data.

    Returns:
        The training images, the test images, and the indices of each client's training images. The
        last `canaries` training images are the canaries, which belong to no client yet.
    """
    nominal = round(settings.privacy.nominal_size or 0) if settings.privacy is not None else 0
    sizes = [max(spec.classes, min(nominal, MAX_OTHER_RECORDS))] * settings.partition.clients
    sizes[client] = max(spec.classes, min(nominal, MAX_RECORDS))
    rng = numpy_generator(settings.seed, "audit")
    classes = np.arange(spec.classes)

    def images(labels: IntArray) -> ImageData:
        pixels = torch.from_numpy(rng.integers(0, 256, (len(labels), *spec.image_shape)))
        of_records = torch.from_numpy(labels)
        if spec.has_masks:  # a mask has one class
            of_records = of_records[:, None, None].expand(-1, *spec.label_shape)
        return ImageData(to_stored(pixels / 255, spec), of_records, spec)

    labels = [np.resize(classes, size) for size in [*sizes, canaries]]
    train = images(np.concatenate(labels))
    return train, images(classes), list(torch.arange(sum(sizes)).split(sizes))


def settings_of_run(folder: Path, settings: RunSettings) -> RunSettings:
    """Returns the settings for a finished run's audit.

    They have the noise multiplier and the number of rounds of the finished run.

    Args:
        folder: the run folder.
        settings: the settings in the folder's config.toml. They must be those of the folder's
            privacy report.

    Raises:
        SettingError: the folder has no summary of a private run.
        PrivacyError: the folder has no privacy report of this version, or the report was made for
            other settings.
    """
    try:
        summary = read_summary(folder)
    except RunFolderError:
        summary = {}
    sigma = value_at(summary, "differential_privacy.noise_multiplier")
    rounds = summary.get("rounds")
    if settings.privacy is None or not sigma or not rounds:
        reason = "must contain a finished private run with at least one round. Name another folder"
        raise SettingError(None, "folder", reason, value=folder)
    _report(folder, settings)
    privacy = replace(settings.privacy, noise_multiplier=sigma, epsilon=None, ledger=None)
    return replace(settings, privacy=privacy, rounds=rounds)


def write_audit(folder: Path, settings: RunSettings, entry: Mapping[str, Any]) -> None:
    """Writes an audit's result into a run's privacy report.

    Args:
        folder: the run folder.
        settings: the settings in the folder's config.toml, as in `settings_of_run`.
        entry: the result, as `AuditResult.entry` returns it.

    Raises:
        PrivacyError: the folder has no privacy report of this version, or the report was made for
            other settings.
    """
    write_report({**_report(folder, settings), "audit": dict(entry)}, folder)


def _report(folder: Path, settings: RunSettings) -> dict[str, Any]:
    report = sound_report(folder)
    if report["provenance"].get("config") != provenance(settings)["config"]:
        raise PrivacyError(f"{folder}/config.toml does not match the settings in its report")
    return report
