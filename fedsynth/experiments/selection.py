"""Private selection: executes a random number of a sweep's runs as trials, and keeps the best one.

One row in each client's ledger, charged before the first trial, pays for all trials
(`fedsynth.privacy.selection`). A trial draws a run of the sweep at random, executes it in a hidden
folder, and releases a noisy score on the clients' held-out records (`fedsynth.simulation.trial`).
The number of trials and the draws are secret. The folder of a trial is deleted as soon as another
trial is better, and nothing is printed about single trials.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

from fedsynth import rank
from fedsynth.config.loading import settings_with_own_code
from fedsynth.config.settings import RunSettings
from fedsynth.core.periods import has_periods
from fedsynth.data.registry import CLASSIFICATION
from fedsynth.errors import DivergedError, PrivacySettingError, SettingError, writing
from fedsynth.experiments.rows import settings_hash
from fedsynth.experiments.runner import locked
from fedsynth.experiments.sweep import SelectionSettings, Sweep
from fedsynth.federation.context import plan_of
from fedsynth.federation.privacy_plan import PrivacyPlan
from fedsynth.federation.protocol import Observer
from fedsynth.federation.run_data import data_of_run
from fedsynth.files import load_json, write_whole
from fedsynth.formatting import format_epsilon
from fedsynth.privacy.accounting import (
    Merged,
    Totals,
    calibrate_noise_multiplier,
    epsilon_of,
    totals,
)
from fedsynth.privacy.ledger import Ledger
from fedsynth.privacy.ledger.ledger import Lines
from fedsynth.privacy.ledger.trial import TrialLedger
from fedsynth.privacy.randomness import SecretGenerator
from fedsynth.privacy.releases import Release
from fedsynth.privacy.selection import Selection
from fedsynth.simulation.simulate import among_clients, simulate
from fedsynth.simulation.trial import Trial, score_row

RESULT = "selection.json"
STAGING = ".trials-"
# The privacy settings that the runs of a selection may vary.
VARIED: dict[str, Any] = {"mechanism": None, "clip": None, "sample_rate": None}


@dataclass(frozen=True)
class SelectionPlan:
    """The plan of a private selection, computed from public values only.

    Attributes:
        sweep: the sweep, whose runs are the candidates.
        plans: the privacy plan of a trial of each candidate.
        row: the row that each client's ledger is charged.
        selection: the selection in the row.
        trial_epsilon: the ε of the run of one trial, at the same δ.
        epsilon: the ε after the selection, with all earlier releases, of the worst client.
    """

    sweep: Sweep
    plans: tuple[PrivacyPlan, ...]
    row: Release
    selection: Selection
    trial_epsilon: float
    epsilon: float

    @cached_property
    def held_out(self) -> float:
        """The number of held-out records that score a trial, computed from public sizes."""
        partition = self.plans[0].run.partition
        share = partition.local_test / (1 - partition.local_test)
        return partition.clients * self.plans[0].nominal_size * share

    @property
    def score_noise(self) -> float:
        """The standard deviation of a score's noise, as a share of the held-out records."""
        clients = self.plans[0].run.partition.clients
        return self.row.noise_multiplier * math.sqrt(clients) / self.held_out


def plan_selection(sweep: Sweep) -> SelectionPlan:
    """Plans a selection with the least noise that stays within the privacy budget.

    Every trial gets the same ε, from which the σ of each candidate follows. The score has the share
    `score_share` of a trial's μ².

    Raises:
        SettingError: the sweep has no private score, or its runs have different data or budgets.
        BudgetExceededError: the earlier releases of a client have spent the budget.
    """
    if sweep.selection is None:
        raise SettingError("selection", "law", "is missing. Add a section [selection]")
    _check(sweep)
    plans = tuple(plan_of(cell.settings) for cell in sweep.cells)
    _check_plans(plans)
    histories, privacy = plans[0].histories, plans[0].privacy
    row = cache(partial(_row, plans, sweep.selection))

    def needed_scale(spent: Totals) -> float:
        def charged(scale: float) -> Totals:
            return spent + totals([row(scale)[0]])

        budget = privacy.epsilon or math.inf
        return calibrate_noise_multiplier(budget, privacy.delta, charged, privacy.adjacency)

    scale = max(map(needed_scale, {totals(history.releases) for history in histories}))
    charge, selection = row(scale)
    charged_histories = [replace(h, releases=(*h.releases, charge)) for h in histories]
    epsilon = plans[0].epsilon(charged_histories)
    trial = _trial_epsilon(scale, privacy.delta)
    trials = tuple(plan.as_trial(trial) for plan in plans)
    return SelectionPlan(sweep, trials, charge, selection, trial, epsilon)


