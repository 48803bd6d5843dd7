"""Condensation speed beside a straightforward implementation (benchmarks/reference.py), timed alternately in one run.

    python benchmarks/condense.py [--quick] [--json] [--device cuda] [--cases mnist cifar10] [--repeats 5]

At the paper's shape: 10 classes, 256 real and 10 synthetic images a class, ConvNet-128, 1×28×28 and 3×32×32. For each case: seconds a
step of the reference and of the engine in fp32 and with bf16 real passes, of the `residual` step and of the `gradient` step against a
loop over examples; medians over alternating repeats; images a second; the ratio; and the floor: operations over the machine's measured
matrix-product peak. Random images: only time is measured. Results are appended to benchmarks/results/condense.jsonl.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import machine
from reference import client_step
from torch import Tensor

from fedsynth.core.client import OpenClients, PrivateClients
from fedsynth.core.method import RoundContext, ServerState
from fedsynth.data.images import ImageData, from_arrays
from fedsynth.data.registry import DatasetSpec, dataset_spec
from fedsynth.methods.feddm import FedDM
from fedsynth.models.convnet import ConvNet
from fedsynth.models.registry import ModelSettings, build_model
from fedsynth.privacy.ledger import Guard, Ledger
from fedsynth.privacy.randomness import SecretGenerator
from fedsynth.privacy.settings import PrivacySettings

IPC, BATCH = 10, 256


def seconds(run: Callable[[], object], device: torch.device) -> float:
    """One timed call, device work included."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def peak_flops(dtype: torch.dtype, device: torch.device) -> float:
    """Floating-point operations a second of a large square matrix product: the best of ten."""
    n = 8192 if device.type == "cuda" else 2048
    a = torch.randn(n, n, device=device).to(dtype)
    return 2 * n**3 / min(seconds(lambda: a @ a, device) for _ in range(10))


def forward_flops(network: ConvNet, shape: tuple[int, int, int]) -> float:
    """Multiply-adds × 2 of one image's forward pass, from the layers' own output sizes."""
    total = 0.0

    def count(layer: Any, inputs: Any, output: Tensor) -> None:
        nonlocal total
        total += 2 * output[0].numel() * layer.weight[0].numel()

    layers = [m for m in network.modules() if isinstance(m, torch.nn.Conv2d | torch.nn.Linear)]
    hooks = [layer.register_forward_hook(count) for layer in layers]
    with torch.no_grad():
        network(torch.zeros(1, *shape, device=next(network.parameters()).device))
    for hook in hooks:
        hook.remove()
    return total


class Case:
    """One shape: data, model and the steps to time; every step is a whole client step of `steps` iterations."""

    def __init__(self, spec: DatasetSpec, width: int, clients: int, steps: int, device: torch.device) -> None:
        rng, per_client = np.random.default_rng(0), spec.classes * (BATCH + 44)  # more than a batch, as in real runs
        n = clients * per_client
        images = rng.integers(0, 256, (n, *spec.image_shape)).astype(np.uint8)
        self.data: ImageData = from_arrays(images, np.arange(n) % spec.classes, spec).to(device)
        self.parts = list(torch.arange(n).split(per_client))
        self.spec, self.steps, self.device = spec, steps, device
        model = build_model(ModelSettings(width=width), spec.image_shape, spec.classes, 0).to(device)
        self.context = RoundContext(1, 0, device, spec, model, nominal_size=per_client)
        self.method = FedDM(ipc=IPC, iterations=steps, batch=BATCH)

    def engine(self, precision: torch.dtype) -> None:
        """All clients in one group."""
        self._step(OpenClients(range(len(self.parts)), self.data, self.parts), replace(self.context, precision=precision))

    def private(self, mechanism: str, method: FedDM | None = None) -> None:
        """The private step of the same expected batch."""
        privacy = PrivacySettings(noise_multiplier=1.0, mechanism=mechanism)
        guards = [Guard(Ledger(str(k)), 1e-5, None) for k in range(len(self.parts))]
        secrets = [SecretGenerator() for _ in self.parts]
        clients = PrivateClients(range(len(self.parts)), self.data, self.parts, guards, secrets)
        self._step(clients, replace(self.context, privacy=privacy), method)

    def _step(self, clients: Any, context: RoundContext, method: FedDM | None = None) -> None:
        method = method or self.method
        message = method.broadcast(ServerState(context.architecture.state_dict()), context)
        method.client_step(message, clients, [{}] * len(self.parts), context)

    def reference(self) -> None:
        """One client after the other."""
        everything = OpenClients(range(len(self.parts)), self.data, self.parts)
        generator = torch.Generator(self.device).manual_seed(0)
        for position in range(len(self.parts)):
            classes = [everything.images(everything.examples(position, c)) for c in range(self.spec.classes)]
            client_step(
                self.context.architecture, classes, [x[:IPC] for x in classes], steps=self.steps, batch=BATCH, learning_rate=1.0, radius=5.0,
                generator=generator,
            )  # fmt: skip


