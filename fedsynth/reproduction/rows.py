"""The results of finished runs, stored as JSON lines with one file for each table, and the folders
of unfinished runs.

    OUTPUT/feddm-table2.jsonl          a line for each finished run of the table
    OUTPUT/runs/HASH/…                 run folders, the unfinished ones with their checkpoints
    OUTPUT/scaled-0.05/…               the same for scaled runs, which are kept separate

A run is identified by a hash of the settings that decide its result, so that tables which need the
same run share it (FedKF's Tables V and VIII; both final models of one training). Precision is not
in the hash, because it changes results only by rounding; it is recorded in the row and shown with
its numbers.
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
from fedsynth.errors import OutputError
from fedsynth.privacy.files import decode_json, open_regular, read_text
from fedsynth.reproduction.measures import curve_of
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
                    f"{path} contains a line that is not the result of a finished run"
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
