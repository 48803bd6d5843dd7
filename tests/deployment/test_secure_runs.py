"""Tests of runs over nodes with secure sums: the server's knowledge, lost clients, and equality
with the simulation."""

from __future__ import annotations

import itertools
import json
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fedsynth import resolve, simulate
from fedsynth.deployment import session
from fedsynth.deployment.frames import Frame
from fedsynth.deployment.policy import Policy
from fedsynth.deployment.proposal import Proposal, new_proposal
from fedsynth.deployment.secure_aggregation import primitives
from fedsynth.deployment.secure_aggregation.client import SumTerms, sum_terms, upload_layout
from fedsynth.deployment.secure_aggregation.primitives import Keys, Present, Roster, Sealed, Shares
from fedsynth.deployment.secure_aggregation.server import SecureStep
from fedsynth.errors import SettingError
from fedsynth.federation.context import public_context
from fedsynth.federation.privacy_plan import PrivacyPlan
from fedsynth.federation.protocol import SecureSum
from fedsynth.federation.server import Server
from fedsynth.privacy import epsilon
from fedsynth.privacy import randomness as grid
from fedsynth.privacy.report.pages import render_markdown
from tests.deployment.local_setup import CLIENTS, Setup, ask, join, kill, noise_of, same_model
from tests.deployment.local_setup import secure_sections as sections
from tests.deployment.test_secure_sums import OTHER_KEY, make_identities
from tests.quick_runs import by_family
from tests.raising import raises
from tests.simulation.test_recorded_numbers import RepeatableNoise

PRIVATE = {"noise_multiplier": 2.0}
METHODS = ["fedstats", "fedsum"]


def four_clients(**run: Any) -> dict[str, dict[str, Any]]:
    """Returns a private run of four clients: two are honest, one may collude, one may be lost."""
    run = {"quorum": 0.75, **run}
    return sections("fedsum", 4, run=run, method={"honest": 2}, privacy=PRIVATE)


