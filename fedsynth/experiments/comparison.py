"""Compares the results of finished runs with a paper's published numbers.

A reproduced mean m is "within" the published mean p if |m − p| ≤ 2·√(s_m² + s_p²). Here s_m and s_p
are standard deviations over runs, not of the means, for two reasons. The authors and we draw
different partitions and initial weights, and the mean over a few seeds is uncertain. If the paper
does not state s_p, s_m replaces it. If a single seed gives no s_m, s_p replaces it. If both are
unknown, there is no verdict.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import filterfalse, product

from scipy.special import stdtrit

from fedsynth.data.registry import dataset_spec
from fedsynth.evaluation import CLIENT_MODELS, DISSIMILARITY, FEATURE_SPACE, NAMES, Names
from fedsynth.experiments import presets
from fedsynth.experiments.presets import Changes
from fedsynth.experiments.rows import Row
from fedsynth.experiments.runner import Job
from fedsynth.federation.context import choose_speed, resolve_device
from fedsynth.results.finished import Spread
from fedsynth.validation import flattened

Curve = Mapping[str, Sequence[float | None]]
# The papers' number of bytes in a megabyte. FedAF's 1.46 MB are 381,450 numbers of four bytes.
MEBI = 2**20
# Published numbers of rounds until a metric reaches FedAvg's last value, with the metric.
_REACHED = {
    "rounds_to_fedavg_100_round_amp": "local.amp",
    "rounds_to_fedavg_accuracy": "test_accuracy",
}
WITHIN, ABOVE, BELOW, NONE = "within", "above", "below", "no verdict"
FACTOR = 2.0
# The curve of averaged students' accuracies.
AVERAGED = "models.average.test_accuracy"
# Verdicts on claims.
HOLDS, FAILS, UNRESOLVED = "holds", "does not hold", "not resolved"


@dataclass(frozen=True)
class Line:
    """A published number, with the results of the runs that reproduce it.

    Args:
        cell: a line of text that identifies the table cell.
        number: the published number.
        values: the reproduced numbers by seed, without diverged runs.
        runs: the rows of all the cell's runs.
        changes: the runs' settings that differ from the preset.
        reduced: whether the runs belong to a smaller edition of the table.
    """

    cell: str
    number: presets.Number
    values: Mapping[int, float]
    runs: Sequence[Row]
    changes: Changes
    reduced: bool = False

    @property
    def spread(self) -> Spread:
        """The mean and the standard deviation of the reproduced numbers."""
        return Spread.of(list(self.values.values()))

    @property
    def averaged_values(self) -> dict[int, float]:
        """The accuracies of averaged students, in %, by seed.

        Runs record these accuracies (`OneShotSettings.student_weights`). Others have none.
        """
        if self.number.metric != "test_accuracy_pct":
            return {}
        curves = {run["seed"]: run["curve"].get(AVERAGED, ()) for run in self.runs}
        return {
            seed: 100 * value for seed, curve in curves.items() for value in _recorded(curve)[-1:]
        }

    @property
    def averaged(self) -> Spread:
        """The mean and the standard deviation of the accuracies of averaged students."""
        return Spread.of(list(self.averaged_values.values()))

    @property
    def hours(self) -> float:
        """The total duration of all runs in hours, including diverged runs."""
        return sum(float(run["seconds"]) for run in self.runs) / 3600

    @property
    def commits(self) -> list[str]:
        """The git commits of the runs' code. Unknown commits are replaced by versions."""
        return list(dict.fromkeys(run["commit"] or run["version"] for run in self.runs))

    @property
    def reduced_precision(self) -> str:
        """The precisions other than fp32 that the runs used, in parentheses.

        It is an empty string if all runs used fp32.
        """
        names = sorted({run["precision"] for run in self.runs} - {"fp32"})
        return f" ({', '.join(names)})" if names else ""

    @property
    def verdict(self) -> str:
        """The verdict on the reproduced numbers, such as "within", or why there is no verdict.

        There is no verdict if runs diverged, used changed settings or are missing.
        """
        diverged = sum("diverged" in run for run in self.runs)
        if diverged:
            return f"{diverged} diverged"
        if not self.values:
            return "not run"
        if self.changes:
            return f"changed: {NONE}"
        if self.reduced:
            return f"smaller: {NONE}"
        return verdict(self.number.value, self.number.std, list(self.values.values()))


