"""The final numbers of every method, as they were recorded: nothing may move them unseen.

Each case is a tiny run on the embedded digits, open or private with injected test noise. Recorded
are the model, what each client sent last, the rounds' metrics, the ledgers' rows and ε: tensors by
three fingerprints each. One may record anew, by

    python -m tests.simulation.test_unchanged

only for a change that is meant to change results, and says so in its commit; or, with nothing else
changed, for another version of torch or NumPy. A change of structure has to leave the file alone.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterator, Mapping
from dataclasses import fields
from itertools import count
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
from fedsynth.methods import METHODS, method_class
from fedsynth.privacy import randomness
from tests.families import by_family

RECORDED = Path(__file__).with_name("recorded_numbers.json")
CLIENTS = 4
HERE = (1e-6, 1e-6)
"""On the machine of the record: how far a number may be off, as a share, and an accuracy."""
ELSEWHERE = (1e-2, 0.02)
"""With other kernels, whose rounding a ReLU or an argmax turns into more: SSE and AVX2 ones in
place of AVX-512 ones, and initial weights moved by 1e-7 of themselves, were seen to move
fingerprints by up to 4e-3 (most by less than 1e-5), and accuracies by one image of 359."""
LEDGER_KEYS = (
    "rounds", "clients", "quantity", "mechanism", "noise_multiplier", "sensitivity", "sample_rate",
    "sampler", "steps", "dimension", "unit",
)  # fmt: skip

Sections = dict[str, dict[str, Any]]

# ------------------------------------------------------------------------------------------- cases

CONDENSES = {"ipc": 2, "iterations": 3, "server_epochs": 10, "server_lr": 0.05, "batch": 16}
DISTILS = {
    "local_epochs": 2, "batch": 64, "server_epochs": 4, "generator_steps": 4, "generator_width": 4,
    "generator_batch": 8, "latent": 8, "server_lr": 0.05,
}  # fmt: skip
LOCAL = {"local_epochs": 2, "batch": 64, "lr": 0.05}
TINY: Mapping[str, Mapping[str, Any]] = {
    "feddm": CONDENSES,
    "fedaf": {**CONDENSES, "local_weight": 0.1, "global_weight": 0.5, "directions": 8},
    "fedsum": {"networks": 3, "ipc": 2, "iterations": 6, "server_epochs": 10, "server_lr": 0.05},
    "real": {"ipc": 2, "server_epochs": 10, "server_lr": 0.05, "radius": 0.5},
    "feddf": {"local_epochs": 2, "batch": 64, "server_steps": 8},
    "dense": DISTILS,
    "fedhydra": {
        **DISTILS, "generator_lr": 0.001, "stratification_steps": 2, "stratification_batch": 8,
        "stratification_lr": 0.001,
    },
    "fedkf": {**LOCAL, "generator_width": 4, "generator_batch": 8, "latent": 8},
    "fedfm": {**LOCAL, "lr": 0.01},
    "fedstats": {"features": "pixels"},
    "fedgen": {**LOCAL, "generator_steps": 3, "generator_batch": 8, "noise": 8, "hidden": 16},
}  # fmt: skip


def case(name: str, /, **sections: Mapping[str, Any]) -> Sections:
    """Sections of settings; those given add to the tiny run's."""
    tiny: Sections = {
        "run": {"method": name, "rounds": 2, "device": "cpu"},
        "partition": {"clients": CLIENTS, "alpha": 1.0},
        "model": {"width": 4, "depth": 2},
        "method": dict(TINY.get(name, LOCAL)),
        "privacy": {},
    }
    if name == "fedbn":
        tiny["model"]["norm"] = "batch"
    return {key: {**values, **sections.get(key, {})} for key, values in tiny.items()}


def private(name: str, /, **sections: Mapping[str, Any]) -> Sections:
    """The same with noise, and Poisson samples."""
    protection = {"noise_multiplier": 2.0, "sample_rate": 0.25, **sections.pop("privacy", {})}
    if name == "fedstats":  # samples nothing
        del protection["sample_rate"]
    return case(name, **sections, privacy=protection)


