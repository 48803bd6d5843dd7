"""Reads the folders of finished runs for comparison: summaries, settings, rounds.

The content of a run folder is untrusted input, so its types are checked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedsynth.errors import FedsynthError
from fedsynth.privacy.files import decode_json, read_text
from fedsynth.results.run_folder import INCOMPLETE
from fedsynth.toml_file import read_sections

Rows = Sequence[Mapping[str, Any]]
Count = Annotated[int, Field(ge=0, lt=2**63)]


class RunFolderError(FedsynthError):
    """The folder is not that of a finished run, or its files are damaged."""


class _Part(BaseModel):
    """A part of a summary. Unknown keys are ignored; a key may be missing."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class Local(_Part):
    """Metrics on the clients' own test splits."""

    amp: float
    wlp: float


class Promise(_Part):
    epsilon: float | None = None


class Summary(_Part):
    """The fields of a run's summary.json that are shown, with types and ranges."""

    method: str | None = None
    dataset: str | None = None
    rounds: Count | None = None
    test_accuracy: float | None = None
    local: Local | None = None
    generator: dict[str, int | float] | None = None
    differential_privacy: Promise | None = None
    upload_bytes: Count | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class Run:
    """A finished run.

    Attributes:
        folder: its folder.
        summary: the fields of summary.json that are shown.
        settings: "section.key" → value, from config.toml.
        rows: metrics of each round, from metrics.jsonl.
        hidden: metrics of each round from simulation_only, for a private run.
    """

    folder: Path
    summary: dict[str, Any]
    settings: dict[str, Any]
    rows: Rows = field(default=())
    hidden: Rows = field(default=())

    @classmethod
    def read(cls, folder: Path) -> Run:
        """Reads a run's folder.

        Raises:
            RunFolderError, ConfigFileError: a file is missing or damaged.
        """
        return cls(
            folder,
            read_summary(folder),
            read_settings(folder),
            _rows(folder / "metrics.jsonl"),
            _rows(folder / "simulation_only" / "rounds.jsonl"),
        )

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def private(self) -> bool:
        """True if the run had differential privacy."""
        return "differential_privacy" in self.summary


def run_folders(folder: Path) -> list[Path]:
    """Returns the folder itself if it is a finished run's, otherwise the finished runs directly
    below it, ordered by time: the time stamp in the name, and within a second the modification time
    of summary.json."""
    if (folder / "summary.json").is_file():
        return [folder]
    summaries = [path for path in folder.glob("*/summary.json") if path.parent.suffix != INCOMPLETE]
    return [
        path.parent
        for path in sorted(
            summaries, key=lambda path: (path.parent.name[:15], path.stat().st_mtime_ns)
        )
    ]


def finished_runs(folders: Sequence[Path]) -> list[Path]:
    """Returns the finished runs in these folders. Each may be a run, a folder of runs, or a sweep,
    whose runs are one level deeper.

    Raises:
        RunFolderError: there is none.
    """
    runs: list[Path] = []
    for folder in folders:
        if not folder.is_dir():
            raise RunFolderError(f"there is no folder {folder}")
        below = sorted(path for path in folder.iterdir() if path.is_dir())
        deeper = [run for inner in below for run in run_folders(inner)]
        runs += run_folders(folder) or deeper
    if not runs:
        raise RunFolderError(f"no finished run in {', '.join(str(folder) for folder in folders)}")
    return runs


def read_summary(folder: Path) -> dict[str, Any]:
    """Returns the content of a run's summary.json.

    Raises:
        RunFolderError: the file cannot be read, or is no summary.
    """
    path = folder / "summary.json"
    try:
        read = Summary.model_validate_json(read_text(path))
    except OSError as error:
        raise RunFolderError(f"cannot read {path}: {error.strerror}") from None
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        location = ".".join(map(str, first["loc"]))[:80]
        raise RunFolderError(
            f"{path} is no run's summary: {location} {first['msg'][:200]}"
        ) from None
    except ValueError as error:
        raise RunFolderError(f"cannot read {path}: {error}") from None
    return read.model_dump(exclude_unset=True)


def read_settings(folder: Path) -> dict[str, Any]:
    """Returns "section.key" → value of a run's config.toml; empty without one."""
    path = folder / "config.toml"
    sections = read_sections(path) if path.is_file() else {}
    return {
        f"{section}.{key}": value
        for section, values in sections.items()
        for key, value in values.items()
    }


def value_at(values: Mapping[str, Any], path: str) -> float | None:
    """Returns the number at a dotted path such as "local.amp", or None if there is none."""
    value: Any = values
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value)


def _rows(file: Path) -> Rows:
    try:
        text = read_text(file) if file.exists() else ""
        rows = [decode_json(line) for line in text.splitlines()]
    except OSError as error:
        raise RunFolderError(f"cannot read {file}: {error.strerror}") from None
    except ValueError as error:
        raise RunFolderError(f"{file} is damaged: {str(error)[:200]}") from None
    if not all(isinstance(row, dict) and type(row.get("round")) is int for row in rows):
        raise RunFolderError(f"{file} is damaged: a line is no round's")
    return rows
