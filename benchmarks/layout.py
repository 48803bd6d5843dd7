"""A training step and a pass of networks with max-pools, with feature maps channels-last
(`models/layout.py`) and as PyTorch has them by itself, alternately in one run.

    python benchmarks/layout.py [--quick] [--json] [--repeats 5]

On a CPU; a GPU's are as they are. Random images of MNIST's shape, batch 128: only time is measured.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from fedsynth.models import small
from fedsynth.models.registry import ModelSettings, build_model
from library.machine import arguments, medians, run_cases

NETWORKS = ("lenet5", "cnn1", "cnn2")
SHAPE = (1, 28, 28)
CLASSES = 10
BATCH = 128


def train(network: nn.Module, x: Tensor, y: Tensor) -> None:
    """The gradient of a step."""
    network.train().zero_grad()
    nn.functional.cross_entropy(network(x), y).backward()


@torch.no_grad()
def evaluate(network: nn.Module, x: Tensor, y: Tensor) -> None:
    """A pass without graph."""
    network.eval()(x)


def as_torch_has_it(run: Callable[[], None]) -> Callable[[], None]:
    """The same without the order of `channels_last`."""

    def patched() -> None:
        with mock.patch.object(small, "channels_last", lambda x_NCHW: x_NCHW):
            run()

    return patched


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    network = build_model(ModelSettings(name), SHAPE, CLASSES, 0)
    x = torch.randn(8 if options.quick else BATCH, *SHAPE)
    y = torch.arange(len(x)) % CLASSES
    ratios = {}
    for what, function in (("train", train), ("evaluate", evaluate)):

        def run(function: Callable[..., None] = function) -> None:
            for _ in range(1 if options.quick else 5):
                function(network, x, y)

        runs: dict[str, Callable[[], object]] = {
            "plain": as_torch_has_it(run),
            "channels-last": run,
        }
        times = medians(runs, options)
        ratios[what] = times["plain"] / times["channels-last"]
    return {"case": name, "ratio": ratios}


def main() -> None:
    run_cases("layout", arguments(__doc__), NETWORKS, measure)


if __name__ == "__main__":
    main()
