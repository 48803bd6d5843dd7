"""Tests of malicious uploads: all messages of all methods under all attacks.

The uploads are recorded in tiny runs. An attack changes a field of the upload of one client. The
server must reject this upload, name the client and the field, and continue without the client.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from math import ceil
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedsynth import Message, ModelParameters, RoundContext, ServerState, simulate
from fedsynth.core.uploads import memory_spans, most_bytes, overlap
from fedsynth.errors import MessageError
from fedsynth.federation.in_process import InProcess
from fedsynth.federation.protocol import Replies
from fedsynth.federation.server import NoQuorum, Server, run_round
from fedsynth.methods import METHODS
from fedsynth.privacy.plans import FIRST, MAIN
from tests.quick_runs import by_family
from tests.simulation.test_recorded_numbers import CASES, OWN_MODELS, case, settings_of

QUICK = ("fedavg", "feddm", "fedaf, first exchange", "fedgen", "fednova", "fedstats")
ATTACKER = 1
CLIENTS = 4
TINY: dict[str, Any] = {
    **{name: case(name) for name in METHODS},
    "fedmix": case("fedmix", run={"rounds": 1}),  # means are sent once
    "fedaf, first exchange": CASES["fedaf, first exchange"],
    "feddf, own architectures": case("feddf", run={"rounds": 1}, model=OWN_MODELS),
}


@dataclass(frozen=True)
class RecordedExchange:
    """An exchange of a run: the server's state before it, and the uploads of the clients."""

    method: Any
    state: ServerState
    exchange: str
    replies: Mapping[int, Message]
    context: RoundContext

    def server(self) -> Server:
        server = Server(self.method, self.state.parameters)
        server.state = server._next = self.state
        return server

    def rejection(self, message: Message) -> str:
        """Returns the reason for which the server rejects the attacker's message, and only this."""
        replies = {**self.replies, ATTACKER: message}
        accepted, rejected = self.server().check(self.exchange, replies, self.context)
        assert list(rejected) == [ATTACKER]
        assert accepted == {k: sent for k, sent in self.replies.items() if k != ATTACKER}
        return str(rejected[ATTACKER])


@functools.cache
def exchanges(name: str) -> tuple[RecordedExchange, ...]:
    """Returns the exchanges of a case's last round, in order."""
    seen: list[RecordedExchange] = []

    class RecordingServer(Server):
        def check(self, exchange: str, replies: Any, context: RoundContext) -> Any:
            seen.append(RecordedExchange(self.method, self._next, exchange, dict(replies), context))
            return super().check(exchange, replies, context)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedsynth.results.active_run.Server", RecordingServer)
        simulate(settings_of(TINY[name]))
    return tuple(item for item in seen if item.context.round == seen[-1].context.round)


Attack = Callable[[Any], Any]