def verdict(published: float | None, published_std: float | None, values: Sequence[float]) -> str:
    """Compares reproduced values with a published mean, and returns the verdict.

    The verdict is `WITHIN`, `ABOVE`, `BELOW` or `NONE`. The module's docstring states the rule.
    `ABOVE` means that the reproduced mean is larger, which need not be better.

    >>> verdict(70.0, 0.3, [69.6, 70.2]), verdict(70.0, 0.3, [60.1, 60.3])
    ('within', 'below')
    >>> verdict(70.0, None, [71.0])  # one seed, and no published deviation
    'no verdict'
    """
    mean, std = Spread.of(values)
    stds = [value for value in (published_std, std) if value is not None]
    if published is None or mean is None or not stds:
        return NONE
    if abs(mean - published) <= FACTOR * math.hypot(stds[0], stds[-1]):
        return WITHIN
    return ABOVE if mean > published else BELOW


def changed_settings(changes: Changes) -> str:
    """Formats changed settings as one line, such as "method.lr=0.1, run.rounds=5"."""
    return ", ".join(f"{key}={value}" for key, value in flattened(changes).items())


def jobs_of(
    table: presets.Preset,
    cells: Iterable[presets.Cell],
    seeds: Iterable[int],
    *,
    changes: Changes | None = None,
    speed: Changes | None = None,
) -> list[Job]:
    """Returns one run per seed for each table cell that can be run.

    The runs are sorted by seed.

    Args:
        table: the table's preset.
        cells: some of the table's cells.
        seeds: the runs' seeds.
        changes: sections of settings that override the preset's.
        speed: sections of settings that do not change results, such as the device.

    Raises:
        FedsynthError: the changes are invalid, as for `resolve`.
    """
    changes = changes or {}
    runnable = list(filterfalse(table.refusal, cells))
    jobs = []
    for seed, cell in product(seeds, runnable):
        settings = table.settings(cell, seed, presets.override(speed or {}, changes))
        settings = choose_speed(settings, resolve_device(settings.device))
        name = f"{table.name} {presets.cell_words(cell, table)} seed={seed}"
        entries = {
            "preset": table.name,
            "cell": cell.columns(),
            "seed": seed,
            "changes": presets.override(changes, {}),
        }
        jobs.append(Job(name, settings, entries))
    return jobs


def lines(
    table: presets.Preset,
    cells: Iterable[presets.Cell],
    seeds: Sequence[int],
    rows: Mapping[str, Row],
    changes: Changes | None = None,
) -> list[Line]:
    """Returns the comparison lines for all published numbers in the cells.

    Args:
        table: the table's preset.
        cells: some of the table's cells.
        seeds: the seeds to include.
        rows: the finished runs' rows by run hash (`rows_by_hash`).
        changes: the runs' changed settings.
    """

    result = []
    for cell in cells:
        variant, dataset = table.variant(cell), presets.dataset_of(cell.dataset)
        name = presets.cell_words(cell, table)
        jobs = jobs_of(table, [cell], seeds, changes=changes)
        runs = _finished(jobs, rows)
        fedavg = _finished(_fedavg_jobs(table, cell, seeds, changes), rows)
        for number in cell.numbers:
            values = {}
            for seed, row in runs.items():
                if "diverged" in row:
                    continue
                reference = fedavg.get(seed)
                value = measured(number, row, variant=variant, dataset=dataset, fedavg=reference)
                if value is not None:
                    values[seed] = value
            finished = list(runs.values())
            result.append(Line(name, number, values, finished, changes or {}, table.reduced))
    return result


