"""Rows of results/*.jsonl, and how documents print their numbers."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from fedsynth.experiments.comparison import interval
from fedsynth.experiments.rows import Rows
from library import RESULTS

NOTHING = "–"
Row = Mapping[str, Any]
REPRODUCTION = "reproduction/*"
# The last commit with the removed scripts, whose rows stay.
LAST_COMMIT = "04719c52"
REMOVED_GRIDS = {"encoder_constants": "0c42699c:benchmarks/grids/encoder_constants.py"}
# The seeds of FedStats' runs. Only the run that is quoted most has the seeds 5 to 9.
STATISTICS_SEEDS = range(10)
# Names of the results files that were read, which tells what a table is made of.
READ: list[str] = []


class RowsError(Exception):
    """Rows that contradict each other, or a missing row that is needed."""


def lines(name: str) -> list[dict[str, Any]]:
    """Returns all rows of a results file, in their order; none if there is no file yet."""
    READ.append(name)
    return Rows(RESULTS / f"{name}.jsonl").all()


def by_key(name: str) -> dict[str, dict[str, Any]]:
    """Returns the rows of a results file by their key without the hash of settings that ends it.

    Raises:
        RowsError: two rows of different settings have the same name: one of them is stale.
    """
    rows: dict[str, dict[str, Any]] = {}
    for row in lines(name):
        short = row["key"].rsplit(" ", 1)[0]
        if rows.setdefault(short, row)["key"] != row["key"]:
            raise RowsError(f"results/{name}.jsonl has two rows of other settings for {short!r}")
        rows[short] = row
    return rows


def by_seed(name: str, key: str, seeds: Iterable[int]) -> dict[int, dict[str, Any]]:
    """Returns the rows "KEY seed=S" by S, for those seeds that have one."""
    rows = by_key(name)
    return {s: rows[f"{key} seed={s}"] for s in seeds if f"{key} seed={s}" in rows}


def case(
    name: str, case: str, condition: Callable[[Row], bool] = bool, machine: str = "CPU"
) -> Any:
    """Returns the last row of a timing's case on a kind of machine.

    Raises:
        RowsError: there is none.
    """
    for row in reversed(lines(name)):
        if row["machine"].startswith(machine) and row["case"] == case and condition(row):
            return row
    raise RowsError(f"results/{name}.jsonl has no row of {case!r} that fits")


def value_of(row: Row, path: str) -> Any:
    """Returns a value of a row by its dotted path."""
    item: Any = row
    for part in path.split("."):
        item = item[int(part) if isinstance(item, list) else part]
    return item


def percents(name: str, key: str, seeds: Iterable[int], value: str = "accuracy") -> list[float]:
    """Returns 100 times a value of the rows "KEY seed=S", for those seeds that have it."""
    values = (value_of(row, value) for row in by_seed(name, key, seeds).values())
    return [100 * number for number in values if number is not None]


def differences(name: str, key: str, less: str, seeds: Iterable[int]) -> list[float]:
    """Returns by how many points a key is more accurate than another, for seeds that have both."""
    rows, others = by_seed(name, key, seeds), by_seed(name, less, seeds)
    pairs = ((rows[seed], others[seed]) for seed in rows if seed in others)
    return [100 * row["accuracy"] - 100 * other["accuracy"] for row, other in pairs]


def number(value: float, form: str) -> str:
    """Returns a number with a true minus sign."""
    return format(value, form).replace("-", "−")


def spread(values: Sequence[float], seeds: int, digits: int = 2, sign: str = "") -> str:
    """Returns mean ± standard deviation, and how many values, in brackets, if seeds are missing."""
    if not values:
        return NOTHING
    text = number(statistics.mean(values), f"{sign}.{digits}f")
    if len(values) > 1:
        text += f" ± {statistics.stdev(values):.{digits}f}"
    return f"{text} ({len(values)})" if len(values) < seeds else text


def spread_of(
    name: str, key: str, seeds: Sequence[int], value: str = "accuracy", digits: int = 2
) -> str:
    """Returns mean ± standard deviation of a value over seeds, in percent."""
    return spread(percents(name, key, seeds, value), len(seeds), digits)


def each(values: Iterable[float], form: str = ".2f") -> str:
    """Returns the numbers, separated by commas."""
    return ", ".join(number(value, form) for value in values)


def paired(differences: Sequence[float], seeds: int) -> str:
    """Returns mean ± standard deviation of paired differences.

    It is bold if their 95 % interval excludes zero.
    """
    text = spread(differences, seeds, 1, "+")
    low, high = interval(differences)
    return f"**{text}**" if low > 0 or high < 0 else text
