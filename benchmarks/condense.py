"""Condensation speed compared with a straightforward implementation (library/condensation.py).

    python benchmarks/condense.py [--quick] [--device cuda] [--cases mnist cifar10]
        [--repeats 5]

At the paper's shape: 10 classes, 256 real and 10 synthetic images a class, ConvNet-128, 1×28×28 and
3×32×32; the engine in fp32 and with bf16 real passes, eager and compiled; medians over alternating
repeats; and the floor: operations over the machine's measured convolution peak. Random images: only
time is measured. `--keep-allocations` gives the reference, too, the allocator's settings of
`fedsynth train` (cli/application.py). Rows of "growth" are those of
`git show 4080bb1e:benchmarks/condense.py`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from fedsynth.cli.application import keep_large_allocations
from library.condensation import BATCH, IPC, Case
from library.machine import medians, run_cases, seconds, timing_options


def measure(shape: tuple[str, int], options: argparse.Namespace) -> dict[str, Any]:
    """Returns medians over alternating repeats, for one step."""
    name, clients = shape
    device = torch.device(options.device)
    width, steps = (8, 1) if options.quick else (128, options.steps)
    case = Case(name, width, clients, steps, BATCH, device)
    runs: dict[str, Callable[[], object]] = {
        "reference": case.plain,
        "engine fp32": lambda: case.engine(torch.float32),
        "engine bf16": lambda: case.engine(torch.bfloat16),
        "engine fp32 compiled": lambda: case.engine(torch.float32, compiled=True),
        "engine bf16 compiled": lambda: case.engine(torch.bfloat16, compiled=True),
    }
    if not options.reference:
        del runs["reference"]
    times = {key: value / steps for key, value in medians(runs, options).items()}
    real = clients * case.data.spec.classes * BATCH
    slow = times.get("reference")
    return {
        "case": name,
        "clients": clients,
        "seconds per step": times,
        "ratio to reference": slow and {key: slow / value for key, value in times.items()},
        **floors(case, real, times),
    }


def floors(case: Case, real: int, times: dict[str, float]) -> dict[str, Any]:
    """Returns the smallest possible seconds of a step at the machine's peak, and the engine's
    share."""
    context = case.context
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        context.architecture(case.images(0)[0][:1])
    flops = counter.get_total_flops()
    types = {"fp32": torch.float32, "bf16": torch.bfloat16}
    peaks = {key: peak_flops(kind, context.device) for key, kind in types.items()}
    synthetic = 2 * (real // BATCH * IPC) * flops / peaks["fp32"]
    floor = {key: real * flops / peak + synthetic for key, peak in peaks.items()}
    engines = {key: value for key, value in times.items() if key != "reference"}
    return {
        "floor": floor,
        "share of the floor": {k: floor[k.split()[1]] / value for k, value in engines.items()},
        "convolution peak GFLOP/s": {key: peak / 1e9 for key, peak in peaks.items()},
    }


def peak_flops(dtype: torch.dtype, device: torch.device) -> float:
    """Returns the operations per second of a 3×3 convolution without padding, the best of ten.

    A convolution needs fewer multiplications than are counted (Winograd), so it can be faster than
    a matrix product of the same size.
    """
    n, channels, size = (256, 256, 32) if device.type == "cuda" else (32, 128, 16)
    x = torch.randn(n, channels, size, size, device=device).to(dtype)
    x = x.contiguous(memory_format=torch.channels_last)
    weight = torch.randn(channels, channels, 3, 3, device=device).to(dtype)
    weight = weight.contiguous(memory_format=torch.channels_last)
    operations = 2 * n * channels * (size - 2) ** 2 * weight[0].numel()
    with torch.no_grad():
        times = [seconds(lambda: F.conv2d(x, weight), device) for _ in range(10)]
    return operations / min(times)


def main() -> None:
    parser = timing_options(__doc__)
    parser.add_argument("--cases", nargs="*", default=["mnist", "cifar10"])
    parser.add_argument("--clients", type=int, nargs="+", default=[1])
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--keep-allocations", action="store_true", help="as `fedsynth train` does")
    parser.add_argument("--no-reference", dest="reference", action="store_false")
    options = parser.parse_args()
    if options.keep_allocations:
        keep_large_allocations()
    shapes = [(name, clients) for name in options.cases for clients in options.clients]
    run_cases("condense", options, {f"{n}, {k} clients": (n, k) for n, k in shapes}, measure)


if __name__ == "__main__":
    main()
