"""Finished runs as JSON lines, a file for each table, and the folders of unfinished runs.

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
from fedsynth.results.run_folder import INCOMPLETE
from fedsynth.version import __version__

NEEDED = frozenset(
    {
        *("preset", "cell", "seed", "settings", "scale", "changes", "precision", "seconds"),
        *("curve", "upload_floats", "client_upload_bytes", "commit", "version"),
    }
)
"""The keys that every row has."""
PACKAGE = Path(__file__).resolve().parents[1]


def run_hash(settings: RunSettings) -> str:
    """Returns the hash that identifies a run."""
    return fingerprint(settings, without=("precision",))


class Rows:
    """The rows of a folder, of whole runs or of those with one scale.

    Args:
        output: the folder.
        scale: None: whole runs.
    """

    def __init__(self, output: Path, scale: float | None = None) -> None:
        self.folder = output if scale is None else output / f"scaled-{scale:g}"
        self.scale = scale

    def all(self) -> dict[str, dict[str, Any]]:
        """Returns all rows by their runs' hashes.

        Raises:
            OutputError: a file cannot be read, or has lines that are not rows.
        """
        rows_by_settings: dict[str, dict[str, Any]] = {}
        for path in sorted(self.folder.glob("*.jsonl")):
            try:
                rows = [decode_json(line) for line in read_text(path).splitlines()]
            except OSError as error:
                raise OutputError(f"cannot read {path}: {error.strerror}") from None
            except ValueError:
                rows = [None]
            if not all(isinstance(row, dict) and row.keys() >= NEEDED for row in rows):
                raise OutputError(f"{path} has a line that is not a row of a finished run")
            rows_by_settings.update(
                {row["settings"]: row for row in rows if row["scale"] == self.scale}
            )
        return rows_by_settings

    def append(self, preset: str, row: Mapping[str, Any]) -> None:
        """Appends a finished run's row to its table's file.

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
        """Returns the parent of the run's own folder. Until it is finished, a run with another
        precision is a different run."""
        return self.folder / "runs" / f"{run_hash(settings)}-{settings.precision}"

    @property
    def trained(self) -> Path | None:
        """The folder in which methods of a table share the clients' models of one-shot runs. None:
        no sharing, because the exact version of the code is not known."""
        made_by = commit()
        clean = made_by is not None and not made_by.endswith("+")
        return self.folder / "runs" / f"trained-{made_by}" if clean else None


@contextmanager
def claimed(folder: Path) -> Iterator[bool]:
    """Yields whether this process has exclusive use of the folder until the block ends.

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
    """Returns the folder of a finished run below this one, or None."""
    folders = [path.parent for path in folder.glob("*/summary.json")]
    complete = sorted(path for path in folders if path.suffix != INCOMPLETE)
    return complete[-1] if complete else None


def unfinished(folder: Path) -> Path | None:
    """Returns the folder of a run that can be resumed, or None."""
    folders = sorted(path.parent for path in folder.glob(f"*{INCOMPLETE}/config.toml"))
    return folders[-1] if folders else None


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    """Returns the metrics of a run folder's rounds; empty before the first."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        return []
    return [decode_json(line) for line in read_text(path).splitlines()]


def facts_of(rows: Sequence[Mapping[str, Any]], domains: bool) -> dict[str, Any]:
    """Returns the fields of a finished run's row that summarise its rounds."""
    uploads = [size for row in rows[-1:] for size in row["client_upload_bytes"]]
    return {
        "rounds": len(rows),
        "seconds": round(sum(row["seconds"] for row in rows), 1),
        "upload_floats": rows[-1]["upload_floats"] if rows else 0,
        "client_upload_bytes": round(sum(uploads) / len(uploads), 1) if uploads else 0,
        "curve": curve_of(rows, domains),
    }


def made_with() -> dict[str, Any]:
    """Returns the code version, date and machine to record in a row."""
    cuda = torch.cuda.is_available()
    device = torch.cuda.get_device_name() if cuda else f"CPU, {torch.get_num_threads()} threads"
    return {
        "version": __version__,
        "commit": commit(),
        "date": str(date.today()),
        "machine": device,
        "torch": torch.__version__,
    }


@cache
def commit() -> str | None:
    """Returns the commit of the package's files when this process first asked, with "+" if they
    have uncommitted changes, or None outside a git checkout."""
    root = PACKAGE.parent
    if not (root / ".git").exists():
        return None
    head = _git(root, "rev-parse", "--short", "HEAD")
    if head is None:
        return None
    changes = _git(root, "status", "--porcelain", "--", "fedsynth", "privacy", "cli")
    return head if changes == "" else f"{head}+"


def _git(root: Path, *arguments: str) -> str | None:
    try:
        process = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False
        )
    except OSError:
        return None
    return process.stdout.strip() if process.returncode == 0 else None
