"""Reads a sweep file and summarises the results of its runs in a table.

A sweep file describes a grid of runs. The table contains the mean ± standard deviation over seeds,
as plain text, CSV or Markdown.

Each run's folder is below OUTPUT/KEY, where KEY depends on the run's settings. A run with changed
settings is a new run.

A TOML file describes the sweep: common settings, and a grid of values (`docs/sweeps.md`). A setting
without a section belongs to the first section with its name.
"""

from __future__ import annotations

import csv
import io
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from fedsynth.config.loading import code_options, with_own_code
from fedsynth.config.resolve import resolve, section_of
from fedsynth.config.settings import SECTIONS, RunSettings
from fedsynth.errors import FedsynthError, short_repr
from fedsynth.experiments.rows import current, settings_hash
from fedsynth.federation.run_data import declared, with_declared
from fedsynth.formatting import format_epsilon
from fedsynth.methods import DEFAULT_METHOD, method_class
from fedsynth.privacy.selection import LAWS, POISSON_LAW
from fedsynth.results import finished
from fedsynth.results.file_names import CONFIG
from fedsynth.results.finished import Spread, value_at, words_of
from fedsynth.validation import check_choice, check_number, converted, read_sections

MAX_RUNS = 10_000
MAX_JOBS = 1000
SEED = "seed"
Values = Mapping[str, Any]
Sections = Mapping[str, Mapping[str, Any]]


class SweepError(FedsynthError, code="sweep.invalid"):
    """Raised for an invalid sweep file."""


@dataclass(frozen=True, eq=False)
class Cell:
    """One run of a sweep. Two `Cell` objects are never equal, even with the same content.

    Attributes:
        values: the run's grid values, by axis.
        settings: the settings of the run.
        key: the name of the run's folder.
        code: the options of `fedsynth train` that load the run's custom code.
    """

    values: Values
    settings: RunSettings
    key: str
    code: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """The run's grid values as text, or the run's key if the grid is empty."""
        return _joined(self.values, " ") or self.key


@dataclass(frozen=True)
class SelectionSettings:
    """A private selection's settings, from a sweep file's section `[selection]`.

    Args:
        law: the law of the number of trials, "poisson" or "negative-binomial".
        trials: the expected number of trials, above 1.
        eta: η of the law "negative-binomial". A smaller η costs less, and makes few trials
            likelier.
        score_share: the share of a trial's μ² that its score gets.

    Raises:
        SettingError: `score_share` is not between 0 and 1.
    """

    law: str = POISSON_LAW
    trials: float = 10.0
    eta: float = 0.0
    score_share: float = 0.1

    def __post_init__(self) -> None:
        check_choice("selection", "law", self.law, LAWS)
        check_number("selection", "score_share", self.score_share, 0.001, 0.999)


@dataclass(frozen=True)
class Sweep:
    """A sweep: its settings and all its runs.

    Attributes:
        output: the folder for the runs.
        jobs: the maximum number of active runs.
        metrics: dotted paths in summary.json, which are the columns of the table.
        cells: the runs.
        selection: the settings of a private selection. None executes all runs.
    """

    output: Path
    jobs: int
    metrics: tuple[str, ...]
    cells: tuple[Cell, ...]
    selection: SelectionSettings | None = None

    @property
    def axes(self) -> tuple[str, ...]:
        """The names of the grid's axes except the seed, in file order."""
        names = dict.fromkeys(name for cell in self.cells for name in cell.values)
        names.pop(SEED, None)
        return tuple(names)

    def folder(self, cell: Cell) -> Path:
        """Returns the parent folder of a run's folder."""
        return self.output / cell.key

    def finished(self, cell: Cell) -> Path | None:
        """Returns the folder of the finished run with the current settings, or None."""
        return current(finished.run_folders(self.folder(cell)), cell.settings)


def read_sweep(file: Path) -> Sweep:
    """Reads a sweep file, and checks every run's settings.

    Custom code named as FILE.py:NAME is loaded. A file named config.toml is refused, because it may
    come from another user's run.

    Raises:
        SweepError: the file is a config.toml, or the grid or a run's settings are invalid. The
            message then names the run's values.
        SettingError, UnknownNameError: one of the sweep's own settings is invalid.
    """
    if file.name == CONFIG:
        raise SweepError(
            f"{file} has the name of a run's stored settings, which another user may have written. "
            "Copy the settings that you trust to a file with another name"
        ).with_code("sweep.untrusted")
    sections: dict[str, dict[str, Any]] = read_sections(file)
    sweep = sections.pop("sweep", {})
    grid = sections.pop("grid", {})
    selection: Any = sections.pop("selection", None)
    try:
        metrics = _choices("sweep.metrics", sweep.pop("metrics", ["test_accuracy"]))
        cells = _cells(sections, grid)
    except SweepError as error:
        raise SweepError(f"{file}: {error}") from None
    settings = converted("sweep", sweep, {"output": Path, "jobs": int}, "sweep", also=("metrics",))
    jobs = settings.get("jobs", 1)
    check_number("sweep", "jobs", jobs, 1, MAX_JOBS, integer=True)
    output = settings.get("output", Path("sweeps", file.stem))
    if selection is not None:
        types = {"law": str, "trials": float, "eta": float, "score_share": float}
        selection = SelectionSettings(**converted("selection", selection, types, "selection"))
    return Sweep(output, jobs, tuple(map(str, metrics)), tuple(cells), selection)


