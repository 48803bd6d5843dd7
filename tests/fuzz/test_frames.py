"""Damaged frames: a client answers each with a frame, and is ended by none."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from fedsynth import load_dataset, resolve
from fedsynth.config.settings import RunSettings
from fedsynth.core.context import RoundContext
from fedsynth.data.images import ImageData
from fedsynth.deployment.frames import Frame
from fedsynth.deployment.remote_client import RemoteClient
from fedsynth.federation.client_runtime import ClientRuntime, OwnData
from fedsynth.federation.context import public_context
from fedsynth.federation.protocol import Models, agreement
from fedsynth.privacy.ledger import Ledger
from tests.fuzz.mutations import Faults, altered, altered_json, fuzzed, generator, json_bytes

CASES = 300
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


@fuzzed(CASES // 2)
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