def _trial_epsilon(scale: float, delta: float) -> float:
    """Returns the ε of one trial, as of a Gaussian mechanism with σ = `scale`."""
    return epsilon_of(Merged(1 / scale), delta)


def _row(
    plans: Sequence[PrivacyPlan], settings: SelectionSettings, scale: float
) -> tuple[Release, Selection]:
    """Returns the ledger row that a selection charges, and the `Selection` in it."""
    epsilon = _trial_epsilon(scale, plans[0].privacy.delta)
    candidates = [plan.as_trial(epsilon).totals.steps for plan in plans]
    selection = Selection.of_mean(
        list(dict.fromkeys(candidates)), settings.law, settings.trials, settings.eta
    )
    row = replace(
        score_row(scale * math.sqrt(1 / settings.score_share - 1), plans[0].unit),
        quantity="the best of a random number of runs, with its score",
        mechanism="private selection",
        clipped="as in the runs, and 1 if a held-out record is classified correctly",
        shares=max(plan.chief.shares for plan in plans),
        selection=selection,
    )
    return row, selection


def _check(sweep: Sweep) -> None:
    """Checks all runs' settings.

    Raises:
        SettingError: a run has no private score or no budget, or runs custom code, or the runs have
            different data.
    """
    if sweep.jobs != 1:
        reason = "must be 1, because trials are executed one after another. Set sweep.jobs=1"
        raise SettingError("sweep", "jobs", reason, value=sweep.jobs)
    for cell in sweep.cells:
        privacy = cell.settings.privacy
        if privacy is None or privacy.epsilon is None or privacy.noise_multiplier is not None:
            reason = (
                "must be set, and privacy.noise_multiplier must not, because a selection computes "
                "the noise. Set privacy.epsilon only"
            )
            raise PrivacySettingError("privacy", "epsilon", reason)
        for section, key in settings_with_own_code(cell.settings):
            reason = (
                "names custom code, which could pass information from one trial to the next. Set "
                "it to a built-in name"
            )
            raise SettingError(section, key, reason)
        method = cell.settings.method
        if has_periods(method):
            reason = (
                "must be 1, because a trial stores no sums for later periods. Set method.periods=1"
            )
            raise SettingError("method", "periods", reason, value=method.periods)
        if not cell.settings.partition.local_test:
            reason = (
                "must be above 0, because a selection scores runs on held-out records. Set it to "
                "0.2"
            )
            raise SettingError("partition", "local_test", reason)
        if _common(cell.settings) != _common(sweep.cells[0].settings):
            if "seed" in cell.values and cell.settings.partition.seed is None:
                reason = (
                    "must be set, because all trials of a selection have the same clients, which "
                    "depend on the run's seed otherwise. Set it to 0"
                )
                raise SettingError("partition", "seed", reason)
            names = ", ".join(f"privacy.{name}" for name in VARIED)
            reason = (
                f"changes the data, the clients or the privacy settings in the run {cell.label}, "
                "but all trials of a selection have the same ones. Change only methods, models, "
                f"rounds and these settings: {names}"
            )
            raise SettingError("grid", "settings", reason)


def _common(settings: RunSettings) -> tuple[object, ...]:
    """Returns a selection's settings that must be the same in all runs."""
    privacy = settings.privacy and replace(settings.privacy, **VARIED)
    data = settings.dataset, settings.data_root, settings.folder, settings.encoder
    return (*data, settings.resolved_partition, privacy)


