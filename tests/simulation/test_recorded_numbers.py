"""Tests that the final numbers of every method match the recorded numbers.

Each case is a tiny run on the embedded digits, open or private with injected test noise. The record
has the model, each client's last upload, the rounds' metrics, the ledgers' rows and ε; three
fingerprints for a tensor. New numbers are recorded by

    python -m tests.simulation.test_recorded_numbers

only for a change that is meant to change results, as its commit message states; or, with nothing
else changed, for another version of torch or NumPy. Refactoring must not change the file.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterator, Mapping
from dataclasses import fields
from functools import cache
from itertools import cycle
from math import fsum, sqrt
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from fedsynth import ImageData, Message, RunResult, from_arrays, resolve, simulate
from fedsynth.data.registry import dataset_spec
from fedsynth.evaluation import MEASURES
from fedsynth.methods import METHODS, method_class
from fedsynth.privacy import randomness
from tests.quick_runs import by_family

RECORDED = Path(__file__).with_name("recorded_numbers.json")
CLIENTS = 4
# The tolerances of numbers, relative, of accuracies and of fingerprints, on the machine of the record.
EXACT = 1e-6
SAME_MACHINE = (EXACT, EXACT, EXACT)
# The same with other kernels, whose rounding a ReLU or an argmax amplifies: SSE and AVX2 in place
# of AVX-512, and initial weights changed by 1e-7 of themselves, changed fingerprints by up to 4e-3
# (most by less than 1e-5) and accuracies by one image of 359.
OTHER_MACHINE = (1e-2, 0.02, 1e-2)
# The tolerances of fingerprints of cases that amplify the last bit even between processors of one
# name, whose libraries choose other kernels. Here, one bit of a convolution (oneDNN for AVX2), of a
# matrix product (MKL's compatible mode) or of log_softmax (ATen for AVX2) changed fingerprints by
# at most 4.1e-5, and 1.2e-3 with own architectures, and no other number by 1e-6.
AMPLIFIED = {
    "feddf, private": 2e-4,
    "fedhydra, private": 2e-4,
    "feddm, σ found": 2e-4,
    "fedhydra, own architectures, private": 5e-3,
}

LEDGER_KEYS = (
    "rounds", "clients", "quantity", "mechanism", "noise_multiplier", "sensitivity", "sample_rate",
    "sampler", "steps", "dimension", "unit",
)  # fmt: skip

Sections = dict[str, dict[str, Any]]


CONDENSATION = {"ipc": 2, "iterations": 3, "server_epochs": 10, "server_lr": 0.05, "batch": 16}
DISTILLATION = {
    "local_epochs": 2, "batch": 64, "server_epochs": 4, "generator_steps": 4, "generator_width": 4,
    "generator_batch": 8, "latent": 8, "server_lr": 0.05,
}  # fmt: skip
LOCAL = {"local_epochs": 2, "batch": 64, "lr": 0.05}
AUTOENCODER = {
    "local_epochs": 2, "batch": 64, "width": 4, "latent": 4, "samples": 60, "server_epochs": 3,
}  # fmt: skip
TINY: Mapping[str, Mapping[str, Any]] = {
    "feddm": CONDENSATION,
    "fedaf": {**CONDENSATION, "local_weight": 0.1, "global_weight": 0.5, "directions": 8},
    "fedsum": {"networks": 3, "ipc": 2, "iterations": 6, "server_epochs": 10, "server_lr": 0.05},
    "real": {"ipc": 2, "server_epochs": 10, "server_lr": 0.05, "radius": 0.5},
    "fedbe": {**LOCAL, "server_steps": 8, "swa_start": 2, "cycle": 3},
    "feddf": {"local_epochs": 2, "batch": 64, "server_steps": 8},
    "dense": DISTILLATION,
    "fedhydra": {
        **DISTILLATION, "generator_lr": 0.001, "stratification_steps": 2, "stratification_batch": 8,
        "stratification_lr": 0.001,
    },
    "fedcvae-ens": AUTOENCODER,
    "fedcvae-kd": {**AUTOENCODER, "decoder_samples": 60, "decoder_epochs": 3},
    "fedkf": {**LOCAL, "generator_width": 4, "generator_batch": 8, "latent": 8},
    "fedfm": {**LOCAL, "lr": 0.01},
    "fedstats": {"features": "pixels"},
    "fedgen": {**LOCAL, "generator_steps": 3, "generator_batch": 8, "noise": 8, "hidden": 16},
}  # fmt: skip


def case(name: str, /, **sections: Mapping[str, Any]) -> Sections:
    """Sections of settings; those given add to the tiny run's."""
    tiny: Sections = {
        "run": {"method": name, "rounds": 2, "device": "cpu"},
        "data": {},
        "partition": {"clients": CLIENTS, "alpha": 1.0},
        "model": {"width": 4, "depth": 2},
        "method": dict(TINY.get(name, LOCAL)),
        "privacy": {},
    }
    if name == "fedbn":
        tiny["model"]["norm"] = "batch"
    return {key: {**values, **sections.get(key, {})} for key, values in tiny.items()}


