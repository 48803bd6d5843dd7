"""A batch's mean and variance for each channel with their gradient: batch norm's kernels
(`models/batch_statistics.py`) and autograd through `torch.var_mean`, alternately in one run.

    python benchmarks/batch_statistics.py [--quick] [--json] [--device cuda] [--repeats 5]

Channels-last feature maps of CNN1 on 128 images of MNIST's shape.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fedsynth.models.batch_statistics import batch_statistics
from library.machine import arguments, medians, run_cases

SHAPES = {"32×28×28": (128, 32, 28, 28), "64×14×14": (128, 64, 14, 14)}


def by_autograd(x: Tensor) -> tuple[Tensor, Tensor]:
    """The same by the reduction that PyTorch names for it."""
    variance, mean = torch.var_mean(x, dim=[0, 2, 3], unbiased=False)
    return mean, variance


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    n, *rest = SHAPES[name]
    x = torch.randn(8 if options.quick else n, *rest, device=options.device)
    x = x.contiguous(memory_format=torch.channels_last).requires_grad_()

    def run(function: Callable[[Tensor], tuple[Tensor, Tensor]]) -> None:
        mean, variance = function(x)
        torch.autograd.grad(mean.norm() + (variance - 0.5).norm(), x)

    runs: dict[str, Callable[[], object]] = {
        "var_mean": lambda: run(by_autograd),
        "batch norm": lambda: run(batch_statistics),
    }
    times = medians(runs, options)
    ratio = times["var_mean"] / times["batch norm"]
    return {"case": name, "seconds": times, "ratio": ratio}


def main() -> None:
    run_cases("batch_statistics", arguments(__doc__), SHAPES, measure)


if __name__ == "__main__":
    main()