def _cells(shared: Sections, grid: Values) -> list[Cell]:
    axes = _common_axes(grid)
    method_axes = {name: values for name, values in grid.items() if isinstance(values, Mapping)}
    default_method = shared.get("run", {}).get("method", DEFAULT_METHOD)
    names = list(map(str, axes.get("method", [default_method])))
    for name in method_axes:
        if name not in names:
            raise SweepError(
                f"[grid.{name}] has no effect, because the runs only use {', '.join(names)}. "
                f"Remove [grid.{name}], or add {name!r} to the grid's methods"
            )
    # counted before settings are resolved, which takes half a minute for ten thousand runs
    points = list(itertools.islice(_points(axes, method_axes, default_method), MAX_RUNS + 1))
    if len(points) > MAX_RUNS:
        raise SweepError(f"the grid has more than {MAX_RUNS:,} runs. Remove values or axes")
    cells = list(itertools.starmap(partial(_cell, shared), points))
    for cell in cells:
        name = cell.settings.method.name
        if method_class(name) is not type(cell.settings.method):
            raise SweepError(f"two files define a method with the name {name!r}. Rename one")
    if len({cell.key for cell in cells}) < len(cells):
        raise SweepError("two runs of the grid have the same settings. Remove repeated values")
    return cells


def _points(
    axes: Mapping[str, list[Any]], method_axes: Values, default_method: str
) -> Iterator[tuple[Values, Values]]:
    """Yields all combinations of grid values, one for each run.

    An item contains the values for axes of all methods, and those for axes of the run's own method.
    """
    for values in _product(axes):
        method = str(values.get("method", default_method))
        for method_values in _product(method_axes.get(method, {})):
            yield values, method_values


def _common_axes(grid: Values) -> dict[str, list[Any]]:
    """Returns the grid axes that apply to all methods.

    "run.seed" is renamed to "seed", the name that the results table uses.
    """
    axes: dict[str, list[Any]] = {}
    names: dict[tuple[str, str], str] = {}  # by the setting that an axis varies
    for name, values in grid.items():
        if isinstance(values, Mapping):
            continue
        first = names.setdefault(setting_of(name), name)
        if first != name:
            raise SweepError(f"{first!r} and {name!r} are the same setting. Remove {name!r}")
        axes[name.removeprefix("run.")] = _choices(name, values)
    return axes


def _cell(shared: Sections, values: Values, method_values: Values) -> Cell:
    """Returns one run of the sweep, after checking its settings.

    Grid values override the common settings.
    """
    sections = {name: dict(section) for name, section in shared.items()}
    for name, value in values.items():
        section, key = setting_of(name)
        sections.setdefault(section, {})[key] = value
    sections.setdefault("method", {}).update(method_values)
    all_values = {**values, **method_values}
    try:
        settings = resolve(with_own_code(sections))
        if settings.privacy is not None and settings.folder is not None:
            settings = with_declared(settings, declared(settings))  # as the run does
        code = tuple(code_options(settings))
    except FedsynthError as error:
        run = _joined(all_values, ", ") or "without a grid"
        raise SweepError(f"the run {run} has invalid settings: {error}") from None
    return Cell(all_values, settings, _key(all_values, settings), code)


def setting_of(name: str) -> tuple[str, str]:
    """Returns the section and the key of a grid axis.

    A name without a section belongs to the first section with the key, or else to the method.

    >>> setting_of("alpha"), setting_of("model.width"), setting_of("seed")
    (('partition', 'alpha'), ('model', 'width'), ('run', 'seed'))

    Raises:
        SweepError: the name begins with a section that does not exist.
    """
    section, dot, key = name.partition(".")
    if not dot:
        return "run" if name == "method" else section_of(name) or "method", name
    if section not in SECTIONS:
        raise SweepError(f"the section {section!r} is unknown. Use one of {', '.join(SECTIONS)}")
    return section, key


def _choices(name: str, values: Any) -> list[Any]:
    if not isinstance(values, list) or not values or {list, dict} & set(map(type, values)):
        raise SweepError(
            f"{name} must be a list of numbers, strings or booleans, got {short_repr(values)}. Put "
            "the values in [ ]"
        )
    return values


