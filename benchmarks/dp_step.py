"""Cost of privacy: FedDM's private steps compared with the step without privacy and with a loop
over examples (library/condensation.py).

    python benchmarks/dp_step.py [--quick] [--device cuda]

MNIST's shape, one client, ConvNet-128. `residual` against the engine's non-private step at the
paper's batch of 256 a class; the `gradient` step, all of it (sampling, clipping in float64, secret
noise), against the loop. Medians over alternating repeats; charging the ledger is part of the
private steps. The row of DP-SGD is that of `git show 04719c52:benchmarks/dp_step.py`.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from typing import Any

import torch

from fedsynth.cli.application import keep_large_allocations
from library.condensation import Case, gradient_step
from library.machine import medians, run_cases, timing_options


def feddm(options: argparse.Namespace, batch: int) -> Case:
    """Returns one client of MNIST's shape."""
    width = 8 if options.quick else 128
    return Case("mnist", width, 1, 1, batch, torch.device(options.device))


def residual(options: argparse.Namespace) -> dict[str, Any]:
    """Compares `residual` with the engine's step without privacy."""
    case = feddm(options, 16 if options.quick else 256)
    runs: dict[str, Callable[[], object]] = {
        "non-private": lambda: case.engine(torch.float32),
        "residual": lambda: case.private("residual"),
        "non-private bf16": lambda: case.engine(torch.bfloat16),
        "residual bf16": lambda: case.private("residual", torch.bfloat16),
    }
    times = medians(runs, options)
    ratios = {
        precision: times[f"residual{end}"] / times[f"non-private{end}"]
        for precision, end in (("fp32", ""), ("bf16", " bf16"))
    }
    return {"seconds": times, "residual over non-private": ratios}


def gradient(options: argparse.Namespace) -> dict[str, Any]:
    """Compares the `gradient` step with a loop over examples."""
    batch = 4 if options.quick else 64
    case = feddm(options, batch)
    classes = [images[:batch] for images in case.images(0)]
    network = copy.deepcopy(case.context.architecture).requires_grad_(False)
    runs: dict[str, Callable[[], object]] = {
        "loop": lambda: gradient_step(network, classes),
        "gradient": lambda: case.private("gradient"),
        "gradient bf16": lambda: case.private("gradient", torch.bfloat16),
    }
    times = medians(runs, options)
    ratios = {key: times["loop"] / value for key, value in times.items()}
    return {"examples": batch * len(classes), "seconds": times, "ratio to the loop": ratios}


if __name__ == "__main__":
    keep_large_allocations()
    cases = {"residual": residual, "gradient": gradient}
    run_cases("dp_step", timing_options(__doc__).parse_args(), cases, lambda case, args: case(args))
