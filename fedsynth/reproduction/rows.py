"""The results of finished runs, stored as JSON lines with one file for each table, and the folders
of unfinished runs.

    OUTPUT/feddm-table2.jsonl          a line for each finished run of the table
    OUTPUT/runs/HASH/…                 run folders, the unfinished ones with their checkpoints
    OUTPUT/scaled-0.05/…               the same for scaled runs, which are kept separate

A run is identified by a hash of the settings that decide its result, so that tables which need the
same run share it (FedKF's Tables V and VIII; both final models of one training). Precision is not
in the hash, because it changes results only by rounding; it is recorded in the row and shown with
its numbers.

`measured` computes a published metric from the curve of a run. A curve has a list for each metric
of a run's rounds, under its dotted path in metrics.jsonl ("models.oca.local.amp"), and the list
"round"; None marks a round that was not evaluated.
"""

from __future__ import annotations

import fcntl
import json
import statistics
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any

import torch

from fedsynth.config.resolve import fingerprint
from fedsynth.config.settings import RunSettings
from fedsynth.data.registry import dataset_spec
from fedsynth.errors import OutputError
from fedsynth.privacy.files import decode_json, open_regular, read_text
from fedsynth.reproduction.presets import Number
from fedsynth.results.finished import run_folders
from fedsynth.results.run_folder import CONFIG, INCOMPLETE, METRICS
from fedsynth.version import __version__

NEEDED = {
    *("preset", "cell", "seed", "settings", "scale", "changes", "precision", "seconds"),
    *("curve", "upload_floats", "client_upload_bytes", "commit", "version"),
}
"""The keys that every row has."""
PACKAGE = Path(__file__).resolve().parents[1]


def run_hash(settings: RunSettings) -> str:
    """Returns a hash that identifies a run by its settings."""
    return fingerprint(settings, without=("precision",))


class Rows:
    """The rows in a folder, either of full runs or of runs with one scale.

    Args:
        output: the folder.
        scale: None: whole runs.
    """

    def __init__(self, output: Path, scale: float | None = None) -> None:
        self.folder = output if scale is None else output / f"scaled-{scale:g}"
        self.scale = scale

    def all(self) -> dict[str, dict[str, Any]]:
        """Returns all rows, by the hash of their run.

        Raises:
            OutputError: a file cannot be read, or has lines that are not rows.
        """
        rows_by_settings: dict[str, dict[str, Any]] = {}
        for path in sorted(self.folder.glob("*.jsonl")):
            try:
                for line in read_text(path).splitlines():
                    row = decode_json(line)
                    if not row.keys() >= NEEDED:
                        raise ValueError
                    if row["scale"] == self.scale:
                        rows_by_settings[row["settings"]] = row
            except OSError as error:
                raise OutputError(f"cannot read {path}: {error.strerror}") from None
            except (AttributeError, ValueError):
                raise OutputError(
                    f"{path} has a line that is not the result of a finished run"
                ) from None
        return rows_by_settings

    def append(self, preset: str, row: Mapping[str, Any]) -> None:
        """Appends the row of a finished run to the file of its table.

        Raises:
            OutputError: the file cannot be written.
        """
        path = self.folder / f"{preset.replace(':', '-', 1)}.jsonl"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")
        except OSError as error:
            raise OutputError(f"cannot write {path}: {error.strerror}") from None

    def run_folder(self, settings: RunSettings) -> Path:
        """Returns the folder in which the run folder is created. Runs with different precisions
        have different folders until they are finished."""
        return self.folder / "runs" / f"{run_hash(settings)}-{settings.precision}"

    @property
    def trained(self) -> Path | None:
        """Returns the folder that caches trained clients for all one-shot methods of a table.
        Returns None if the exact version of the code is unknown."""
        version = commit()
        if version is None or version.endswith("+"):
            return None
        return self.folder / "runs" / f"trained-{version}"


@contextmanager
def claimed(folder: Path) -> Iterator[bool]:
    """Yields whether this process has exclusive use of the folder. The claim ends with the block.

    Raises:
        OutputError: the folder cannot be created.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open_regular(folder / ".claimed", writing=True, create=True)
    except OSError as error:
        raise OutputError(f"cannot write {folder}: {error.strerror}") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


def finished(folder: Path) -> Path | None:
    """Returns the run folder of a finished run inside this folder, or None."""
    return next(reversed(run_folders(folder)), None)


def unfinished(folder: Path) -> Path | None:
    """Returns the run folder of a run that can be resumed inside this folder, or None."""
    configs = folder.glob(f"*{INCOMPLETE}/{CONFIG}")
    return max((path.parent for path in configs), default=None)


def metrics_of(folder: Path | None) -> list[dict[str, Any]]:
    """Returns the metrics of each round of a run folder. The list is empty before round 1."""
    if folder is None or not (folder / METRICS).exists():
        return []
    return [decode_json(line) for line in read_text(folder / METRICS).splitlines()]


def round_summary(rows: Sequence[Mapping[str, Any]], domains: bool) -> dict[str, Any]:
    """Returns the fields of a row that summarise the rounds of a finished run."""
    last: Mapping[str, Any] = {"upload_floats": 0, "client_upload_bytes": [0]}
    if rows:
        last = rows[-1]
    return {
        "rounds": len(rows),
        "seconds": round(sum(row["seconds"] for row in rows), 1),
        "upload_floats": last["upload_floats"],
        "client_upload_bytes": round(statistics.fmean(last["client_upload_bytes"] or [0]), 1),
        "curve": curve_of(rows, domains),
    }


def environment() -> dict[str, Any]:
    """Returns the code version, the date and the machine, which are recorded in each row."""
    device = f"CPU, {torch.get_num_threads()} threads"
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
    return {
        "version": __version__,
        "commit": commit(),
        "date": str(date.today()),
        "machine": device,
        "torch": torch.__version__,
    }


@cache
def commit() -> str | None:
    """Returns the commit of the package, with "+" if files had uncommitted changes when this
    process first asked. Returns None outside a git checkout."""
    root = PACKAGE.parent
    if not (root / ".git").exists():
        return None
    try:
        head = _git(root, "rev-parse", "--short", "HEAD")
        changes = _git(root, "status", "--porcelain", "--", "fedsynth", "privacy", "cli")
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"{head}+" if changes else head


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    return subprocess.check_output(command, stderr=subprocess.DEVNULL, text=True).strip()


Curve = Mapping[str, Sequence[float | None]]
MEBI = 2**20
"""Bytes of a published megabyte: FedAF's 1.46 MB are 381,450 numbers of four bytes."""
FIGURES = ("test_accuracy", "amp", "fm", "wlp")


