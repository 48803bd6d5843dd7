"""Condensation speed compared with a straightforward implementation (library/reference.py).

    python benchmarks/condense.py [--quick] [--device cuda] [--cases mnist cifar10]
        [--repeats 5]

At the paper's shape: 10 classes, 256 real and 10 synthetic images a class, ConvNet-128, 1×28×28 and
3×32×32; the engine in fp32 and with bf16 real passes, eager and compiled; medians over alternating
repeats; and the floor: operations over the machine's measured convolution peak. Then time and
peak memory by clients and classes, each in a separate process, with a narrower network. Random
images: only time is measured. `--keep-allocations` gives the reference, too, the allocator's
settings of `fedsynth train` (cli/application.py).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from fedsynth.cli.application import keep_large_allocations
from fedsynth.data.registry import dataset_spec
from fedsynth.federation.context import memory_bytes
from library.cases import BATCH, IPC, Case, forward_flops, peak_flops
from library.machine import medians, resident_bytes, run_cases, seconds, timing_options

Point = tuple[int, int, float | None]
"""Clients, classes, and the run's memory bound in GB."""
GROWTH: tuple[Point, ...] = (
    (1, 10, None),
    (10, 10, None),
    (100, 10, None),
    (1, 100, None),
    (10, 100, None),
    (100, 10, 0.5),
)


def measure(shape: tuple[str, int], options: argparse.Namespace) -> dict[str, Any]:
    """Returns medians over alternating repeats, for one step."""
    name, clients = shape
    device = torch.device(options.device)
    width, steps = (8, 1) if options.quick else (128, options.steps)
    case = Case(dataset_spec(name), width, clients, steps, device)
    runs: dict[str, Callable[[], object]] = {
        "reference": case.reference,
        "engine fp32": lambda: case.engine(torch.float32),
        "engine bf16": lambda: case.engine(torch.bfloat16),
        "engine fp32 compiled": lambda: case.engine(torch.float32, compiled=True),
        "engine bf16 compiled": lambda: case.engine(torch.bfloat16, compiled=True),
    }
    if not options.reference:
        del runs["reference"]
    times = {key: value / steps for key, value in medians(runs, options).items()}
    real = clients * case.spec.classes * BATCH
    slow = times.get("reference")
    return {
        "case": name,
        "clients": clients,
        "seconds per step": times,
        "images per second": {key: real / value for key, value in times.items()},
        "ratio to reference": slow and {key: slow / value for key, value in times.items()},
        **floors(case, real, times),
        "peak memory GB": peak_memory(device),
    }


def floors(case: Case, real: int, times: dict[str, float]) -> dict[str, Any]:
    """Returns the smallest possible seconds of a step at the machine's peak, and the engine's
    share."""
    network: Any = case.context.architecture
    synthetic = real // BATCH * IPC
    flops = forward_flops(network, case.spec.image_shape)
    types = {"fp32": torch.float32, "bf16": torch.bfloat16}
    peaks = {key: peak_flops(kind, case.device) for key, kind in types.items()}
    floor = {
        key: real * flops / peak + 2 * synthetic * flops / peaks["fp32"]
        for key, peak in peaks.items()
    }
    engines = {key: value for key, value in times.items() if key != "reference"}
    return {
        "floor": floor,
        "share of the floor": {k: floor[k.split()[1]] / value for k, value in engines.items()},
        "convolution peak GFLOP/s": {key: peak / 1e9 for key, peak in peaks.items()},
    }


def measure_growth(point: Point, options: argparse.Namespace) -> dict[str, Any]:
    """Measures one point of the growth table, without the reference, in this process."""
    device = torch.device(options.device)
    clients, classes, bound = point
    names = tuple(str(c) for c in range(classes))
    spec = replace(dataset_spec("mnist"), classes=classes, class_names=names)
    width = 8 if options.quick else 32
    case = Case(spec, width, clients, 1, device)
    case.context = replace(case.context, memory_bytes=memory_bytes(bound, device))
    initial_peak = peak_memory(device)
    times = [
        seconds(lambda: case.engine(torch.float32), device)
        for _ in range(1 if options.quick else 3)
    ]
    return {
        "case": f"growth, mnist shape, width {width}",
        "clients": clients,
        "classes": classes,
        "memory bound GB": bound,
        "seconds per step": min(times),
        "microseconds per real image": 1e6 * min(times) / (clients * classes * BATCH),
        "peak memory GB": peak_memory(device),
        "peak memory GB before the first step": initial_peak,
    }


def peak_memory(device: torch.device) -> float:
    """Returns the peak memory so far, in GB."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 1e9
    return resident_bytes("VmHWM") / 1e9


def main() -> None:
    parser = timing_options(__doc__)
    parser.add_argument("--cases", nargs="*", default=["mnist", "cifar10"])
    parser.add_argument("--clients", type=int, nargs="+", default=[1])
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--keep-allocations", action="store_true", help="as `fedsynth train` does")
    parser.add_argument("--no-reference", dest="reference", action="store_false")
    parser.add_argument("--no-growth", dest="growth", action="store_false")
    options = parser.parse_args()
    if options.keep_allocations:
        keep_large_allocations()
    shapes = [(name, clients) for name in options.cases for clients in options.clients]
    run_cases("condense", options, {f"{n}, {k} clients": (n, k) for n, k in shapes}, measure)
    if options.growth:
        points = GROWTH[:2] if options.quick else GROWTH
        growing = {f"growth {point}": point for point in points}
        run_cases("condense", options, growing, measure_growth, separate_processes=True)


if __name__ == "__main__":
    main()
