"""What `--precision bf16` saves of plain training and of distillation without data: a step in fp32
and in bf16, alternately in one run.

    python benchmarks/mixed_precision.py [--quick] [--json] [--device cuda] [--repeats 5]

A client's step of CNN1 (batch 128), FedKF's generator step (width 64, batch 64, LeNet-5 as
teacher), DENSE's and FedHydra's (width 64, batch 128, five CNN1 with batch norm as teachers), and,
for ConvNets of several widths, a step of FedDM's server (batch 256) and a pass of 256 real images.
Images are random and teachers untrained: only time is measured. On a CPU without AVX512_BF16
(`lscpu`) bf16 saves nothing.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from fedsynth.data.registry import dataset_spec
from fedsynth.models.registry import ModelSettings, build_model
from fedsynth.seeding import torch_generator
from fedsynth.synthesizer.condensation.loop import NetworkFeatures
from fedsynth.synthesizer.generation.ensembles import average_of_logits
from fedsynth.synthesizer.generation.generators import make_generator
from fedsynth.synthesizer.generation.many_teachers import OneShotDistillation
from fedsynth.synthesizer.generation.one_teacher import Distillation
from fedsynth.training.optimisers import MomentumSgd
from fedsynth.training.sgd import SgdSettings, train_on
from library.machine import alternating, arguments, run_cases

STEPS = 10
WIDTHS = (16, 32, 64, 128)
DIGITS = dataset_spec("mnist")
LETTERS = dataset_spec("emnist-letters")


def network(name: str, seed: int, norm: str, device: torch.device) -> nn.Module:
    """An untrained one, for letters or digits."""
    spec = LETTERS if name == "lenet5" else DIGITS
    settings = ModelSettings(name, norm=norm)
    return build_model(settings, spec.image_shape, spec.classes, seed).to(device)


def client(precision: torch.dtype, options: argparse.Namespace) -> Callable[[], object]:
    """STEPS steps of a client's training."""
    model = network("cnn1", 0, "batch", torch.device(options.device))
    settings = SgdSettings(1, 8 if options.quick else 128, MomentumSgd(0.01))
    return training(model, settings, precision)


def convnet(width: int, options: argparse.Namespace) -> nn.Module:
    """An untrained one, for digits."""
    settings = ModelSettings(width=8 if options.quick else width)
    return build_model(settings, DIGITS.image_shape, DIGITS.classes, 0).to(options.device)


def server(width: int, precision: torch.dtype, options: argparse.Namespace) -> Callable[[], object]:
    """STEPS steps on the union of synthetic images."""
    batch = 8 if options.quick else 256
    settings = SgdSettings(1, batch, MomentumSgd(0.01, 0.9, 5e-4), radius=5.0)
    return training(convnet(width, options), settings, precision)


def real_pass(
    width: int, precision: torch.dtype, options: argparse.Namespace
) -> Callable[[], object]:
    """STEPS passes of real images."""
    features = NetworkFeatures(convnet(width, options), 1.0, None, precision)
    x = torch.randn(8 if options.quick else 256, *DIGITS.image_shape, device=options.device)
    segment = torch.zeros(len(x), dtype=torch.int64, device=options.device)
    return lambda: [features.real(x, segment) for _ in range(STEPS)]


def training(
    model: nn.Module, settings: SgdSettings, precision: torch.dtype
) -> Callable[[], object]:
    """STEPS steps."""
    device = next(model.parameters()).device
    x = torch.randn(STEPS * settings.batch, *DIGITS.image_shape, device=device)
    y = torch.arange(len(x), device=device) % DIGITS.classes
    order = torch_generator(0, "benchmark")
    return lambda: train_on(model, x.__getitem__, y, settings, order, precision=precision)


def one_teacher(precision: torch.dtype, options: argparse.Namespace) -> Callable[[], object]:
    """STEPS steps of FedKF's generator, its images and the teacher's answers."""
    device = torch.device(options.device)
    pair = Distillation(
        network("lenet5", 0, "", device),
        make_generator(LETTERS, 0, width=8 if options.quick else 64).to(device),
        torch_generator(0, "benchmark", device=device),
        batch=64,
        learning_rate=1e-3,
        one_hot_weight=0.1,
        activation_weight=0.1,
        precision=precision,
    )
    return lambda: [pair.step() for _ in range(STEPS)]


def five_teachers(precision: torch.dtype, options: argparse.Namespace) -> Callable[[], object]:
    """An epoch of STEPS generator steps, and as many of the student."""
    device = torch.device(options.device)
    *models, student = (network("cnn1", seed, "batch", device) for seed in range(6))
    width, batch = (8, 8) if options.quick else (64, 128)
    epoch = OneShotDistillation(epochs=1, generator_steps=STEPS, width=width, batch=batch)
    return lambda: epoch.fit(models, student, average_of_logits, DIGITS, 0, precision=precision)


CASES: dict[str, Callable[[torch.dtype, argparse.Namespace], Callable[[], object]]] = {
    "a client's step, CNN1": client,
    "a generator's step, one teacher": one_teacher,
    "a generator's and a student's step, five teachers": five_teachers,
    **{f"the server's step, ConvNet-{width}": partial(server, width) for width in WIDTHS},
    **{f"a pass of real images, ConvNet-{width}": partial(real_pass, width) for width in WIDTHS},
}


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    precisions = {"fp32": torch.float32, "bf16": torch.bfloat16}
    runs = {key: CASES[name](precision, options) for key, precision in precisions.items()}
    seconds = alternating(
        runs, 1 if options.quick else options.repeats, torch.device(options.device)
    )
    times = {key: statistics.median(values) / STEPS for key, values in seconds.items()}
    ratio = times["fp32"] / times["bf16"]
    return {"case": name, "seconds per step": times, "ratio": ratio}


def main() -> None:
    run_cases("mixed_precision", arguments(__doc__), CASES, measure)


if __name__ == "__main__":
    main()
