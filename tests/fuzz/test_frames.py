"""Damaged frames: a client answers each with a frame, and a server takes each answer or names what
is wrong with it; neither is ended by one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from fedsynth import load_dataset, resolve
from fedsynth.core.context import RoundContext
from fedsynth.core.frames import Frame
from fedsynth.data.images import ImageData
from fedsynth.federation.exchange.client_runtime import ClientRuntime, OwnData
from fedsynth.federation.exchange.protocol import Terms
from fedsynth.federation.exchange.remote_client import RemoteClient
from fedsynth.federation.exchange.wire import Models, agreement
from fedsynth.federation.nodes.bundles import pack, unpack
from fedsynth.federation.nodes.carrier import Timeouts
from fedsynth.federation.nodes.client_records import ClientRecords
from fedsynth.federation.nodes.node_exchange import NodeExchange
from fedsynth.federation.nodes.proposal import Proposal, new_run
from fedsynth.federation.terms.context import public_context
from fedsynth.federation.terms.settings import RunSettings
from fedsynth.privacy.ledger import Ledger
from tests.fuzz.mutations import Faults, altered, altered_json, fuzzed, generator, json_bytes

ASKED, ANSWERED = 300, 200
CASES = ASKED + ANSWERED
CPU = torch.device("cpu")
ROUND = {"round": 1, "participants": [0]}


@pytest.fixture(scope="module")
def data() -> ImageData:
    train, _ = load_dataset("digits")
    few = torch.arange(40)
    return ImageData(train.images[few], train.labels[few], train.spec)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def settings_of(private: bool) -> RunSettings:
    more = {"privacy": {"noise_multiplier": 3.0, "sample_rate": 1.0}} if private else {}
    return resolve(
        {
            "run": {"method": "fedavg", "rounds": 3, "device": "cpu"},
            "partition": {"clients": 1, "local_test": 0.0 if private else 0.2},
            "model": {"name": "linear"},
            "method": {"local_steps": 1},
            **more,
        }
    )


def client(settings: RunSettings, data: ImageData) -> tuple[RemoteClient, RoundContext]:
    context = public_context(settings, data.spec, CPU)
    own = OwnData(data, torch.arange(30), torch.arange(30, 40))
    ledger = None if settings.privacy is None else Ledger("client-000")
    return RemoteClient(ClientRuntime(0, settings, context, own, ledger), context), context


def conversation(settings: RunSettings, context: RoundContext) -> list[Frame]:
    """All that a server asks a client, in order."""
    model = context.architecture.state_dict()
    message = settings.method.exchange_types("main").downlink
    assert message is not None
    sent = message(parameters=model, weight=1.0).to_bytes()
    private = settings.privacy is not None
    asked = [
        ("join", {"agreement": agreement(settings)}, b""),
        ("start", {"sizes": None, "noise_multiplier": 3.0 if private else None}, b""),
        ("prepare", ROUND, b""),
        ("begin", ROUND, b""),
        ("step", {**ROUND, "phase": "main"}, sent),
        ("facts", ROUND, b""),
        ("history", {}, b""),
        *([] if private else [("evaluate", ROUND, Models(model).to_bytes())]),
    ]
    return [
        Frame(kind, {**facts, "number": number}, payload)
        for number, (kind, facts, payload) in enumerate(asked, 1)
    ]


def damaged(frame: Frame, rng: Any) -> bytes:
    """A frame's bytes, its JSON header, or its message."""
    good = frame.to_bytes()
    match rng.randrange(4):
        case 0:
            return altered(good, rng)
        case 1 if frame.payload:
            return replace(frame, payload=altered(frame.payload, rng)).to_bytes()
        case _:
            header = json_bytes(
                altered_json({"kind": frame.kind, "facts": dict(frame.facts)}, rng), rng
            )
            return len(header).to_bytes(8, "little") + header + frame.payload


