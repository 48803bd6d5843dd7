"""Data owners' nodes and a server in this process, and the messages between them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from fedsynth.deployment.frames import Connection, Frame, Timeouts
from fedsynth.deployment.networked_run import NetworkedRun
from fedsynth.deployment.node import DatasetPart, Node, Source
from fedsynth.deployment.policy import ANY, Owner, Policy
from fedsynth.deployment.proposal import Proposal, new_proposal
from fedsynth.privacy import randomness, read_ledger
from fedsynth.results.verification import verify_run
from tests.quick_runs import quick_sections
from tests.simulation.test_recorded_numbers import RepeatableNoise

CLIENTS = 3
PRIVATE = {"noise_multiplier": 5.0}


def sections(name: str, clients: int = CLIENTS, **more: Any) -> dict[str, dict[str, Any]]:
    """Returns the settings of two rounds of a method, evaluated once."""
    run = {"evaluate_every": 2, **more.pop("run", {})}
    return quick_sections(name, run=run, partition={"clients": clients}, **more)


def secure_sections(name: str, clients: int = CLIENTS, **more: Any) -> dict[str, dict[str, Any]]:
    method = {"aggregation": "secure", **more.pop("method", {})}
    if name == "fedsum":
        method["networks"] = 2
    all_needed = "privacy" in more and "honest" not in method  # H and one that may collude
    run = {"quorum": 1.0 if all_needed else 0.6, **more.pop("run", {})}
    return sections(name, clients, run=run, method=method, **more)


@dataclass
class Link:
    """Carries messages to nodes in this process. `change` maps (node, request, answer) to the answer
    that arrives, or None; `seen` has the three of each message."""

    nodes_: dict[int, Node]
    change: Callable[[int, Frame, bytes], bytes | str | None] = lambda node, request, answer: answer
    run: str = ""
    seen: list[tuple[int, Frame, bytes]] = field(default_factory=list)

    def nodes(self) -> Sequence[int]:
        return list(self.nodes_)

    def ask(self, messages: Mapping[int, bytes], seconds: float) -> dict[int, bytes | str]:
        answers: dict[int, bytes | str] = {}
        for node, content in messages.items():
            request = Frame.from_bytes(content)
            answer = self.nodes_[node].answer(self.run, content)
            self.seen.append((node, request, answer))
            arrived = self.change(node, request, answer)
            if arrived is not None:
                answers[node] = arrived
        return answers


@dataclass
class Setup:
    """A folder for each data owner and one for the server."""

    folder: Path
    messages: list[str] = field(default_factory=list)

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
        """Returns the node of an owner with a policy or an approved agreement."""
        owner = Owner(policy) if policy is not None else Owner(approved=frozenset({approved}))
        folder = self.folder / (home or f"owner-{number}")
        records = source or DatasetPart()
        return Node(number, folder, owner, "cpu", self.messages.append, source=records, **more)

    def link(self, *nodes: Node, **more: Any) -> Link:
        nodes = nodes or tuple(map(self.node, range(CLIENTS)))
        return Link({100 + node.number: node for node in nodes}, **more)

    def serve(
        self, settings: Any, link: Link | None = None, *, join: float = 0.2, **more: Any
    ) -> NetworkedRun:
        """Serves a proposal, or a new one of these settings."""
        proposal = settings if isinstance(settings, Proposal) else new_proposal(settings)
        post = Connection(link or self.link(), Timeouts(join=join, answer=60, poll=0.05))
        run = NetworkedRun(proposal, post, self.folder / "runs", **more)
        run.run()
        return run

    def ledger(self, number: int, home: str = "") -> tuple[Any, ...]:
        folder = self.folder / (home or f"owner-{number}")
        return read_ledger(folder / f"client-{number:03d}.jsonl").releases

    def verified_reports(self, count: int = CLIENTS + 1) -> list[Any]:
        """Returns the reports of the server and its clients' owners, whose folders verify."""
        files = list(self.folder.rglob("privacy_report.json"))
        assert len(files) == count
        assert [verify_run(file.parent).problems for file in files] == [[]] * count
        return [json.loads(file.read_text()) for file in files]


def noise_of(number: int) -> Callable[[], randomness.SecretGenerator]:
    """Returns the repeatable noise of the client with this number."""
    noise: Any = RepeatableNoise(number)
    return lambda: randomness.SecretGenerator(test_only=noise)


def same_model(served: NetworkedRun, simulation: Any) -> None:
    """Compares the models to 1e-5 of a tensor's largest number. (Open sums are rounded to 2^-32,
    which a ridge regression on few examples amplifies to 2e-5 of a weight.)"""
    final = served.server.final_parameters()
    for name, value in simulation.model.state_dict().items():
        scale = max(1.0, float(value.abs().max())) if value.is_floating_point() else 1.0
        torch.testing.assert_close(final[name], value, rtol=0, atol=1e-5 * scale, msg=name)


def ask(node: Node, run: str, kind: str, payload: bytes = b"", **facts: Any) -> Frame:
    sent = Frame(kind, {"number": 1, **facts}, payload).to_bytes()
    return Frame.from_bytes(node.answer(run, sent))


def join(node: Node, proposal: Proposal, last_round: int = 0) -> Frame:
    return ask(node, proposal.run, "join", proposal=proposal.to_json(), last_round=last_round)


def kill(
    setup: Setup, settings: Any, link: Link, steps: int, kind: str = "step", **more: Any
) -> Path:
    """Kills the server at the `steps`-th request of a kind and returns the run's folder."""
    original = link.change
    seen: list[int] = []

    def stop_server(node: int, request: Frame, answer: bytes) -> bytes | str | None:
        seen.extend([node] if request.kind == kind else [])
        if len(seen) == steps:
            raise SystemExit
        return original(node, request, answer)

    link.change = stop_server
    with pytest.raises(SystemExit):
        setup.serve(settings, link, **more)
    link.change = original
    [folder] = (setup.folder / "runs").glob("*.incomplete")
    return folder
