"""A sweep's file: settings that all its runs share, and the axes of its grid.

[sweep]                      # optional, as is each key
output = "sweeps/skew"       # default: sweeps/NAME of the file
jobs = 2                     # runs at once; default 1
memory_gb = 10               # of all concurrent runs together
metrics = ["test_accuracy"]  # of summary.json

[run]                        # and [partition], [model], …: as in a run's config.toml
rounds = 5

[grid]                       # each list is an axis
method = ["fedavg", "feddm"]
alpha = [0.1, 1.0]           # without a section: the first that has such a setting
seed = [0, 1, 2]
"model.width" = [32, 64]

[grid.feddm]                 # axes of one method's own settings
ipc = [1, 10]

[methods.fedavg]             # settings of one method
lr = 0.1
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from fedsynth.config.resolve import resolve, section_of
from fedsynth.config.settings import MOST_GB, SECTIONS, RunSettings
from fedsynth.errors import FedsynthError
from fedsynth.methods import DEFAULT_METHOD
from fedsynth.privacy.errors import PrivacyError, shown
from fedsynth.toml_file import read_sections
from fedsynth.validation import check_ranges, from_mapping

MOST_RUNS = 10_000
SEED = "seed"
PLACES = ("device", "data_root", "memory_gb", "threads")
"""Settings of a run's execution; changing them does not make it a different run."""
Values = Mapping[str, Any]
Sections = dict[str, dict[str, Any]]


class SweepError(FedsynthError):
    """A sweep's file is invalid."""


@dataclass(frozen=True)
class SweepSettings:
    """The settings of a sweep.

    Args:
        output: the folder of its runs; "" takes sweeps/NAME, with the file's name.
        jobs: runs at once.
        memory_gb: memory limit of all concurrent runs together, in 2^30 bytes; 0: limited only by
            `jobs`.
        metrics: of summary.json, by dotted paths, comma-separated; the first is the first column.
    """

    section: ClassVar[str] = "sweep"

    output: str = ""
    jobs: int = 1
    memory_gb: float = 0.0
    metrics: str = "test_accuracy"

    def __post_init__(self) -> None:
        check_ranges(self, jobs=(1, 1000), memory_gb=(0, MOST_GB))


@dataclass(frozen=True, eq=False)
class Cell:
    """One run of a sweep; compared by identity.

    Attributes:
        values: axis → its value in this run.
        settings: the run's.
        key: the name of its folder.
    """

    values: Values
    settings: RunSettings
    key: str

    @property
    def words(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.values.items())


@dataclass(frozen=True)
class Sweep:
    """A sweep's runs.

    Attributes:
        settings: of the sweep.
        output: the folder of its runs.
        axes: their names, in the file's order.
        cells: its runs.
    """

    settings: SweepSettings
    output: Path
    axes: tuple[str, ...]
    cells: tuple[Cell, ...]

    @property
    def metrics(self) -> list[str]:
        return [metric.strip() for metric in self.settings.metrics.split(",")]


def read_sweep(file: Path) -> Sweep:
    """Reads a sweep's file and checks the settings of every run.

    Raises:
        SweepError, SettingError, UnknownNameError, PrivacyError: a setting is invalid; the message
            names the run's axes.
    """
    sections = read_sections(file)
    sweep = sections.pop("sweep", {})
    metrics = sweep.get("metrics", "test_accuracy")
    if isinstance(metrics, list):
        sweep = {**sweep, "metrics": ",".join(map(str, metrics))}
    settings = from_mapping(SweepSettings, sweep)
    grid = sections.pop("grid", {})
    methods = sections.pop("methods", {})
    for name in sections:
        if name not in SECTIONS:
            raise SweepError(
                f"{file}: unknown section {name!r}; use sweep, grid, methods, {', '.join(SECTIONS)}"
            )
    cells = _cells(sections, grid, methods, file)
    output = Path(settings.output) if settings.output else Path("sweeps") / file.stem
    axes = tuple(dict.fromkeys(name for cell in cells for name in cell.values))
    return Sweep(settings, output, axes, tuple(cells))