def _check_plans(plans: tuple[PrivacyPlan, ...]) -> None:
    """Checks that the runs can be used in a selection.

    Raises:
        SettingError: the ledgers are not kept, a run has no guarantee, or the score or its cost is
            not defined.
    """
    if plans[0].spec.task != CLASSIFICATION:
        raise SettingError(
            "data",
            "dataset",
            "must have class labels, because a selection counts correct labels. Remove [selection]",
        )
    for plan in plans:
        _ledger_folder(plan)
        if not plan.facts.guaranteed:
            reason = "has no privacy guarantee, which a selection needs. Use another mechanism"
            raise PrivacySettingError("privacy", "mechanism", reason, value=plan.facts.name)
        sampled = any(rate < 1 for _, rate, _ in plan.totals.steps)
        if sampled and plan.privacy.adjacency == "replace-one":
            reason = "cannot be used for a selection of subsampled runs. Use add-remove"
            raise PrivacySettingError("privacy", "adjacency", reason, value="replace-one")


def _ledger_folder(plan: PrivacyPlan) -> Path:
    """Returns the folder of the ledgers.

    Raises:
        PrivacySettingError: the ledgers are not kept.
    """
    folder = plan.privacy.ledger_folder
    if folder is None:
        reason = "must be a folder, because a selection needs permanent ledgers. Name a folder"
        raise PrivacySettingError("privacy", "ledger", reason)
    return folder


def select_privately(
    sweep: Sweep, report: Callable[[str], None], *, download: bool = False
) -> dict[str, Any]:
    """Executes a selection, and returns the content of selection.json.

    If the selection has already finished, its result is returned. The best run's folder is
    `result_folder(sweep) / result["run"]`. An interrupted selection keeps its charge and nothing
    else; the next call is a new selection with a new charge.

    Args:
        sweep: the sweep, with `selection` set.
        report: a function that receives a line about the plan.
        download: True lets torchvision download a missing data set.

    Raises:
        SettingError, PrivacyError: as `plan_selection`, or a ledger cannot be charged.
        OutputError: another sweep is active in the folder, or the folder cannot be written.
    """
    rank.require_one_process("a selection")
    folder = result_folder(sweep)
    if (folder / RESULT).exists():
        return dict(load_json(folder / RESULT))
    with locked(sweep), writing(sweep.output):
        if (folder / RESULT).exists():  # another process has finished it meanwhile
            return dict(load_json(folder / RESULT))
        for stale in sweep.output.glob(f"{STAGING}*"):  # of a killed selection
            shutil.rmtree(stale)
        plan = plan_selection(sweep)
        report(describe(plan))
        with tempfile.TemporaryDirectory(prefix=STAGING, dir=sweep.output) as staging:
            best = _Trials(plan, Path(staging), folder, download).best()
        result = _result(plan, best)
        folder.mkdir(exist_ok=True)
        write_whole(folder / RESULT, f"{json.dumps(result, indent=1)}\n".encode())
        return result


def result_folder(sweep: Sweep) -> Path:
    """Returns the folder for a selection's result.

    The folder's name contains a hash of all settings.
    """
    text = f"{[settings_hash(cell.settings) for cell in sweep.cells]} {sweep.selection}"
    digest = hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
    return sweep.output / f"best-{digest}"


def describe(plan: SelectionPlan) -> str:
    """Describes in a sentence how the number of trials is drawn, and what the selection costs."""
    delta = plan.plans[0].privacy.delta
    return (
        f"selection among {len(plan.sweep.cells)} runs: {plan.selection.mean:g} trials are "
        f"expected, each with ε = {format_epsilon(plan.trial_epsilon)}; in total ε = "
        f"{format_epsilon(plan.epsilon)} at δ = {delta:g}; a score's noise has standard "
        f"deviation {plan.score_noise:.2g}"
    )


@dataclass(frozen=True, eq=False)
class _Best:
    """The best trial so far, with the index of its candidate and its run folder."""

    trial: Trial
    candidate: int
    folder: Path


