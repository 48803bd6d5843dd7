"""What it costs that passes over private records have one constant length (`privacy/passes.py`).

    python benchmarks/fixed_passes.py [--quick] [--json] [--device cuda] [--only NAME]

Each private step as it is, beside the same step in passes as long as the sample: no rows are filled
up, and shapes go by the data. One thread; medians of alternating repeats, in processor time on a
CPU.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from fedsynth.cli.process import keep_large_allocations
from fedsynth.core.charging import charge_for
from fedsynth.core.client import PrivateClients
from fedsynth.core.context import Compute, round_context
from fedsynth.core.method import Method
from fedsynth.data.images import ImageData
from fedsynth.data.registry import dataset_spec
from fedsynth.methods.fedavg import FedAvg
from fedsynth.methods.feddm import FedDM
from fedsynth.models.registry import ModelSettings, build_model
from fedsynth.privacy.guard import Guard
from fedsynth.privacy.ledger import Ledger
from fedsynth.privacy.randomness import SecretGenerator
from fedsynth.privacy.settings import PrivacySettings
from library.machine import arguments, machine, saver


@dataclass(frozen=True)
class Case:
    """One private step of `clients` clients with `records` records each."""

    method: Method
    mechanism: str
    dataset: str = "mnist"
    records: int = 6000
    width: int = 16
    depth: int = 3
    clients: int = 1
    precision: str = "float32"


CASES = {
    "residual, width 128": Case(FedDM(iterations=1), "residual", width=128),
    "residual, width 128, bf16": Case(
        FedDM(iterations=1), "residual", width=128, precision="bfloat16"
    ),
    "residual, width 16, 10 clients": Case(
        FedDM(ipc=5, iterations=4, batch=32), "residual", clients=10
    ),
    "residual, digits' preset": Case(
        FedDM(iterations=10), "residual", "digits", 287, 32, 2, clients=5
    ),
    "features, width 16, 10 clients": Case(
        FedDM(ipc=5, iterations=1, networks=1), "features", clients=10
    ),
    "gradient, width 128": Case(FedDM(iterations=1, batch=64), "gradient", width=128),
    "gradient, width 16, 10 clients": Case(
        FedDM(ipc=5, iterations=2, batch=6), "gradient", clients=10
    ),
    "dp-sgd, width 128": Case(FedAvg(local_steps=1), "dp-sgd", width=128),
    "dp-sgd, width 16": Case(FedAvg(local_steps=4), "dp-sgd"),
    "dp-sgd, digits' preset": Case(
        FedAvg(local_epochs=2, batch=32), "dp-sgd", "digits", 287, 32, 2, clients=5
    ),
}


@contextlib.contextmanager
def as_long_as_the_sample() -> Iterator[None]:
    """The former behaviour, for comparison: shapes that go by the private number of records."""
    longest = mock.Mock(side_effect=lambda expected, start, most: most)
    as_is = mock.Mock(side_effect=lambda rows, length, fill=0: rows)
    with contextlib.ExitStack() as patches:
        for module in ("fedsynth.core.client", "fedsynth.privacy.dpsgd"):
            patches.enter_context(mock.patch(f"{module}.pass_length", longest))
            patches.enter_context(mock.patch(f"{module}.padded", as_is))
        patches.enter_context(
            mock.patch("fedsynth.synthesizer.condensation.matchers.padded", as_is)
        )
        yield


def step_of(case: Case, device: torch.device) -> Callable[[], object]:
    """One client step, charging included."""
    spec = dataset_spec(case.dataset)
    generator = torch.Generator().manual_seed(0)
    total = case.records * case.clients
    images = torch.randint(
        0, 256, (total, *spec.image_shape), generator=generator, dtype=torch.uint8
    )
    labels = torch.randint(0, spec.classes, (total,), generator=generator)
    data = ImageData(images, labels, spec).to(device)
    settings = ModelSettings(width=case.width, depth=case.depth)
    network = build_model(settings, spec.image_shape, spec.classes, 0)
    mechanism = None if case.mechanism == "dp-sgd" else case.mechanism
    privacy = PrivacySettings(noise_multiplier=3.0, mechanism=mechanism)
    context = round_context(
        1,
        0,
        device,
        spec,
        network,
        float(case.records),
        privacy,
        compute=Compute(device, getattr(torch, case.precision)),
    )
    parts = list(torch.arange(total).split(case.records))
    message = case.method.broadcast(
        case.method.initial_state(network.to(device).state_dict()), context
    )

    def step() -> None:
        ids = range(case.clients)
        guards = [Guard(Ledger(str(k)), 1e-5, None) for k in ids]
        charged = charge_for(case.method, context, ids, guards, [SecretGenerator() for _ in ids])
        group = PrivateClients(ids, data, parts, charged, nominal_size=float(case.records))
        case.method.client_step(message, group, [{}] * case.clients, context)

    return step


def spent(run: Callable[[], object], device: torch.device) -> float:
    """Processor seconds on a CPU, which a busy neighbour disturbs less; wall seconds on a GPU."""
    if device.type != "cuda":
        started = time.process_time()
        run()
        return time.process_time() - started
    torch.cuda.synchronize()
    started = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def measure(name: str, device: torch.device, repeats: int) -> dict[str, Any]:
    step = step_of(CASES[name], device)
    constant: list[float] = []
    free: list[float] = []
    for repeat in range(repeats + 1):
        one = spent(step, device)
        with as_long_as_the_sample():
            other = spent(step, device)
        if repeat:
            constant.append(one)
            free.append(other)
    medians = {"constant": statistics.median(constant), "as the sample": statistics.median(free)}
    ratio = medians["constant"] / medians["as the sample"]
    return {"case": name, "seconds": medians, "constant over as the sample": ratio}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--only", help="the cases whose names contain this")
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_large_allocations()
    save = saver("fixed_passes", options)
    for name in CASES:
        if options.only is None or options.only in name:
            repeats = 1 if options.quick else options.repeats
            save({**measure(name, torch.device(options.device), repeats), **machine()})


if __name__ == "__main__":
    main()
