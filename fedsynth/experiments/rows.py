"""Stores finished runs' results as rows of JSON Lines files. A row identifies its run by a hash of
the settings that determine the result. A published table's row contains the run's curve, which maps
each metric to the list of its values after each round. A metric's name is its dotted path in
metrics.jsonl, such as "models.oca.local.amp". The list "round" contains the round numbers. None
marks a round in which the metric was not computed. If the server measured a student after each
epoch of the last round, the row also contains the epochs' accuracies.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import statistics
import subprocess
import time
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch

from fedsynth.config.settings import RunSettings
from fedsynth.errors import OutputError, writing
from fedsynth.evaluation import (
    CLIENT_MODELS,
    DISSIMILARITY,
    EPOCHS,
    FEATURE_SPACE,
    NAMES,
    TEST_KEYS,
)
from fedsynth.files import decode_json, locked_file, read_text
from fedsynth.privacy.settings import PrivacySettings
from fedsynth.results.finished import read_settings, unfinished_runs
from fedsynth.validation import flattened, to_toml
from fedsynth.version import __version__

Row = Mapping[str, Any]
PACKAGE = Path(__file__).resolve().parents[1]
# Settings that change a run's duration or the place of its data, but not its result.
SPEED = ("compile", "memory_gb", "threads", "device", "data_root", "encoder_cache")


def settings_hash(settings: RunSettings, without: Collection[str] = ()) -> str:
    """Returns a hash of the settings that determine a run's result, as eight hexadecimal digits.

    Default values are left out, so that a new setting does not change earlier results' hashes. A
    changed default therefore keeps the hash, and `changed_setting` finds it.

    Args:
        settings: the run's settings.
        without: the names of further settings to leave out.
    """
    privacy = settings.privacy and PrivacySettings(epsilon=1.0)
    defaults = RunSettings(type(settings.method)(), privacy=privacy).to_mapping()
    sections: dict[str, dict[str, Any]] = {}
    for section, values in settings.to_mapping().items():
        sections[section] = {}
        for key, value in values.items():
            is_default = key != "method" and value == defaults.get(section, {}).get(key)
            if not is_default and key not in (*SPEED, *without):
                sections[section][key] = value
    text = json.dumps(sections, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()


def changed_setting(run: Path, settings: RunSettings) -> str:
    """Describes a setting that has changed since a run, or returns an empty string.

    Settings newer than the run are not compared, nor those that change only the speed.

    Args:
        run: a run folder, whose config.toml contains all the run's settings.
        settings: the settings as resolved today.
    """
    today = flattened(tomllib.loads(to_toml(settings.to_mapping())))
    for name, value in read_settings(run).items():
        # a run states the precision that "auto" was on its device
        is_auto = name == "run.precision" and today[name] == "auto"
        # the file of own code is known only where the run names it
        is_source = name == "run.method_source" and name not in today
        # a run states the hub's commit, and the hash of an encoder's weights
        is_commit = name == "data.revision" and name not in today
        has_hash = name == "data.encoder" and value.rpartition("@")[0] == today.get(name)
        is_speed = name.rpartition(".")[2] in SPEED
        uncompared = is_auto or is_source or is_commit or has_hash or is_speed
        if not uncompared and value != today.get(name):
            return f"{name} was {value!r} and is {today.get(name, 'unset')!r} now"
    return ""


def current(runs: Sequence[Path], settings: RunSettings) -> Path | None:
    """Returns the last of the run folders that have the given settings, or None."""
    return next((run for run in reversed(runs) if not changed_setting(run, settings)), None)


def interrupted(folder: Path, settings: RunSettings) -> Path | None:
    """Returns a folder's last unfinished run with the given settings, or None.

    A run of an earlier version that lacked one of the settings cannot be resumed.
    """
    names = flattened(settings.to_mapping()).keys()
    runs = [run for run in unfinished_runs(folder) if names <= read_settings(run).keys()]
    return current(runs, settings)


@dataclass(eq=False)
class Rows:
    """A file of results, with one row for each computation.

    A missing row is computed and appended, unless the deadline has passed.

    Args:
        path: the file.
        deadline: the time after which no row is begun, as by `time.monotonic`.
        only: a text that a row's key must contain. Other rows are not made.
    """

    path: Path
    deadline: float = math.inf
    only: str = ""

    def all(self) -> list[dict[str, Any]]:
        """Returns the rows in file order, or none if the file does not exist.

        Raises:
            OutputError: the file cannot be read, or a line is not a row.
        """
        try:
            return _parsed(read_text(self.path)) if self.path.exists() else []
        except OSError as error:
            raise OutputError(
                f"cannot read {self.path}: {error.strerror}. Check its permissions"
            ) from None
        except ValueError:
            raise OutputError(
                f"{self.path} contains a line that is not a JSON object. Remove the line"
            ) from None

    def append(self, row: Row) -> None:
        """Appends a row. Other processes may append to the same file.

        Raises:
            OutputError: the file cannot be written.
        """
        with writing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with locked_file(self.path) as file:
                file.truncate(file.read().rfind(b"\n") + 1)  # a line that was cut
                line = f"{json.dumps(row, ensure_ascii=False, allow_nan=False)}\n".encode()
                if file.write(line) < len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def get(
        self, key: str, work: Callable[[], Row | None], repeats: int = 1
    ) -> dict[str, Any] | None:
        """Returns the last row with a key. If there is none, computes and appends it.

        Args:
            key: the key of the rows.
            work: returns the entries of a new row, or None if a run was interrupted.
            repeats: the number of rows with this key.

        Returns:
            The row, or None if rows are still missing.
        """
        rows = [row for row in self.all() if row["key"] == key]
        while len(rows) < repeats and self.only in key and time.monotonic() < self.deadline:
            entries = work()
            if entries is None:
                return None
            rows.append({"key": key, **entries})
            self.append(rows[-1])
        return rows[-1] if len(rows) >= repeats else None


@lru_cache(maxsize=8)
def _parsed(text: str) -> list[dict[str, Any]]:
    # an incomplete last line was cut: its run is still in its folder
    rows = list(map(decode_json, text.split("\n")[:-1]))
    if not all(isinstance(row, dict) for row in rows):
        raise ValueError
    return rows


def environment() -> dict[str, Any]:
    """Returns a row's entries for the code's version, the date and the machine."""
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
    """Returns fedsynth's git commit, or None outside a git checkout.

    A "+" at the end means uncommitted changes. The result of the first call is kept.
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


