"""The settings in which runs differ, and short names that distinguish them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedsynth.results.folders import Run

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
"""Settings that are shown elsewhere or do not affect a result."""
SEEDS = ("run.seed", "partition.seed")
MAX_LABEL = 40
"""Maximum length of a run's name in a legend or a heading, in characters."""


def differing(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Returns each run's settings that differ: the method's settings between runs of the same
    method, all others between all runs. Their names are as short as on the command line."""
    differences = []
    for run in runs:
        differ = {}
        for key, value in run.settings.items():
            comparable = [other for other in runs if _comparable(key, run, other)]
            # an ε or σ that only one of two private runs sets is a difference, too
            unset = None if key.startswith("privacy.") else value
            if key not in QUIET and any(o.settings.get(key, unset) != value for o in comparable):
                differ[key.removeprefix("method.").removeprefix("run.")] = value
        differences.append(differ)
    return differences


def _comparable(key: str, run: Run, other: Run) -> bool:
    if key.startswith("method."):
        return _method(other) == _method(run)
    return other.private == run.private or not key.startswith("privacy.")


def labels(runs: Sequence[Run]) -> list[str]:
    """Returns a short name for each run, for legends and headings.

    It consists of the method, "private" if other runs are not, and the fewest differing settings
    that distinguish the runs; "…" replaces the rest. If a name is longer than `MAX_LABEL`, only
    methods are used. Names that coincide are numbered.
    """
    mixed = len({run.private for run in runs}) > 1
    texts = [_method(run) + (" private" if mixed and run.private else "") for run in runs]
    rest = differing(runs)
    while len(set(texts)) < len(texts):
        keys = dict.fromkeys(key for settings in rest for key in settings)
        options = [[_with(key, *pair) for pair in zip(texts, rest, strict=True)] for key in keys]
        best = max(options, key=lambda names: len(set(names)), default=texts)
        if len(set(best)) == len(set(texts)):
            break
        used = list(keys)[options.index(best)]
        rest = [
            {key: value for key, value in remaining.items() if key != used} for remaining in rest
        ]
        texts = best
    names = [
        f"{word} …" if remaining else word for word, remaining in zip(texts, rest, strict=True)
    ]
    if max(map(len, names)) > MAX_LABEL:
        names = [_method(run) for run in runs]
    return [
        f"{name} #{number}" if names.count(name) > 1 else name
        for number, name in enumerate(names, start=1)
    ]


def _with(key: str, word: str, settings: Mapping[str, Any]) -> str:
    return f"{word} {key}={settings[key]}" if key in settings else word


def by_seed(runs: Sequence[Run]) -> list[list[Run]]:
    """Returns the runs in groups that differ only in seeds, in the order of each group's first
    run."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        same = {key: value for key, value in run.settings.items() if key not in (*SEEDS, *QUIET)}
        groups.setdefault(repr((_method(run), sorted(same.items()))), []).append(run)
    return list(groups.values())


def _method(run: Run) -> str:
    return str(run.summary.get("method"))
