"""The program that the tests of ranks start at each rank: `python -m ... CASE FOLDER`.

The cases compute the same at any number of ranks. Rank 0 writes what a test compares.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from safetensors.torch import load_file

from fedsynth import FedAvg, RunResult, load_dataset, resolve, simulate
from fedsynth.core.messages import Message, Tensors
from fedsynth.errors import DivergedError, FedsynthError
from fedsynth.features import encoding
from fedsynth.federation import links as links_module
from fedsynth.federation import ranks
from fedsynth.federation.links import RankError, connect
from fedsynth.privacy import randomness
from fedsynth.privacy.passes import values_of_each
from fedsynth.rank import this_rank
from tests.quick_runs import interrupt_in_round, quick_sections
from tests.simulation.test_recorded_numbers import case, settings_of

# One method of each family, and the mechanics that a method may use: states, personal models, two
# exchanges, failures, and rounds with some clients.
EQUAL: dict[str, dict[str, dict[str, Any]]] = {
    "averaging, states": case("scaffold", run={"client_failures": 0.3, "rounds": 3}),
    "personal models": case("solo", partition={"clients": 4, "local_test": 0.2}),
    "condensation, client by client": case("feddm", run={"memory_gb": 1e-6}),
    "alignment, two exchanges": case("fedaf", method={"knowledge_from": "first-exchange"}),
    "distillation each round": case("fedkf", run={"participation": 0.5, "rounds": 3}),
    "one-shot distillation": case("fedhydra", run={"rounds": 1}),
    "distillation on public images": case("feddf", method={"server_steps": 20}),
    "statistics": case("fedstats"),
    "images from statistics": case(
        "fedstats", method={"ipc": 8, "drawn_ipc": 4, "image_steps": 2, "pictures": "yes"}
    ),
}
# Cases with passes over several clients, whose last bits depend on who shares a pass.
CLOSE = {
    "condensation": case("feddm"),
    "training in one pass": case(
        "scaffold", partition={"clients": 40}, model={"name": "linear"}, method={"batch": 8}
    ),
}
RESUMED = quick_sections("scaffold", run={"rounds": 3}, partition={"clients": 4})


def digest(tensors: Tensors) -> str:
    result = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        result.update(name.encode() + tensor.cpu().contiguous().numpy().tobytes())
    return result.hexdigest()


def facts(result: RunResult) -> dict[str, Any]:
    """Returns exact facts of a run, with the digest of the model."""
    rows = [{k: v for k, v in row.items() if k != "seconds"} for row in result.metrics]
    uploads = {str(k): digest(dict(upload.arrays())) for k, upload in result.uploads.items()}
    made = {"model": digest(result.model.state_dict()), "artefacts": digest(result.artefacts)}
    images = result.folder / "synthetic.safetensors" if result.folder else None
    if images is not None and images.exists():
        made["images"] = digest(load_file(images))
    return {**made, "rows": rows, "uploads": uploads}


def numbers(result: RunResult) -> list[float]:
    parameters = [t.flatten().double() for t in result.model.state_dict().values()]
    return torch.cat(parameters).tolist()


def equal(folder: Path) -> dict[str, Any]:
    values: dict[str, Any]
    values = {}
    for name, sections in EQUAL.items():
        output = folder if "ipc" in sections["method"] else None
        values[name] = facts(simulate(settings_of(sections), output=output, quiet=True))
    for name, sections in CLOSE.items():
        values[name] = numbers(simulate(settings_of(sections), quiet=True))
    return values


def encoded(folder: Path) -> dict[str, Any]:
    """Encodes images without a cache, then with an empty one, and then with the filled one."""
    original = encoding.values_of_each
    counts, values = [], []
    folder.mkdir(parents=True, exist_ok=True)
    for cache in ("", "cache", "cache"):
        batches: list[int] = []

        def counted(*arguments: Any, done: list[int] = batches) -> Any:
            done.append(1)
            return original(*arguments)

        data = {"encoder": "scattering", "encoder_cache": str(folder / cache) if cache else None}
        settings = settings_of(case("fedavg", data=data, model={"name": "linear"}))
        with patch.object(encoding, "values_of_each", counted):
            values.append(facts(simulate(settings, quiet=True)))
        counts.append(len(batches))
    return {"facts": values, "batches": counts}


def interrupted(folder: Path) -> dict[str, Any]:
    """Interrupts a run after its first round."""
    with interrupt_in_round(2), suppress(KeyboardInterrupt, RankError):
        simulate(resolve(RESUMED), output=folder, quiet=True)
    return {}


def resumed(folder: Path) -> dict[str, Any]:
    """Resumes the run, or makes it in one piece if there is nothing to resume."""
    unfinished = next(folder.glob("*.incomplete"), None)
    return facts(simulate(resolve(RESUMED), resume=unfinished, quiet=True))


def private(folder: Path) -> dict[str, Any]:
    """Releases sums of four clients with equal records, so that uploads differ by noise only."""
    train, _ = load_dataset("digits")
    part = train.subset(np.arange(200))
    data = train.subset(np.tile(np.arange(200), 4))
    parts = list(np.arange(800).reshape(4, 200))
    privacy = {"noise_multiplier": 1.0, "ledger": str(folder / "ledgers")}
    settings = settings_of(case("fedstats", privacy=privacy))
    assert len(part) == 200
    if os.environ.get("EQUAL_KEYS"):  # a broken variant, which the test must detect
        patch.object(randomness.secrets, "token_bytes", lambda count: bytes(count)).start()
    result = simulate(settings, data=(data, None), parts=parts, output=folder, quiet=True)
    patch.stopall()
    uploads = [digest(dict(upload.arrays())) for upload in result.uploads.values()]
    return {"uploads": uploads, "folder": str(result.folder), "metrics": len(result.metrics)}


def rejected(folder: Path) -> dict[str, Any]:
    """Lets clients send invalid uploads."""
    original = FedAvg.client_step

    def broken(self: FedAvg, message: Any, clients: Any, *rest: Any) -> Any:
        results: list[Any] = original(self, message, clients, *rest)
        for place, number in enumerate(clients.ids):
            upload, state = results[place]
            name, weight = next(iter(upload.parameters.items()))
            bad = {
                0: replace(upload, weight=-1.0),
                1: replace(upload, parameters={**upload.parameters, name: weight * math.nan}),
                2: replace(upload, parameters={name: weight[1:]}),
                3: Message(),
                4: replace(upload, weight=math.nan),
            }
            results[place] = bad.get(number, upload), state
        return results

    with patch.object(FedAvg, "client_step", broken):
        settings = settings_of(case("fedavg", partition={"clients": 10}, run={"quorum": 0.5}))
        return facts(simulate(settings, quiet=True))


def failing(folder: Path) -> dict[str, Any]:
    """Lets runs fail, and returns the errors of this rank. Then a run succeeds."""
    settings = settings_of(case("fedavg"))
    errors = {}
    original = FedAvg.client_step

    def broken(self: FedAvg, message: Any, clients: Any, *rest: Any) -> Any:
        if this_rank():
            raise DivergedError("the loss is not finite")
        return original(self, message, clients, *rest)

    def attempt(name: str, **values: Any) -> None:
        try:
            simulate(settings, quiet=True, **values)
        except FedsynthError as error:
            errors[name] = [error.code, str(error)]

    def fails_at_rank_1(*arguments: Any) -> Any:
        if this_rank():
            raise DivergedError("the encoder failed")
        return values_of_each(*arguments)

    with patch.object(FedAvg, "client_step", broken):
        attempt("client")
    with patch.object(ranks, "__version__", "0.0.1" if this_rank() else "0.0.2"):
        attempt("version")
    settings = settings_of(case("fedavg", run={"seed": this_rank()}))
    attempt("settings")
    settings = settings_of(case("fedavg", method={"lr": 1e30}))
    attempt("diverged")
    settings = settings_of(case("fedavg", data={"encoder": "pixels"}, model={"name": "linear"}))
    with patch.object(encoding, "values_of_each", fails_at_rank_1):
        attempt("encoder")
    attempt("nothing")
    settings = settings_of(case("fedavg"))
    attempt("nothing more")
    return errors


def alive(folder: Path) -> dict[str, Any]:
    """Lets rank 0 compute for longer than a rank may give no sign."""
    connected = connect()
    assert connected is not None
    with patch.object(connected, "_seconds", 2.0), connected.run():
        if this_rank() == 0:
            connected.send(1, "step")
        else:
            first = connected.next([0]).kind
        if this_rank() == 0:
            time.sleep(5.0)
        total = torch.tensor([1 + this_rank()])
        connected.add(total)  # which rank 1 has called long before
        if this_rank() == 0:
            connected.send(1, "end")
            return {"total": int(total)}
        return {"frames": [first, connected.next([0]).kind], "total": int(total)}


def links(folder: Path) -> dict[str, Any]:
    """Fails at rank 0 before rank 1 begins. Then a request overtakes three large answers."""
    connected = connect()
    assert connected is not None
    time.sleep(2.0 * this_rank())
    with (
        patch.object(links_module, "STOP_SECONDS", 0.1),
        suppress(RankError, DivergedError),
        connected.run(),
    ):
        if this_rank():
            connected.next()
        raise DivergedError("the loss is not finite")
    with connected.run():
        if this_rank() == 0:
            connected.send(1, "step")
            sums = [float(connected.next().parts["x"].double().sum()) for _ in range(4)]
            connected.send(1, "end")
            return {"sums": sums}
        for number in range(4):
            if number == 3:
                connected.next()  # the request, which arrived before all answers were sent
            part = torch.full((2**24,), number, dtype=torch.uint8)
            connected.send(0, "part", parts={"x": part})
            del part
        connected.next()
    return {}


def hanging(folder: Path) -> dict[str, Any]:
    """Stops rank 1 for good. No other case can follow."""
    original = FedAvg.client_step

    def stopped(self: FedAvg, *arguments: Any) -> Any:
        if this_rank():
            os.kill(os.getpid(), signal.SIGSTOP)
        return original(self, *arguments)

    with patch.object(FedAvg, "client_step", stopped), patch.object(connect(), "_seconds", 5.0):
        try:
            simulate(settings_of(case("fedavg")), quiet=True)
        except FedsynthError as error:
            return {"error": [error.code, str(error)]}
    return {}


CASES: dict[str, Callable[[Path], dict[str, Any]]] = {
    function.__name__: function
    for function in (
        *(equal, encoded, interrupted, resumed, private),
        *(rejected, failing, links, alive, hanging),
    )
}


def main(names: str, folder: Path) -> None:
    torch.set_num_threads(1)
    for name in names.split(","):
        values = CASES[name](folder / name.replace("resumed", "interrupted"))
        file = folder / f"{name}-{this_rank()}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(values), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