FIGURES = (*TEST_KEYS, "amp", "fm", "wlp", *FEATURE_SPACE, DISSIMILARITY)


def round_summary(rows: Sequence[Row], domains: bool) -> dict[str, Any]:
    """Summarises a finished run's rounds as entries of a result row.

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
        **({EPOCHS: last[EPOCHS]} if EPOCHS in last else {}),
    }


def curve_of(rows: Sequence[Row], domains: bool) -> dict[str, list[float | None]]:
    """Converts each round's metrics to a curve, with one list per metric.

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
    """Returns the metrics of one round by dotted path, rounded to six decimals."""
    figures = {f"{prefix}{name}": row.get(name) for name in FIGURES}
    for client, accuracy in enumerate(row.get(CLIENT_MODELS, ())):
        figures[f"{prefix}{CLIENT_MODELS}.{client}"] = accuracy
    for names in NAMES.values():
        for name, accuracy in row.get(names.domains, {}).items():
            figures[f"{prefix}{names.domains}.{name}"] = accuracy
        if domains:
            for client, accuracy in enumerate(row.get(names.clients, ())):
                figures[f"{prefix}client.{client}"] = accuracy
    rounded = {name: round(float(n), 6) for name, n in figures.items() if n is not None}
    if "local" in row:
        rounded |= _figures(f"{prefix}local.", row["local"], domains)
    for name, model in row.get("models", {}).items():
        rounded |= _figures(f"{prefix}models.{name}.", model, domains)
    return rounded