def curve_of(rows: Sequence[Mapping[str, Any]], domains: bool) -> dict[str, list[float | None]]:
    """Returns the metrics of a run's rounds as curves.

    Args:
        rows: the rows of metrics.jsonl.
        domains: True if clients are domains, so that the accuracy of each client is kept.
    """
    flat = [_figures("", row, domains) for row in rows]
    names = dict.fromkeys(name for figures in flat for name in figures)
    curve: dict[str, list[float | None]] = {"round": [row["round"] for row in rows]}
    for name in names:
        curve[name] = [figures.get(name) for figures in flat]
    return curve


def _figures(prefix: str, row: Mapping[str, Any], domains: bool) -> dict[str, float]:
    """Returns the numbers in a row, by their paths, rounded to six decimals."""
    figures = {f"{prefix}{name}": row.get(name) for name in FIGURES}
    for name, accuracy in row.get("domain_accuracy", {}).items():
        figures[f"{prefix}domain_accuracy.{name}"] = accuracy
    if domains:
        for client, accuracy in enumerate(row.get("client_accuracy", ())):
            figures[f"{prefix}client.{client}"] = accuracy
    rounded = {name: round(float(n), 6) for name, n in figures.items() if n is not None}
    if "local" in row:
        rounded |= _figures(f"{prefix}local.", row["local"], domains)
    for name, model in row.get("models", {}).items():
        rounded |= _figures(f"{prefix}models.{name}.", model, domains)
    return rounded


def measured(
    number: Number,
    row: Mapping[str, Any],
    *,
    variant: str,
    dataset: str,
    fedavg: Mapping[str, Any] | None = None,
) -> float | None:
    """Returns the value of a finished run for a published number, in the unit of that number.
    Returns None if the run has no such value.

    Args:
        number: the published one.
        row: the row of the run.
        variant: which of several final models is measured; empty: the run's.
        dataset: the name of the data set in this package.
        fedavg: FedAvg's row of the same seed, for the number of rounds to FedAvg's accuracy.
    """
    curve = row["curve"]
    if number.metric == "upload_floats_per_round":
        return float(row["upload_floats"])
    if number.metric == "upload_mb_per_client_per_round":
        return float(row["client_upload_bytes"]) / MEBI
    if number.metric == "rounds_to_fedavg_100_round_amp":
        return None if fedavg is None else _rounds_to(fedavg, curve, variant)
    if number.metric in ("amp_pct", "fm", "wlp_pct"):
        values = _column(curve, variant, f"local.{number.metric.removesuffix('_pct')}")
    elif number.domain:
        values = [_of_domain(curve, number.domain, dataset)]
    else:
        values = _column(curve, variant, "test_accuracy")
    measurements = [value for value in values if value is not None]
    if not measurements:
        return None
    value = max(measurements) if number.metric.startswith("best_") else measurements[-1]
    return value if number.metric == "fm" else 100 * value


def _column(curve: Curve, variant: str, name: str) -> Sequence[float | None]:
    """Returns a metric of the variant if the run has several final models, otherwise the metric of
    its model."""
    return curve.get(f"models.{variant}.{name}", curve.get(name, ()))


def _last(curve: Curve, name: str) -> float | None:
    values = [value for value in curve.get(name, ()) if value is not None]
    return values[-1] if values else None


def _of_domain(curve: Curve, domain: str, dataset: str) -> float | None:
    """Returns the accuracy on a domain. Clients with personalised models are tested on their own
    test split of the domain, all others on the domain's part of the test set."""
    names = dataset_spec(dataset).domains
    accuracies = {name: _last(curve, f"local.client.{k}") for k, name in enumerate(names)}
    if set(accuracies.values()) == {None}:
        accuracies = {name: _last(curve, f"domain_accuracy.{name}") for name in names}
    if domain != "average":
        return accuracies.get(domain)
    values = [value for value in accuracies.values() if value is not None]
    return sum(values) / len(names) if len(values) == len(names) else None


def _rounds_to(fedavg: Mapping[str, Any], curve: Curve, variant: str) -> float | None:
    """Returns the number of rounds until AMP reaches FedAvg's final AMP. If it never does, returns
    the number of rounds plus one."""
    targets = [value for value in _column(fedavg["curve"], "aca", "local.amp") if value is not None]
    amps = _column(curve, variant, "local.amp")
    if not targets or not amps:
        return None
    for number, value in enumerate(amps, start=1):
        if value is not None and value >= targets[-1]:
            return number
    return len(amps) + 1