def _cells(shared: Sections, grid: Values, methods: Values, file: Path) -> list[Cell]:
    common = _common_axes(grid, file)
    method_axes = {name: values for name, values in grid.items() if isinstance(values, Mapping)}
    default_method = str(shared.get("run", {}).get("method", DEFAULT_METHOD))
    named = [str(entry) for entry in common.get("method", (default_method,))]
    for name, values in methods.items():
        if not isinstance(values, Mapping):
            raise SweepError(f"{file}: methods.{name} must be a table, got {shown(values)}")
    for name in (*method_axes, *methods):
        if name not in named:
            raise SweepError(
                f"{file}: no run of the sweep has method {name!r}; its methods are "
                f"{', '.join(named)}"
            )
    # counted before settings are resolved, which takes half a minute for ten thousand runs
    points = list(itertools.islice(_points(common, method_axes, default_method), MOST_RUNS + 1))
    if len(points) > MOST_RUNS:
        raise SweepError(f"{file}: the grid has more than {MOST_RUNS:,} runs")
    cells = [
        _cell(shared, methods.get(method, {}), values, more) for method, values, more in points
    ]
    if len({cell.key for cell in cells}) < len(cells):
        raise SweepError(f"{file}: two runs of the grid have the same settings")
    return cells


def _points(
    common: Mapping[str, list[Any]], method_axes: Values, default_method: str
) -> Iterator[tuple[str, Values, Values]]:
    """Yields each run's method (the sweep's own if no axis sets one), the values of the common
    axes, and those of the method's own axes."""
    for values in _product(common):
        method = str(values.get("method", default_method))
        axes = {name: _axis(name, choices) for name, choices in method_axes.get(method, {}).items()}
        for more in _product(axes):
            yield method, values, more


def _common_axes(grid: Values, file: Path) -> dict[str, list[Any]]:
    """Returns the axes of all methods; "run.seed" becomes "seed", the name that tables and methods'
    sections use."""
    axes: dict[str, list[Any]] = {}
    names: dict[tuple[str, str], str] = {}  # by the setting that an axis varies
    for name, values in grid.items():
        if isinstance(values, Mapping):
            continue
        home = home_of(name)
        if home in names:
            raise SweepError(
                f"{file}: {names[home]!r} and {name!r} of the grid are the same setting"
            )
        names[home] = name
        axes[name.removeprefix("run.")] = _axis(name, values)
    return axes


def _cell(shared: Sections, of_method: Values, values: Values, method_values: Values) -> Cell:
    """Returns one run: shared settings, overridden by its method's, then by the grid's."""
    sections: Sections = {name: dict(entries) for name, entries in shared.items()}
    sections.setdefault("method", {}).update(of_method)
    for name, value in values.items():
        section, key = home_of(name)
        sections.setdefault(section, {})[key] = value
    sections["method"].update(method_values)
    together = {**values, **method_values}
    try:
        settings = resolve(sections)
    except (FedsynthError, PrivacyError) as error:
        text = ", ".join(f"{name}={value}" for name, value in together.items())
        raise SweepError(f"the run of {text or 'the sweep'}: {error}") from None
    return Cell(together, settings, _key(together, settings))


def home_of(name: str) -> tuple[str, str]:
    """Returns the section and key of a setting. A name without a section belongs to the first
    section that has this key, otherwise to the method.

    >>> home_of("alpha"), home_of("model.width"), home_of("seed")
    (('partition', 'alpha'), ('model', 'width'), ('run', 'seed'))

    Raises:
        SweepError: there is no such section.
    """
    section, dot, key = name.partition(".")
    if dot:
        if section not in SECTIONS:
            raise SweepError(f"grid: {name!r} must begin with a section: {', '.join(SECTIONS)}")
        return section, key
    if name == "method":
        return "run", name
    return section_of(name) or "method", name


def _axis(name: str, values: Any) -> list[Any]:
    if not isinstance(values, list) or not values:
        raise SweepError(
            f"grid: {name} must be a list of values, such as [0, 1], got {values!r:.80}"
        )
    if any(isinstance(value, list | dict) for value in values):
        raise SweepError(f"grid: {name} must be a list of numbers, texts or booleans")
    return values


def _product(axes: Mapping[str, list[Any]]) -> Iterator[dict[str, Any]]:
    for values in itertools.product(*axes.values()):
        yield dict(zip(axes, values, strict=True))


def _key(values: Values, settings: RunSettings) -> str:
    """Returns a readable folder name that is different for different settings."""
    sections = settings.to_mapping()
    plain = {
        name: {key: value for key, value in section.items() if key not in PLACES}
        for name, section in sections.items()
    }
    text = json.dumps(plain, sort_keys=True)
    digest = hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
    readable = "-".join(
        str(value) if name == "method" else f"{name.rpartition('.')[2]}{value}"
        for name, value in values.items()
    )
    safe = re.sub(r"[^\w.+=-]", "_", readable)[:80]
    return f"{safe}-{digest}".lstrip("-.")