@dataclass(frozen=True)
class Judgement:
    """The result of checking a paper's claim on one data set and partition.

    Args:
        claim: the claim.
        data: the data set and the partition.
        differences: the metric's differences by rival, one for each seed that both methods have.
            Positive differences support the claim.
        published: the paper's differences by rival. None if a number is missing.
    """

    claim: presets.Claim
    data: str
    differences: Mapping[str, Sequence[float]]
    published: Mapping[str, float | None]

    @property
    def closest(self) -> str:
        """The rival method that decides: the 95 % interval of its difference reaches lowest.

        If the claim fails, it is the rival whose interval is below zero. Of rivals with a single
        seed, it is the best one.
        """
        bound = 1 if self.verdict == FAILS else 0

        def rank(rival: str) -> tuple[float, float]:
            differences = self.differences[rival]
            mean = Spread.of(differences).mean
            return interval(differences)[bound], math.inf if mean is None else mean

        return min(self.differences, key=rank)

    @property
    def published_difference(self) -> str:
        """The paper's difference from the deciding rival, as text."""
        return self._text(Spread(self.published[self.closest], None))

    @property
    def deciding_difference(self) -> str:
        """The mean difference from the deciding rival, ± half its interval's width, and its name.

        There is no width for fewer than two seeds.
        """
        differences = self.differences[self.closest]
        low, high = interval(differences)
        width = (high - low) / 2 if math.isfinite(high) else None
        return f"{self._text(Spread(Spread.of(differences).mean, width))} ({self.closest})"

    def _text(self, difference: Spread) -> str:
        return difference.format(1.0, 4 if self.claim.metric == "fm" else 2)

    @property
    def verdict(self) -> str:
        """`HOLDS` if the claim holds against all rivals, `FAILS` if one of them is better.

        Otherwise `UNRESOLVED`. A difference counts if its 95 % interval by Student's t over the
        seeds excludes zero.
        """
        intervals = [interval(values) for values in self.differences.values()]
        if any(high < 0 for _, high in intervals):
            return FAILS
        return HOLDS if all(low > 0 for low, _ in intervals) else UNRESOLVED


def interval(differences: Sequence[float]) -> tuple[float, float]:
    """Returns the 95 % interval of the mean difference (Student's t).

    It is infinite for fewer than two differences.
    """
    mean, std = Spread.of(differences)
    if mean is None or std is None:
        return -math.inf, math.inf
    count = len(differences)
    width = float(stdtrit(count - 1, 0.975)) * std / math.sqrt(count)
    return mean - width, mean + width


def judgements(
    table: presets.Preset,
    rows: Mapping[str, Row],
    changes: Changes | None = None,
    *,
    averaged: bool = False,
) -> list[Judgement]:
    """Checks the claims of a published table with the results of finished runs.

    Each claim is checked on each data set and partition. Data sets without one of a claim's methods
    are left out.

    Args:
        table: the table's preset.
        rows: the finished runs' rows by run hash (`rows_by_hash`).
        changes: the runs' changed settings.
        averaged: whether averaged students replace the last ones of the methods that have them.
    """
    places: dict[tuple[str, str], dict[tuple[str, str], Line]] = {}
    for cell in filterfalse(table.refusal, table.cells):
        place = places.setdefault((cell.dataset, cell.partition), {})
        for line in lines(table, [cell], range(table.seeds), rows, changes):
            students = line.averaged_values if averaged else {}
            line = replace(line, values={**line.values, **students})
            place[cell.method, line.number.metric] = line
    result = []
    for claim, (data, measured_lines) in product(table.claims, places.items()):
        names = [(method, claim.metric) for method in (claim.ahead, *claim.of)]
        if measured_lines.keys() >= set(names):
            ahead, *rivals = (measured_lines[name] for name in names)
            result.append(_judgement(claim, " ".join(data), ahead, rivals))
    return result


def _judgement(claim: presets.Claim, data: str, ahead: Line, rivals: Sequence[Line]) -> Judgement:
    """Returns the judgement on a claim's methods, whose rivals are in the order of `claim.of`."""
    sign = -1 if claim.lower else 1
    differences: dict[str, list[float]] = {}
    published: dict[str, float | None] = {}
    for name, rival in zip(claim.of, rivals, strict=True):
        seeds = sorted(ahead.values.keys() & rival.values.keys())
        differences[name] = [sign * (ahead.values[k] - rival.values[k]) for k in seeds]
        value, rival_value = ahead.number.value, rival.number.value
        published[name] = None
        if value is not None and rival_value is not None:
            published[name] = sign * (value - rival_value)
    return Judgement(claim, data, differences, published)


def _finished(jobs: Iterable[Job], rows: Mapping[str, Row]) -> dict[int, Row]:
    """Returns the result rows of the finished jobs, by seed."""
    return {job.entries["seed"]: rows[job.hash] for job in jobs if job.hash in rows}


