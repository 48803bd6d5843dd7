"""Every method with a server and clients in processes of their own, over bytes alone: the result is
that of the same federation in one process."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest
import torch

from fedsynth import RunSettings, load_dataset, resolve, simulate
from fedsynth.data.images import ImageData
from fedsynth.data.partition import partition
from fedsynth.errors import MessageError
from fedsynth.federation.client_runtime import ClientRuntime, OwnData
from fedsynth.federation.planning import public_context
from fedsynth.federation.rounds import agree, play_round, with_proxy
from fedsynth.federation.server import Server
from fedsynth.federation.wire import Frame, OverWire, RemoteClient, RemoteError
from fedsynth.methods import METHODS, method_class
from fedsynth.privacy.ledger import Ledger

CLIENTS = 3
CPU = torch.device("cpu")
Sections = Mapping[str, Mapping[str, Any]]
SMALL: dict[str, dict[str, Any]] = {
    "feddm": {"iterations": 3, "ipc": 2, "server_epochs": 2},
    "fedaf": {"iterations": 3, "ipc": 2, "server_epochs": 2},
    "real": {"ipc": 2, "server_epochs": 2},
    "feddf": {"local_epochs": 1, "server_steps": 3, "proxy": "noise"},
    "dense": {"local_epochs": 1, "server_epochs": 2, "generator_steps": 2},
    "fedhydra": {
        "local_epochs": 1,
        "server_epochs": 2,
        "generator_steps": 2,
        "stratification_steps": 2,
    },
}


def sections(method: str, **more: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Two rounds of a method on the digits, with a subset and small steps."""
    return {
        "run": {"method": method, "rounds": 2, "device": "cpu", "evaluate_every": 2},
        "partition": {"clients": CLIENTS, "subset": 0.2, "alpha": 1.0},
        "model": {"width": 4, "depth": 2, "norm": "batch" if method == "fedbn" else "instance"},
        "method": SMALL.get(method, {"local_epochs": 1}),
        **{name: dict(values) for name, values in more.items()},
    }


def parts_of(settings: RunSettings, train: ImageData) -> list[Any]:
    return partition(
        train.labels.numpy(), settings.resolved_partition, train.spec.classes, *train.origins()
    )


def remote_client(settings: RunSettings, number: int, own: ImageData) -> RemoteClient:
    """A client that has nothing but its own records, and the settings."""
    context = with_proxy(public_context(settings, own.spec, CPU), settings)
    data = OwnData(own, torch.arange(len(own)), torch.zeros(0, dtype=torch.int64))
    ledger = Ledger(f"client-{number:03d}") if settings.privacy is not None else None
    return RemoteClient(settings, ClientRuntime(number, settings.method, data, ledger), context)


def work(connection: Connection, number: int, pixels: Any, labels: Any) -> None:
    """A client's process: it is given its records once, and for each run the settings."""
    torch.set_num_threads(1)
    spec = load_dataset("digits")[0].spec
    everything = ImageData(torch.from_numpy(pixels), torch.from_numpy(labels), spec)
    client: RemoteClient | None = None
    while True:
        try:
            asked = connection.recv_bytes()
        except EOFError:
            return
        if asked.startswith(b"settings:"):
            settings = resolve(json.loads(asked.removeprefix(b"settings:")))
            client = remote_client(settings, number, everything)
        elif client is not None:
            connection.send_bytes(client.answer(asked))


@dataclass
class Pipe:
    """A channel over a pipe, which counts what it carries."""

    connection: Connection
    carried: int = 0

    def send(self, frame: bytes) -> None:
        self.carried += len(frame)
        self.connection.send_bytes(frame)

    def receive(self) -> bytes:
        received = self.connection.recv_bytes()
        self.carried += len(received)
        return received


@pytest.fixture(scope="module")
def connections() -> Iterator[list[Connection]]:
    """Client processes, each with its own records and no others."""
    settings = resolve(sections("fedavg"))
    train, _ = load_dataset("digits")
    spawn = multiprocessing.get_context("spawn")
    ends: list[Connection] = []
    processes = []
    for number, part in enumerate(parts_of(settings, train)):
        here, there = spawn.Pipe()
        own = train.subset(np.asarray(part))
        arguments = (there, number, own.images.numpy(), own.labels.numpy())
        process = spawn.Process(target=work, args=arguments, daemon=True)
        process.start()
        there.close()
        ends.append(here)
        processes.append(process)
    yield ends
    for end in ends:
        end.close()
    for process in processes:
        process.join(timeout=20)
        process.terminate()


