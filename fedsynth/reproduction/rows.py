"""Stores the results of finished runs of published tables, and finds the unfinished runs.

A row is the result of one finished run. The rows of a table are the lines of one JSON lines file.

    OUTPUT/feddm-table2.jsonl          a line for each finished run of the table
    OUTPUT/runs/HASH/…                 run folders, the unfinished ones with their checkpoints

A run is identified by a hash of the settings that decide its result. Tables that need the same run
therefore share it, such as FedKF's Tables V and VIII. The precision is not in the hash, because it
changes results only by rounding. The row states the precision, and it is shown with the numbers.

`measured` computes a published metric from the curve of a run. The curve is a mapping from each
metric to the list of its values after each round. A metric's name is its dotted path in
metrics.jsonl, such as "models.oca.local.amp". The list "round" has the numbers of the rounds. None
marks a round in which the metric was not computed.
"""

from __future__ import annotations

import errno
import json
import os
import statistics
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any

import torch

from fedsynth.config.resolve import fingerprint
from fedsynth.config.settings import RunSettings
from fedsynth.data.registry import dataset_spec
from fedsynth.errors import OutputError, writing
from fedsynth.files import decode_json, lock, open_regular, read_text
from fedsynth.reproduction.presets import Number
from fedsynth.version import __version__

Row = Mapping[str, Any]
# The keys that every row has.
NEEDED = {
    *("preset", "cell", "seed", "settings", "changes", "precision", "seconds"),
    *("curve", "upload_floats", "client_upload_bytes", "commit", "version"),
}

PACKAGE = Path(__file__).resolve().parents[1]


def run_hash(settings: RunSettings) -> str:
    """Returns a hash of the settings of a run that decide its result."""
    return fingerprint(settings, without=("precision",))


class Rows:
    """The results of finished runs in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def all(self) -> dict[str, dict[str, Any]]:
        """Reads all rows, and returns a mapping from the hash of each run to its row.

        Raises:
            OutputError: a file cannot be read, or a line is not the row of a finished run.
        """
        rows_by_settings: dict[str, dict[str, Any]] = {}
        for path in sorted(self.folder.glob("*.jsonl")):
            try:
                # a last line without its end was cut: its run is still in its folder
                for line in read_text(path).rpartition("\n")[0].splitlines():
                    row = decode_json(line)
                    if not row.keys() >= NEEDED:
                        raise ValueError
                    rows_by_settings[row["settings"]] = row
            except OSError as error:
                raise OutputError(f"cannot read {path}: {error.strerror}") from None
            except (AttributeError, ValueError):
                raise OutputError(f"{path} has a line that is not the result of a run") from None
        return rows_by_settings

    def append(self, preset: str, row: Row) -> None:
        """Appends the row of a finished run to the file of its table.

        Raises:
            OutputError: the file cannot be written.
        """
        path = self.folder / f"{preset.replace(':', '-', 1)}.jsonl"
        with writing(path):
            self.folder.mkdir(parents=True, exist_ok=True)
            with open_regular(path, writing=True, create=True) as file:
                lock(file, path)  # against other processes
                file.truncate(file.read().rfind(b"\n") + 1)  # a line that was cut
                text = json.dumps(row, ensure_ascii=False, allow_nan=False)
                if file.write(line := f"{text}\n".encode()) < len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def run_folder(self, settings: RunSettings) -> Path:
        """Returns the parent folder of the run folder for a run with these settings.

        Runs that differ only in precision have different folders.
        """
        return self.folder / "runs" / f"{run_hash(settings)}-{settings.precision}"

    @property
    def trained(self) -> Path | None:
        """The folder in which runs of one round share their trained clients.

        It is None if the code is not a git commit without changes, because trained clients of
        another version must not be used.
        """
        version = commit()
        if version is None or version.endswith("+"):
            return None
        return self.folder / "runs" / f"trained-{version}"


def round_summary(rows: Sequence[Row], domains: bool) -> dict[str, Any]:
    """Returns the entries of a result row that summarise the rounds of a finished run.

    Args:
        rows: the metrics of each round, as in metrics.jsonl.
        domains: True if each client has the images of one domain. The accuracy of each client is
            then kept.
    """
    last: Row = {"upload_floats": 0, "client_upload_bytes": [0]}
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
    """Returns the entries of a row that state the version of the code, the date and the machine."""
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
    """Returns the git commit of this package, or None if the package is not in a git checkout.

    A "+" at the end means that files had uncommitted changes. The result of the first call is kept.
    """
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
# The number of bytes in a megabyte of the papers. FedAF's 1.46 MB are 381,450 numbers of four
# bytes.
MEBI = 2**20

FIGURES = ("test_accuracy", "amp", "fm", "wlp")


def curve_of(rows: Sequence[Row], domains: bool) -> dict[str, list[float | None]]:
    """Converts the metrics of each round to a curve, which has one list for each metric.

    Args:
        rows: the metrics of each round, as in metrics.jsonl.
        domains: True if each client has the images of one domain. The accuracy of each client is
            then kept.
    """
    flat = [_figures("", row, domains) for row in rows]
    names = dict.fromkeys(name for figures in flat for name in figures)
    curve: dict[str, list[float | None]] = {"round": [row["round"] for row in rows]}
    for name in names:
        curve[name] = [figures.get(name) for figures in flat]
    return curve


def _figures(prefix: str, row: Row, domains: bool) -> dict[str, float]:
    """Returns a mapping from dotted paths to the metrics of one round, rounded to six decimals."""
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
    number: Number, row: Row, *, variant: str, dataset: str, fedavg: Row | None = None
) -> float | None:
    """Returns the value with which a finished run reproduces a published number.

    The value has the unit of the published number. It is None if the run did not compute it.

    Args:
        number: the published number.
        row: the row of the finished run.
        variant: the final model to which the number refers, if a run has several. Otherwise empty.
        dataset: the name of the data set in this package.
        fedavg: the row of the FedAvg run with the same seed. It is needed for the number of rounds
            until FedAvg's accuracy is reached.
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
    measurements = _recorded(values)
    if not measurements:
        return None
    value = max(measurements) if number.metric.startswith("best_") else measurements[-1]
    return value if number.metric == "fm" else 100 * value


