"""CPU seconds of fedsynth compared with the algorithms of other libraries.

    python benchmarks/peers.py [--quick] [--repeats N] [--only dp-sgd]

A step of DP-SGD is compared with Opacus (per-example gradients by hooks, and ghost clipping), and a
round of FedAvg with many small clients is compared with a plain loop. The runs of a case alternate.
Seconds are CPU seconds of one thread, which other processes on the machine change little. Each case
is measured in a separate process, and the memory of DP-SGD in a separate child process.
`condense.py` compares FedDM's step with a plain loop, and `commands.py` measures commands.
"""

from __future__ import annotations

import argparse
import copy
import os
import re
import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from torch import Tensor, nn

from fedsynth.cli.application import keep_large_allocations
from fedsynth.data.registry import dataset_spec
from fedsynth.models.registry import ModelSettings, build_model, parameter_count
from fedsynth.privacy.dpsgd import DpSgdSettings, dp_sgd
from fedsynth.privacy.ledger import Ledger
from fedsynth.privacy.mechanisms import BudgetEnforcer, GaussianSumMechanism
from fedsynth.privacy.randomness import SecretGenerator
from fedsynth.privacy.releases import Release
from fedsynth.training.sgd import MomentumSgd
from library.client_rounds import rounds
from library.machine import run_cases, timing_options

CLIP = 1.0
LR = 0.01


class Step(NamedTuple):
    """A step of DP-SGD: a model, the shape of a data set, the batch size, and steps of a run."""

    model: ModelSettings
    dataset: str
    batch: int
    steps: int = 3


CASES: dict[str, Step | int] = {
    "dp-sgd ConvNet-128 b64": Step(ModelSettings("convnet", width=128), "mnist", 64),
    "dp-sgd ConvNet-128 b256": Step(ModelSettings("convnet", width=128), "mnist", 256),
    "dp-sgd CNN1 b256": Step(ModelSettings("cnn1", norm="group"), "cifar10", 256),
    "dp-sgd LeNet-5 b64": Step(ModelSettings("lenet5"), "mnist", 64, 20),
    "dp-sgd linear b64": Step(ModelSettings("linear"), "mnist", 64, 20),
    **{f"{clients} clients": clients for clients in (10, 100, 1000)},
}


def ours(model: nn.Module, x: Tensor, y: Tensor, steps: int) -> None:
    """Trains by fedsynth's DP-SGD, with every record in each step."""
    parameters = parameter_count(model)
    release = Release(
        0, "model", "dp-sgd", "gradient", 1.0, CLIP, 1.0, "full", steps, dimension=parameters
    )
    budget = BudgetEnforcer(Ledger("0"), 1e-5, None)
    series = GaussianSumMechanism(release, 1, budget, SecretGenerator())
    settings = DpSgdSettings(MomentumSgd(LR), len(x))
    dp_sgd(model, lambda indices: x[indices], y, series, settings)


def opacus_hooks(model: nn.Module, x: Tensor, y: Tensor, steps: int) -> None:
    """Trains by Opacus with per-example gradients."""
    wrapped = GradSampleModule(model, loss_reduction="sum")
    optimizer = DPOptimizer(
        torch.optim.SGD(model.parameters(), LR),
        noise_multiplier=1.0,
        max_grad_norm=CLIP,
        expected_batch_size=len(x),
    )
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(wrapped(x), y, reduction="sum").backward()
        optimizer.step()
    wrapped.to_standard_module()


def opacus_ghost(model: nn.Module, x: Tensor, y: Tensor, steps: int) -> None:
    """Trains by Opacus with ghost clipping."""
    wrapped = GradSampleModuleFastGradientClipping(model, max_grad_norm=CLIP)
    optimizer = DPOptimizerFastGradientClipping(
        torch.optim.SGD(model.parameters(), LR),
        noise_multiplier=1.0,
        max_grad_norm=CLIP,
        expected_batch_size=len(x),
    )
    criterion = DPLossFastGradientClipping(wrapped, optimizer, nn.CrossEntropyLoss())
    for _ in range(steps):
        optimizer.zero_grad()
        criterion(wrapped(x), y).backward()
        optimizer.step()
    wrapped.to_standard_module()


def peak_megabytes(run: Callable[[], object]) -> int:
    """Returns by how many MB a run raises the memory of a new process at its peak."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        before = _peak_kilobytes()
        run()
        os.write(writer, str((_peak_kilobytes() - before) // 1024).encode())
        os._exit(0)
    os.waitpid(child, 0)
    return int(os.read(reader, 20))


def _peak_kilobytes() -> int:
    """Returns the peak memory of the process since the last call."""
    [line] = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    return int(line)


def cpu_seconds(runs: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Returns the median CPU seconds of each run. The first of the turns is left out."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats + 1):
        for name, run in runs.items():
            started = time.process_time()
            run()
            times[name].append(time.process_time() - started)
    return {name: statistics.median(values[1:]) for name, values in times.items()}


def measure(case: Step | int, options: argparse.Namespace) -> dict[str, Any]:
    """Returns the row of a step of DP-SGD, or of a round with a number of clients."""
    warnings.filterwarnings("ignore", message="Full backward hook is firing")  # Opacus' hooks
    torch.set_num_threads(1)
    keep_large_allocations()
    if isinstance(case, Step):
        return measure_step(case, options)
    times = cpu_seconds(rounds(case), 1 if options.quick else options.repeats)
    return {
        "milliseconds": {name: 1000 * value for name, value in times.items()},
        "ratio": {name: times["fedsynth"] / value for name, value in times.items()},
    }


def measure_step(step: Step, options: argparse.Namespace) -> dict[str, Any]:
    """Returns the milliseconds and memory of a step, and the ratio to the faster one of Opacus."""
    spec = dataset_spec(step.dataset)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(step.batch, *spec.image_shape, generator=generator)
    y = torch.arange(step.batch) % spec.classes
    network = build_model(step.model, spec.image_shape, spec.classes, 0)
    steps = 1 if options.quick else step.steps

    def training(train: Callable[..., None]) -> Callable[[], None]:
        return lambda: train(copy.deepcopy(network).train(), x, y, steps)

    peers = {"opacus hooks": opacus_hooks, "opacus ghost": opacus_ghost}
    runs = {"fedsynth": training(ours), **{name: training(run) for name, run in peers.items()}}
    memory = {name: peak_megabytes(run) for name, run in runs.items()}
    times = cpu_seconds(runs, 1 if options.quick else options.repeats)
    faster = min(times[name] for name in peers)
    milliseconds = {name: round(1000 * value / steps, 2) for name, value in times.items()}
    return {
        "milliseconds": milliseconds,
        "megabytes": memory,
        "ratio to the faster": round(times["fedsynth"] / faster, 2),
    }


def main() -> None:
    options = timing_options(__doc__).parse_args()
    run_cases("peers", options, CASES, measure, separate_processes=True)


if __name__ == "__main__":
    main()