SOME = {"participation": 0.5}
OWN_SPLIT = {"clients": CLIENTS, "local_test": 0.2}
OWN_MODELS = {"clients": "convnet,cnn2"}  # cnn2 has batch norm
ONE_ROUND = {"rounds": 1}
BATCH_NORM = {"norm": "batch"}
LATE = {"stragglers": 0.5}
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
    # Its noise is not that of the clients' other releases: one round, as it may start anew in each.
    "feddm, paper": private("feddm", run=ONE_ROUND, privacy={"mechanism": "paper"}),
    "feddm, batch norm": case("feddm", model=BATCH_NORM),
    "feddm, siamese, inside the ball": case(
        "feddm", method={"augment": "siamese", "perturbation": "ball", "restart": True}
    ),
    "feddm, siamese, private": private("feddm", method={"augment": "siamese", "image_lr": 1.0}),
    "feddm, distributions": case("feddm", method={"matching": "sinkhorn"}),
    "feddm, client by client": case("feddm", run={"memory_gb": 1e-6}),
    "feddm, some clients": case("feddm", run=SOME),
    "feddm, σ found": private("feddm", privacy={"noise_multiplier": None, "epsilon": 4.0}),
    "feddm, ended by its cap": private("feddm", run={"rounds": 4}, privacy={"epsilon": 1.4}),
    "feddm, one replaced": private("feddm", privacy={"adjacency": "replace-one"}),
    "feddm, users": private("feddm", privacy=USERS),
    "fedaf, first phase": case("fedaf", method={"knowledge_from": "first-phase"}),
    "fedaf, first phase, private": private("fedaf", method={"knowledge_from": "first-phase"}),
    "fedaf, batch norm": case("fedaf", model=BATCH_NORM),
    "fedaf, some clients": case("fedaf", run={**SOME, "rounds": 3}),
    "fedaf, users": private("fedaf", privacy={**USERS, "user_records": 4}),
    "fedsum, some clients": case("fedsum", run={**SOME, "rounds": 3}),
    "fedsum, fresh networks": case(
        "fedsum",
        method={"perturbation": "fresh", "augment": "siamese", "start": "random-process"},
    ),
    "fedsum, users": private("fedsum", privacy=USERS),
    "fedstats, users, secure": private("fedstats", method={"aggregation": "secure"}, privacy=USERS),
    # Training of models
    **{
        f"{name}, some clients": case(name, run={**SOME, "rounds": 3})
        for name in ("fedkf", "scaffold", "feddyn", "fedfm", "fedgen", "moon", "fedbn")
    },
    "scaffold, some clients, private": private("scaffold", run={**SOME, "rounds": 3}),
    "fedavg, some clients, oca": case("fedavg", run={**SOME, "rounds": 3}, method={"final": "oca"}),
    "fedavg, oca of all": case("fedavg", run=SOME, method={"final": "oca", "oca": "all"}),
    "fedavg, drawn by size": case("fedavg", run={**SOME, "sampling": "size"}),
    "fedavg, equal steps": case("fedavg", method={"equal_steps": True}),
    "fedavg, users": private("fedavg", privacy=USERS),
    "fedkf, some clients, private": private("fedkf", run={**SOME, "rounds": 3}),
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
}


# -------------------------------------------------------------------------------- a run, and its
# numbers


class RepeatableNoise:
    """In place of a client's secret generator: noise that can be repeated.

    Draws of each kind and shape are a sequence of their own, so that their order among others does
    not matter.
    """

    def __init__(self, client: int) -> None:
        self._client = client
        self._drawn: dict[str, np.random.Generator] = {}

    def _of(self, what: str) -> np.random.Generator:
        seed = [self._client, _number_of(what)]
        return self._drawn.setdefault(what, np.random.default_rng(seed))

    def standard_normal(self, shape: tuple[int, ...]) -> npt.NDArray[np.float64]:
        return self._of(f"noise {tuple(shape)}").standard_normal(shape)

    def random(self, records: int) -> npt.NDArray[np.float64]:
        return self._of(f"sample of {records}").random(records)


