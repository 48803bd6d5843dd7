"""Uploads that lie: every method's messages under every attack, and what becomes of the round.

What clients send is taken from tiny runs. An attack changes one field of one client's upload; the
server must reject that upload, name that client and field, and go on as if the client was not
there.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from math import ceil
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedsynth import Message, ModelParameters, RoundContext, ServerState, resolve, simulate
from fedsynth.core.uploads import most_bytes, overlap
from fedsynth.errors import DivergedError, MessageError
from fedsynth.federation.in_process import InProcess
from fedsynth.federation.protocol import Replies
from fedsynth.federation.server import NoQuorum, Server, run_round
from fedsynth.methods import METHODS
from fedsynth.methods.fedfm import FeatureSums
from fedsynth.privacy.plans import FIRST, MAIN
from tests.families import by_family
from tests.simulation.test_unchanged import CASES, OWN_MODELS, case, settings_of

QUICK = ("fedavg", "feddm", "fedaf, first phase", "fedgen", "fednova", "fedstats")
LIAR = 1
CLIENTS = 4
TINY: dict[str, Any] = {
    **{name: case(name) for name in METHODS},
    "fedaf, first phase": CASES["fedaf, first phase"],
    "feddf, own architectures": case("feddf", run={"rounds": 1}, model=OWN_MODELS),
}


@dataclass(frozen=True)
class Exchanged:
    """One exchange of a run: the server's state before it, and what its clients sent."""

    method: Any
    state: ServerState
    phase: str
    replies: Mapping[int, Message]
    context: RoundContext

    def server(self) -> Server:
        made = Server(self.method, self.state.parameters)
        made.state = made._next = self.state
        return made

    def rejected(self, message: Message) -> str:
        """Why the server rejects this in place of the liar's; nobody else is."""
        checked = self.server().check(self.phase, {**self.replies, LIAR: message}, self.context)
        assert list(checked.rejected) == [LIAR]
        others = {k: sent for k, sent in self.replies.items() if k != LIAR}
        assert dict(checked.accepted) == others
        return str(checked.rejected[LIAR])


@functools.cache
def exchanges(name: str) -> tuple[Exchanged, ...]:
    """Those of a case's last round, in order."""
    seen: list[Exchanged] = []

    class Watching(Server):
        def check(self, phase: str, replies: Any, context: RoundContext) -> Any:
            seen.append(Exchanged(self.method, self._next, phase, dict(replies), context))
            return super().check(phase, replies, context)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedsynth.simulation.run.Server", Watching)
        simulate(settings_of(TINY[name]))
    return tuple(one for one in seen if one.context.round == seen[-1].context.round)


# ------------------------------------------------------------------------------------------ attacks

Attack = Callable[[Any], Any]


