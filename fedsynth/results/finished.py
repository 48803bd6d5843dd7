"""Reads finished runs and compares them.

This module finds the settings in which runs differ, gives each run a short name, and puts the
results into table rows. A run folder is untrusted input, so the types of all values are checked.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from fedsynth.errors import FedsynthError, one_line
from fedsynth.files import decode_json, load_json, read_text
from fedsynth.results import disclosed
from fedsynth.results.file_names import CONFIG, HIDDEN, INCOMPLETE, METRICS, SUMMARY
from fedsynth.validation import flattened, read_sections

Rows = Sequence[Mapping[str, Any]]
NONE = "–"
# The text for an AUROC that is undefined (`classification_measures`).
UNDEFINED = "undefined"


_SHARES = ("accuracy", "dice", "auroc", "f1", "error", "amp", "wlp", "agreement", "share")


class RunFolderError(FedsynthError, code="files.run"):
    """Raised if a folder does not contain a finished run, or contains damaged files."""


@dataclass(frozen=True)
class Run:
    """A finished run, read from its folder.

    Attributes:
        folder: the run folder.
        summary: the fields of summary.json that are shown.
        settings: the settings in config.toml, with keys such as "run.rounds".
        rows: the metrics of each round, from metrics.jsonl.
        hidden: the metrics of each round from the folder simulation_only, which only a private run
            has.
        label: a short name of the run among the runs that are compared (`labels`).
    """

    folder: Path
    summary: dict[str, Any]
    settings: dict[str, Any]
    rows: Rows = ()
    hidden: Rows = ()
    label: str = ""

    @classmethod
    def read(cls, folder: Path) -> Run:
        """Reads a finished run's folder.

        Raises:
            RunFolderError, ConfigFileError: a file is missing or damaged.
        """
        summary, settings = read_summary(folder), read_settings(folder)
        rows, hidden = read_rows(folder / METRICS), read_rows(folder / HIDDEN)
        return cls(folder, summary, settings, rows, hidden)

    @property
    def method(self) -> str:
        """The name of the method in the run's summary."""
        return str(self.summary.get("method"))

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def private(self) -> bool:
        """True if the run had differential privacy."""
        return disclosed.GUARANTEE in self.summary


class Spread(NamedTuple):
    """A value's mean and sample standard deviation over runs with different seeds.

    Attributes:
        mean: the mean, or None if there are no values.
        std: the sample standard deviation, or None if there are fewer than two values.
    """

    mean: float | None
    std: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Computes the mean and the standard deviation of values."""
        if len(values) > 1:
            return cls(statistics.fmean(values), statistics.stdev(values))
        return cls(next(iter(values), None), None)

    def format(self, scale: float, digits: int) -> str:
        """Returns the mean and the standard deviation as text, such as "83.1 ± 0.4".

        Both numbers are multiplied by `scale`, which is 100 for fractions that are shown in
        percent.
        """
        if self.mean is None:
            return NONE
        text = f"{scale * self.mean:,.{digits}f}"
        if self.std is not None:
            text += f" ± {scale * self.std:,.{digits}f}"
        return text


def run_folders(folder: Path) -> list[Path]:
    """Returns the finished runs' folders in a folder, ordered by the runs' start.

    If the folder is itself that of a finished run, the list contains only this folder. Otherwise
    the list contains the finished runs directly below it. The order is that of the time stamps in
    the folder names. Runs with the same time stamp are ordered by the modification time of
    summary.json.
    """
    if (folder / SUMMARY).is_file():
        return [folder]
    summaries = [path for path in folder.glob("*/summary.json") if path.parent.suffix != INCOMPLETE]
    summaries.sort(key=lambda path: (path.parent.name[:15], path.stat().st_mtime_ns))
    return [path.parent for path in summaries]


def finished_run(folder: Path) -> Path | None:
    """Returns the folder of the last finished run in a folder, or None."""
    return next(reversed(run_folders(folder)), None)


def unfinished_runs(folder: Path) -> list[Path]:
    """Returns the folders of the unfinished runs in a folder, ordered by the runs' start."""
    return sorted(path.parent for path in folder.glob(f"*{INCOMPLETE}/{CONFIG}"))