def _number_of(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def people() -> tuple[ImageData, ImageData]:
    """Random images of 40 users, eight records each."""
    rng = np.random.default_rng(0)
    spec = dataset_spec("digits")
    images = rng.integers(0, 256, (320, 1, 8, 8)).astype(np.uint8)
    labels = rng.integers(0, 10, 320)
    groups = torch.arange(320) // 8
    test = from_arrays(images[:100], labels[:100], spec)
    data = from_arrays(images, labels, spec)
    return ImageData(data.images, data.labels, spec, None, groups), test


def run(name: str, monkeypatch: pytest.MonkeyPatch) -> RunResult:
    """One case on one thread. A client's noise is told by how many generators were made before:
    clients' are made in their order, and FedDM's `paper`, which makes others, starts again."""
    made = count()
    monkeypatch.setattr(
        randomness, "_fresh_generator", lambda: RepeatableNoise(next(made) % CLIENTS), raising=True
    )
    sections = CASES[name]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        if sections["privacy"].get("unit") == "user":
            parts = list(np.arange(320).reshape(CLIENTS, 80))
            return simulate(settings_of(sections), data=people(), parts=parts)
        return simulate(settings_of(sections))
    finally:
        torch.set_num_threads(threads)


def settings_of(sections: Sections) -> Any:
    given = {
        name: {key: value for key, value in values.items() if value is not None}
        for name, values in sections.items()
    }
    return resolve({name: values for name, values in given.items() if values})


def fingerprint(tensors: Mapping[str, Tensor]) -> dict[str, float]:
    """Of tensors together: their numbers, sum, sum of squares, and product with a fixed vector
    that each one's name draws; added up exactly, as BLAS differs in the last digit from call to
    call."""
    size = 0
    total, squares, product = [], [], []
    for name, tensor in tensors.items():
        values = tensor.detach().cpu().to(torch.float64).numpy().ravel()
        fixed = np.random.default_rng(_number_of(name)).standard_normal(values.size)
        size += values.size
        total.append(fsum(values))
        squares.append(fsum(values * values))
        product.append(fsum(values * fixed))
    return {
        "size": size,
        "sum": fsum(total),
        "squares": fsum(squares),
        "product": fsum(product),
    }


def sent(message: Message) -> dict[str, Any]:
    """A message's fields: fingerprints of tensors (of a mapping's together), and numbers."""
    found: dict[str, Any] = {}
    for field in fields(message):
        value = getattr(message, field.name)
        if isinstance(value, Tensor):
            value = {field.name: value}
        found[field.name] = fingerprint(value) if isinstance(value, Mapping) else value
    return found


def ledger_rows(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of all ledgers, in an order that does not depend on that of the charges."""
    rows = [{key: row[key] for key in LEDGER_KEYS} for row in report["ledger"]]
    return sorted(rows, key=lambda row: json.dumps(row, sort_keys=True))


def numbers(result: RunResult) -> dict[str, Any]:
    """Everything of a run that is recorded."""
    rows = [{key: v for key, v in row.items() if key != "seconds"} for row in result.metrics]
    found: dict[str, Any] = {
        "accuracy": result.accuracy,
        "model": fingerprint(result.model.state_dict()),
        "uploads": {str(client): sent(upload) for client, upload in result.uploads.items()},
        "artefacts": {name: fingerprint({name: t}) for name, t in result.artefacts.items()},
        "rows": rows,
        "ended early": len(result.deviations),
    }
    if result.privacy is not None:
        report: Any = result.privacy
        found["ledger"] = ledger_rows(report)
        found["epsilon"] = (report["guarantee"] or {}).get("epsilon")
    plain: dict[str, Any] = json.loads(json.dumps(found))
    return plain


# --------------------------------------------------------------------------------------- comparison


def machine() -> dict[str, str]:
    """What the last digits of a number depend on."""
    try:
        cpu = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0].splitlines()
    except OSError:
        cpu = []
    wanted = ("vendor_id", "cpu family", "model\t", "model name")
    processor = ", ".join(line.split(":")[1].strip() for line in cpu if line.startswith(wanted))
    return {
        "torch": torch.__version__,
        "numpy": np.__version__,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "machine": platform.machine(),
        "processor": processor,
    }


def differences(
    path: str, recorded: Any, found: Any, tolerance: float, images: float
) -> Iterator[str]:
    """Where two records differ: fingerprints by more than `tolerance` of their scale, other numbers
    by more than that of themselves or of 1, accuracies by more than `images` (a share)."""
    if isinstance(recorded, dict) and recorded.keys() == {"size", "sum", "squares", "product"}:
        yield from _moved(path, recorded, found, tolerance)
    elif isinstance(recorded, dict) and isinstance(found, dict):
        for key in sorted({*recorded, *found}):
            if key not in recorded or key not in found:
                yield f"{path}.{key}: only {'now' if key in found else 'in the record'}"
                continue
            yield from differences(f"{path}.{key}", recorded[key], found[key], tolerance, images)
    elif isinstance(recorded, list) and isinstance(found, list) and len(recorded) == len(found):
        for place, (one, other) in enumerate(zip(recorded, found, strict=True)):
            yield from differences(f"{path}[{place}]", one, other, tolerance, images)
    elif isinstance(recorded, float) and isinstance(found, float | int):
        measured = "accuracy" in path or ".local" in path
        allowed = images if measured else tolerance * max(1.0, abs(recorded))
        if not abs(found - recorded) <= allowed:
            yield f"{path}: {recorded!r} was recorded, {found!r} is now"
    elif recorded != found:
        yield f"{path}: {recorded!r} was recorded, {found!r} is now"


def _moved(path: str, recorded: dict[str, float], found: Any, tolerance: float) -> Iterator[str]:
    length = sqrt(recorded["squares"])
    scales = {
        "size": 0.0,
        "sum": sqrt(recorded["size"]) * length,
        "squares": recorded["squares"],
        "product": length,
    }
    for key, scale in scales.items():
        if not abs(found[key] - recorded[key]) <= tolerance * scale:
            far = abs(found[key] - recorded[key]) / (scale or 1.0)
            yield f"{path}: {key} differs by {far:.2g} of its scale"


def recorded_numbers() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RECORDED.read_text(encoding="utf-8"))
    return found


def test_every_case_is_recorded() -> None:
    assert recorded_numbers()["cases"].keys() == CASES.keys()


SHORT = {
    "feddm, open", "feddm, private", "feddm, features", "feddm, paper", "feddm, batch norm",
    "feddm, siamese, inside the ball", "fedaf, first phase", "fedaf, users", "fedsum, open",
    "fedsum, private", "fedstats, open", "fedstats, private", "fedstats, users, secure",
    "fedkf, open", "dense, one round", "fedhydra, open", "feddf, one round", "fedavg, private",
    "fedavg, some clients, oca", "fedavg, all in one pass", "scaffold, some clients",
    "fedprox, stragglers", "feddyn, open", "fednova, open", "fedbn, open", "fedfm, open",
    "fedgen, open", "fedfa-plus, open", "moon, projection",
}  # fmt: skip
"""Cases outside the slow tests: one of each loop and mechanism."""


@pytest.mark.parametrize("name", by_family(CASES, SHORT))
def test_nothing_moved(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    record = recorded_numbers()
    tolerance, images = HERE if record["machine"] == machine() else ELSEWHERE
    found = numbers(run(name, monkeypatch))
    assert not list(differences(name, record["cases"][name], found, tolerance, images))


def test_a_small_change_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rate that differs by a ten-thousandth, on the machine of the record and on any other."""
    name = "feddm, open"
    before = numbers(run(name, monkeypatch))
    assert not list(differences(name, before, numbers(run(name, monkeypatch)), 0.0, 0.0))
    rate = settings_of(CASES[name]).method.image_lr
    monkeypatch.setitem(CASES, name, case("feddm", method={"image_lr": rate * 1.0001}))
    assert list(differences(name, before, numbers(run(name, monkeypatch)), *HERE))


def record_anew() -> None:
    """Writes the file of recorded numbers."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        cases = {name: numbers(run(name, monkeypatch)) for name in CASES}
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(one)}" for name, one in cases.items())
    text = f'{{"machine": {json.dumps(machine())},\n"cases": {{\n{lines}\n}}}}\n'
    RECORDED.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    record_anew()