def _column(curve: Curve, variant: str, name: str) -> Sequence[float | None]:
    """Returns the values of a metric after each round.

    They belong to the model `variant` if the run has several final models.
    """
    return curve.get(f"models.{variant}.{name}", curve.get(name, ()))


def _recorded(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _last(curve: Curve, name: str) -> float | None:
    values = _recorded(curve.get(name, ()))
    return values[-1] if values else None


def _of_domain(curve: Curve, domain: str, dataset: str) -> float | None:
    """Returns the last accuracy on a domain, or the mean over all domains for "average".

    If the run evaluated the test splits of the clients, the accuracy is that of the domain's client
    on its test split. Otherwise, it is the accuracy on the domain's part of the test set. Returns
    None if it is missing.
    """
    names = dataset_spec(dataset).domains
    accuracies = {name: _last(curve, f"local.client.{k}") for k, name in enumerate(names)}
    if set(accuracies.values()) == {None}:
        accuracies = {name: _last(curve, f"domain_accuracy.{name}") for name in names}
    if domain != "average":
        return accuracies.get(domain)
    values = _recorded(accuracies.values())
    return sum(values) / len(names) if len(values) == len(names) else None


def _rounds_to(fedavg: Row, curve: Curve, variant: str) -> float | None:
    """Returns the number of rounds until the metric AMP reaches the final AMP of FedAvg.

    Returns the number of rounds plus one if FedAvg's AMP is never reached, and None if an AMP is
    missing.
    """
    targets = _recorded(_column(fedavg["curve"], "aca", "local.amp"))
    amps = _column(curve, variant, "local.amp")
    if not targets or not amps:
        return None
    for number, value in enumerate(amps, start=1):
        if value is not None and value >= targets[-1]:
            return number
    return len(amps) + 1
