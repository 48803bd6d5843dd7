"""Reads the folder of a private run: its settings, its initial state, its rows, its summary and the
location of its ledgers. The folder is untrusted input.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from fedsynth.config.resolve import resolve
from fedsynth.config.settings import RunSettings
from fedsynth.core.context import RoundContext
from fedsynth.core.method import Method
from fedsynth.data.registry import DatasetSpec, dataset_spec, spec_from_json
from fedsynth.errors import FedsynthError, UnknownNameError
from fedsynth.federation.context import public_context
from fedsynth.privacy.errors import PrivacyError, shown
from fedsynth.privacy.files import read_text
from fedsynth.privacy.report.figures import SCHEMA_VERSION, Began, Event, Start, schema_problems
from fedsynth.privacy.report.file import HOSTILE, parse_json, read_json
from fedsynth.results.run_folder import CONFIG, PRIVATE_START, RESUMED, resumed_rounds
from fedsynth.toml_file import read_sections

OWN_METHOD = (
    "a method of your own has to be given again: its file, or in Python "
    "fedsynth.results.verification.verify_run(folder, method=TheClass)"
)


class MismatchError(PrivacyError):
    """A file of the run folder does not fit the others."""


@dataclass(frozen=True)
class RunStart:
    """The initial state of a run.

    Attributes:
        settings: read from config.toml.
        spec: the data set's.
        stated: the content of privacy_start.json; its schema is valid.
    """

    settings: RunSettings
    spec: DatasetSpec
    stated: dict[str, Any]

    @cached_property
    def context(self) -> RoundContext:
        """The public context of the first round."""
        return public_context(self.settings, self.spec, torch.device("cpu"))

    @property
    def began(self) -> Began:
        """The run's identity and the date of its start."""
        return Began(**self.stated["run"])

    @property
    def served(self) -> bool:
        """Returns whether the run was over nodes."""
        return not self.stated["simulated"]


@dataclass(frozen=True)
class RunFiles(RunStart):
    """The content of a run folder.

    Attributes:
        rows: read from metrics.jsonl.
        summary: None if there is none.
        resumed: the rounds after which the run was resumed.
    """

    rows: list[dict[str, Any]]
    summary: dict[str, Any] | None
    resumed: tuple[int, ...] = ()

    @property
    def resumptions(self) -> list[Event]:
        """The events of the report for `resumed`."""
        return [Event(kind="resumed", after=after) for after in self.resumed]


def read_run(folder: Path, method: type[Method] | None = None) -> RunFiles:
    """Reads a private run's folder.

    Raises:
        PrivacyError: a file is missing, damaged, or does not fit another.
    """
    start = read_start(folder, method)
    clients = start.settings.partition.clients
    if clients != len(start.stated["ledgers"]):
        raise MismatchError(
            f"config.toml has {clients} clients, and {PRIVATE_START} {len(start.stated['ledgers'])}"
        )
    summary = folder / "summary.json"
    rows = _metrics(folder / "metrics.jsonl")
    try:
        resumed = resumed_rounds(folder / RESUMED)
    except (OSError, ValueError) as error:
        raise MismatchError(f"{RESUMED} is damaged: {error}") from None
    limit = min(len(rows), start.settings.rounds - 1)
    if resumed and resumed[-1] > limit:
        raise MismatchError(f"{RESUMED} names round {resumed[-1]}, and at most {limit} can be")
    return RunFiles(
        start.settings,
        start.spec,
        start.stated,
        rows,
        read_json(summary, "run's summary") if summary.exists() else None,
        tuple(resumed),
    )


def read_start(folder: Path, method: type[Method] | None) -> RunStart:
    """Reads the initial state of a private run.

    Raises:
        PrivacyError: a file is missing, damaged, or does not fit another.
    """
    start = read_json(folder / PRIVATE_START, "start of a private run")
    problems = schema_problems(start, Start)
    if problems:
        raise MismatchError(f"{PRIVATE_START}: {'; '.join(problems)}")
    if start["schema_version"] != SCHEMA_VERSION:
        raise MismatchError(f"{PRIVATE_START} is of schema {start['schema_version']}")
    sections = read_sections(folder / CONFIG)
    spec, custom = _specification(start["data_set"])
    try:
        settings = resolve(sections, own_method=method, own_data=spec.name if custom else None)
    except UnknownNameError as error:
        raise MismatchError(f"config.toml: {error}; {OWN_METHOD}") from None
    except FedsynthError as error:
        raise MismatchError(f"config.toml: {error}") from None
    if settings.privacy is None:
        raise MismatchError(
            "config.toml says that the run had no differential privacy: it has no privacy report"
        )
    named = sections.get("data", {}).get("dataset")
    if named != spec.name and not (custom and named is None):
        raise MismatchError(
            f"config.toml names the data set {shown(named)}, and {PRIVATE_START} {spec.name!r}"
        )
    return RunStart(settings, spec, start)


def _specification(stated: Mapping[str, Any]) -> tuple[DatasetSpec, bool]:
    """Returns the data set's specification, and whether it is the operator's, not one that fedsynth
    publishes.
    """
    try:
        spec = spec_from_json(stated)
    except (FedsynthError, *HOSTILE) as error:
        raise MismatchError(f"{PRIVATE_START} has no data set's specification: {error}") from None
    try:
        published = dataset_spec(spec.name)
    except UnknownNameError:
        return spec, True
    for field in fields(spec):
        if getattr(spec, field.name) != getattr(published, field.name):
            raise MismatchError(
                f"{PRIVATE_START} gives {spec.name} another {field.name} than the published one"
            )
    return spec, False


def _metrics(file: Path) -> list[dict[str, Any]]:
    """Returns the rows; skips a last line that was cut off when the run was killed."""
    try:
        text = read_text(file) if file.exists() else ""
    except (OSError, ValueError) as error:
        raise MismatchError(f"cannot read {file}: {error}") from None
    lines = text.split("\n")[:-1]
    rows = [parse_json(line, f"{file.name} is damaged") for line in lines]
    for number, row in enumerate(rows, start=1):
        if row.get("round") != number:
            raise MismatchError(f"{file.name}: line {number} is not of round {number}")
    return rows


def ledger_files(folder: Path, run: RunFiles, ledger: Path | None) -> tuple[Path | None, bool]:
    """Returns the folder of the ledger files (None: not accessible), and whether they hold only
    this run's rows: files in the run folder belong only to this run, a kept ledger may have grown
    since.
    """
    if run.served:  # its clients keep their ledgers
        return ledger, False
    privacy = run.settings.privacy
    local = folder / "ledger"
    kept_in = privacy.ledger_folder if privacy is not None else None
    files = ledger or (local if local.is_dir() or kept_in is None else kept_in)
    if not files.is_dir():
        if ledger is not None or kept_in is None:
            raise MismatchError(f"there is no ledger folder {files}")
        return None, False
    return files, kept_in is None or files.resolve() == local.resolve()
