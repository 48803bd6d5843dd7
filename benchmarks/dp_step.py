"""What privacy costs: FedDM's private steps and DP-SGD, beside the non-private step and loops over
examples (library/reference.py).

    python benchmarks/dp_step.py [--quick] [--device cuda]

MNIST's shape, one client, ConvNet-128. `residual` against the engine's non-private step at the
paper's batch of 256 a class; the `gradient` step, all of it (sampling, clipping in float64, secret
noise), against the loop; DP-SGD at an expected batch of 256 against its loop. Medians over
alternating repeats; charging the ledger is part of the private steps.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from fedsynth.cli.process import keep_large_allocations
from fedsynth.core.client import OpenClients
from fedsynth.data.registry import dataset_spec
from fedsynth.methods.fedavg import FedAvg
from fedsynth.models.registry import parameter_count
from fedsynth.privacy.dpsgd import DpSgdSettings, dp_sgd
from fedsynth.privacy.guard import Guard
from fedsynth.privacy.ledger import Ledger
from fedsynth.privacy.mechanisms import GaussianSums
from fedsynth.privacy.randomness import SecretGenerator
from fedsynth.privacy.releases import Release
from fedsynth.training.optimisers import MomentumSgd
from library.cases import Case
from library.machine import medians, run_cases, timing_options
from library.reference import dp_sgd_step, gradient_step

EXAMPLES = 64  # of a class, in the comparison with loops


def feddm(options: argparse.Namespace, batch: int) -> Case:
    """Returns one client of MNIST's shape."""
    width = 8 if options.quick else 128
    case = Case(dataset_spec("mnist"), width, 1, 1, torch.device(options.device))
    case.method = replace(case.method, batch=batch)
    return case


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
    batch = 4 if options.quick else EXAMPLES
    case = feddm(options, batch)
    data = OpenClients([0], case.data, case.parts)
    classes = [data.images(data.examples(0, c)[:batch]) for c in range(case.spec.classes)]
    network = copy.deepcopy(case.context.architecture).requires_grad_(False)
    runs: dict[str, Callable[[], object]] = {
        "loop": lambda: gradient_step(network, classes, [x[:10] for x in classes], 1.0, 1.0),
        "gradient": lambda: case.private("gradient"),
        "gradient bf16": lambda: case.private("gradient", torch.bfloat16),
    }
    times = medians(runs, options)
    ratios = {key: times["loop"] / value for key, value in times.items()}
    examples = batch * case.spec.classes
    return {"examples": examples, "seconds": times, "ratio to the loop": ratios}


def local_training(options: argparse.Namespace) -> dict[str, Any]:
    """Compares a step of DP-SGD with a loop over examples."""
    case = feddm(options, 256)
    batch = 16 if options.quick else 256
    model = case.context.architecture
    rate = batch / len(case.data.labels)
    data = OpenClients([0], case.data, case.parts)
    parameters = parameter_count(model)
    release = Release(1, "model", "dp-sgd", "x", 1.0, 1.0, rate, "poisson", 1, parameters)
    settings = DpSgdSettings(MomentumSgd(FedAvg().lr), batch)
    x, y = data.images(torch.arange(batch)), case.data.labels[:batch]

    def ours() -> None:
        series = GaussianSums(release, 1, Guard(Ledger("0"), 1e-5, None), SecretGenerator())
        dp_sgd(copy.deepcopy(model), data.images, case.data.labels, series, 1, settings)

    runs: dict[str, Callable[[], object]] = {
        "loop": lambda: dp_sgd_step(copy.deepcopy(model), x, y, 1.0, 1.0, 0.01),
        "dp-sgd": ours,
    }
    times = medians(runs, options)
    ratio = times["loop"] / times["dp-sgd"]
    return {"examples": batch, "seconds": times, "ratio to the loop": ratio}


def main() -> None:
    keep_large_allocations()
    cases = {"residual": residual, "gradient": gradient, "dp-sgd": local_training}
    options = timing_options(__doc__).parse_args()
    run_cases("dp_step", options, cases, lambda case, given: case(given))


if __name__ == "__main__":
    main()
