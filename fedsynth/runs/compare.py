"""In what runs differ, and what each is called beside the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedsynth.runs.folders import Run

QUIET = (
    "run.method",
    "run.device",
    "data.data_root",
    "privacy.ledger",
    "privacy.epsilon",
    "report.responsible",
    "report.purpose",
    "report.sites",
)
"""Settings that are said elsewhere, or are no matter for a result."""
SEEDS = ("run.seed", "partition.seed")
MAX_LABEL = 40
"""Letters of a run's name in a legend or a heading."""


def differing(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Of each run the settings that differ: the method's between runs of the same method, all
    others between all runs. Their names are as short as the command line has them."""
    found = []
    for run in runs:
        differ = {}
        for key, value in run.settings.items():
            others = [other for other in runs if _comparable(key, run, other)]
            # a ε or σ that only one of two private runs names is a difference, too
            unset = None if key.startswith("privacy.") else value
            if key not in QUIET and any(o.settings.get(key, unset) != value for o in others):
                differ[key.removeprefix("method.").removeprefix("run.")] = value
        found.append(differ)
    return found


def _comparable(key: str, run: Run, other: Run) -> bool:
    if key.startswith("method."):
        return _method(other) == _method(run)
    return other.private == run.private or not key.startswith("privacy.")


def labels(runs: Sequence[Run]) -> list[str]:
    """Returns a short name for each run, for legends and headings.

    It has the method, "private" where other runs are not, and as few of the settings that differ
    as distinguish the runs; "…" stands for the others. Runs that these do not distinguish, and
    long names, get a number.
    """
    mixed = len({run.private for run in runs}) > 1
    words = [_method(run) + (" private" if mixed and run.private else "") for run in runs]
    rest = differing(runs)
    while len(set(words)) < len(words):
        keys = dict.fromkeys(key for settings in rest for key in settings)
        options = [[_with(key, *pair) for pair in zip(words, rest, strict=True)] for key in keys]
        best = max(options, key=lambda names: len(set(names)), default=words)
        if len(set(best)) == len(set(words)):
            break
        used = list(keys)[options.index(best)]
        rest = [{key: one for key, one in some.items() if key != used} for some in rest]
        words = best
    names = [f"{word} …" if some else word for word, some in zip(words, rest, strict=True)]
    if max(map(len, names)) > MAX_LABEL:
        names = [_method(run) for run in runs]
    return [
        f"{name} #{number}" if names.count(name) > 1 else name
        for number, name in enumerate(names, start=1)
    ]


def _with(key: str, word: str, settings: Mapping[str, Any]) -> str:
    return f"{word} {key}={settings[key]}" if key in settings else word


def by_seed(runs: Sequence[Run]) -> list[list[Run]]:
    """Runs that differ in seeds alone, together, in the order of their first ones."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        same = {key: value for key, value in run.settings.items() if key not in (*SEEDS, *QUIET)}
        groups.setdefault(repr((_method(run), sorted(same.items()))), []).append(run)
    return list(groups.values())


def _method(run: Run) -> str:
    return str(run.summary.get("method"))
