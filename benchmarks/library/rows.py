"""Rows of results/*.jsonl, and how documents print their numbers."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from library import RESULTS
from library.machine import read

NOTHING = "–"
Row = Mapping[str, Any]
Value = str | Callable[[Row], Any]
"""A number of a row: its dotted path, or a function of the row."""
REPRODUCTION = "reproduction/*"
LAST_COMMIT = "04719c52"
"""Has the removed scripts, whose questions are settled and whose rows stay."""
STATISTICS_SEEDS = range(10)
"""Of FedStats' runs: 0 to 4, and 5 to 9 of the one that is quoted most."""
READ: list[str] = []
"""Names of the results files that were read, which tells what a table is made of."""


class RowsError(Exception):
    """Rows that contradict each other, or a missing row that is needed."""


def lines(name: str) -> list[dict[str, Any]]:
    """Returns all rows of a results file, in their order; none where there is no file yet."""
    READ.append(name)
    return read(RESULTS / f"{name}.jsonl")


def by_key(name: str) -> dict[str, dict[str, Any]]:
    """Returns the rows of a results file by their key without the hash of settings that ends it.

    Raises:
        RowsError: two rows of different settings have the same name: one of them is stale.
    """
    found: dict[str, dict[str, Any]] = {}
    for row in lines(name):
        short = row["key"].rsplit(" ", 1)[0]
        if short in found and found[short]["key"] != row["key"]:
            raise RowsError(f"results/{name}.jsonl has two rows of other settings for {short!r}")
        found[short] = row
    return found


def names(name: str) -> list[str]:
    """Returns the names of a results file's rows without their seeds, each once."""
    return list(dict.fromkeys(key.rsplit(" seed=", 1)[0] for key in by_key(name)))


def named(name: str, key: str) -> list[dict[str, Any]]:
    """Returns all rows of a case, or of a key with or without its hash, in their order."""
    return [
        row
        for row in lines(name)
        if key == row.get("case") or key in ((full := row.get("key", "")), full.rpartition(" ")[0])
    ]


def by_seed(name: str, key: str, seeds: Iterable[int]) -> dict[int, dict[str, Any]]:
    """Returns the rows "KEY seed=S" by S, for those seeds that are there."""
    rows = by_key(name)
    return {s: rows[f"{key} seed={s}"] for s in seeds if f"{key} seed={s}" in rows}


def case(name: str, case: str, wanted: Callable[[Row], bool] = bool) -> Any:
    """Returns the last row of a timing's case on a CPU.

    Raises:
        RowsError: there is none.
    """
    here = [row for row in lines(name) if row["machine"].startswith("CPU")]
    found = [row for row in here if row["case"] == case and wanted(row)]
    if not found:
        raise RowsError(f"results/{name}.jsonl has no row of {case!r} that fits")
    return found[-1]


def value_of(row: Row, value: Value) -> Any:
    """Returns a number of a row."""
    if callable(value):
        return value(row)
    found: Any = row
    for part in value.split("."):
        found = found[int(part) if isinstance(found, list) else part]
    return found


def percents(name: str, key: str, seeds: Iterable[int], value: Value = "accuracy") -> list[float]:
    """Returns 100 times a value of the rows "KEY seed=S", for those seeds that have it."""
    found = (value_of(row, value) for row in by_seed(name, key, seeds).values())
    return [100 * number for number in found if number is not None]


def number(value: float, form: str) -> str:
    """Returns a number with a true minus sign."""
    return format(value, form).replace("-", "−")


def spread(values: Sequence[float], seeds: int, digits: int = 2, sign: str = "") -> str:
    """Returns mean ± standard deviation; in brackets how many, where seeds are missing."""
    if not values:
        return NOTHING
    mean = number(statistics.mean(values), f"{sign}.{digits}f")
    some = f" ({len(values)})" if len(values) < seeds else ""
    if len(values) == 1:
        return mean + some
    return f"{mean} ± {statistics.stdev(values):.{digits}f}{some}"


def apart(differences: Sequence[float], seeds: int) -> str:
    """Returns mean ± standard deviation of paired differences, in bold where the mean of three
    seeds or more is beyond the deviation."""
    if not differences:
        return NOTHING
    text = spread(differences, seeds, 1, "+")
    mean = abs(statistics.mean(differences))
    clear = len(differences) > 2 and mean > statistics.stdev(differences)
    return f"**{text}**" if clear else text


def markdown(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """Returns a Markdown table."""
    rule = ["---"] * len(head)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, rule, *body))
