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
        release, epoch = row["seconds_a_release"], row["seconds_an_epoch"]
        sizes = [f"{row[size]:,}" for size in ("images", "side", "classes", "width")]
        total = _duration(RELEASES * release + EPOCHS * epoch)
        body.append([*sizes, f"{release:.2f} s", f"{1000 * epoch:.0f} ms", total])
    head = ["images", "pixels a side", "classes", "width", "per release", "per epoch", "total"]
    return markdown(head, body)


@table("how-long-federation")
def _federation() -> str:
    body = []
    for method, file, key in (
        ("FedDM", "precision", "FedDM fp32"),
        ("FedAvg", "fashion_table", "fedavg"),
    ):
        seconds = statistics.mean(row["seconds"] for row in by_seed(file, key, range(3)).values())
        body.append([method, "5", _duration(seconds)])
    return markdown(["Fashion-MNIST, 10 clients", "rounds", "time"], body)


@sentence(
    "docs/how-long.md",
    "takes {:.2f} s, and 20 rounds of 1,000 steps for ten clients {:.1f} days",
)
def _paper() -> list[float]:
    """A step at the size of FedDM's paper, and its whole run."""
    seconds = case("condense", "cifar10")["seconds per step"]["engine fp32"]
    return [seconds, seconds * 20 * 1000 * 10 / 86400]