@fuzzed(ASKED // 2)
@pytest.mark.parametrize("private", [False, True])
def test_a_client_answers_whatever_it_is_asked(
    cases: range, private: bool, data: ImageData
) -> None:
    """The conversation as it should be, with one damaged frame before each of its frames; the
    right one is answered as ever."""
    settings = settings_of(private)
    faults = Faults()
    left = list(cases)
    while left:
        remote, context = client(settings, data)
        for frame in conversation(settings, context)[: len(left)]:
            number = left.pop(0)
            sent = damaged(frame, generator(number))
            before = 0 if remote.runtime.budget is None else len(remote.runtime.history().releases)
            answer = faults.of(number, lambda s=sent, r=remote: Frame.from_bytes(r.answer(s)))
            if answer is None:
                continue
            known = answer.kind in ("answer", "refusal", "error")
            faults.unless(known, number, f"answers {answer.kind}")
            faults.unless(answer.facts["client"] == 0, number, "another client answers")
            text = str(answer.facts.get("text", ""))
            faults.unless("\n" not in text and len(text) < 2000, number, f"says {text[:200]!r}")
            after = 0 if remote.runtime.budget is None else len(remote.runtime.history().releases)
            fair = after == before or (answer.kind == "answer" and frame.kind == "step")
            faults.unless(fair, number, f"{frame.kind}: charged, and gave {answer.kind}")
            right = Frame.from_bytes(remote.answer(frame.to_bytes()))
            # a step that a private client began is never begun again
            done = private and frame.kind == "step" and answer.kind != "error"
            faults.unless(
                right.kind == ("error" if done else "answer") or answer.kind == "answer",
                number,
                f"after {sent[:200]!r} ({answer.kind}), {frame.kind} gives {right}",
            )
    faults.check(cases)


class Damaging:
    """Carries messages to one client, and damages one of its answers."""

    def __init__(self, remote: RemoteClient, settings: RunSettings, which: int, seed: int) -> None:
        self.run = ""
        self.remote = remote
        self.agreed = {"agreement": agreement(settings)}
        self.left = which
        self.seed = seed

    def nodes(self) -> list[int]:
        return [7]

    def ask(self, messages: Mapping[int, bytes], seconds: float) -> dict[int, bytes | str]:
        return {node: pack(list(map(self.answer, unpack(sent)))) for node, sent in messages.items()}

    def answer(self, sent: bytes) -> bytes:
        frame = Frame.from_bytes(sent)
        if frame.kind == "join":  # as a node asks its client
            frame = replace(frame, facts={**frame.facts, **self.agreed})
        reply = self.remote.answer(frame.to_bytes())
        self.left -= 1
        if self.left:
            return reply
        return damaged(Frame.from_bytes(reply), generator(self.seed))


@fuzzed(ANSWERED)
def test_a_server_reads_whatever_it_is_answered(
    cases: range, data: ImageData, tmp_path: Path
) -> None:
    """A client whose answer is damaged does not join, or is lost for the round."""
    faults = Faults()
    lost: list[int] = []
    for number in cases:
        settings = settings_of(number % 2 == 0)
        remote, context = client(settings, data)
        carrier = Damaging(remote, settings, 1 + number % 8, number)
        proposal = Proposal(new_run(), settings, data.spec)
        records = ClientRecords(tmp_path / str(number))
        exchange = NodeExchange(
            proposal, carrier, CPU, Timeouts(join=0.02, look=0.01), records=records
        )
        faults.of(number, partial(talk, exchange, settings, context, lost))
    faults.check(cases)
    assert faults.refused + len(lost) > len(cases) / 4


def talk(
    exchange: NodeExchange, settings: RunSettings, context: RoundContext, lost: list[int]
) -> bool:
    """A run's questions to one client."""
    private = settings.privacy is not None
    context = replace(context, round=1)
    downlink = settings.method.exchange_types("main").downlink
    assert downlink is not None
    asked: Any = downlink.from_bytes(conversation(settings, context)[4].payload)
    (joined,) = exchange.join()
    assert joined.size is None or type(joined.size) is int
    exchange.start(Terms(None if private else (joined.size or 0,), 3.0 if private else None))
    exchange.prepare(context)
    exchange.begin(context)
    replies = exchange.step("main", asked, context)
    lost.extend(replies.lost)
    for reply in replies.messages.values():
        for _, tensor in reply.arrays():
            assert tensor.dtype.is_floating_point or tensor.numel() >= 0
    exchange.facts(context)
    exchange.histories()
    for evaluated in () if private else exchange.evaluate({"model": asked.parameters}, context):
        assert type(evaluated.size) is int
        assert type(evaluated.right["model"]) is int
    return True
