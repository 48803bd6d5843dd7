"""Condensation speed beside a straightforward implementation (library/reference.py), timed
alternately in one run.

    python benchmarks/condense.py [--quick] [--json] [--device cuda] [--cases mnist cifar10]
        [--repeats 5]

At the paper's shape: 10 classes, 256 real and 10 synthetic images a class, ConvNet-128, 1×28×28 and
3×32×32. For each case: seconds a step of the reference and of the engine in fp32 and with bf16 real
passes, eager and compiled; medians over alternating repeats; images a second; the ratio; and the
floor: operations over the machine's measured matrix-product peak. Then how time and peak memory
grow with clients (1, 10, 100) and classes (10, 100), each in a process of its own, with a narrower
network. Random images: only time is measured. On Linux the allocator is left as it is:
`--keep-allocations` gives the reference, too, what `fedsynth train` asks of it (cli/process.py).
Results are appended to benchmarks/results/condense.jsonl.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fedsynth.cli.process import keep_large_allocations
from fedsynth.data.registry import dataset_spec
from library.cases import BATCH, IPC, Case, forward_flops, peak_flops
from library.machine import alternating, arguments, machine, saver, seconds

GROWTH = [
    (1, 10, None),
    (10, 10, None),
    (100, 10, None),
    (1, 100, None),
    (10, 100, None),
    (100, 10, 0.5),
]
"""(clients, classes, --memory-gb)"""


def measure(name: str, clients: int, options: argparse.Namespace) -> dict[str, Any]:
    """Medians over alternating repeats, per step."""
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
    runs = {key: run for key, run in runs.items() if options.compile or "compiled" not in key}
    if not options.reference:
        del runs["reference"]
    times = alternating(runs, 1 if options.quick else options.repeats, device)
    medians = {key: statistics.median(values) / steps for key, values in times.items()}
    network: Any = case.context.architecture
    real = clients * case.spec.classes * BATCH
    synthetic = clients * case.spec.classes * IPC
    flops = forward_flops(network, case.spec.image_shape)
    peaks = {"fp32": peak_flops(torch.float32, device), "bf16": peak_flops(torch.bfloat16, device)}
    floors = {
        key: real * flops / peak + 2 * synthetic * flops / peaks["fp32"]
        for key, peak in peaks.items()
    }
    return {
        "case": name,
        "clients": clients,
        "seconds per step": medians,
        "images per second": {key: real / value for key, value in medians.items()},
        "ratio to reference": {key: medians["reference"] / value for key, value in medians.items()}
        if options.reference
        else None,
        "floor": floors,
        "share of the floor": {
            key: floors[key.split()[1]] / value
            for key, value in medians.items()
            if key != "reference"
        },
        "matrix peak GFLOP/s": {key: peak / 1e9 for key, peak in peaks.items()},
        "peak memory GB": peak_memory(device),
        **machine(),
    }


def measure_growth(options: argparse.Namespace) -> dict[str, Any]:
    """One point of the growth table: the engine alone, in this process."""
    from fedsynth.federation.context import memory_bytes

    device = torch.device(options.device)
    clients, classes = options.point
    spec = replace(
        dataset_spec("mnist"), classes=classes, class_names=tuple(str(c) for c in range(classes))
    )
    case = Case(spec, 8 if options.quick else 32, clients, 1, device)
    bound = memory_bytes(options.memory_gb, device)
    case.context = replace(case.context, memory_bytes=bound)
    before = peak_memory(device)
    times = [
        seconds(lambda: case.engine(torch.float32), device)
        for _ in range(1 if options.quick else 3)
    ]
    return {
        "case": "growth, mnist shape, width 8"
        if options.quick
        else "growth, mnist shape, width 32",
        "clients": clients,
        "classes": classes,
        "memory bound GB": options.memory_gb,
        "seconds per step": min(times),
        "microseconds per real image": 1e6 * min(times) / (clients * classes * BATCH),
        "peak memory GB": peak_memory(device),
        "peak memory GB before the first step": before,
        **machine(),
    }


def grow(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The growth table, a process a point, so that peaks of memory do not mix."""
    points = [(1, 10, None), (2, 10, None)] if options.quick else GROWTH
    rows = []
    for clients, classes, bound in points:
        words = [
            sys.executable,
            __file__,
            "--device",
            options.device,
            "--point",
            str(clients),
            str(classes),
        ]
        words += [
            *(["--memory-gb", str(bound)] if bound else []),
            *(["--quick"] if options.quick else []),
        ]
        rows.append(
            json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
        )
    return rows


def peak_memory(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 1e9
    status = Path("/proc/self/status")
    if status.exists():  # getrusage's peak begins with the parent's
        return next(
            float(line.split()[1]) / 1e6
            for line in status.read_text().splitlines()
            if line.startswith("VmHWM")
        )
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--cases", nargs="*", default=["mnist", "cifar10"])
    parser.add_argument("--clients", type=int, nargs="+", default=[1])
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument(
        "--no-compile", dest="compile", action="store_false", help="without the compiled engine"
    )
    parser.add_argument(
        "--keep-allocations",
        action="store_true",
        help="with the allocator setting of the command line, for all",
    )
    parser.add_argument(
        "--no-reference", dest="reference", action="store_false", help="the engine alone"
    )
    parser.add_argument(
        "--no-growth", dest="growth", action="store_false", help="without the growth table"
    )
    parser.add_argument(
        "--point",
        type=int,
        nargs=2,
        metavar=("CLIENTS", "CLASSES"),
        help="one point of the growth table, printed",
    )
    parser.add_argument("--memory-gb", type=float, help="with --point: the run's memory bound")
    options = parser.parse_args()
    if options.keep_allocations:
        keep_large_allocations()
    if options.point:
        print(json.dumps(measure_growth(options)))
        return
    save = saver("condense", options)
    for name in options.cases:
        for clients in options.clients:
            save(measure(name, clients, options))
    for row in grow(options) if options.growth else ():
        save(row)


if __name__ == "__main__":
    main()
