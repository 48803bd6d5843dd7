"""A client that is apart from its server: what it answers, and what it refuses before it is
charged."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fedsynth import RunSettings, load_dataset, resolve
from fedsynth.core.messages import ModelParameters
from fedsynth.data.images import ImageData
from fedsynth.data.partition import partition
from fedsynth.deployment.frames import Frame
from fedsynth.deployment.remote_client import RemoteClient
from fedsynth.errors import MessageError
from fedsynth.federation.client_runtime import ClientRuntime, OwnData
from fedsynth.federation.context import public_context, with_proxy
from fedsynth.federation.protocol import Models, agreement
from fedsynth.methods import METHODS, method_class
from fedsynth.privacy.ledger import Ledger
from tests.families import by_family
from tests.small import small_settings

CLIENTS = 3
CPU = torch.device("cpu")
Sections = Mapping[str, Mapping[str, Any]]


def sections(method: str, **more: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Two rounds of a method on the digits, with a subset and small steps."""
    return {
        "run": {"method": method, "rounds": 2, "device": "cpu", "evaluate_every": 2},
        "partition": {"clients": CLIENTS, "subset": 0.2, "alpha": 1.0},
        "model": {"width": 4, "depth": 2, "norm": "batch" if method == "fedbn" else "instance"},
        "method": small_settings(method),
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
    return RemoteClient(ClientRuntime(number, settings, context, data, ledger), context)


def client_of(given: Sections) -> RemoteClient:
    """A client in this process."""
    settings = resolve(given)
    train, _ = load_dataset("digits")
    own = train.subset(np.asarray(parts_of(settings, train)[0]))
    return remote_client(settings, 0, own)


def test_a_client_answers_a_hostile_frame_with_an_error() -> None:
    client = client_of(sections("fedavg"))
    step = {"phase": "main", "round": 1, "participants": [0]}
    frames = [Frame("step", {**step, "phase": phase}) for phase in ("other", "first")]
    frames += [Frame("read the disk", {}), Frame("step", {"phase": "main"})]
    frames += [Frame("step", step, b"junk"), Frame("start", {"sizes": ["many"]})]
    for number, participants in ((-1, [0]), (1, [7]), (1, [1, 0])):
        frames.append(Frame("prepare", {"round": number, "participants": participants}))
    for sent in (b"", b"\xff" * 40, *(frame.to_bytes() for frame in frames)):
        answer = Frame.from_bytes(client.answer(sent))
        assert answer.kind == "error"
        assert answer.facts["text"]


def test_a_client_refuses_a_server_with_other_settings() -> None:
    client = client_of(sections("fedavg", privacy=EPSILON))
    other = agreement(resolve(sections("fedavg", privacy={"epsilon": 80.0})))
    assert "other settings" in asked(client, "join", agreement=other).facts["text"]


def test_a_private_client_is_not_measured_on_its_own_records() -> None:
    client, _ = joined(sections("fedavg", privacy=EPSILON), noise_multiplier=3.0)
    answer = asked(client, "evaluate", **ROUND)
    assert answer.kind == "error"
    assert "not protected" in answer.facts["text"]


def asked(client: RemoteClient, kind: str, payload: bytes = b"", **facts: Any) -> Frame:
    """The client's answer to one request."""
    return Frame.from_bytes(client.answer(Frame(kind, facts, payload).to_bytes()))


def joined(given: Sections, **terms: Any) -> tuple[RemoteClient, Ledger]:
    """A private client in this process that was told terms, and its ledger."""
    client = client_of(given)
    assert asked(client, "join", agreement=agreement(resolve(given))).kind == "answer"
    if terms:
        answer = asked(client, "start", **terms)
        assert answer.kind == "answer", answer.facts
    ledger = client.runtime.ledger
    assert ledger is not None
    return client, ledger


def model_of(client: RemoteClient, **other: torch.Tensor) -> dict[str, torch.Tensor]:
    return {**client.runtime.context.architecture.state_dict(), **other}


ROUND: dict[str, Any] = {"round": 1, "participants": list(range(CLIENTS))}
EPSILON = {"epsilon": 8.0}
SIGMA = {"noise_multiplier": 5.0}


@pytest.mark.parametrize(
    "method", by_family((n for n in METHODS if method_class(n).protects), ("fedavg", "feddm"))
)
def test_nothing_is_answered_before_the_terms_are_told(method: str) -> None:
    """A client is private by its own settings, and not because a server has said so: before, a
    step that came first was answered with the plain model, and the true n_k."""
    client, ledger = joined(sections(method, privacy=EPSILON))
    for kind in ("prepare", "begin", "facts", "evaluate"):
        assert asked(client, kind, **ROUND).kind == "error", kind
    state = resolve(sections(method)).method.initial_state(model_of(client))
    sent = client.runtime.method.broadcast(state, client.runtime.context)
    for order in ({"phase": "main"}, {"phase": "first"}):
        assert asked(client, "step", sent.to_bytes(), **ROUND, **order).kind in ("error", "refusal")
    assert ledger.releases == ()


def test_terms_are_told_to_those_who_joined_and_once() -> None:
    given = sections("fedavg", privacy=EPSILON)
    assert asked(client_of(given), "start", noise_multiplier=3.0).kind == "error"
    client, _ = joined(given, noise_multiplier=3.0)
    assert asked(client, "start", noise_multiplier=0.01).kind == "error"


def test_the_noise_is_that_of_the_clients_own_settings() -> None:
    """Where they name σ, it is this one, whatever the server says."""
    client, ledger = joined(sections("fedavg", privacy=SIGMA))
    message = ModelParameters(model_of(client), 1.0).to_bytes()
    for sigma in ("3", None, 3, 0.0, -1.0, 1e-300, 0.001, 4.999):
        assert asked(client, "start", noise_multiplier=sigma).kind == "error"
        answer = asked(client, "step", message, **ROUND, phase="main")
        assert answer.kind in ("error", "refusal")
    assert ledger.releases == ()


def test_a_cap_holds_whatever_noise_a_server_asks_for() -> None:
    client, ledger = joined(sections("fedavg", privacy=EPSILON), noise_multiplier=0.05)
    message = ModelParameters(model_of(client), 1.0).to_bytes()
    assert asked(client, "prepare", **ROUND).kind != "answer"
    assert asked(client, "step", message, **ROUND, phase="main").kind == "refusal"
    assert ledger.releases == ()


def test_rounds_are_those_of_the_schedule_each_once() -> None:
    client, ledger = joined(sections("fedavg", privacy=SIGMA), noise_multiplier=5.0)
    message = ModelParameters(model_of(client), 1.0).to_bytes()
    assert asked(client, "step", message, **ROUND, phase="main").kind == "answer"
    charged = len(ledger.releases)
    for facts in (
        ROUND,
        {**ROUND, "round": 0},
        {**ROUND, "round": 3},
        {**ROUND, "round": 10**9},
        {"round": 2, "participants": [1, 2]},
        {"round": 2, "participants": [0]},
    ):
        assert asked(client, "step", message, **facts, phase="main").kind == "error", facts
    assert len(ledger.releases) == charged


def test_a_crafted_model_is_refused_before_it_is_charged() -> None:
    changes: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda own: own[None],
        lambda own: torch.full_like(own, 7).to(torch.int64),
        lambda own: own.to(torch.complex64),
        lambda own: torch.full_like(own, float("inf")),
    ]
    changes.append(torch.clone)  # under another name
    for change in changes:
        client, ledger = joined(sections("fedavg", privacy=SIGMA), noise_multiplier=5.0)
        name, own = next(iter(model_of(client).items()))
        name = "other" if change is torch.clone else name
        message = ModelParameters(model_of(client, **{name: change(own)}), 1.0).to_bytes()
        answer = asked(client, "step", message, **ROUND, phase="main")
        assert answer.kind in ("refusal", "error")
        assert ledger.releases == ()


