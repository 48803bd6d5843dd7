"""Reads a private run's folder, which is untrusted input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from fedsynth.config.resolve import resolve
from fedsynth.config.settings import RunSettings
from fedsynth.core.context import RoundContext
from fedsynth.core.method import Method
from fedsynth.data.registry import DatasetSpec, published_spec, spec_from_json
from fedsynth.errors import HOSTILE, FedsynthError, PrivacyError, UnknownNameError, short_repr
from fedsynth.federation.context import public_context
from fedsynth.privacy.report.figures import Event, Start
from fedsynth.privacy.report.file import read_json
from fedsynth.privacy.report.verify import differences
from fedsynth.privacy.settings import PrivacySettings
from fedsynth.results import disclosed, run_folder
from fedsynth.results.disclosed import Declared
from fedsynth.results.file_names import CONFIG, INCOMPLETE, METRICS, SUMMARY
from fedsynth.results.finished import read_rows
from fedsynth.results.run_folder import PRIVATE_START, RESUMED
from fedsynth.validation import read_sections

CUSTOM_METHOD = "For a custom method, pass its file, or call verify_run(folder, method=TheClass)"


@dataclass(frozen=True)
class PrivateRun:
    """The type-checked content of a private run's folder.

    In the folder of a data owner's report, the files for the attributes after `start` do not exist,
    so these attributes are empty.

    Attributes:
        settings: the settings in config.toml.
        privacy: the privacy settings in config.toml.
        spec: the specification of the data set.
        start: the content of privacy_start.json.
        rows: the metrics of each round in metrics.jsonl. Their keys and types are those that the
            method declares.
        summary: the content of summary.json, or None if there is no such file.
        resumed: the numbers of the rounds after which the run was resumed.
        abandoned: whether the run was killed.
    """

    settings: RunSettings
    privacy: PrivacySettings
    spec: DatasetSpec
    start: Start
    rows: Sequence[dict[str, Any]] = ()
    summary: dict[str, Any] | None = None
    resumed: Sequence[int] = ()
    abandoned: bool = False

    @cached_property
    def context(self) -> RoundContext:
        """The context of the first round, computed from public values."""
        return public_context(self.settings, self.spec, torch.device("cpu"))

    @property
    def networked(self) -> bool:
        """True if the clients were on other machines, False for a simulation."""
        return not self.start.simulated

    @property
    def resumptions(self) -> list[Event]:
        """The resumptions of the run, as events of the privacy report."""
        return [Event(kind="resumed", rounds_done=number) for number in self.resumed]


def read_run(folder: Path, method: type[Method] | None = None) -> PrivateRun:
    """Reads the folder of a private run.

    Raises:
        PrivacyError: a file is missing or damaged, or two files contradict each other.
    """
    run = read_start(folder, method)
    clients, started = run.settings.partition.clients, len(run.start.ledgers)
    if clients != started:
        text = f"config.toml sets {clients} clients, but {PRIVATE_START} lists {started}"
        raise PrivacyError(text).with_code(CONFIG)
    rows = _metrics(folder / METRICS, disclosed.declared_row(type(run.settings.method)))
    resumed = run_folder.resumed_rounds(folder)
    limit = min(len(rows), run.settings.rounds - 1)
    if resumed and resumed[-1] > limit:
        text = (
            f"{RESUMED} lists a resumption after round {resumed[-1]}, but none is possible after "
            f"round {limit}"
        )
        raise PrivacyError(text).with_code(RESUMED)
    summary = None
    if (folder / SUMMARY).exists():
        summary = read_json(folder / SUMMARY, "run's summary")
    abandoned = summary is None and folder.resolve().suffix == INCOMPLETE
    return replace(run, rows=rows, summary=summary, resumed=resumed, abandoned=abandoned)


def read_start(folder: Path, method: type[Method] | None) -> PrivateRun:
    """Reads the settings and the initial state of a private run.

    Raises:
        PrivacyError: a file is missing or damaged, or two files contradict each other.
    """
    start = run_folder.private_start(folder)
    sections = read_sections(folder / CONFIG)
    spec, custom = _specification(start.data_set)
    try:
        settings = resolve(sections, own_method=method, own_data=spec.name if custom else None)
    except UnknownNameError as error:
        raise PrivacyError(f"config.toml: {error}. {CUSTOM_METHOD}").with_code(CONFIG) from None
    except FedsynthError as error:
        raise PrivacyError(f"config.toml: {error}").with_code(CONFIG) from None
    if settings.privacy is None:
        text = "according to config.toml, the run had no differential privacy"
        raise PrivacyError(text).with_code(CONFIG)
    named = sections.get("data", {}).get("dataset")
    if named != spec.name and not (custom and named is None):
        text = f"config.toml names the data set {short_repr(named)}, but {PRIVATE_START} names "
        raise PrivacyError(f"{text}{spec.name!r}").with_code(CONFIG)
    return PrivateRun(settings, settings.privacy, spec, start)


def _specification(stated: Mapping[str, Any]) -> tuple[DatasetSpec, bool]:
    """Returns a run's data set specification, and whether the data set is custom."""
    try:
        spec = spec_from_json(stated)
    except (FedsynthError, *HOSTILE) as error:
        text = f"the data set in {PRIVATE_START} is invalid: {error}"
        raise PrivacyError(text).with_code(PRIVATE_START) from None
    try:
        published = published_spec(spec)
    except UnknownNameError:
        return spec, True
    location = f"{PRIVATE_START}: the published data set's"
    for problem in differences(location, asdict(published), asdict(spec)):
        raise PrivacyError(problem.text).with_code(PRIVATE_START)
    return spec, False


def _metrics(file: Path, declared: Declared) -> list[dict[str, Any]]:
    """Reads all rounds' metrics, and checks that the run declares each metric."""
    rows = read_rows(file)
    for number, row in enumerate(rows, start=1):
        if row["round"] != number:
            text = f"{file.name}: line {number} must contain round {number}, got {row['round']}"
            raise PrivacyError(text).with_code(METRICS)
        for problem in disclosed.undeclared(row, declared):
            raise PrivacyError(f"{file.name}: round {number} {problem}").with_code(METRICS)
    return rows


def ledger_files(folder: Path, run: PrivateRun, ledger: Path | None) -> tuple[Path | None, bool]:
    """Finds the ledger files of a run.

    Returns their folder, and whether the ledgers belong only to this run. The folder is None if the
    ledgers cannot be read here. Ledgers in the run folder belong only to this run. A ledger kept
    for several runs may have grown since the run's end.
    """
    if run.networked:  # its clients keep their ledgers
        return ledger, False
    local = folder / "ledger"
    configured = run.privacy.ledger_folder
    files = ledger or configured or local
    if ledger is None and local.is_dir():
        files = local
    if files.is_dir():
        return files, configured is None or files.resolve() == local.resolve()
    if ledger is None and configured is not None:
        return None, False
    raise PrivacyError(f"the ledger folder {files} does not exist").with_code("ledger.folder")