def filled(value: float) -> Attack:
    """One value of a tensor is another."""

    def change(tensor: Tensor) -> Tensor:
        changed = tensor.clone()
        changed.view(-1)[changed.numel() // 2] = value
        return changed

    return change


OF_TENSORS: dict[str, Attack] = {
    "NaN": filled(float("nan")),
    "infinite": filled(float("inf")),
    "1e30": filled(1e30),
    "-1e30": filled(-1e30),
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
FOR_FLOATS = ("NaN", "infinite", "1e30", "-1e30")
"""Attacks that only numbers with a point can carry."""


def in_first_float(attack: Attack) -> Attack:
    def change(named: Mapping[str, Tensor]) -> dict[str, Any]:
        key = next(key for key, tensor in named.items() if tensor.is_floating_point())
        return {**named, key: attack(named[key])}

    return change


def aliased(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Two entries of one memory, each with its own shape."""
    large, small = sorted(named, key=lambda key: -named[key].numel())[:2]
    within = named[large].view(-1)[: named[small].numel()].view(named[small].shape)
    return {**named, small: within}


OF_MAPPINGS: dict[str, Attack] = {
    **{name: in_first_float(attack) for name, attack in OF_TENSORS.items()},
    "missing name": lambda named: {key: named[key] for key in list(named)[:-1]},
    "extra name": lambda named: {**named, "backdoor": torch.ones(3)},
    "name that is none": lambda named: {**named, 7: torch.ones(3)},
    "no names": lambda named: [*named.values()],
    "aliased": aliased,
}
OF_NUMBERS: dict[str, Attack] = {
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
        return OF_MAPPINGS
    if isinstance(value, Tensor):
        whole = not value.is_floating_point()
        return {n: a for n, a in OF_TENSORS.items() if not (whole and n in FOR_FLOATS)}
    return OF_NUMBERS


def attacked(exchanged: Exchanged) -> Iterator[tuple[str, str, Message]]:
    """(field, attack, the liar's message) of all attacks on one exchange."""
    honest: Any = exchanged.replies[LIAR]
    for f in fields(honest):
        value = getattr(honest, f.name)
        empty = isinstance(value, Tensor | Mapping) and not len(value)
        if empty:  # FedAF's knowledge, where it went up in a first exchange
            continue
        for name, attack in attacks_of(value).items():
            changed = attack(value)
            if name == "whole numbers" and getattr(value, "dtype", None) == torch.int32:
                continue
            yield f.name, name, replace(honest, **{f.name: changed})


@pytest.mark.parametrize("name", by_family(TINY, QUICK))
def test_every_field_of_every_upload_is_checked(name: str) -> None:
    """As an object, and as bytes where it can be packed."""
    tried = 0
    for exchanged in exchanges(name):
        for field, attack, message in attacked(exchanged):
            why = exchanged.rejected(message)
            assert why.startswith(field), f"{field} {attack}: {why}"
            assert len(why) < 400
            tried += 1
            try:
                got = type(message).from_bytes(message.to_bytes())
            except (MessageError, AttributeError, TypeError, RuntimeError, KeyError, ValueError):
                continue
            if attack != "aliased":  # bytes are separate, and the values are those of a model
                exchanged.rejected(got)
    least = {"solo": 0, "fedstats": 10}.get(name, 20)  # fedstats sends one vector an exchange
    assert tried >= least


@pytest.mark.parametrize("name", by_family(TINY, QUICK))
def test_what_clients_honestly_send_is_taken_and_within_its_bytes(name: str) -> None:
    for exchanged in exchanges(name):
        checked = exchanged.server().check(exchanged.phase, exchanged.replies, exchanged.context)
        assert checked.rejected == {}
        for client, message in exchanged.replies.items():
            rules = exchanged.method.upload_rules(exchanged.phase, client, exchanged.context)
            packed = message.to_bytes()
            assert len(packed) <= most_bytes(type(message), rules)
            again = {client: type(message).from_bytes(packed)}
            checked = exchanged.server().check(exchanged.phase, again, exchanged.context)
            assert list(checked.accepted) == [client]


# --------------------------------------------------------------------------------- fields together


def with_fields(**changes: Callable[[Any], Any]) -> Attack:
    """Each of these fields of a message is what its function makes of the message."""
    return lambda sent: replace(sent, **{name: change(sent) for name, change in changes.items()})


def half_histogram(sent: Any) -> dict[str, Any]:
    return {**sent.statistics, "histogram": sent.statistics["histogram"] / 2}


INCONSISTENT: dict[str, tuple[Attack, str]] = {
    **{
        f"label {label:g}": (
            with_fields(labels=lambda sent, y=label: filled(y)(sent.labels)),
            re.escape(f"labels must have values between 0 and 9, got {label:.6g}"),
        )
        for label in (-100, -1, 10, 2**40)
    },
    "a label too few": (
        with_fields(labels=lambda sent: sent.labels[:-1]),
        "labels must have one entry",
    ),
    "an image too few": (
        with_fields(images=lambda sent: sent.images[:-1].clone()),
        "labels must have one entry",
    ),
    "no label": (with_fields(labels=lambda sent: sent.labels[:0]), "labels must have one entry"),
    "more images": (
        with_fields(
            images=lambda sent: sent.images.repeat(100, 1, 1, 1),
            labels=lambda sent: sent.labels.repeat(100),
        ),
        "must be .*at most 20",  # two of each of ten classes
    ),
    "one class": (
        with_fields(labels=lambda sent: torch.zeros_like(sent.labels)),
        "at most 2 times",
    ),
}
ONE_METHODS: dict[tuple[str, str], tuple[Attack, str]] = {
    **{
        ("fedaf", f"soft label {p}"): (
            with_fields(soft=lambda sent, p=p: filled(p)(sent.soft)),
            "^soft must have rows" if p == 0.9 else "^soft must have values",
        )
        for p in (-0.5, 0.9, 2.0)
    },
    ("fedfa-plus", "half a histogram"): (
        with_fields(statistics=half_histogram),
        "rows that sum to 1",
    ),
    ("fedavg", "weight"): (with_fields(weight=lambda sent: sent.weight + 1.0), "weight must be"),
    ("fedgen", "counts"): (
        with_fields(counts=lambda sent: torch.full((10,), sent.weight)),
        "add up to",
    ),
    ("fedgen", "no counts"): (with_fields(counts=lambda sent: torch.zeros(10)), "a value above 0"),
    **{
        ("fednova", f"norm {name}"): (with_fields(norm=norm), "norm must be")
        for name, norm in {
            "0": lambda sent: 0.0,
            "1e-300": lambda sent: 1e-300,
            "of less than a step": lambda sent: 0.99,
            "of more than all steps": lambda sent: 1.01 * sent.norm,
        }.items()
    },
    ("feddm", "another message"): (lambda sent: ModelParameters({}, 1.0), "is a ModelParameters"),
}


@pytest.mark.parametrize(
    ("name", "attack"),
    [(name, key) for name in ("feddm", "fedaf, first phase") for key in INCONSISTENT]
    + list(ONE_METHODS),
)
def test_values_that_do_not_go_together_are_rejected(name: str, attack: str) -> None:
    """Labels of other images, more images than agreed, no probabilities, sizes above the declared
    one, norms of more steps than were taken."""
    change, words = ONE_METHODS.get((name, attack)) or INCONSISTENT[attack]
    exchanged = exchanges(name)[-1]
    assert re.search(words, exchanged.rejected(change(exchanged.replies[LIAR])))


def test_another_clients_architecture_is_another_model() -> None:
    exchanged = exchanges("feddf, own architectures")[-1]
    assert exchanged.rejected(exchanged.replies[0]).startswith("parameters ")


def test_a_model_that_is_the_servers_own_memory_is_rejected() -> None:
    exchanged = exchanges("fedavg")[-1]
    own = exchanged.state.parameters
    why = exchanged.rejected(ModelParameters(own, 1.0))
    assert "must not share memory with the server's parameters." in why
    copied: Any = {name: tensor.clone() for name, tensor in own.items()}
    last = list(own)[-1]
    copied[last] = own[last].view(own[last].shape)
    assert f"parameters.{last} must not share" in exchanged.rejected(ModelParameters(copied, 1.0))


@settings(deadline=None, max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 8)), min_size=2, max_size=6))
def test_overlap_is_that_of_bytes(spans: list[tuple[int, int]]) -> None:
    whole = torch.zeros(40)
    named = [(str(n), whole[start : start + size]) for n, (start, size) in enumerate(spans)]
    taken = [set(range(start, start + size)) for start, size in spans]
    expected = any(taken[i] & taken[j] for i in range(len(taken)) for j in range(i))
    assert (overlap(named) is not None) == expected
    across = any(taken[0] & one for one in taken[1:])
    assert (overlap(named[:1], named[1:]) is not None) == across


# ------------------------------------------------------------------------------------ whole rounds


def run(
    name: str, monkeypatch: pytest.MonkeyPatch, change: Callable[[Message], Message] | None
) -> Any:
    """A run whose client LIAR sends what `change` makes of its uploads; None: nothing arrives."""
    honest = InProcess.step

    def step(self: InProcess, *arguments: Any) -> Replies:
        replies = honest(self, *arguments)
        messages = dict(replies.messages)
        if LIAR not in messages:
            return replies
        sent = messages.pop(LIAR)
        if change is None:
            return Replies(messages, lost={LIAR: "a test's"})
        return Replies({**messages, LIAR: change(sent)})

    with monkeypatch.context() as patch:
        patch.setattr(InProcess, "step", step)
        return simulate(settings_of(TINY[name]))


def nan_everywhere(message: Any) -> Any:
    changed: dict[str, Any] = {}
    for f in fields(message):
        value = getattr(message, f.name)
        if isinstance(value, float):
            changed[f.name] = float("nan")
        elif isinstance(value, Mapping):
            changed[f.name] = {key: tensor * float("nan") for key, tensor in value.items()}
        elif isinstance(value, Tensor) and value.numel():
            changed[f.name] = value.to(torch.float32) * float("nan")
    return replace(message, **changed)


@pytest.mark.parametrize(
    "name",
    by_family([n for n in TINY if n != "solo"], ("fedavg", "fedaf, first phase", "fedstats")),
)
def test_a_run_with_a_liar_is_the_run_without_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lied = run(name, monkeypatch, nan_everywhere)
    lost = run(name, monkeypatch, None)
    for key, value in lost.model.state_dict().items():
        assert torch.equal(lied.model.state_dict()[key], value), key
    for one, other in zip(lied.metrics, lost.metrics, strict=True):
        assert list(one.pop("rejected")) == [str(LIAR)]
        assert other.pop("lost") == {str(LIAR): "a test's"}
        assert {**one, "seconds": 0} == {**other, "seconds": 0}


def test_who_is_rejected_in_the_first_exchange_is_not_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def first_alone(sent: Any) -> Any:
        return nan_everywhere(sent) if isinstance(sent, FeatureSums) else sent

    lied = run("fedfm", monkeypatch, first_alone)
    lost = run("fedfm", monkeypatch, None)
    for key, value in lost.model.state_dict().items():
        assert torch.equal(lied.model.state_dict()[key], value), key
    assert lied.metrics[-1]["rejected"] == {"1": "first exchange: sums is not finite"}


def test_all_that_diverge_are_an_optimisation_and_no_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = InProcess.step

    def step(self: InProcess, *arguments: Any) -> Replies:
        sent = honest(self, *arguments).messages
        return Replies({client: nan_everywhere(message) for client, message in sent.items()})

    monkeypatch.setattr(InProcess, "step", step)
    with pytest.raises(DivergedError, match=r"round 1: parameters.* of client 0 is not finite"):
        simulate(resolve(TINY["fedavg"]))


@dataclass
class Canned:
    """An exchange that brings what it was given."""

    replies: Mapping[int, Message]

    def prepare(self, context: RoundContext) -> list[Any]:
        return []

    def begin(self, context: RoundContext) -> None:
        """Nothing."""

    def step(self, phase: str, message: Message, context: RoundContext, asked: Any) -> Replies:
        return Replies({client: self.replies[client] for client in asked})


@pytest.mark.parametrize(
    ("quorum", "liars", "counts"),
    [
        (0.5, 2, True),
        (0.75, 2, False),
        (0.0, 3, True),
        (1.0, 1, False),
        (0.5, 4, False),  # the round ends, and not the run
    ],
)
def test_a_round_below_the_quorum_leaves_the_state(quorum: float, liars: int, counts: bool) -> None:
    exchanged = exchanges("fedavg")[-1]
    server = exchanged.server()
    bad: Any = {k: replace(exchanged.replies[k], weight=-1.0) for k in range(liars)}  # type: ignore[call-arg]
    exchange: Any = Canned({**exchanged.replies, **bad})
    played = run_round(server, exchange, exchanged.context, quorum)
    assert set(played.rejected) == set(range(liars))
    assert played.no_quorum == (
        None if counts else NoQuorum(MAIN, CLIENTS - liars, ceil(quorum * CLIENTS))
    )
    assert (server.state is exchanged.state) == (not counts)
    assert bool(played.uploads) == counts
    assert played.present == tuple(range(liars, CLIENTS))


@pytest.mark.parametrize("name", by_family(TINY, QUICK))
def test_a_server_copes_with_any_subset(name: str) -> None:
    """Also one that is another in the round's two exchanges."""
    for exchanged in exchanges(name):
        made = []
        for kept in ([0], [3], [1, 2], [0, 2, 3]):
            server = exchanged.server()
            some = {k: exchanged.replies[k] for k in kept}
            server.receive(exchanged.phase, some, exchanged.context)
            assert all(bool(torch.isfinite(t).all()) for _, t in server._next.arrays())
            made.append(server._next)
        if exchanged.phase == FIRST:
            assert made[0] is not exchanged.state