@pytest.mark.parametrize("field", ["known", "anchors"])
def test_a_crafted_request_of_a_method_is_refused_before_it_is_charged(field: str) -> None:
    """`known` as a matrix would make each example's loss depend on the others."""
    given = sections("fedfm-lite", privacy=SIGMA)
    client, ledger = joined(given, noise_multiplier=5.0)
    context = client.runtime.context
    state = client.runtime.method.initial_state(model_of(client))
    sent = client.runtime.method.broadcast(state, context)
    odd = {"known": torch.ones(10, 64, dtype=torch.bool), "anchors": torch.ones(64)}[field]
    answer = asked(client, "step", replace(sent, **{field: odd}).to_bytes(), **ROUND, phase="main")
    assert answer.kind == "refusal"
    assert field in answer.facts["reason"]
    assert ledger.releases == ()


def test_an_open_client_records_a_round_that_a_server_does_not_announce() -> None:
    """A step, or a test of models on its own split, is written down first."""
    settings = resolve(sections("fedavg"))
    train, _ = load_dataset("digits")
    own = train.subset(np.asarray(parts_of(settings, train)[0]))
    everything = torch.arange(len(own))
    context = public_context(settings, own.spec, CPU)
    for kind in ("step", "evaluate"):
        ledger = Ledger("client-000")
        data = OwnData(own, everything[:-5], everything[-5:])
        client = RemoteClient(ClientRuntime(0, settings, context, data, ledger), context)
        asked(client, "join", agreement=agreement(settings))
        asked(client, "start", sizes=[1] * CLIENTS)
        state = model_of(client)
        packed = {"step": ModelParameters(state, 1.0), "evaluate": Models(state)}[kind]
        for _ in range(2):
            answer = asked(client, kind, packed.to_bytes(), **ROUND, phase="main")
            assert answer.kind == "answer"
        assert [row.unaccounted is not None for row in ledger.releases] == [True]


def test_a_frame_that_is_cut_off_is_none() -> None:
    whole = Frame("step", {"round": 1}, b"payload").to_bytes()
    for cut in (0, 5, 8, 20):
        with pytest.raises(MessageError):
            Frame.from_bytes(whole[:cut])