def finished_runs(folders: Sequence[Path]) -> list[Path]:
    """Returns the folders of all finished runs in the given folders.

    Each given folder may be a run folder, a folder that contains run folders, or the folder of a
    sweep.

    Raises:
        RunFolderError: a folder does not exist, or no finished run was found.
    """
    runs: list[Path] = []
    for folder in folders:
        if not folder.is_dir():
            raise RunFolderError(f"the folder {folder} does not exist. Check the path")
        below = sorted(path for path in folder.iterdir() if path.is_dir())
        deeper = [run for inner in below for run in run_folders(inner)]
        runs += run_folders(folder) or deeper
    if not runs:
        raise RunFolderError(
            f"no finished run is in {', '.join(map(str, folders))}. Check the path"
        )
    return runs


def is_unfinished(path: Path) -> bool:
    """Returns True if the run in a folder was killed or is still running."""
    if not (path / CONFIG).is_file() or (path / SUMMARY).exists():
        return False
    return path.resolve().suffix == INCOMPLETE or not (path / "privacy_report.json").exists()


def read_summary(folder: Path) -> dict[str, Any]:
    """Reads a run's summary.json.

    Raises:
        RunFolderError: the file cannot be read, or its content is not a run's summary.
    """
    path = folder / SUMMARY
    try:
        summary = load_json(path)
    except (OSError, ValueError) as error:
        raise RunFolderError(f"cannot read {path}: {one_line(error)}") from None
    if not isinstance(summary, dict):
        raise RunFolderError(f"{path} is not a run's summary: the content is not a JSON object")
    for key, declaration in disclosed.SUMMARY.items():
        if key in summary and not declaration.fits(summary[key]):
            raise RunFolderError(f"{path} is not a run's summary: {key} has the wrong type")
    return {key: summary[key] for key in disclosed.SUMMARY if key in summary}


def read_settings(folder: Path) -> dict[str, Any]:
    """Reads the settings in a run's config.toml, with keys such as "run.rounds". Returns an empty
    dictionary if there is no config.toml.
    """
    path = folder / CONFIG
    return flattened(read_sections(path)) if path.is_file() else {}


def value_at(values: Mapping[str, Any], path: str) -> float | None:
    """Returns the number at a dotted path in nested dictionaries.

    The path "local.amp" refers to `values["local"]["amp"]`. Returns None if there is no number at
    the path.
    """
    value: Any = values
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value)


def read_rows(file: Path) -> list[dict[str, Any]]:
    """Reads the metrics of all rounds from a file such as metrics.jsonl.

    Returns an empty list if the file does not exist. An incomplete last line, from a killed run, is
    skipped.

    Raises:
        RunFolderError: the file cannot be read, or a line does not contain a round's metrics.
    """
    try:
        text = read_text(file) if file.exists() else ""
        rows = list(map(decode_json, text.split("\n")[:-1]))
    except (OSError, ValueError) as error:
        raise RunFolderError(f"cannot read {file}: {one_line(error)}") from None
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict) or type(row.get("round")) is not int:
            raise RunFolderError(f"{file} is damaged: line {number} contains no round number")
    return rows


def is_share(metric: str) -> bool:
    """Returns True if a metric is a fraction, to be shown in percent."""
    return metric.endswith(_SHARES)


def words_of(metric: str) -> str:
    """Returns a metric's name in words for a plot axis or heading. For example,
    "local.amp" becomes "local amp".
    """
    return metric.replace("_", " ").replace(".", " ")


def percent(value: float | None) -> str:
    """Formats a fraction as a percentage. Returns a dash if the fraction is None."""
    return NONE if value is None else f"{100 * value:.2f} %"


def auroc_text(measures: Mapping[str, Any]) -> str:
    """Formats a run's or domain's AUROC, or states that it is undefined.

    >>> auroc_text({"auroc": 0.75}), auroc_text({"auroc": None}), auroc_text({})
    ('75.00 %', 'undefined', '–')
    """
    if "auroc" in measures and measures["auroc"] is None:
        return UNDEFINED
    return percent(value_at(measures, "auroc"))


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Formats rows as lines of text with aligned columns. Each column is as wide as its longest
    cell, and no text is cut.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip() + "\n")
    return "".join(lines)
