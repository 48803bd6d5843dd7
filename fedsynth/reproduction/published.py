"""What the papers print: the numbers of `published_results.csv`, as typed rows.

A row is one number of one table: whose it is, of which data set, partition, model and method, the
metric, the value, and the standard deviation and notes where the paper has them. Words are the
file's own ("dirichlet(0.1)", "fedkf- (oca)"); what a run makes of them is in the presets.
"""

from __future__ import annotations

import csv
import functools
from dataclasses import dataclass, fields
from importlib.resources import files

FILE = "published_results.csv"
DATA = files("fedsynth.reproduction")


@dataclass(frozen=True)
class Published:
    """One published number.

    Args:
        source: the paper, or the overview of papers.
        table: where in it.
        dataset: as the file writes it; after a colon the domain that is tested.
        partition: who has what, in words.
        clients: K, as text.
        model: the architecture, in words.
        rounds: as text; empty: the paper does not say.
        method: the row's, in lower case.
        metric: what is measured, with its unit ("test_accuracy_pct").
        value: the number.
        std: its standard deviation; None: not published.
        note: what else the paper says of it.
    """

    source: str
    table: str
    dataset: str
    partition: str
    clients: str
    model: str
    rounds: str
    method: str
    metric: str
    value: float
    std: float | None
    note: str


@functools.cache
def published() -> tuple[Published, ...]:
    """All rows, in the file's order."""
    text = (DATA / FILE).read_text(encoding="utf-8")
    names = {field.name for field in fields(Published)}
    return tuple(
        Published(
            **{
                **{name: text for name, text in row.items() if name in names},
                "value": float(row["value"]),
                "std": float(row["std"]) if row["std"] else None,
            }  # type: ignore[arg-type]
        )
        for row in csv.DictReader(text.splitlines())
    )
