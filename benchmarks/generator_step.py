"""A step of a generator and its teacher's answer (FedKF's T2, width 64, batch 64), with doubling
and convolution as one operation, and as the two layers, alternately in one run.

    python benchmarks/generator_step.py [--quick] [--json] [--device cuda] [--repeats 5]

LeNet-5 for letters and ResNet-8 for CIFAR-10, the paper's. Untrained teachers: only time is
measured.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fedsynth.data.registry import dataset_spec
from fedsynth.models.registry import ModelSettings, build_model
from fedsynth.seeding import torch_generator
from fedsynth.synthesizer.generation.generators import DoublingConv2d, Generator, make_generator
from fedsynth.synthesizer.generation.one_teacher import Distillation
from library.machine import arguments, medians, run_cases

CASES = {"emnist-letters": "lenet5", "cifar10": "resnet8"}


def with_two_layers(generator: Generator) -> Generator:
    """The same network with the two layers that `DoublingConv2d` is, and their weights."""
    for place, layer in enumerate(generator.body):
        if isinstance(layer, DoublingConv2d):
            conv = nn.Conv2d(layer.in_channels, layer.out_channels, 3, padding=1)
            conv.load_state_dict(layer.state_dict())
            generator.body[place] = nn.Sequential(nn.Upsample(scale_factor=2), conv)
    return generator


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    device = torch.device(options.device)
    spec = dataset_spec(name)
    teacher = build_model(ModelSettings(CASES[name]), spec.image_shape, spec.classes, 0).to(device)
    width = 8 if options.quick else 64
    one, two = (make_generator(spec, 0, width=width) for _ in range(2))
    runs: dict[str, Callable[[], object]] = {
        kind: Distillation(
            teacher,
            generator.to(device),
            torch_generator(0, "benchmark", device=device),
            batch=64,
            learning_rate=1e-3,
            one_hot_weight=0.1,
            activation_weight=0.1,
        ).step
        for kind, generator in (("two layers", with_two_layers(two)), ("one operation", one))
    }
    times = medians(runs, options)
    ratio = times["two layers"] / times["one operation"]
    return {"case": name, "seconds per step": times, "ratio": ratio}


def main() -> None:
    run_cases("generator_step", arguments(__doc__), CASES, measure)


if __name__ == "__main__":
    main()