def _product(axes: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for values in itertools.product(*itertools.starmap(_choices, axes.items())):
        yield dict(zip(axes, values, strict=True))


def _joined(values: Values, separator: str) -> str:
    return separator.join(f"{name}={value}" for name, value in values.items())


def _key(values: Values, settings: RunSettings) -> str:
    """Returns a readable folder name for a run, unique to its settings."""
    parts = []
    for name, value in values.items():
        prefix = "" if name == "method" else name.rpartition(".")[2]
        parts.append(f"{prefix}{value}")
    readable = re.sub(r"[^\w.+=-]", "_", "-".join(parts))[:80]
    return f"{readable}-{settings_hash(settings)}".lstrip("-.")


FORMATS = ("table", "csv", "markdown")


class Column(NamedTuple):
    """A results-table column, for one value in summary.json.

    Attributes:
        path: the value's dotted path in summary.json.
        heading: the column's heading.
        scale: the factor on the values.
        digits: the number of decimals.
    """

    path: str
    heading: str
    scale: float
    digits: int


# The columns after the sweep's metrics in every table.
COLUMNS = {
    "epsilon": Column("differential_privacy.epsilon", "ε", 1.0, 2),
    "upload_bytes": Column("upload_bytes", "MB up", 1e-6, 2),
    "seconds": Column("seconds", "s", 1.0, 1),
}


class SweepRow(NamedTuple):
    """A results-table row, for runs that differ only in their seeds.

    Attributes:
        values: the runs' grid values, by axis.
        finished: the number of finished seeds.
        planned: the number of seeds in the grid.
        results: the finished runs' numbers in each column. Runs without the number are left out.
    """

    values: Mapping[str, Any]
    finished: int
    planned: int
    results: Mapping[str, Sequence[float]]


def sweep_rows(sweep: Sweep) -> list[SweepRow]:
    """Returns the rows of a sweep's results table.

    There is a row for each combination of grid values, except that all seeds share one row.
    """
    groups: dict[tuple[tuple[str, Any], ...], list[Path | None]] = {}
    for cell in sweep.cells:
        values = tuple((name, value) for name, value in cell.values.items() if name != SEED)
        groups.setdefault(values, []).append(sweep.finished(cell))
    rows = []
    for values, folders in groups.items():
        summaries = [finished.read_summary(folder) for folder in folders if folder is not None]
        results = {}
        for name, column in _columns(sweep).items():
            numbers = [value_at(summary, column.path) for summary in summaries]
            results[name] = [number for number in numbers if number is not None]
        rows.append(SweepRow(dict(values), len(summaries), len(folders), results))
    return rows


def _columns(sweep: Sweep) -> dict[str, Column]:
    columns = {}
    for metric in sweep.metrics:
        columns[metric] = Column(metric, words_of(metric), 1.0, 4)
        if finished.is_share(metric):
            columns[metric] = Column(metric, f"{words_of(metric)} (%)", 100.0, 2)
    return {**columns, **COLUMNS}


def render(sweep: Sweep, rows: Sequence[SweepRow], form: str) -> str:
    """Returns a sweep's results table as text, in one of the formats in `FORMATS`."""
    if form == "csv":
        return _csv(sweep, rows)
    cells = _table(sweep, rows)
    return _markdown(cells) if form == "markdown" else finished.aligned(cells)


def _table(sweep: Sweep, rows: Sequence[SweepRow]) -> list[list[str]]:
    """Returns the cells of the table as strings, with the headings in the first row.

    Columns without any value are left out.
    """
    table = [[*sweep.axes, "runs"]]
    for row in rows:
        count = str(row.finished)
        if row.finished < row.planned:
            count += f"/{row.planned}"
        table.append([*(str(row.values.get(name, finished.NONE)) for name in sweep.axes), count])
    for name, column in _columns(sweep).items():
        texts = [_text(name, column, row) for row in rows]
        if name in sweep.metrics or set(texts) != {finished.NONE}:
            for line, text in zip(table, [column.heading, *texts], strict=True):
                line.append(text)
    return table


def _text(name: str, column: Column, row: SweepRow) -> str:
    """Formats the mean and the standard deviation of a row's numbers, or the largest ε.

    The number of values follows in parentheses if some of the finished runs have none.
    """
    numbers = row.results[name]
    if name == "epsilon" and numbers:
        text = format_epsilon(max(numbers))  # a mean is not a guarantee
    else:
        text = Spread.of(numbers).format(column.scale, column.digits)
    return f"{text} ({len(numbers)})" if 0 < len(numbers) < row.finished else text


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    rule = ["---"] * len(rows[0])
    lines = [rows[0], rule, *rows[1:]]
    escaped = ([cell.replace("|", "\\|") for cell in line] for line in lines)
    return "".join("| " + " | ".join(line) + " |\n" for line in escaped)


def _csv(sweep: Sweep, rows: Sequence[SweepRow]) -> str:
    """Returns the table as CSV, with values that are not rounded or scaled.

    The mean, the standard deviation and the number of values are separate columns.
    """
    names = list(_columns(sweep))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    heads = [f"{name}_{part}" for name in names for part in ("mean", "std", "n")]
    writer.writerow([*sweep.axes, "finished", "planned", *heads])
    for row in rows:
        values = list(map(row.values.get, sweep.axes))
        spreads: list[float | None] = []
        for numbers in map(row.results.__getitem__, names):
            spreads += [*Spread.of(numbers), len(numbers)]
        writer.writerow([*values, row.finished, row.planned, *spreads])  # None is an empty field
    return text.getvalue()
