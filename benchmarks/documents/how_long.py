"""Durations of runs: docs/how-long.md."""

from __future__ import annotations

import statistics

from library.pages import markdown, sentence, table
from library.rows import by_seed, case, lines

# Of `fedsynth synthesize`'s own settings: two rounds of 20, and of 100.
RELEASES, EPOCHS = 40, 200


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


@table("how-long-owner")
def _owner() -> str:
    body = []
    for row in lines("how_long"):
        if row["images"] < 2000:  # seconds, as with 2,000
            continue
        release, epoch = row["seconds_a_release"], row["seconds_an_epoch"]
        sizes = [f"{row[size]:,}" for size in ("images", "side", "classes", "width")]
        total = _duration(RELEASES * release + EPOCHS * epoch)
        body.append([*sizes, total])
    return markdown(["images", "pixels a side", "classes", "width", "time"], body)


@sentence("docs/how-long.md", "five rounds take {:.0f} minutes with FedDM")
def _feddm() -> list[float]:
    return [_minutes("precision", "FedDM fp32")]


@sentence("docs/how-long.md", "and {:.0f} with FedAvg")
def _fedavg() -> list[float]:
    return [_minutes("fashion_table", "fedavg")]


def _minutes(file: str, key: str) -> float:
    """Returns the mean duration of three seeds' runs."""
    return statistics.mean(row["seconds"] for row in by_seed(file, key, range(3)).values()) / 60


@sentence(
    "docs/how-long.md",
    "takes {:.2f} s, and 20 rounds of 1,000 steps for ten clients {:.1f} days",
)
def _paper() -> list[float]:
    """A step at the size of FedDM's paper, and its whole run."""
    seconds = case("condense", "cifar10")["seconds per step"]["engine fp32"]
    return [seconds, seconds * 20 * 1000 * 10 / 86400]
