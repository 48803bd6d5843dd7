"""Lists the differing settings and the results of several finished runs."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fedsynth.formatting import format_epsilon, printable
from fedsynth.results.finished import NONE, Run, auroc_text, percent, value_at

# Settings left out of comparisons, which do not affect a result or are shown elsewhere.
QUIET = (
    "run.method",
    "run.device",
    "data.data_root",
    "privacy.ledger",
    "report.responsible",
    "report.purpose",
    "report.sites",
)

SEEDS = ("run.seed", "partition.seed")
# Maximum length of a run's name in a legend or heading, in characters. A number after the name is
# not counted.
MAX_LABEL = 36


def differing(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Returns the settings that differ between runs, with each run's values.

    Method settings are compared only between runs of the same method, and privacy settings only
    between private runs. All other settings are compared between all runs, except those in `QUIET`.
    The keys are as short as on the command line.
    """
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
        return other.method == run.method
    return other.private == run.private or not key.startswith("privacy.")


def labels(runs: Sequence[Run]) -> list[str]:
    """Returns a short name for each run, for legends and headings.

    A name consists of the method, the word "private" if only some runs are private, and the
    differing settings. It is cut to `MAX_LABEL` characters. Equal names are numbered.
    """
    mixed = len({run.private for run in runs}) > 1
    names = []
    for run, settings in zip(runs, differing(runs), strict=True):
        parts = [run.method]
        if mixed and run.private:
            parts.append("private")
        parts += [f"{key}={value}" for key, value in settings.items()]
        text = printable(" ".join(parts))
        names.append(textwrap.shorten(text, MAX_LABEL, placeholder=" …"))
    counts = Counter(names)
    return [
        f"{name} #{number}" if counts[name] > 1 else name
        for number, name in enumerate(names, start=1)
    ]


def by_seed(runs: Sequence[Run]) -> list[list[Run]]:
    """Groups runs that differ only in their seeds. The groups are in the order of their first
    runs.
    """
    groups: dict[str, list[Run]] = {}
    for run in runs:
        same = {key: value for key, value in run.settings.items() if key not in (*SEEDS, *QUIET)}
        groups.setdefault(repr((run.method, sorted(same.items()))), []).append(run)
    return list(groups.values())


# The columns of the table of runs: the heading, the value's path in the summary, and a function
# that formats the value.
_COLUMNS: Mapping[str, tuple[str, Callable[[float], str]]] = {
    "accuracy": ("test_accuracy", percent),
    "Dice": ("test_dice", percent),
    "balanced": ("balanced_accuracy", percent),
    "AUROC": ("auroc", percent),
    "AMP": ("local.amp", percent),
    "WLP": ("local.wlp", percent),
    "agreement": ("generator.agreement", percent),
    "class entropy": ("generator.class_entropy_share", "{:.2f}".format),
    "ε": ("differential_privacy.epsilon", format_epsilon),
    "rounds": ("rounds", "{:.0f}".format),
    "MB up": ("upload_bytes", lambda count: f"{count / 1e6:.2f}"),
    "s": ("seconds", "{:.1f}".format),
}


def overview(runs: Sequence[Run]) -> list[list[str]]:
    """Returns a table of runs, with the headings in the first row.

    The first column is the method. Columns of `_COLUMNS` without any value are left out.
    """
    rows = [["method"], *([run.method] for run in runs)]
    for heading, (path, show) in _COLUMNS.items():
        values = [value_at(run.summary, path) for run in runs]
        if any(value is not None for value in values):
            cells = [NONE if value is None else show(value) for value in values]
            if path == "auroc":
                cells = [auroc_text(run.summary) for run in runs]
            for row, cell in zip(rows, [heading, *cells], strict=True):
                row.append(cell)
    return rows