@dataclass(eq=False)
class _Trials:
    """Charges the clients for a selection, and executes its trials.

    Args:
        plan: the plan of the selection.
        staging: the folder of the trials.
        home: the folder of the result.
        download: True lets torchvision download a missing data set.
    """

    _plan: SelectionPlan
    _staging: Path
    _home: Path
    _download: bool
    _secret: SecretGenerator = field(default_factory=SecretGenerator)
    _began: datetime = field(default_factory=datetime.now)

    def best(self) -> _Best | None:
        """Executes the trials, and moves the best trial's run folder to its final place.

        Returns:
            The best trial, or None if no trial was drawn or all have diverged.
        """
        ledgers = self._charged()
        charged = [ledger.lines for ledger in ledgers]
        best: _Best | None = None
        for _ in range(self._plan.selection.number_of_trials(self._secret.uniform())):
            best = self._better(best, self._executed(ledgers, charged))
        if best is None:
            return None
        for ledger, of_trial in zip(ledgers, best.trial.ledgers, strict=True):
            ledger.note_files(of_trial.files)
        for path in (best.folder, *best.folder.rglob("*")):  # no file states when the trial ran
            os.utime(path, (self._began.timestamp(),) * 2)
        self._home.mkdir(exist_ok=True)
        return replace(best, folder=best.folder.rename(self._home / best.folder.name))

    def _charged(self) -> list[Ledger]:
        """Charges all clients' ledgers for the selection, and returns the ledgers."""
        settings = self._plan.sweep.cells[0].settings
        loaded = data_of_run(settings, None, None, lambda text: None, download=self._download)
        loaded, clients = among_clients(loaded)
        plan = plan_of(settings)
        ledgers = clients.kept_ledgers(_ledger_folder(plan), loaded.settings)
        for ledger in ledgers:
            plan.guard(ledger).check([self._plan.row])
        charge_id = secrets.token_hex(8)
        for ledger in ledgers:
            ledger.charge_id = charge_id
            plan.guard(ledger).charge(self._plan.row)
        return ledgers

    def _executed(self, ledgers: Sequence[Ledger], charged: Sequence[Lines]) -> _Best:
        """Executes one trial of a random candidate."""
        candidate = int(len(self._plan.plans) * self._secret.uniform())
        plan = self._plan.plans[candidate]
        row = score_row(self._plan.row.noise_multiplier, plan.unit)
        covered = plan.totals + totals([row])
        of_trial = [TrialLedger(*pair, covered) for pair in zip(ledgers, charged, strict=True)]
        trial = Trial(of_trial, row, self._began, self._home)
        place = Path(tempfile.mkdtemp(dir=self._staging))
        settings = self._plan.sweep.cells[candidate].settings
        privacy = settings.privacy
        if privacy is not None:
            privacy = replace(privacy, epsilon=None, noise_multiplier=plan.sigma)
        with suppress(DivergedError):  # the score then stays −∞
            simulate(
                replace(settings, privacy=privacy),
                output=place,
                observer=Observer(),
                download=self._download,
                trial=trial,
            )
        return _Best(trial, candidate, next(place.iterdir()))

    def _better(self, best: _Best | None, new: _Best) -> _Best | None:
        """Returns the better of two trials, and deletes the other one's folder."""
        if new.trial.score > (-math.inf if best is None else best.trial.score):
            best, new = new, best
        if new is not None:
            shutil.rmtree(new.folder.parent)
        return best


def _result(plan: SelectionPlan, best: _Best | None) -> dict[str, Any]:
    """Returns the content of selection.json, which consists of public and released values."""
    chosen: dict[str, Any] = dict.fromkeys(("run", "values", "score"))
    if best is not None:
        values = dict(plan.sweep.cells[best.candidate].values)
        score = best.trial.score / plan.held_out
        chosen = {"run": best.folder.name, "values": values, "score": score}
    return {
        **chosen,
        "score_noise": plan.score_noise,
        "epsilon": plan.epsilon,
        "delta": plan.plans[0].privacy.delta,
        "trial_epsilon": plan.trial_epsilon,
        "expected_trials": plan.selection.mean,
        "candidates": len(plan.sweep.cells),
    }
