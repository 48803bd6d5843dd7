"""The published numbers of `published_results.csv`, and what the words of its columns mean.

The words are the file's own ("dirichlet(0.1)", "fedkf- (oca)"). What a word means for every table
is defined here; what a paper's own words mean ("cnn (not specified in the paper)") is in the
table's preset.
"""

from __future__ import annotations

import csv
import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from fedsynth.errors import FedsynthError
from fedsynth.methods import METHODS

Sections = dict[str, dict[str, Any]]
DATA = files("fedsynth.reproduction")
DATASETS: Mapping[str, str] = {
    "fashion_mnist": "fashion-mnist",
    "emnist_letters": "emnist-letters",
    "emnist_letters_10pct": "emnist-letters",
    "office_caltech": "office-caltech-10",
    "domainnet10": "domainnet-10",
    "tiny_imagenet": "tiny-imagenet",
}
"""The file's names of data sets that have another name in this package."""
_PARTITIONS: tuple[tuple[str, Mapping[str, str]], ...] = (
    (r"(?:NIID-1 )?dirichlet\((?P<alpha>[\d.]+)\)", {"kind": "dirichlet"}),
    (r"(?P<classes_per_client>\d+) classes per client", {"kind": "classes"}),
    (r"(?P<missing_classes>\d+) classes missing per client", {"kind": "missing"}),
    (r"NIID-2 dominant classes", {"kind": "dominant"}),
    (r"one domain per client", {"kind": "domain"}),
    (r"by (?:writer|device)", {"kind": "natural"}),
    (r"iid", {"kind": "iid"}),
    (r"any|centralised", {}),
)


class PresetError(FedsynthError):
    """A preset, a table or a cell does not exist or cannot be run."""


@dataclass(frozen=True)
class Published:
    """One published number; text fields are empty where the paper does not say.

    Args:
        source: the paper, or the overview of papers.
        table: where in it.
        dataset: the data set; after a colon, the domain that is tested.
        partition: how the data are partitioned, in words.
        clients: K.
        model: the architecture, in words.
        rounds: number of rounds.
        method: the method, in lower case.
        metric: what is measured, with its unit ("test_accuracy_pct").
        value: the number.
        std: its standard deviation; None: not published.
        note: further conditions that the paper states.
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
    """Returns all rows, in the file's order."""
    text = (DATA / "published_results.csv").read_text(encoding="utf-8")
    rows = []
    for row in csv.DictReader(text.splitlines()):
        words: dict[str, Any] = {name: row[name] for name in Published.__dataclass_fields__}
        words["value"] = float(row["value"])
        words["std"] = float(row["std"]) if row["std"] else None
        rows.append(Published(**words))
    return tuple(rows)


def dataset_of(word: str) -> str:
    """Returns the data set's name in this package, without the domain."""
    name = word.partition(":")[0]
    return DATASETS.get(name, name)


def partition_of(word: str) -> dict[str, Any]:
    """Returns the settings of the section "partition" that the words stand for.

    Raises:
        PresetError: no partition has this name.
    """
    for pattern, values in _PARTITIONS:
        match = re.fullmatch(pattern, word)
        if match is None:
            continue
        settings: dict[str, Any] = dict(values)
        for name, text in match.groupdict().items():
            settings[name] = float(text) if name == "alpha" else int(text)
        return settings
    raise PresetError(f"no partition is called {word!r} in published tables")


def sections_of_words(
    *, dataset: str, partition: str, clients: str, rounds: str, method: str
) -> Sections:
    """Returns the settings that a row's columns give in every table."""
    sections: Sections = {
        "run": {"method": method} if method in METHODS else {},
        "data": {"dataset": dataset_of(dataset)},
        "partition": partition_of(partition),
    }
    if rounds:
        sections["run"]["rounds"] = int(rounds)
    if clients:
        sections["partition"]["clients"] = int(clients)
    if dataset.endswith("_10pct"):
        sections["partition"]["subset"] = 0.1
    return sections