def over_bytes(given: Sections, connections: list[Connection]) -> tuple[Server, list[Pipe], Any]:
    """Plays a run's rounds with the client processes; the server, the pipes, what was agreed."""
    settings = resolve(given)
    for connection in connections:
        connection.send_bytes(b"settings:" + json.dumps(given).encode())
    pipes = [Pipe(connection) for connection in connections]
    spec = load_dataset("digits")[0].spec
    context = with_proxy(public_context(settings, spec, CPU), settings)
    exchange = OverWire(settings, pipes, CPU)
    terms, context = agree(settings, context, exchange)
    server = Server(settings.method, context.architecture.state_dict())
    for number in range(1, settings.rounds + 1):
        in_round = replace(context, round=number, participants=tuple(range(CLIENTS)))
        assert play_round(server, exchange, in_round).refusal is None
        settings.method.merge_facts(exchange.facts(in_round))
    return server, pipes, (terms, exchange.histories())


@pytest.mark.parametrize("method", sorted(METHODS))
def test_processes_get_what_one_process_gets(method: str, connections: list[Connection]) -> None:
    given = sections(method)
    server, pipes, _ = over_bytes(given, connections)
    together = simulate(resolve(given))
    found = server.final_parameters()
    for name, value in together.model.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6, msg=name)
    assert all(pipe.carried > 1000 for pipe in pipes) or method == "solo"


@pytest.mark.parametrize(
    "method", [name for name in sorted(METHODS) if method_class(name).protects]
)
def test_a_private_federation_over_bytes_charges_as_planned(
    method: str, connections: list[Connection]
) -> None:
    given = sections(method, privacy={"epsilon": 8.0})
    server, _, (terms, histories) = over_bytes(given, connections)
    assert all(bool(torch.isfinite(t).all()) for t in server.final_parameters().values())
    alone = simulate(resolve(given))
    assert alone.privacy is not None
    planned = sorted(str(row) for row in terms.plan.planned())
    for history in histories:
        assert sorted(str(row) for row in history.releases) == planned
    assert terms.plan.epsilon(histories) == pytest.approx(alone.metrics[-1]["epsilon"])


def test_a_client_refuses_a_server_with_other_settings(connections: list[Connection]) -> None:
    given = sections("fedavg", privacy={"epsilon": 8.0})
    other = resolve(sections("fedavg", privacy={"epsilon": 80.0}))
    for connection in connections:
        connection.send_bytes(b"settings:" + json.dumps(given).encode())
    exchange = OverWire(other, [Pipe(connection) for connection in connections], CPU)
    with pytest.raises(RemoteError, match="other settings"):
        exchange.join()


def client_of(given: Sections) -> RemoteClient:
    """A client in this process."""
    settings = resolve(given)
    train, _ = load_dataset("digits")
    own = train.subset(np.asarray(parts_of(settings, train)[0]))
    return remote_client(settings, 0, own)


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xff" * 40,
        Frame("read the disk", {}).to_bytes(),
        Frame("step", {"phase": "main"}).to_bytes(),
        Frame("step", {"phase": "other", "round": 1, "participants": [0]}).to_bytes(),
        Frame("step", {"phase": "first", "round": 1, "participants": [0]}).to_bytes(),
        Frame("step", {"phase": "main", "round": 1, "participants": [0]}, b"junk").to_bytes(),
        Frame("prepare", {"round": -1, "participants": [0]}).to_bytes(),
        Frame("prepare", {"round": 1, "participants": [7]}).to_bytes(),
        Frame("prepare", {"round": 1, "participants": [1, 0]}).to_bytes(),
        Frame("start", {"sizes": ["many"]}).to_bytes(),
    ],
)
def test_a_client_answers_a_hostile_frame_with_an_error(frame: bytes) -> None:
    answer = Frame.from_bytes(client_of(sections("fedavg")).answer(frame))
    assert answer.kind == "error"
    assert answer.facts["text"]


def test_a_private_client_is_not_measured_on_its_own_records() -> None:
    client = client_of(sections("fedavg", privacy={"epsilon": 8.0}))
    asked = Frame("evaluate", {"round": 1, "participants": [0]})
    answer = Frame.from_bytes(client.answer(asked.to_bytes()))
    assert answer.kind == "error"
    assert "not protected" in answer.facts["text"]


def test_a_private_client_wants_a_noise_multiplier() -> None:
    client = client_of(sections("fedavg", privacy={"epsilon": 8.0}))
    for facts in ({}, {"noise_multiplier": "3"}, {"noise_multiplier": None}):
        answer = Frame.from_bytes(client.answer(Frame("start", facts).to_bytes()))
        assert answer.kind == "error"


@pytest.mark.parametrize("cut", [0, 5, 8, 20])
def test_a_frame_that_is_cut_off_is_none(cut: int) -> None:
    whole = Frame("step", {"round": 1}, b"payload").to_bytes()
    with pytest.raises(MessageError):
        Frame.from_bytes(whole[:cut])