def _fedavg_jobs(
    table: presets.Preset, cell: presets.Cell, seeds: Sequence[int], changes: Changes | None
) -> list[Job]:
    """Returns the FedAvg runs that a cell's numbers are compared with.

    They are needed if a number counts the rounds until FedAvg's accuracy is reached, and use the
    cell's data set and partition. Otherwise the list is empty.
    """
    if all("fedavg" not in number.metric for number in cell.numbers):
        return []
    data = (cell.dataset, cell.partition)
    same = [c for c in table.cells if c.method == "fedavg" and (c.dataset, c.partition) == data]
    return jobs_of(table, same[:1], seeds, changes=changes)


def format_number(mean: float | None, std: float | None) -> str:
    """Formats a mean and its standard deviation. Larger means get fewer decimals."""
    digits = 4
    if abs(mean or 0) >= 1000:
        digits = 0
    elif abs(mean or 0) >= 1:
        digits = 2
    return Spread(mean, std).format(1.0, digits)


def measured(
    number: presets.Number, row: Row, *, variant: str, dataset: str, fedavg: Row | None = None
) -> float | None:
    """Returns a finished run's value for a published number, in the number's unit.

    It is None if the run did not compute it.

    Args:
        number: the published number.
        row: the finished run's row.
        variant: the number's final model, if a run has several. Otherwise empty.
        dataset: fedsynth's name for the data set.
        fedavg: the FedAvg run's row with the same seed, needed for the number of rounds until
            FedAvg's accuracy is reached.
    """
    curve = row["curve"]
    if number.metric == "upload_floats_per_round":
        return float(row["upload_floats"])
    if number.metric == "upload_mb_per_client_per_round":
        return float(row["client_upload_bytes"]) / MEBI
    if number.metric == "upload_mega_floats_per_round":
        return float(row["upload_floats"]) / 1e6
    if number.metric in (*FEATURE_SPACE, DISSIMILARITY):
        return _last(curve, number.metric)
    if number.metric in _REACHED:
        name = _REACHED[number.metric]
        return None if fedavg is None else _rounds_to(fedavg, curve, variant, name)
    if number.metric in ("amp_pct", "fm", "wlp_pct"):
        values = _column(curve, variant, f"local.{number.metric.removesuffix('_pct')}")
    elif number.metric == f"{CLIENT_MODELS}_pct":
        values = curve.get(f"{CLIENT_MODELS}.{number.domain.removeprefix('client ')}", ())
    elif number.domain:
        values = [_of_domain(curve, number.domain, dataset)]
    else:
        values = _column(curve, variant, _names(dataset).test)
    measurements = _recorded(values)
    if not measurements:
        return None
    value = max(measurements) if number.metric.startswith("best_") else measurements[-1]
    return value if number.metric == "fm" else 100 * value


def _column(curve: Curve, variant: str, name: str) -> Sequence[float | None]:
    """Returns the values of a metric for one model, one for each round.

    If the run has only one model, `variant` is ignored.
    """
    return curve.get(f"models.{variant}.{name}", curve.get(name, ()))


def _recorded(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _last(curve: Curve, name: str) -> float | None:
    values = _recorded(curve.get(name, ()))
    return values[-1] if values else None


def _names(dataset: str) -> Names:
    return NAMES[dataset_spec(dataset).task]


def _of_domain(curve: Curve, domain: str, dataset: str) -> float | None:
    """Returns the last accuracy on a domain, or the mean over all domains for "average".

    If the run evaluated the clients' test splits, it is the accuracy of the domain's client on its
    split. Otherwise, it is the accuracy on the domain's part of the test set. Returns None if it is
    missing.
    """
    names = dataset_spec(dataset).domains
    accuracies = {name: _last(curve, f"local.client.{k}") for k, name in enumerate(names)}
    if set(accuracies.values()) == {None}:
        of_domains = _names(dataset).domains
        accuracies = {name: _last(curve, f"{of_domains}.{name}") for name in names}
    if domain != "average":
        return accuracies.get(domain)
    values = _recorded(accuracies.values())
    return sum(values) / len(names) if len(values) == len(names) else None


def _rounds_to(fedavg: Row, curve: Curve, variant: str, name: str) -> float | None:
    """Counts the rounds until a metric reaches FedAvg's final value.

    Returns the number of rounds plus one if the value is never reached, and None if the metric is
    missing.
    """
    targets = _recorded(_column(fedavg["curve"], "aca", name))
    values = _column(curve, variant, name)
    if not targets or not values:
        return None
    for number, value in enumerate(values, start=1):
        if value is not None and value >= targets[-1]:
            return number
    return len(values) + 1