def private(name: str, /, **sections: Mapping[str, Any]) -> Sections:
    protection = {"noise_multiplier": 2.0, "sample_rate": 0.25, **sections.pop("privacy", {})}
    if name == "fedstats":  # samples nothing
        del protection["sample_rate"]
    return case(name, **sections, privacy=protection)


HALF = {"participation": 0.5}
OWN_SPLIT = {"clients": CLIENTS, "local_test": 0.2}
OWN_MODELS = {"clients": "convnet,cnn2"}  # cnn2 has batch norm
ONE_ROUND = {"rounds": 1}
BATCH_NORM = {"norm": "batch"}
LATE = {"stragglers": 0.5}
TEXT = {"data": {"dataset": "plays"}, "model": {"name": "lstm"}, "method": {"lr": 0.8}}
IMAGES = "fedmix", "fedrobust"  # whose clients mix or shift images
USERS = {"unit": "user", "nominal_size": 10, "noise_multiplier": 3.0}

CASES: dict[str, Sections] = {
    **{f"{name}, open": case(name) for name in METHODS},
    **{f"{name}, private": private(name) for name in METHODS if method_class(name).dp_mechanisms},
    **{f"{name}, one round": case(name, run=ONE_ROUND) for name in ("feddf", "dense", "fedhydra")},
    **{
        f"{name}, own architectures": case(name, run=ONE_ROUND, model=OWN_MODELS)
        for name in ("feddf", "dense", "fedhydra")
    },
    **{f"{name}, batch norm": case(name, model=BATCH_NORM) for name in ("dense", "fedhydra")},
    "fedhydra, own architectures, private": private(
        "fedhydra", run=ONE_ROUND, model={"clients": "convnet,linear"}
    ),
    # Condensation
    **{
        f"feddm, {mechanism}": private("feddm", privacy={"mechanism": mechanism})
        for mechanism in ("gradient", "features")
    },
    # Its noise is not that of the clients' other releases: one round, as it may restart in each.
    "feddm, paper": private("feddm", run=ONE_ROUND, privacy={"mechanism": "paper"}),
    "feddm, batch norm": case("feddm", model=BATCH_NORM),
    "feddm, siamese, inside the ball": case(
        "feddm", method={"augment": "siamese", "perturbation": "ball", "restart": True}
    ),
    "feddm, siamese, private": private("feddm", method={"augment": "siamese", "image_lr": 1.0}),
    "feddm, distributions": case("feddm", method={"matching": "sinkhorn"}),
    "feddm, client by client": case("feddm", run={"memory_gb": 1e-6}),
    "feddm, some clients": case("feddm", run=HALF),
    "feddm, σ found": private("feddm", privacy={"noise_multiplier": None, "epsilon": 4.0}),
    "feddm, ended by its cap": private("feddm", run={"rounds": 4}, privacy={"epsilon": 1.4}),
    "feddm, one replaced": private("feddm", privacy={"adjacency": "replace-one"}),
    "feddm, users": private("feddm", privacy=USERS),
    "fedaf, first exchange": case("fedaf", method={"knowledge_from": "first-exchange"}),
    "fedaf, first exchange, private": private("fedaf", method={"knowledge_from": "first-exchange"}),
    "fedaf, batch norm": case("fedaf", model=BATCH_NORM),
    "fedaf, some clients": case("fedaf", run={**HALF, "rounds": 3}),
    "fedaf, users": private("fedaf", privacy={**USERS, "user_records": 4}),
    "fedsum, some clients": case("fedsum", run={**HALF, "rounds": 3}),
    "fedsum, fresh networks": case(
        "fedsum",
        method={"perturbation": "fresh", "augment": "siamese", "start": "random-process"},
    ),
    "fedsum, users": private("fedsum", privacy=USERS),
    "fedstats, users, secure": private("fedstats", method={"aggregation": "secure"}, privacy=USERS),
    # Training of models
    **{
        f"{name}, some clients": case(name, run={**HALF, "rounds": 3})
        for name in (
            *("fedkf", "scaffold", "feddyn", "feddc", "fedfm", "fedgen", "moon", "fedbn"),
            *IMAGES,
        )
    },
    "scaffold, some clients, private": private("scaffold", run={**HALF, "rounds": 3}),
    "fedavg, some clients, oca": case("fedavg", run={**HALF, "rounds": 3}, method={"final": "oca"}),
    "fedavg, oca of all": case("fedavg", run=HALF, method={"final": "oca", "oca": "all"}),
    "fedavg, drawn by size": case("fedavg", run={**HALF, "sampling": "size"}),
    "fedavg, equal steps": case("fedavg", method={"equal_steps": True}),
    "fedavg, users": private("fedavg", privacy=USERS),
    "fedkf, some clients, private": private("fedkf", run={**HALF, "rounds": 3}),
    "fedprox, stragglers": case("fedprox", method=LATE),
    "fedprox, stragglers, private": private("fedprox", method=LATE),
    "fedprox, stragglers dropped": case("fedprox", method={**LATE, "drop_stragglers": True}),
    **{
        f"{name}, all in one pass": case(name, model={"name": "linear"}, method={"batch": 8})
        for name in ("fedavg", "fedprox", "feddyn", "scaffold")
    },
    **{
        f"{name}, own test splits": case(name, partition=OWN_SPLIT)
        for name in ("fedavg", "fedbn", "solo")
    },
    "fedavg, own test splits, private": private("fedavg", partition=OWN_SPLIT),
    "moon, projection": case("moon", model={"projection": 8}),
    "fedprox, text": case("fedprox", **TEXT),
    "fedprox, text, private": private("fedprox", **TEXT),
}


