"""How long a client's round of FedDM takes at the paper's size, with a new network in every step and
with M networks a round (`networks_per_round`), in one run.

    python benchmarks/networks_time.py [--quick] [--json] [--device cuda] [--repeats 3]

A client of MNIST's tenth: 6,000 images of 10 classes, ConvNet-128, ipc 10, batch 256, bf16 real
passes, compiled. Timed are a few steps of the literal loop; and M = 1 with one step and with five,
of which the difference is four steps that have their means, and the rest is a network's means. A
round of T = 1000 steps is then T literal steps, or M means and T steps. Random images: only time is
measured; the server's training is not in it.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from fedsynth.cli.memory import keep_large_allocations
from fedsynth.data.registry import dataset_spec
from library.cases import Case
from library.machine import alternating, arguments, machine, saver

OF_CLASS = 600
STEPS = 1000
NETWORKS = (20, 50)
FEW, MORE = 1, 5


def measure(options: argparse.Namespace) -> dict[str, Any]:
    device = torch.device(options.device)
    width, of_class = (8, 20) if options.quick else (128, OF_CLASS)
    cases = {
        name: Case(
            dataset_spec("mnist"), width, 1, steps, device, of_class=of_class, networks=networks
        )
        for name, steps, networks in (
            ("literal", FEW, 0),
            ("one step", FEW, 1),
            ("more steps", MORE, 1),
        )
    }
    runs: dict[str, Callable[[], object]] = {
        name: partial(case.engine, torch.bfloat16, compiled=options.compile)
        for name, case in cases.items()
    }
    times = alternating(runs, 1 if options.quick else options.repeats, device)
    medians = {name: statistics.median(values) for name, values in times.items()}
    step = (medians["more steps"] - medians["one step"]) / (MORE - FEW)
    parts = {
        "literal step": medians["literal"] / FEW,
        "a network's means": medians["one step"] - FEW * step,
        "step with means": step,
    }
    rounds = {"literal": STEPS * parts["literal step"]}
    for networks in NETWORKS:
        made = networks * parts["a network's means"]
        rounds[f"M = {networks}"] = made + STEPS * parts["step with means"]
    ratios = {name: rounds["literal"] / value for name, value in rounds.items()}
    return {
        "case": "a client's round, MNIST, ConvNet-128",
        "seconds": parts,
        "seconds a round": rounds,
        "ratio": ratios,
        **machine(),
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument(
        "--no-compile", dest="compile", action="store_false", help="without torch.compile"
    )
    parser.set_defaults(repeats=3)
    options = parser.parse_args()
    keep_large_allocations()
    saver("networks_time", options)(measure(options))


if __name__ == "__main__":
    main()
