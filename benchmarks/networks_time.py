"""How long a client's round of FedDM takes at the paper's size, with a new network in every step
and with M networks a round (`networks_per_round`), in one run.

    python benchmarks/networks_time.py [--quick] [--json] [--device cuda] [--repeats 3]

A client of MNIST's tenth: 6,000 images of 10 classes, ConvNet-128, ipc 10, batch 256, bf16 real
passes, compiled. Timed are two lengths of the literal loop, and two of M = 1, whose first step
makes the means; the longer less the shorter are steps alone. What a network's means take is M = 1
with one step, less that step and less the set-up, which is one literal step's call less the step. A
round of T = 1000 steps is then T literal steps, or M means and T steps. Random images: only time is
measured; the server's training is not in it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from fedsynth.cli.process import keep_large_allocations
from fedsynth.data.registry import dataset_spec
from library.cases import Case
from library.machine import arguments, machine, medians, saver

OF_CLASS = 600
STEPS = 1000
NETWORKS = (20, 50)
LENGTHS = {"literal": (0, 5), "means": (1, 21)}
"""(M of networks_per_round, steps of the longer loop)"""


def measure(options: argparse.Namespace) -> dict[str, Any]:
    device = torch.device(options.device)
    width, of_class = (8, 20) if options.quick else (128, OF_CLASS)
    runs: dict[str, Callable[[], object]] = {}
    for name, (networks, longer) in LENGTHS.items():
        for steps in (1, longer):
            case = Case(
                dataset_spec("mnist"), width, 1, steps, device, of_class=of_class, networks=networks
            )
            run = partial(case.engine, torch.bfloat16, compiled=options.compile)
            runs[f"{name}, {steps} steps"] = run
    times = medians(runs, options)
    step = {
        name: (times[f"{name}, {longer} steps"] - times[f"{name}, 1 steps"]) / (longer - 1)
        for name, (_, longer) in LENGTHS.items()
    }
    set_up = times["literal, 1 steps"] - step["literal"]
    means = times["means, 1 steps"] - set_up - step["means"]
    rounds = {"literal": STEPS * step["literal"]}
    for networks in NETWORKS:
        rounds[f"M = {networks}"] = networks * means + STEPS * step["means"]
    return {
        "case": f"a client's round, MNIST, ConvNet-{width}",
        "seconds": {
            "literal step": step["literal"],
            "step with means": step["means"],
            "a network's means": means,
            "set-up": set_up,
        },
        "seconds a round": rounds,
        "ratio": {name: rounds["literal"] / value for name, value in rounds.items()},
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
