"""Rows of results/*.jsonl, and how the documents print them."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from library import RESULTS

NOTHING = "–"
Row = Mapping[str, Any]
REPRODUCTION = "reproduction/*"
SCRIPTS = {
    "fedstats_students": "benchmarks/fedstats_table.py --students",
    REPRODUCTION: "cli/reproduce_command.py (fedsynth reproduce)",
}
"""The script that makes a results file, where it is not the script of the file's name."""
LAST_COMMIT = "04719c52"
"""Has the removed scripts, whose questions are settled and whose rows stay."""
READ: list[str] = []
"""Names of the results files that were asked for: whoever makes a table learns what it is made
of."""


class RowsError(Exception):
    """Rows that say two things, or none where one is needed."""


def lines(name: str) -> list[dict[str, Any]]:
    """All rows of a results file, in their order; none where there is no file yet."""
    READ.append(name)
    path = RESULTS / f"{name}.jsonl"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.splitlines()]


def by_key(name: str) -> dict[str, dict[str, Any]]:
    """The rows of a results file by their key without the hash of settings that ends it.

    Raises:
        RowsError: two rows of other settings have the same name: one of them is stale.
    """
    found: dict[str, dict[str, Any]] = {}
    for row in lines(name):
        short = row["key"].rsplit(" ", 1)[0]
        if short in found and found[short]["key"] != row["key"]:
            raise RowsError(f"results/{name}.jsonl has two rows of other settings for {short!r}")
        found[short] = row
    return found


def case(name: str, case: str, wanted: Callable[[Mapping[str, Any]], bool] = bool) -> Any:
    """The last row of a timing's case on a CPU.

    Raises:
        RowsError: there is none.
    """
    here = [row for row in lines(name) if row["machine"].startswith("CPU")]
    found = [row for row in here if row["case"] == case and wanted(row)]
    if not found:
        raise RowsError(f"results/{name}.jsonl has no row of {case!r} that fits")
    return found[-1]


STATISTICS_SEEDS = range(10)
"""Of FedStats' runs: 0 to 4, and 5 to 9 of the one that is quoted most."""


def percents(
    rows: Mapping[str, Mapping[str, Any]],
    name: str,
    seeds: Sequence[int],
    value: Callable[[Mapping[str, Any]], Any] = lambda row: row["accuracy"],
) -> list[float]:
    """100 times a value of the rows "NAME seed=S", for those seeds that are there."""
    made = [rows[f"{name} seed={seed}"] for seed in seeds if f"{name} seed={seed}" in rows]
    return [100 * number for row in made if (number := value(row)) is not None]


def spread(values: Sequence[float], seeds: int, digits: int = 2, sign: str = "") -> str:
    """Mean ± standard deviation; in brackets how many, where seeds are still to come."""
    if not values:
        return NOTHING
    mean = f"{statistics.mean(values):{sign}.{digits}f}".replace("-", "−")
    some = f" ({len(values)})" if len(values) < seeds else ""
    if len(values) == 1:
        return mean + some
    return f"{mean} ± {statistics.stdev(values):.{digits}f}{some}"


def apart(one: Sequence[float], other: Sequence[float], seeds: int) -> str:
    """Mean ± standard deviation of paired differences; bold where the mean of three seeds or more
    is beyond the deviation."""
    if len(one) != len(other) or not one:
        return NOTHING
    differences = [a - b for a, b in zip(one, other, strict=True)]
    text = spread(differences, seeds, 1, "+")
    clear = len(one) > 2 and abs(statistics.mean(differences)) > statistics.stdev(differences)
    return f"**{text}**" if clear else text


def table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    rule = ["---"] * len(head)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, rule, *body))