class RepeatableNoise:
    """Repeatable noise in place of a client's secret generator.

    Each kind and shape has a separate sequence, so that the order of draws does not matter.
    """

    def __init__(self, client: int) -> None:
        self._generator_of = cache(lambda kind: np.random.default_rng([client, _number_of(kind)]))

    def standard_normal(self, shape: tuple[int, ...]) -> npt.NDArray[np.float64]:
        return self._generator_of(f"noise {tuple(shape)}").standard_normal(shape)

    def random(self, records: int) -> npt.NDArray[np.float64]:
        return self._generator_of(f"sample of {records}").random(records)


def _number_of(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def user_data() -> tuple[ImageData, ImageData]:
    """Returns random images of 40 users with eight records each."""
    rng, spec = np.random.default_rng(0), dataset_spec("digits")
    images = rng.integers(0, 256, (320, 1, 8, 8)).astype(np.uint8)
    labels = rng.integers(0, 10, 320)
    data = from_arrays(images, labels, spec)
    users = ImageData(data.images, data.labels, spec, None, torch.arange(320) // 8)
    return users, from_arrays(images[:100], labels[:100], spec)


def run(name: str, monkeypatch: pytest.MonkeyPatch) -> RunResult:
    """Runs a case. Clients' noise follows the order of their generators, which FedDM's `paper`
    makes again."""
    generators = map(RepeatableNoise, cycle(range(CLIENTS)))
    monkeypatch.setattr(randomness, "_fresh_generator", lambda: next(generators))
    sections = CASES[name]
    if sections["privacy"].get("unit") == "user":
        parts = list(np.arange(320).reshape(CLIENTS, 80))
        return simulate(settings_of(sections), data=user_data(), parts=parts)
    return simulate(settings_of(sections))


def settings_of(sections: Sections) -> Any:
    return resolve({
        name: {key: value for key, value in values.items() if value is not None}
        for name, values in sections.items()
    })  # fmt: skip


def fingerprint(tensors: Mapping[str, Tensor]) -> dict[str, float]:
    """Returns the size, sum, sum of squares, and product with a fixed vector (seeded by the names)
    of tensors together, summed exactly: BLAS differs in the last digit from call to call."""
    values, fixed = np.empty(0), np.empty(0)
    for name, tensor in tensors.items():
        values = np.append(values, tensor.detach().cpu().to(torch.float64))
        draws = np.random.default_rng(_number_of(name)).standard_normal(tensor.numel())
        fixed = np.append(fixed, draws)
    sums = {"sum": fsum(values), "squares": fsum(values * values), "product": fsum(values * fixed)}
    return {"size": values.size, **sums}


def fields_of(message: Message) -> dict[str, Any]:
    """Returns a message's numbers, with fingerprints for tensors and mappings of tensors."""
    values: dict[str, Any] = {}
    for field in fields(message):
        value = getattr(message, field.name)
        if isinstance(value, Tensor):
            value = {field.name: value}
        values[field.name] = fingerprint(value) if isinstance(value, Mapping) else value
    return values


def ledger_rows(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    rows = [{key: row[key] for key in LEDGER_KEYS} for row in report["ledger"]]
    return sorted(rows, key=lambda row: json.dumps(row, sort_keys=True))


def _recorded(row: Mapping[str, Any]) -> dict[str, Any]:
    recorded = {key: v for key, v in row.items() if key not in ("seconds", *MEASURES)}
    if "models" in row:
        recorded["models"] = {name: _recorded(metrics) for name, metrics in row["models"].items()}
    return recorded


def numbers(result: RunResult) -> dict[str, Any]:
    """Returns all recorded numbers of a run. Measures that follow from the model are left out."""
    rows = [_recorded(row) for row in result.metrics]
    values: dict[str, Any] = {
        "accuracy": result.accuracy,
        "model": fingerprint(result.model.state_dict()),
        "uploads": {str(client): fields_of(upload) for client, upload in result.uploads.items()},
        "artefacts": {name: fingerprint({name: t}) for name, t in result.artefacts.items()},
        "rows": rows,
        "ended early": len(result.deviations),
    }
    if result.privacy is not None:
        report: Any = result.privacy
        values["ledger"] = ledger_rows(report)
        values["epsilon"] = (report["guarantee"] or {}).get("epsilon")
    json_values: dict[str, Any] = json.loads(json.dumps(values))
    return json_values


def machine() -> dict[str, str]:
    """Returns the versions and the processor, on which last digits depend."""
    try:
        cpu = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0].splitlines()
    except OSError:
        cpu = []
    keys = ("vendor_id", "cpu family", "model\t", "model name")
    processor = ", ".join(line.split(":")[1].strip() for line in cpu if line.startswith(keys))
    return {
        "torch": torch.__version__,
        "numpy": np.__version__,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "machine": platform.machine(),
        "processor": processor,
    }


def differences(
    path: str, recorded: Any, actual: Any, tolerance: float, images: float, moved: float
) -> Iterator[str]:
    """Yields differences of two records: fingerprints by more than `moved` of their scale, other
    numbers by more than `tolerance` of themselves or of 1, accuracies by more than `images` (a
    share). What is charged does not depend on the machine."""
    if path.endswith((".ledger", ".epsilon")):
        tolerance = min(tolerance, EXACT)
    if isinstance(recorded, dict) and recorded.keys() == {"size", "sum", "squares", "product"}:
        yield from _moved(path, recorded, actual, moved)
    elif isinstance(recorded, dict) and isinstance(actual, dict):
        for key in sorted({*recorded, *actual}):
            if key not in recorded or key not in actual:
                yield f"{path}.{key}: only {'now' if key in actual else 'in the record'}"
                continue
            values = recorded[key], actual[key]
            yield from differences(f"{path}.{key}", *values, tolerance, images, moved)
    elif isinstance(recorded, list) and isinstance(actual, list) and len(recorded) == len(actual):
        for position, (old, new) in enumerate(zip(recorded, actual, strict=True)):
            yield from differences(f"{path}[{position}]", old, new, tolerance, images, moved)
    elif isinstance(recorded, float) and isinstance(actual, float | int):
        measured = "accuracy" in path or ".local" in path
        allowed = images if measured else tolerance * max(1.0, abs(recorded))
        if not abs(actual - recorded) <= allowed:
            yield f"{path}: {recorded!r} was recorded, {actual!r} is now"
    elif recorded != actual:
        yield f"{path}: {recorded!r} was recorded, {actual!r} is now"


def _moved(path: str, recorded: dict[str, float], actual: Any, tolerance: float) -> Iterator[str]:
    length = sqrt(recorded["squares"])
    scales = {
        "size": 0.0,
        "sum": sqrt(recorded["size"]) * length,
        "squares": recorded["squares"],
        "product": length,
    }
    for key, scale in scales.items():
        if not abs(actual[key] - recorded[key]) <= tolerance * scale:
            relative = abs(actual[key] - recorded[key]) / (scale or 1.0)
            yield f"{path}: {key} differs by {relative:.2g} of its scale"


def recorded_numbers() -> dict[str, Any]:
    record: dict[str, Any] = json.loads(RECORDED.read_text(encoding="utf-8"))
    return record


def test_every_case_is_recorded() -> None:
    assert recorded_numbers()["cases"].keys() == CASES.keys()


# The cases that are not slow tests: one of each loop and mechanism.
SHORT = {
    "feddm, open", "feddm, private", "feddm, features", "feddm, paper", "feddm, batch norm",
    "feddm, siamese, inside the ball", "feddm, some clients", "fedaf, first exchange", "fedaf, users",
    "fedaf, some clients", "fedsum, open", "fedsum, private", "fedstats, open", "fedstats, private",
    "fedstats, users, secure", "fedkf, open", "dense, one round", "fedhydra, open",
    "feddf, one round", "fedavg, private", "fedavg, some clients, oca", "fedavg, all in one pass",
    "scaffold, some clients", "fedprox, stragglers", "fedprox, text", "feddyn, open", "fednova, open", "fedbn, open",
    "ccvr, private", "fedbe, open", "fedfm, open", "fedgen, open", "fedfa-plus, open",
    "moon, projection", "fedsam, open", "fedmix, some clients", "fedrobust, some clients",
}  # fmt: skip


@pytest.mark.parametrize("name", by_family(CASES, SHORT))
def test_numbers_match_the_record(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    record = recorded_numbers()
    tolerances = OTHER_MACHINE
    if record["machine"] == machine():
        tolerances = (EXACT, EXACT, AMPLIFIED.get(name, EXACT))
    actual = numbers(run(name, monkeypatch))
    assert not list(differences(name, record["cases"][name], actual, *tolerances))


def test_charges_have_no_tolerance() -> None:
    for path in ("case.epsilon", "case.rows[0].epsilon", "case.ledger"):
        for old, new, count in ((1.0, 1.0, 0), (1.0, 1.0001, 1)):
            found = list(differences(path, [{"x": old}], [{"x": new}], *OTHER_MACHINE))
            assert len(found) == count


def test_small_changes_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rate that differs by a ten-thousandth is detected with the tolerances of the same
    machine."""
    name = "feddm, open"
    original = numbers(run(name, monkeypatch))
    assert not list(differences(name, original, numbers(run(name, monkeypatch)), 0.0, 0.0, 0.0))
    rate = settings_of(CASES[name]).method.image_lr
    monkeypatch.setitem(CASES, name, case("feddm", method={"image_lr": rate * 1.0001}))
    assert list(differences(name, original, numbers(run(name, monkeypatch)), *SAME_MACHINE))


def record_numbers() -> None:
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as monkeypatch:
        cases = {name: numbers(run(name, monkeypatch)) for name in CASES}
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(case)}" for name, case in cases.items())
    text = f'{{"machine": {json.dumps(machine())},\n"cases": {{\n{lines}\n}}}}\n'
    RECORDED.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    record_numbers()
