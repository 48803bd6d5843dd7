"""In what runs differ, and what each is called beside the others."""

from __future__ import annotations

from collections.abc import Sequence
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
    """What each run is called: its method, whether it is private where others are not, and the
    settings that differ; where that is the same of two, also the folder's name."""
    mixed = len({run.private for run in runs}) > 1
    words = []
    for run, settings in zip(runs, differing(runs), strict=True):
        private = ["private"] if mixed and run.private else []
        given = [f"{key}={value}" for key, value in settings.items()]
        words.append(" ".join([_method(run), *private, *given]))
    return [
        f"{word} ({run.name})" if words.count(word) > 1 else word
        for run, word in zip(runs, words, strict=True)
    ]


def by_seed(runs: Sequence[Run]) -> list[list[Run]]:
    """Runs that differ in seeds alone, together, in the order of their first ones."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        same = {key: value for key, value in run.settings.items() if key not in (*SEEDS, *QUIET)}
        groups.setdefault(repr((_method(run), sorted(same.items()))), []).append(run)
    return list(groups.values())


def _method(run: Run) -> str:
    return str(run.summary.get("method"))
