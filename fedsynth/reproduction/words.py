"""The words of published_results.csv as sections of settings.

What a word means for every table alike is here ("dirichlet(0.1)", "2 classes per client"); what a
paper's own words mean ("cnn (not specified in the paper)") is in the table's preset.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from fedsynth.errors import FedsynthError
from fedsynth.methods import METHODS

Sections = dict[str, dict[str, Any]]
DATASETS: Mapping[str, str] = {
    "fashion_mnist": "fashion-mnist",
    "emnist_letters": "emnist-letters",
    "emnist_letters_10pct": "emnist-letters",
    "office_caltech": "office-caltech-10",
    "domainnet10": "domainnet-10",
    "tiny_imagenet": "tiny-imagenet",
}
"""The file's names of data sets that have another one here."""
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
    """A preset, a table or a cell that does not exist, or that cannot be run."""


def dataset_of(word: str) -> str:
    """The data set, without the domain that a number is of."""
    name = word.partition(":")[0]
    return DATASETS.get(name, name)


def domain_of(word: str) -> str:
    """The domain that a number is of, "average" for the mean of all; empty: it is of none."""
    return word.partition(":")[2]


def partition_of(word: str) -> dict[str, Any]:
    """Settings of the section "partition".

    Raises:
        PresetError: nobody knows the words.
    """
    for pattern, values in _PARTITIONS:
        found = re.fullmatch(pattern, word)
        if found is not None:
            numbers = {name: float(text) for name, text in found.groupdict().items()}
            whole = {k: v if k == "alpha" else int(v) for k, v in numbers.items()}
            return {**values, **whole}
    raise PresetError(f"no partition is called {word!r} in published tables")


def sections_of_words(
    *, dataset: str, partition: str, clients: str, rounds: str, method: str
) -> Sections:
    """What the columns of a row say of a run, as far as every table means the same by them."""
    run: dict[str, Any] = {"method": method} if method in METHODS else {}
    if rounds:
        run["rounds"] = int(rounds)
    who = partition_of(partition)
    if clients:
        who["clients"] = int(clients)
    sections: Sections = {"run": run, "data": {"dataset": dataset_of(dataset)}, "partition": who}
    if dataset.endswith("_10pct"):
        sections["partition"]["subset"] = 0.1
    return sections