def measure(name: str, clients: int, options: argparse.Namespace) -> dict[str, Any]:
    """Medians over alternating repeats, per step."""
    device = torch.device(options.device)
    width, steps = (8, 1) if options.quick else (128, options.steps)
    case = Case(dataset_spec(name), width, clients, steps, device)
    runs: dict[str, Callable[[], object]] = {
        "reference": case.reference,
        "engine fp32": lambda: case.engine(torch.float32),
        "engine bf16": lambda: case.engine(torch.bfloat16),
        "residual": lambda: case.private("residual"),
    }
    for run in runs.values():
        run()  # warm-up
    times: dict[str, list[float]] = {key: [] for key in runs}
    for _ in range(1 if options.quick else options.repeats):
        for key, run in runs.items():
            times[key].append(seconds(run, device) / steps)
    medians = {key: statistics.median(values) for key, values in times.items()}
    network: Any = case.context.architecture
    real, synthetic = clients * case.spec.classes * BATCH, clients * case.spec.classes * IPC
    flops = forward_flops(network, case.spec.image_shape)
    peaks = {"fp32": peak_flops(torch.float32, device), "bf16": peak_flops(torch.bfloat16, device)}
    floors = {key: real * flops / peak + 2 * synthetic * flops / peaks["fp32"] for key, peak in peaks.items()}
    return {
        "case": name,
        "clients": clients,
        "seconds per step": medians,
        "images per second": {key: real / value for key, value in medians.items()},
        "ratio to reference": {key: medians["reference"] / value for key, value in medians.items()},
        "residual over engine fp32": medians["residual"] / medians["engine fp32"],
        "floor": floors,
        "share of the floor": {"fp32": floors["fp32"] / medians["engine fp32"], "bf16": floors["bf16"] / medians["engine bf16"]},
        "matrix peak GFLOP/s": {key: peak / 1e9 for key, peak in peaks.items()},
        "peak memory GB": peak_memory(device),
        **machine(),
    }


def measure_gradient(options: argparse.Namespace) -> dict[str, Any]:
    """The `gradient` mechanism's rows for one client, against a loop over examples with autograd."""
    from fedsynth.synthesizer.condensation import NetworkFeatures
    from fedsynth.synthesizer.matching import per_example_gradients, synthetic_means

    device = torch.device(options.device)
    spec, width, examples = dataset_spec("mnist"), 8 if options.quick else 128, 20 if options.quick else 100
    network = build_model(ModelSettings(width=width), spec.image_shape, spec.classes, 0).to(device).requires_grad_(False)
    features = NetworkFeatures(network, 1.0, None)
    S, x = torch.randn(10, IPC, *spec.image_shape, device=device), torch.randn(examples, *spec.image_shape, device=device)
    segment = torch.arange(examples, device=device) % 10

    def loop() -> None:
        for i in range(examples):
            leaf = S[segment[i] : segment[i] + 1].clone().requires_grad_()
            residual = synthetic_means(features, leaf) - features.real(x[i : i + 1], segment[i : i + 1])
            torch.autograd.grad(residual.square().sum(), leaf)

    runs = {"loop": loop, "engine": lambda: per_example_gradients(features, S, x, segment)}
    times: dict[str, list[float]] = {key: [] for key in runs}
    for repeat in range(2 if options.quick else options.repeats + 1):
        for key, run in runs.items():
            value = seconds(run, device)
            if repeat:
                times[key].append(value)
    medians = {key: statistics.median(values) for key, values in times.items()}
    return {
        "case": "gradient rows, mnist",
        "examples": examples,
        "seconds": medians,
        "ratio": medians["loop"] / medians["engine"],
        **machine(),
    }


def peak_memory(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a narrow network and one repeat, to see that it runs")
    parser.add_argument("--json", action="store_true", help="print results as JSON lines")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--cases", nargs="+", default=["mnist", "cifar10"])
    parser.add_argument("--clients", type=int, nargs="+", default=[1])
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    path = Path(__file__).parent / "results" / f"condense{'_quick' if options.quick else ''}.jsonl"
    for make in (
        *((lambda n=n, k=k: measure(n, k, options)) for n in options.cases for k in options.clients),
        lambda: measure_gradient(options),
    ):
        row = make()
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row) if options.json else json.dumps(row, indent=2), flush=True)


if __name__ == "__main__":
    main()