def with_value(value: float) -> Attack:
    """Replaces a value of a tensor."""
    return lambda t: t.flatten().index_fill(0, torch.tensor(t.numel() // 2), value).view_as(t)


TENSOR_ATTACKS: dict[str, Attack] = {
    "NaN": with_value(float("nan")),
    "infinite": with_value(float("inf")),
    "1e30": with_value(1e30),
    "-1e30": with_value(-1e30),
    "other shape": lambda tensor: torch.cat([tensor.reshape(-1), tensor.reshape(-1)[:1]]),
    "no shape": lambda tensor: tensor.reshape(-1)[:1].reshape(()),
    "one more dimension": lambda tensor: tensor[None],
    "double": lambda tensor: tensor.double(),
    "half": lambda tensor: tensor.half(),
    "whole numbers": lambda tensor: tensor.to(torch.int32),
    "complex": lambda tensor: tensor.to(torch.complex64),
    "sparse": lambda tensor: tensor.to_sparse(),
    "elsewhere": lambda tensor: tensor.to("meta"),
    "text": lambda tensor: "a tensor",
    "a number": lambda tensor: 1.0,
    "nothing": lambda tensor: None,
}
# Attacks on floating-point tensors only.
FLOAT_ATTACKS = ("NaN", "infinite", "1e30", "-1e30")


def in_first_float(attack: Attack) -> Attack:
    def change(named: Mapping[str, Tensor]) -> dict[str, Any]:
        key = next(key for key, tensor in named.items() if tensor.is_floating_point())
        return {**named, key: attack(named[key])}

    return change


def with_shared_memory(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns tensors of which two share memory, with different shapes."""
    large, small = sorted(named, key=lambda key: -named[key].numel())[:2]
    within = named[large].view(-1)[: named[small].numel()].view(named[small].shape)
    return {**named, small: within}


MAPPING_ATTACKS: dict[str, Attack] = {
    **{name: in_first_float(attack) for name, attack in TENSOR_ATTACKS.items()},
    "missing name": lambda named: {key: named[key] for key in list(named)[:-1]},
    "extra name": lambda named: {**named, "backdoor": torch.ones(3)},
    "name that is none": lambda named: {**named, 7: torch.ones(3)},
    "no names": lambda named: [*named.values()],
    "aliased": with_shared_memory,
}
NUMBER_ATTACKS: dict[str, Attack] = {
    "NaN": lambda number: float("nan"),
    "infinite": lambda number: float("inf"),
    "-1": lambda number: -1.0,
    "-1e9": lambda number: -1e9,
    "1e9": lambda number: 1e9,
    "text": lambda number: "1",
    "true": lambda number: True,
    "a tensor": lambda number: torch.ones(()),
}


def attacks_of(value: Any) -> dict[str, Attack]:
    if isinstance(value, Mapping):
        return MAPPING_ATTACKS
    if isinstance(value, Tensor):
        is_integer = not value.is_floating_point()
        return {n: a for n, a in TENSOR_ATTACKS.items() if not (is_integer and n in FLOAT_ATTACKS)}
    return NUMBER_ATTACKS


def attacked_messages(honest: Any) -> Iterator[tuple[str, str, Message]]:
    """Yields (field, attack, message) of all attacks on a message."""
    for f in fields(honest):
        value = getattr(honest, f.name)
        if isinstance(value, Tensor | Mapping) and not len(value):
            continue  # FedAF's knowledge, if sent in a first exchange
        for name, attack in attacks_of(value).items():
            if name == "whole numbers" and getattr(value, "dtype", None) == torch.int32:
                continue
            yield f.name, name, replace(honest, **{f.name: attack(value)})


@pytest.mark.parametrize("name", by_family(TINY, QUICK))
def test_fields_of_uploads_are_checked(name: str) -> None:
    """Checks messages as objects, and as bytes if possible."""
    attacks = 0
    for exchanged in exchanges(name):
        for field, attack, message in attacked_messages(exchanged.replies[ATTACKER]):
            reason = exchanged.rejection(message)
            assert reason.startswith(field), f"{field} {attack}: {reason}"
            assert len(reason) < 400
            attacks += 1
            try:
                unpacked = type(message).from_bytes(message.to_bytes())
            except (MessageError, AttributeError, TypeError, RuntimeError, KeyError, ValueError):
                continue
            if attack != "aliased":  # bytes are separate, and the values are those of a model
                exchanged.rejection(unpacked)
    minimum = {"solo": 0, "fedstats": 10}.get(name, 20)  # fedstats sends one vector an exchange
    assert attacks >= minimum


@pytest.mark.parametrize("name", by_family(TINY, QUICK))
def test_honest_uploads_of_any_clients_are_accepted_within_size_limit(name: str) -> None:
    """The clients may differ between the exchanges of a round."""
    for exchanged in exchanges(name):
        exchange, context = exchanged.exchange, exchanged.context
        for client, message in exchanged.replies.items():
            rules = exchanged.method.upload_rules(exchange, client, context)
            packed = message.to_bytes()
            assert len(packed) <= most_bytes(type(message), rules)
            unpacked = {client: type(message).from_bytes(packed)}
            assert list(exchanged.server().check(exchange, unpacked, context)[0]) == [client]
        for subset in ([0], [3], [1, 2], [0, 2, 3], range(CLIENTS)):
            server = exchanged.server()
            replies = {k: exchanged.replies[k] for k in subset}
            assert server.check(exchange, replies, context)[1] == {}
            server.receive(exchange, replies, context)
            assert all(bool(torch.isfinite(t).all()) for _, t in server._next.arrays())
            assert exchange != FIRST or server._next is not exchanged.state


def with_fields(reason: str, **changes: Callable[[Any], Any]) -> tuple[Attack, str]:
    """Replaces fields of a message by functions of the message."""
    return lambda sent: replace(sent, **{name: f(sent) for name, f in changes.items()}), reason


ONE_EACH = "labels contain .* entries for"
INCONSISTENT_ATTACKS: dict[str, tuple[Attack, str]] = {
    **{
        f"label {label:g}": with_fields(
            re.escape(f"labels must have values between 0 and 9, got {label:.6g}"),
            labels=lambda sent, y=label: with_value(y)(sent.labels),
        )
        for label in (-100, -1, 10, 2**40)
    },
    "a label too few": with_fields(ONE_EACH, labels=lambda sent: sent.labels[:-1]),
    "an image too few": with_fields(ONE_EACH, images=lambda sent: sent.images[:-1].clone()),
    "no label": with_fields(ONE_EACH, labels=lambda sent: sent.labels[:0]),
    "more images": with_fields(
        "must be .*at most 20",  # two of each of ten classes
        images=lambda sent: sent.images.repeat(100, 1, 1, 1),
        labels=lambda sent: sent.labels.repeat(100),
    ),
    "one class": with_fields("at most 2 times", labels=lambda sent: torch.zeros_like(sent.labels)),
}
METHOD_ATTACKS: dict[tuple[str, str], tuple[Attack, str]] = {
    **{
        ("fedaf", f"soft label {p}"): with_fields(
            "^soft must contain rows" if p == 0.9 else "^soft must have values",
            soft=lambda sent, p=p: with_value(p)(sent.soft),
        )
        for p in (-0.5, 0.9, 2.0)
    },
    ("fedfa-plus", "half a histogram"): with_fields(
        "rows that sum to 1",
        statistics=lambda sent: sent.statistics | {"histogram": sent.statistics["histogram"] / 2},
    ),
    ("fedavg", "weight"): with_fields("weight must be", weight=lambda sent: sent.weight + 1.0),
    ("fedgen", "counts"): with_fields(
        "must sum to at most", counts=lambda sent: torch.full((10,), sent.weight)
    ),
    ("fedgen", "no counts"): with_fields("must not all be 0", counts=lambda sent: torch.zeros(10)),
    **{
        ("fednova", f"norm {name}"): with_fields("must be at least 1|must be between", norm=norm)
        for name, norm in {
            "0": lambda sent: 0.0,
            "1e-300": lambda sent: 1e-300,
            "of less than a step": lambda sent: 0.99,
            "of more than all steps": lambda sent: 1.01 * sent.norm,
        }.items()
    },
    ("feddm", "another message"): (
        lambda sent: ModelParameters({}, 1.0),
        "got ModelParameters",
    ),
}


@pytest.mark.parametrize(
    ("name", "attack"),
    [(name, key) for name in ("feddm", "fedaf, first exchange") for key in INCONSISTENT_ATTACKS]
    + list(METHOD_ATTACKS),
)
def test_inconsistent_fields_are_rejected(name: str, attack: str) -> None:
    change, message = METHOD_ATTACKS.get((name, attack)) or INCONSISTENT_ATTACKS[attack]
    exchanged = exchanges(name)[-1]
    assert re.search(message, exchanged.rejection(change(exchanged.replies[ATTACKER])))


def test_models_of_wrong_architecture_or_in_server_memory_are_rejected() -> None:
    exchanged = exchanges("feddf, own architectures")[-1]
    assert exchanged.rejection(exchanged.replies[0]).startswith("parameters ")
    exchanged = exchanges("fedavg")[-1]
    parameters = exchanged.state.parameters
    reason = exchanged.rejection(ModelParameters(parameters, 1.0))
    assert "shares memory with the server's parameters." in reason
    copied: Any = {name: tensor.clone() for name, tensor in parameters.items()}
    last = list(parameters)[-1]
    copied[last] = parameters[last].view(parameters[last].shape)
    assert f"parameters.{last} shares memory" in exchanged.rejection(ModelParameters(copied, 1.0))


@settings(deadline=None, max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 8)), min_size=2, max_size=6))
def test_overlap_compares_bytes(spans: list[tuple[int, int]]) -> None:
    memory = torch.zeros(40)
    named = [(str(n), memory[start : start + size]) for n, (start, size) in enumerate(spans)]
    used = [set(range(start, start + size)) for start, size in spans]
    expected = any(used[i] & used[j] for i in range(len(used)) for j in range(i))
    assert (overlap(named) is not None) == expected
    across = any(used[0] & other for other in used[1:])
    assert (overlap(named[:1], memory_spans(named[1:], server=True)) is not None) == across


def run(name: str, monkeypatch: pytest.MonkeyPatch, attacked: bool) -> Any:
    """Runs a case: the attacker's first upload of each round has NaN, or its uploads are dropped."""
    honest = InProcess.step
    rounds: set[int] = set()

    def step(
        self: InProcess, exchange: str, request: Message, context: RoundContext, clients: Any
    ) -> Replies:
        messages = dict(honest(self, exchange, request, context, clients).messages)
        if ATTACKER not in messages or context.round in rounds:
            return Replies(messages)
        rounds.add(context.round)
        attacks = attacked_messages(messages.pop(ATTACKER))
        if not attacked:
            return Replies(messages, lost={ATTACKER: "dropped"})
        with_nan = next(message for _, attack, message in attacks if attack == "NaN")
        return Replies({**messages, ATTACKER: with_nan})

    with monkeypatch.context() as patch:
        patch.setattr(InProcess, "step", step)
        return simulate(settings_of(TINY[name]))


@pytest.mark.parametrize(
    "name",
    by_family([n for n in TINY if n != "solo"], ("fedavg", "fedaf, first exchange", "fedstats")),
)
def test_run_with_attacker_equals_one_without(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that is rejected in the first exchange takes no part in the second one."""
    attacked_run, dropped_run = (run(name, monkeypatch, attacked) for attacked in (True, False))
    for key, value in dropped_run.model.state_dict().items():
        assert torch.equal(attacked_run.model.state_dict()[key], value), key
    for attacked_row, dropped_row in zip(attacked_run.metrics, dropped_run.metrics, strict=True):
        [(client, reason)] = attacked_row.pop("rejected").items()
        assert client == str(ATTACKER)
        assert dropped_row.pop("lost") == {str(ATTACKER): "dropped"}
        assert {**attacked_row, "seconds": 0} == {**dropped_row, "seconds": 0}
    assert reason.startswith("first exchange: ") == (exchanges(name)[0].exchange == FIRST)


@pytest.mark.parametrize(
    ("quorum", "attackers", "reached"),
    [(0.5, 2, True), (0.75, 2, False), (0.0, 3, True), (1.0, 1, False), (0.5, 4, False)],
)
def test_round_below_quorum_keeps_state(quorum: float, attackers: int, reached: bool) -> None:
    exchanged = exchanges("fedavg")[-1]
    server = exchanged.server()
    attacks: Any = {k: replace(exchanged.replies[k], weight=-1.0) for k in range(attackers)}  # type: ignore[call-arg]
    replies = {**exchanged.replies, **attacks}
    backend = Mock(step=lambda *_: Replies(replies), **{"prepare.return_value": []})
    outcome = run_round(server, backend, exchanged.context, quorum)
    assert set(outcome.rejected) == set(range(attackers))
    assert outcome.no_quorum == (
        None if reached else NoQuorum(MAIN, CLIENTS - attackers, ceil(quorum * CLIENTS))
    )
    assert (server.state is exchanged.state) == (not reached)
    assert bool(outcome.uploads) == reached