PARTIAL = {"participation": 0.75, "quorum": 0.7, "rounds": 3}


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(sections("fedstats", privacy=PRIVATE), id="a fine grid"),
        pytest.param(sections("fedsum", privacy={**PRIVATE, "clip": 1e9}), id="steps above 1"),
        pytest.param(  # features and thumbnails have different noise; the images use both
            sections("fedstats", privacy=PRIVATE, method={"ipc": 2, "image_steps": 1}), id="two"
        ),
        pytest.param(four_clients(**PARTIAL), id="three of four clients"),
    ],
)
def test_private_sums_match_the_simulation_with_the_same_noise(
    setup: Setup, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    owners = enumerate(make_identities(setup.folder, settings["partition"]["clients"]))
    nodes = [setup.node(k, secret=noise_of(k), identities=identity) for k, identity in owners]
    served = setup.serve(settings, setup.link(*nodes))
    numbers = itertools.cycle(range(settings["partition"]["clients"]))
    monkeypatch.setattr(grid, "_fresh_generator", lambda: RepeatableNoise(next(numbers)))
    simulation: Any = simulate(resolve(settings), output=setup.folder / "simulated", quiet=True)
    same_model(served, simulation)
    assert served.record.rows[-1]["epsilon"] == simulation.metrics[-1]["epsilon"]
    if "participation" in settings["run"]:
        assert any(row["participants"] != [0, 1, 2] for row in served.record.rows)
    if "image_steps" in settings["method"]:
        images = load_file(served.folder.path / "synthetic.safetensors")
        expected = load_file(simulation.folder / "synthetic.safetensors")
        for name in ("images", "soft_labels"):
            torch.testing.assert_close(images[name], expected[name], rtol=0, atol=1e-3)


# -------------------------------------------------------------------------- the server's knowledge


def observe_sums(monkeypatch: pytest.MonkeyPatch, runs: Path) -> Any:
    """Records the clients' uploads, plain and masked, the sums, and the server's objects and files.
    Keys are (round, exchange, client)."""
    seen = SimpleNamespace(plain={}, uploads={}, masked={}, totals={}, server_data=[])
    answers, receive, take_step = SecureStep._answers, Server.receive, session.step_together

    def at_client(clients: Any, exchange: str, message: Any, context: Any) -> Any:
        replies = take_step(clients, exchange, message, context)
        for number, reply in replies.messages.items():
            key = (context.round, exchange, number)
            seen.plain[key] = upload_layout(clients[0].method, exchange, context).encode(reply)
            seen.uploads[key] = reply
        return replies

    def at_server(self: SecureStep, *arguments: Any) -> Any:
        answered = answers(self, *arguments)
        for client, words in self.server.masked.items():
            seen.masked[self.context.round, self.exchange, client] = words
        seen.server_data.append(pickle.dumps(self.server))
        return answered

    def summed(self: Server, exchange: str, total: SecureSum, context: Any) -> None:
        seen.totals[context.round, exchange] = total
        receive(self, exchange, total, context)
        seen.server_data.append(pickle.dumps(self.state))
        seen.server_data.extend(file.read_bytes() for file in runs.rglob("*") if file.is_file())

    monkeypatch.setattr(session, "step_together", at_client)
    monkeypatch.setattr(SecureStep, "_answers", at_server)
    monkeypatch.setattr(Server, "receive", summed)
    return seen


def all_words(content: bytes) -> primitives.IntVector:
    """Returns all words of eight bytes in a byte string, at any offset."""
    octets = np.frombuffer(content.ljust(8, b"\xff"), np.uint8)
    return np.lib.stride_tricks.sliding_window_view(octets, 8).copy().view("<u8").ravel()


@pytest.mark.parametrize("method", by_family(METHODS, ("fedstats",)))
def test_server_holds_only_masked_vectors_and_the_sum(
    setup: Setup, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No received byte, object or file of the server contains a word of an upload, as fixed point,
    double or float; masked words are uniform and uncorrelated with the upload; the sum is that of
    the uploads."""
    monkeypatch.setattr(grid, "FINE", 2.0**32)  # so fine that no word is another's by chance
    seen = observe_sums(monkeypatch, setup.folder / "runs")
    link = setup.link()
    setup.serve(sections(method, privacy=PRIVATE), link)
    assert len(seen.plain) == CLIENTS * (3 if method == "fedstats" else 2)
    known = [answer for _, _, answer in link.seen] + seen.server_data
    known_words = np.unique(np.concatenate([all_words(data) for data in known]))
    masked_words = np.concatenate([array.astype("<u8") for array in seen.masked.values()])
    assert np.isin(masked_words, known_words).all()  # the search finds existing words
    for key, words in seen.plain.items():
        values = np.concatenate([t.double().numpy().ravel() for _, t in seen.uploads[key].arrays()])
        assert not np.isin(words, known_words).any()
        assert not np.isin(values.view(np.uint64), known_words).any()
        narrow = values.astype(np.float32)
        pairs_ = np.frombuffer(narrow[: len(narrow) // 2 * 2].tobytes(), "<u8")
        assert not np.isin(pairs_, known_words).any()
        check_uniform(seen.masked[key], words)
    for number, exchange in seen.totals:
        check_total(seen, number, exchange, range(CLIENTS))


def check_total(seen: Any, number: int, exchange: str, clients: Sequence[int]) -> None:
    for name, total in seen.totals[number, exchange].message.arrays():
        parts = [getattr(seen.uploads[number, exchange, k], name).double() for k in clients]
        torch.testing.assert_close(total, torch.stack(parts).sum(0), rtol=1e-15, atol=1e-12)


def check_uniform(masked: primitives.IntVector, plain: primitives.IntVector) -> None:
    """Bounds the Kolmogorov-Smirnov distance from the uniform distribution modulo 2^64 and the
    correlation with the plain words: one of 10^7 honest cases or fewer exceeds each bound."""
    n = len(masked)
    share = np.sort(masked.astype(np.float64) / 2.0**64)
    steps = np.arange(1, n + 1) / n
    assert np.abs(share - steps).max() < 3 / np.sqrt(n)
    signed = plain.view(np.int64).astype(np.float64)
    correlation = np.corrcoef(masked.astype(np.float64), signed)[0, 1]
    assert abs(correlation) < 6 / np.sqrt(n)
    bits = np.unpackbits((masked - plain).view(np.uint8))
    assert abs(bits.mean() - 0.5) < 3 / np.sqrt(len(bits))


def test_uniformity_check_detects_weak_masks() -> None:
    """The check fails without a mask and with one of 32 bits."""
    rng = np.random.default_rng(0)
    plain = rng.normal(0, 2.0**40, 500).astype(np.int64).view(np.uint64)
    check_uniform(plain + rng.integers(0, 2**64, 500, np.uint64), plain)
    for mask in (np.zeros(500, np.uint64), rng.integers(0, 2**32, 500, np.uint64)):
        with pytest.raises(AssertionError):
            check_uniform(plain + mask, plain)


# ----------------------------------------------------------------------------------- lost clients


# For each round: the request to which these nodes' answers are lost or truncated.
FAILURES = [
    ("keys", {103}, "lost"),
    ("shares", {103}, "lost"),
    ("step", {103}, "lost"),
    ("unmask", {103}, "lost"),
    ("shares", {103}, "nonsense"),
    ("step", {103}, "nonsense"),
    ("shares", {102, 103}, "lost"),
    ("unmask", {102, 103}, "lost"),
]


def test_failed_clients_are_left_out_of_sums(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client lost at unmasking has sent its vector, which counts; a malformed message excludes
    only its sender. There is no sum of two clients that add the noise, as one may collude."""
    seen = observe_sums(monkeypatch, setup.folder / "runs")

    def change(node: int, request: Frame, answer: bytes) -> bytes | None:
        number = request.facts.get("round", 9)
        kind, nodes, failure = FAILURES[number - 1] if number < 9 else ("", set(), "")
        if request.kind != kind or node not in nodes:
            return answer
        frame = Frame.from_bytes(answer)
        return None if failure == "lost" else replace(frame, payload=frame.payload[:-1]).to_bytes()

    link = setup.link(*map(setup.node, range(4)), change=change)
    rows = setup.serve(four_clients(rounds=9), link).record.rows
    for number, (kind, nodes, failure) in enumerate(FAILURES, 1):
        row = rows[number - 1]
        if len(nodes) == 2:
            assert (number, "main") not in seen.totals
            assert row["not_counted"] == {"exchange": "main", "uploads": 0, "needed": 3}
            assert "cannot compute the secure sum" in row["rejected"]["0"]
            continue
        counted = (0, 1, 2, 3) if kind == "unmask" else (0, 1, 2)
        assert seen.totals[number, "main"].clients == counted
        check_total(seen, number, "main", counted)
        assert "not_counted" not in row
        key = "lost" if failure == "lost" else "rejected"
        assert ("3" in row.get(key, {})) == (kind != "unmask")
    assert seen.totals[9, "main"].clients == (0, 1, 2, 3)
    assert len(setup.ledger(0)) == 2 * 8  # no step in round 7


def test_thresholds_are_majorities_above_the_honest_clients_and_bound_quorums(setup: Setup) -> None:
    """The proposal and the run itself refuse them; H + 1 of five are four."""
    settings = sections("fedsum", 5, run={"quorum": 0.6}, method={"honest": 3}, privacy=PRIVATE)
    message = r"quorum=0\.6 is too low, because a secure sum needs 4 of a round.s 5 clients"
    with raises(SettingError, "run.quorum"):
        new_proposal({**settings, "method": {**settings["method"], "honest": 0}})
    with pytest.raises(SettingError, match=message):
        new_proposal(settings)
    accepted = new_proposal({**settings, "run": {**settings["run"], "quorum": 0.8}})
    with pytest.raises(SettingError, match=message):
        setup.serve(replace(accepted, settings=replace(accepted.settings, quorum=0.6)))
    assert not (setup.folder / "runs").exists()
    context = public_context(accepted.settings, accepted.spec, torch.device("cpu"))
    context = PrivacyPlan.checked(accepted.settings, context).in_context(context)

    def terms(**changes: Any) -> SumTerms:
        arguments = {"exchange": "main", "context": context, "name": "ab" * 16, "agreed": "1"}
        return sum_terms(accepted.settings.method, **{**arguments, **changes})

    assert (terms().threshold, terms().clients) == (4, (0, 1, 2, 3, 4))
    for other in ({"context": replace(context, round=2)}, {"name": "cd" * 16}, {"agreed": "2"}):
        assert terms(**other).name != terms().name


# --------------------------------------------------------------------------- the server's requests


@dataclass
class FakeServer:
    nodes: list[Any]
    proposal: Proposal
    facts: dict[str, Any]
    message: bytes

    def ask(self, node: Any, kind: str, payload: bytes = b"", **more: Any) -> Frame:
        return ask(node, self.proposal.run, kind, payload, **{**self.facts, **more})

    def keys(self) -> dict[int, Keys]:
        return {k: Keys.from_bytes(self.ask(n, "keys").payload) for k, n in enumerate(self.nodes)}

    def shared(self) -> dict[int, Sealed]:
        """Sends the first two requests and returns the ciphertexts for each client."""
        roster = Roster(keys=self.keys()).to_bytes()
        answers = [self.ask(node, "shares", roster).payload for node in self.nodes]
        sent = {k: Sealed.from_bytes(answer).of for k, answer in enumerate(answers)}
        return {k: Sealed(of={j: sent[j][k] for j in sent if j != k}) for k in sent}

    def step(self, number: int, sealed: Sealed) -> Frame:
        ciphertexts = sealed.to_bytes().decode()
        return self.ask(self.nodes[number], "step", self.message, sealed=ciphertexts)

    def steps(self) -> None:
        """Sends all requests but the last."""
        for k, sealed in self.shared().items():
            assert self.step(k, sealed).kind == "answer"


def join_all(setup: Setup, settings: Any, policy: Policy | None = None) -> FakeServer:
    """Returns nodes that have joined a run and the message of the first transport."""
    proposal = new_proposal(settings)
    clients = settings["partition"]["clients"]
    nodes = [setup.node(k, policy) for k in range(clients)]
    context = public_context(proposal.settings, proposal.spec, torch.device("cpu"))
    method: Any = proposal.settings.method
    state = method.initial_state(context.architecture.state_dict())
    facts = {"round": 1, "participants": list(range(clients)), "sum": "ab" * 16}
    if "privacy" in settings:
        facts |= {"exchange": "main", "noise_multiplier": 2.0}
        message = method.broadcast(state, context)
    else:
        facts |= {"exchange": "first", "sizes": [100] * clients}
        message = method.first_broadcast(state, context)
    for node in nodes:
        assert join(node, proposal).kind == "answer"
    return FakeServer(nodes, proposal, facts, message.to_bytes())


def test_clients_never_reveal_both_shares_of_a_client(setup: Setup) -> None:
    """A server that reports a client first as lost and then as present gets only the first answer,
    also under another name of the sum or after a restart of it. Only the owner can read the stored
    state of a sum."""
    server = join_all(setup, four_clients())
    server.steps()
    stored = [path for path in setup.folder.glob("owner-0/runs/*/*") if path.is_file()]
    assert {"sum.json", "session.json"} <= {path.name for path in stored}
    report = ("config.toml", "owner.json", "privacy_")
    state = [path for path in stored if not path.name.startswith(report)]
    assert {path.stat().st_mode & 0o777 for path in state} == {0o600}
    assert stored[0].parent.stat().st_mode & 0o777 == 0o700
    without_3 = Present(clients=(0, 1, 2)).to_bytes()
    answer = server.ask(server.nodes[0], "unmask", without_3)
    shares = Shares.from_bytes(answer.payload)
    assert (set(shares.seeds), set(shares.keys)) == ({0, 1, 2}, {3})
    all_clients = Present(clients=(0, 1, 2, 3)).to_bytes()
    assert server.ask(server.nodes[0], "unmask", all_clients).kind == "error"
    assert server.ask(server.nodes[0], "unmask", all_clients, sum="cd" * 16).kind == "error"
    assert server.ask(server.nodes[0], "unmask", without_3).payload == answer.payload
    assert server.ask(server.nodes[0], "keys").kind == "answer"  # the same answer, of the same sum
    assert server.ask(server.nodes[0], "unmask", all_clients).kind == "error"
    new_process = setup.node(1)  # another process of the owner
    assert server.ask(new_process, "unmask", without_3).kind == "answer"
    assert server.ask(server.nodes[1], "unmask", all_clients).kind == "error"
    assert server.ask(server.nodes[1], "unmask", without_3).kind == "answer"  # the stored answer


def test_uploads_are_sent_only_in_sums(setup: Setup) -> None:
    """Steps outside a sum, in an unknown sum, with too few clients, and repeated steps are refused;
    only one step is charged."""
    server = join_all(setup, sections("fedsum", privacy=PRIVATE))
    answer = server.ask(server.nodes[0], "step", server.message, sum=None)
    assert "an upload without a secure sum" in answer.facts["text"]
    assert server.step(0, Sealed(of={})).kind == "error"
    sealed = server.shared()
    assert server.step(0, Sealed(of={})).kind == "error"
    assert len(setup.ledger(0)) == 0
    server.facts["sum"] = "cd" * 16  # the previous sum is over for this client
    sealed = server.shared()
    assert server.step(0, sealed[0]).kind == "answer"
    assert len(setup.ledger(0)) == 2
    other = Sealed(of={k: v for k, v in sealed[0].of.items() if k != 2})
    assert server.step(0, other).kind == "error"
    assert len(setup.ledger(0)) == 2


@pytest.mark.parametrize("signed", [True, False])
def test_identities_prevent_impersonation_by_the_server(setup: Setup, signed: bool) -> None:
    """The server presents its own keys as client 2's; without identities it is undetected."""
    server = join_all(setup, sections("fedsum", privacy=PRIVATE))
    if signed:
        identities = make_identities(setup.folder, CLIENTS)
        for node, identity in zip(server.nodes, identities, strict=True):
            node.identities = identity
            assert join(node, server.proposal).kind == "answer"
    keys = server.keys()
    forged = {**keys, 2: keys[2].model_copy(update={"mask": OTHER_KEY})}
    for number, sent, refused in ((0, forged, signed), (1, keys, False)):
        answer = server.ask(server.nodes[number], "shares", Roster(keys=sent).to_bytes())
        assert answer.kind == ("error" if refused else "answer")


def test_restarted_servers_get_a_fresh_sum(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server is killed with all masked vectors: a repeated sum is charged and has fresh noise
    and masks, as the difference of two sums of the same uploads could reveal one of them."""
    settings = sections("fedsum", privacy={**PRIVATE, "epsilon": 60.0})
    monkeypatch.setattr(grid, "FINE", 2.0**32)  # so fine that no word is another's by chance
    link = setup.link()
    seen = observe_sums(monkeypatch, setup.folder / "runs")
    folder = kill(setup, settings, link, CLIENTS + 1, kind="unmask")
    first = {key: words for key, words in seen.plain.items() if key[0] == 2}
    assert len(first) == CLIENTS
    served = setup.serve(settings, setup.link(*link.nodes_.values()), resume=folder)
    for key, words in first.items():
        assert not np.isin(seen.plain[key], words).any()
    assert len(setup.ledger(0)) == 3 * 2
    heads: Any = served.report["ledger_heads"]
    assert {(head["rows_before"], head["rows"]) for head in heads.values()} == {(0, 3 * 2)}
    assert served.record.rows[-1]["epsilon"] == epsilon(setup.ledger(0), 1e-5)
    setup.verified_reports()


@pytest.mark.parametrize("method", METHODS)
def test_reports_state_executed_aggregation_and_its_assumptions(setup: Setup, method: str) -> None:
    settings = sections(method, privacy=PRIVATE)
    served = setup.serve(settings)
    for report in setup.verified_reports():
        assert (report["shares"], report["min_clients"]) == (2, 3)
        assert "secure aggregation: aggregation executed" in render_markdown(report)
    summary = json.loads((served.folder.path / "summary.json").read_text())
    assert summary["differential_privacy"]["aggregation"] == "executed"
    simulation = simulate(resolve(settings), quiet=True).summary
    assert simulation["differential_privacy"]["aggregation"] == "assumed, not executed"


def test_policies_allow_shared_noise_by_setting_or_identities(setup: Setup) -> None:
    """Regression: a server that plays all clients but one exceeds the policy's ε."""
    proposal = new_proposal(sections("fedstats", 100, run={"quorum": 1.0}, privacy=PRIVATE))
    policy = Policy(epsilon=1.0, delta=1e-5)
    [objection] = policy.objections(proposal)
    assert "each client adds only 1/99 of the noise, so a server with false" in objection
    assert not policy.objections(proposal, identified=True)
    assert not replace(policy, settings={"method.aggregation": ("secure",)}).objections(proposal)
    open_ = new_proposal(sections("fedstats", 100, method={"aggregation": "own"}, privacy=PRIVATE))
    assert not policy.objections(open_)
    declined = join(setup.node(0, policy), proposal)
    assert "the other owners' keys" in declined.facts["reason"]


def test_participants_follow_the_settings(setup: Setup) -> None:
    """A server that chooses fewer participants would lower the threshold, down to one client."""
    server = join_all(setup, sections("fedstats", 5, method={"honest": 2}, run={"rounds": 3}))
    for clients in ([0], [0, 1], [0, 1, 2, 3]):
        assert server.ask(server.nodes[0], "keys", participants=clients).kind == "error"
    for kind in ("keys", "shares", "step", "unmask"):
        for number in (10**300, 0, -1):
            assert server.ask(server.nodes[0], kind, round=number).kind == "error"
    assert server.ask(server.nodes[0], "keys").kind == "answer"


def test_open_exchanges_are_never_repeated(setup: Setup) -> None:
    """The difference of sums with and without a client is its upload."""
    policy = Policy(open=True, epsilon=8.0, delta=1e-5)
    server = join_all(setup, sections("fedstats", run={"rounds": 3}), policy)
    server.steps()
    for node in server.nodes:
        assert join(node, server.proposal).kind == "answer"
    server.facts["sum"] = "cd" * 16
    sealed = server.shared()
    assert server.step(0, sealed[0]).kind == "error"
