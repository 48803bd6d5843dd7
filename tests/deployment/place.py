"""Data owners' nodes in this process, a server over them, and what passes between them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from fedsynth import resolve, simulate
from fedsynth.deployment.frames import Connection, Frame, Timeouts
from fedsynth.deployment.networked_run import NetworkedRun
from fedsynth.deployment.node import DatasetPart, Node, Source
from fedsynth.deployment.policy import ANY, Owner, Policy
from fedsynth.deployment.proposal import Proposal, new_proposal
from fedsynth.privacy import randomness, read_ledger
from tests.quick_settings import quick_sections
from tests.simulation.test_unchanged import RepeatableNoise

CLIENTS = 3
PRIVATE = {"noise_multiplier": 5.0}


def sections(name: str, clients: int = CLIENTS, **more: Any) -> dict[str, dict[str, Any]]:
    """Two rounds of a method, which are evaluated once."""
    run = {"evaluate_every": 2, **more.pop("run", {})}
    return quick_sections(name, run=run, partition={"clients": clients}, **more)


class StoppedError(Exception):
    """The server's process is gone."""


@dataclass
class Hand:
    """Carries messages to nodes in this process.

    Args:
        nodes_: by their number, 100 and more.
        change: of (node, question, answer) what arrives; None: nothing.

    Attributes:
        seen: what nodes were asked and have answered.
    """

    nodes_: dict[int, Node]
    change: Callable[[int, Frame, bytes], bytes | str | None] = lambda node, asked, answer: answer
    run: str = ""
    seen: list[tuple[int, Frame, bytes]] = field(default_factory=list)

    def nodes(self) -> Sequence[int]:
        return list(self.nodes_)

    def ask(self, messages: Mapping[int, bytes], seconds: float) -> dict[int, bytes | str]:
        found: dict[int, bytes | str] = {}
        for node, sent in messages.items():
            asked = Frame.from_bytes(sent)
            answer = self.nodes_[node].answer(self.run, sent)
            self.seen.append((node, asked, answer))
            arrived = self.change(node, asked, answer)
            if arrived is not None:
                found[node] = arrived
        return found


@dataclass
class Place:
    """Owners, each with a folder, and a server's."""

    folder: Path
    said: list[str] = field(default_factory=list)

    def node(
        self,
        number: int,
        policy: Policy | None = None,
        *,
        home: str = "",
        approved: str = ANY,
        source: Source | None = None,
        **more: Any,
    ) -> Node:
        """A node of an owner with a policy, or of one who approves of an agreement."""
        owner = Owner(policy) if policy is not None else Owner(approved=frozenset({approved}))
        folder = self.folder / (home or f"owner-{number}")
        records = source or DatasetPart()
        return Node(number, folder, records, owner, device="cpu", say=self.said.append, **more)

    def hand(self, *nodes: Node) -> Hand:
        return Hand({100 + node.number: node for node in nodes or map(self.node, range(CLIENTS))})

    def serve(
        self, given: Any, hand: Hand | None = None, *, join: float = 0.2, **more: Any
    ) -> NetworkedRun:
        post = Connection(hand or self.hand(), Timeouts(join=join, answer=60, poll=0.05))
        run = NetworkedRun(new_proposal(given), post, self.folder / "runs", **more)
        run.run()
        return run

    def ledger(self, number: int, home: str = "") -> tuple[Any, ...]:
        folder = self.folder / (home or f"owner-{number}")
        return read_ledger(folder / f"client-{number:03d}.jsonl").releases


def injected(number: int) -> Callable[[], randomness.SecretGenerator]:
    """The noise that `simulated` gives the client with this number."""
    noise: Any = RepeatableNoise(number)
    return lambda: randomness.SecretGenerator(test_only=noise)


@dataclass
class FreshProcesses(Hand):
    """Each message finds another process of its node."""

    place: Any = None

    def nodes(self) -> Sequence[int]:
        return range(100, 100 + CLIENTS)

    def ask(self, messages: Mapping[int, bytes], seconds: float) -> dict[int, bytes | str]:
        self.nodes_ = dict(enumerate(map(self.place.node, range(CLIENTS)), 100))
        return super().ask(messages, seconds)


def simulated(given: Any, monkeypatch: pytest.MonkeyPatch, output: Path | None = None) -> Any:
    """The same run in one process, with noise that can be repeated."""
    made = itertools.count()
    clients = given["partition"]["clients"]
    with monkeypatch.context() as patch:
        fresh = lambda: RepeatableNoise(next(made) % clients)  # noqa: E731
        patch.setattr(randomness, "_fresh_generator", fresh)
        return simulate(resolve(given), output=output, quiet=True)


def close(served: NetworkedRun, together: Any) -> None:
    """The models are the same, but for rounding: to 1e-5 of a tensor's largest number. (Open
    sums are rounded to 2^-32, which a ridge regression on few examples makes 2e-5 of a weight.)"""
    final = served.server.final_parameters()
    for name, value in together.model.state_dict().items():
        scale = max(1.0, float(value.abs().max())) if value.is_floating_point() else 1.0
        torch.testing.assert_close(final[name], value, rtol=0, atol=1e-5 * scale, msg=name)


def ask(node: Node, run: str, kind: str, payload: bytes = b"", **facts: Any) -> Frame:
    """What a node answers to a server."""
    sent = Frame(kind, {"number": 1, **facts}, payload).to_bytes()
    return Frame.from_bytes(node.answer(run, sent))


def joined(node: Node, proposal: Proposal, last_round: int = 0) -> Frame:
    """What a node answers to a server that proposes this."""
    return ask(node, proposal.run, "join", proposal=proposal.to_json(), last_round=last_round)


def killed(
    place: Place,
    given: Any,
    hand: Hand,
    steps: int,
    resume: Path | None = None,
    kind: str = "step",
) -> Path:
    """The folder of a run whose server is killed when it has asked so many times for steps, or for
    another kind of frame."""
    before = hand.change
    seen: list[int] = []

    def stops(node: int, asked: Frame, answer: bytes) -> bytes | str | None:
        seen.extend([node] if asked.kind == kind else [])
        if len(seen) == steps:
            raise StoppedError
        return before(node, asked, answer)

    hand.change = stops
    with pytest.raises(StoppedError):
        place.serve(given, hand, resume=resume)
    hand.change = before
    [folder] = (place.folder / "runs").glob("*.incomplete")
    return folder
