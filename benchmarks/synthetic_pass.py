"""What `--compile` saves of condensation's synthetic images: a pass forward with the
vector-Jacobian product back to the images, eager and compiled, alternately in one run.

    python benchmarks/synthetic_pass.py [--quick] [--json] [--repeats 5]

MNIST's shape, instance norm, fp32, ipc 10, as many images as a whole pass of
`fedsynth.synthesizer.condensation.loop` has (on a CPU 10 with the papers' ConvNet-128, 120 with a
ConvNet-16). Random images: only time is measured. Compiling is in the first turn, which is thrown
away.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch

from fedsynth.cli.process import keep_large_allocations
from fedsynth.data.registry import dataset_spec
from fedsynth.models.registry import ModelSettings, build_model
from fedsynth.synthesizer.condensation.loop import NetworkFeatures
from fedsynth.synthesizer.condensation.matchers import segments_at_once
from library.machine import alternating, arguments, machine, saver

IPC = 10
WIDTHS = (128, 16)
STEPS = 10
DIGITS = dataset_spec("mnist")


def passes(
    width: int, compiled: bool, options: argparse.Namespace
) -> tuple[Callable[[], object], int]:
    """STEPS passes, and the images of them all."""
    device = torch.device(options.device)
    network = build_model(ModelSettings(width=width), DIGITS.image_shape, DIGITS.classes, 0)
    network = network.to(device).requires_grad_(False)
    features = NetworkFeatures(network, 1.0, None, compiled=compiled, ipc=IPC)
    one = torch.randn(1, *DIGITS.image_shape, device=device)
    images = IPC * segments_at_once(features, one, IPC)
    x = torch.randn(images, *DIGITS.image_shape, device=device)
    segments = torch.zeros(images, dtype=torch.int64, device=device)
    embedding: Any = network.embedding_size
    vectors = torch.randn(1, images, embedding + DIGITS.classes, device=device)

    def run() -> None:
        for _ in range(STEPS):
            _, pull = features.vjp(x, segments)
            pull(vectors)

    return run, STEPS * images


def measure(width: int, options: argparse.Namespace) -> dict[str, Any]:
    eager, images = passes(width, False, options)
    compiled, _ = passes(width, True, options)
    runs = {"eager": eager, "compiled": compiled}
    times = alternating(runs, 1 if options.quick else options.repeats, torch.device(options.device))
    medians = {key: 1000 * statistics.median(values) / images for key, values in times.items()}
    ratio = medians["eager"] / medians["compiled"]
    return {
        "case": f"ConvNet-{width}",
        "milliseconds an image": medians,
        "ratio": ratio,
    } | machine()


def main() -> None:
    options = arguments(__doc__).parse_args()
    keep_large_allocations()
    save = saver("synthetic_pass", options)
    for width in (8,) if options.quick else WIDTHS:
        save(measure(width, options))


if __name__ == "__main__":
    main()
