"""What the folder of a private run says of its run, as far as the run's report follows from it:
settings, what it began with, rows, summary, and where its ledgers are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from fedsynth.config_file import read_sections
from fedsynth.core.method import Method
from fedsynth.data.registry import DatasetSpec, dataset_spec
from fedsynth.data.stated_spec import spec_from_json
from fedsynth.errors import FedsynthError, UnknownNameError
from fedsynth.federation.outputs import privacy_words
from fedsynth.federation.outputs.run_folder import PRIVATE_START, RESUMED, SERVED, resumed_rounds
from fedsynth.federation.terms.resolve import resolve
from fedsynth.federation.terms.settings import RunSettings
from fedsynth.privacy.errors import PrivacyError, shown
from fedsynth.privacy.files import read_text
from fedsynth.privacy.report import SCHEMA_VERSION
from fedsynth.privacy.report_file import HOSTILE, parse_json, read_json
from fedsynth.privacy.report_schema import Began, Start, schema_problems

OWN_METHOD = (
    "a method of your own has to be given again: its file, or in Python "
    "fedsynth.federation.outputs.verification.verify_run(folder, method=TheClass)"
)


class MismatchError(PrivacyError):
    """A file of the run folder does not fit the others."""


@dataclass(frozen=True)
class RunFiles:
    """What a run folder says of its run, as far as the run's report follows from it.

    Attributes:
        settings: of config.toml.
        spec: the data set's.
        start: privacy_start.json, of a sound shape.
        rows: of metrics.jsonl.
        summary: None, where there is none.
        resumed: after which rounds the run was resumed.
        served: it was over nodes.
    """

    settings: RunSettings
    spec: DatasetSpec
    start: dict[str, Any]
    rows: list[dict[str, Any]]
    summary: dict[str, Any] | None
    resumed: tuple[int, ...] = ()
    served: bool = False

    @property
    def began(self) -> Began:
        """Which run it is, and on which day it began."""
        return Began(**self.start["run"])

    @property
    def resumptions(self) -> list[str]:
        """What the report says of them."""
        rounds = self.settings.rounds
        simulated = not self.served
        return [privacy_words.resumed(one, rounds, simulated=simulated) for one in self.resumed]


def read_run(folder: Path, method: type[Method] | None = None) -> RunFiles:
    """Reads a private run's folder.

    Raises:
        MismatchError, PrivacyError: a file is missing, damaged, or does not fit another.
    """
    start, settings, spec = read_start(folder, method)
    if settings.partition.clients != len(start["ledgers"]):
        raise MismatchError(
            f"config.toml has {settings.partition.clients} clients, and {PRIVATE_START} "
            f"{len(start['ledgers'])}"
        )
    summary = folder / "summary.json"
    run = RunFiles(
        settings,
        spec,
        start,
        _metrics(folder / "metrics.jsonl"),
        read_json(summary, "run's summary") if summary.exists() else None,
        _resumed(folder / RESUMED, settings.rounds),
        (folder / SERVED).is_file(),
    )
    _check_resumed(run)
    return run


def read_start(
    folder: Path, method: type[Method] | None
) -> tuple[dict[str, Any], RunSettings, DatasetSpec]:
    """What a private run began with, its settings and its data set."""
    start = read_json(folder / PRIVATE_START, "start of a private run")
    problems = schema_problems(start, Start)
    if problems:
        raise MismatchError(f"{PRIVATE_START}: {'; '.join(problems)}")
    if start["schema_version"] != SCHEMA_VERSION:
        raise MismatchError(f"{PRIVATE_START} is of schema {start['schema_version']}")
    sections = read_sections(folder / "config.toml")
    spec, own = _specification(start["data_set"])
    try:
        settings = resolve(sections, own_method=method, own_data=spec.name if own else None)
    except UnknownNameError as error:
        raise MismatchError(f"config.toml: {error}; {OWN_METHOD}") from None
    except FedsynthError as error:
        raise MismatchError(f"config.toml: {error}") from None
    if settings.privacy is None:
        raise MismatchError(
            "config.toml says that the run had no differential privacy: it has no privacy report"
        )
    named = sections.get("data", {}).get("dataset")
    if named != spec.name and not (own and named is None):
        raise MismatchError(
            f"config.toml names the data set {shown(named)}, and {PRIVATE_START} {spec.name!r}"
        )
    return start, settings, spec


def _check_resumed(run: RunFiles) -> None:
    if run.resumed and run.resumed[-1] > len(run.rows):
        raise MismatchError(
            f"{RESUMED} names round {run.resumed[-1]}, and metrics.jsonl has {len(run.rows)}"
        )


def _specification(stated: Mapping[str, Any]) -> tuple[DatasetSpec, bool]:
    """The data set's specification, and whether it is the user's own and not one that fedsynth
    publishes."""
    try:
        spec = spec_from_json(stated)
    except (FedsynthError, *HOSTILE) as error:
        raise MismatchError(f"{PRIVATE_START} has no data set's specification: {error}") from None
    try:
        published = dataset_spec(spec.name)
    except UnknownNameError:
        return spec, True
    if published != spec:
        differ = [
            f.name for f in fields(spec) if getattr(spec, f.name) != getattr(published, f.name)
        ]
        raise MismatchError(
            f"{PRIVATE_START} gives {spec.name} another {differ[0]} than the published one"
        )
    return spec, False


def _metrics(file: Path) -> list[dict[str, Any]]:
    """The rows; a last line that was cut off when the run was killed is none."""
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


def _resumed(file: Path, rounds: int) -> tuple[int, ...]:
    try:
        found = resumed_rounds(file)
    except (OSError, ValueError) as error:
        raise MismatchError(f"{file.name} is damaged: {error}") from None
    if found and found[-1] >= rounds:
        raise MismatchError(f"{file.name} names round {found[-1]}, and the run has {rounds}")
    return tuple(found)


def ledger_files(folder: Path, run: RunFiles, ledger: Path | None) -> tuple[Path | None, bool]:
    """The folder of the ledger files (None: out of reach), and whether they hold this run's rows
    alone.

    Files beside the report are the run's own; a kept ledger may have grown since.
    """
    if run.served:  # its clients' ledgers are theirs
        return ledger, False
    privacy = run.settings.privacy
    beside = folder / "ledger"
    kept_in = privacy.ledger_folder if privacy is not None else None
    files = ledger or (beside if beside.is_dir() or kept_in is None else kept_in)
    if not files.is_dir():
        if ledger is not None or kept_in is None:
            raise MismatchError(f"there is no ledger folder {files}")
        return None, False
    return files, kept_in is None or files.resolve() == beside.resolve()
