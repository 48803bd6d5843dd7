"""Runs over nodes whose server sees sums alone: what it holds, who may be lost, and that the result
is the simulation's."""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fedsynth import resolve, simulate
from fedsynth.deployment import session
from fedsynth.deployment.frames import Connection, Frame, Timeouts
from fedsynth.deployment.networked_run import NetworkedRun
from fedsynth.deployment.policy import Policy
from fedsynth.deployment.proposal import Proposal, new_proposal
from fedsynth.deployment.secure_aggregation import primitives
from fedsynth.deployment.secure_aggregation.client import (
    Identities,
    SumTerms,
    read_identities,
)
from fedsynth.deployment.secure_aggregation.primitives import (
    IntVector,
    Keys,
    Present,
    Roster,
    Sealed,
    Shares,
)
from fedsynth.deployment.secure_aggregation.quantization import sum_terms, upload_layout
from fedsynth.deployment.secure_aggregation.server import SecureStep
from fedsynth.errors import SettingError
from fedsynth.federation.context import public_context
from fedsynth.federation.privacy_plan import PrivacyPlan
from fedsynth.federation.protocol import SecureSum
from fedsynth.federation.server import Server
from fedsynth.privacy import randomness as grid
from fedsynth.privacy.report.pages import render_markdown
from tests.deployment import place as places
from tests.deployment.place import (
    CLIENTS,
    FreshProcesses,
    Place,
    ask,
    close,
    injected,
    joined,
    killed,
    simulated,
)
from tests.families import by_family

PRIVATE = {"noise_multiplier": 2.0}
METHODS = ["fedstats", "fedsum"]


def sections(name: str, clients: int = CLIENTS, **more: Any) -> dict[str, dict[str, Any]]:
    """Two rounds on the digits, with sums that the server alone does not see the parts of."""
    method = {"aggregation": "secure", **more.pop("method", {})}
    if name == "fedsum":
        method["networks"] = 2
    all_needed = "privacy" in more and "honest" not in method  # H and one who may look
    run = {"quorum": 1.0 if all_needed else 0.6, **more.pop("run", {})}
    return places.sections(name, clients, run=run, method=method, **more)


def of_four(rounds: int = 2) -> dict[str, dict[str, Any]]:
    """A private run of four that can lose one: the noise is that of two, and one may look."""
    run = {"quorum": 0.75, "rounds": rounds}
    return sections("fedsum", 4, run=run, method={"honest": 2}, privacy=PRIVATE)


@pytest.mark.parametrize(
    ("method", "privacy"),
    [("fedstats", PRIVATE), ("fedsum", {**PRIVATE, "clip": 1e9})],
)
def test_with_injected_noise_the_result_is_the_simulations(
    place: Place, method: str, privacy: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also on a grid with steps larger than 1, which a large clip has, and with identities."""
    given = sections(method, privacy=privacy)
    known = identified(place.folder)
    nodes = [place.node(k, secret=injected(k), identities=known[k]) for k in range(CLIENTS)]
    served = place.serve(given, place.hand(*nodes))
    together = simulated(given, monkeypatch)
    close(served, together)
    assert served.record.rows[-1]["epsilon"] == together.metrics[-1]["epsilon"]


def test_two_releases_in_one_exchange_are_added_up_each_on_its_grid(
    place: Place, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Features and small pictures, whose noises differ; the images are made of both."""
    given = sections("fedstats", privacy=PRIVATE, method={"ipc": 2, "image_steps": 1})
    nodes = [place.node(k, secret=injected(k)) for k in range(CLIENTS)]
    served = place.serve(given, place.hand(*nodes))
    together = simulated(given, monkeypatch, tmp_path / "runs")
    close(served, together)
    made, wanted = (
        load_file(folder / "synthetic.safetensors")
        for folder in (served.folder.path, together.folder)
    )
    torch.testing.assert_close(made["images"], wanted["images"], rtol=0, atol=1e-3)
    torch.testing.assert_close(made["soft_labels"], wanted["soft_labels"], rtol=0, atol=1e-3)


@pytest.mark.parametrize("method", by_family(METHODS, ("fedstats",)))
def test_each_message_may_find_another_process(place: Place, method: str) -> None:
    """What a sum needs from one question to the next is in the owner's files, and gone after it.
    Without noise the result is the simulation's."""
    served = place.serve(sections(method), FreshProcesses({}, place=place))
    close(served, simulate(resolve(sections(method)), quiet=True))
    assert not list(place.folder.glob("owner-*/runs/*/sum.json"))


def test_some_clients_of_a_round_have_a_sum_of_their_own(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three of four take part, who are known to each other by their places among these."""
    run = {"participation": 0.75, "quorum": 0.7, "rounds": 3}
    given = sections("fedsum", 4, run=run, method={"honest": 2}, privacy=PRIVATE)
    nodes = [place.node(k, secret=injected(k)) for k in range(4)]
    served = place.serve(given, place.hand(*nodes))
    taking = [row["participants"] for row in served.record.rows]
    assert any(some != [0, 1, 2] for some in taking)
    close(served, simulated(given, monkeypatch))


# ---------------------------------------------------------------------------- what a server holds


@dataclass
class Seen:
    """What the clients would have sent in the open, and what their server was sent.

    Attributes:
        plain: words, by (round, exchange, place of the client).
        uploads: the same as messages.
        masked: words that arrived, likewise.
        totals: the sums that the server made its states of.
        held: everything that stood in the server's objects and files, as bytes.
    """

    plain: dict[tuple[int, str, int], IntVector] = field(default_factory=dict)
    uploads: dict[tuple[int, str, int], Any] = field(default_factory=dict)
    masked: dict[tuple[int, str, int], IntVector] = field(default_factory=dict)
    totals: dict[tuple[int, str], SecureSum] = field(default_factory=dict)
    held: list[bytes] = field(default_factory=list)


def watched(monkeypatch: pytest.MonkeyPatch, runs: Path) -> Seen:
    """Looks on at both sides of every sum."""
    seen = Seen()
    unmasked, total_of, taken = SecureStep._run, Server.receive_total, session.step_alone

    def at_client(runtime: Any, phase: str, message: Any, context: Any) -> Any:
        reply = taken(runtime, phase, message, context)
        where = (context.round, phase, context.active.index(runtime.number))
        seen.plain[where] = upload_layout(runtime.method, phase, context).encode(reply)
        seen.uploads[where] = reply
        return reply

    def at_server(self: SecureStep, clients: Any, request: Any) -> SecureSum:
        made = unmasked(self, clients, request)
        for place_, words in self.server.masked.items():
            seen.masked[self.context.round, self.phase, place_] = words
        return made

    def made(self: Server, phase: str, total: SecureSum, context: Any) -> None:
        seen.totals[context.round, phase] = total
        total_of(self, phase, total, context)
        seen.held.append(pickle.dumps(self.state))
        seen.held.extend(file.read_bytes() for file in runs.rglob("*") if file.is_file())

    answered = SecureStep._answers

    def collected(self: SecureStep, *asked: Any) -> Any:
        found = answered(self, *asked)
        seen.held.append(pickle.dumps(self.server))
        return found

    monkeypatch.setattr(session, "step_alone", at_client)
    monkeypatch.setattr(SecureStep, "_run", at_server)
    monkeypatch.setattr(SecureStep, "_answers", collected)
    monkeypatch.setattr(Server, "receive_total", made)
    return seen


def as_words(content: bytes) -> IntVector:
    """All words of eight bytes in some bytes, wherever they begin."""
    found = [
        np.frombuffer(content[k : len(content) - (len(content) - k) % 8], "<u8") for k in range(8)
    ]
    return np.concatenate(found) if content else np.zeros(0, np.uint64)


@pytest.mark.parametrize("method", by_family(METHODS, ("fedstats",)))
def test_the_server_has_only_masked_vectors_and_the_sum(
    place: Place, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every byte that it is sent, every object that it has on the way, and every file of its run:
    no word of an upload, as fixed point, double or float, stands in it; masked words say nothing of
    the upload; and the sum is that of the uploads."""
    monkeypatch.setattr(grid, "FINE", 2.0**30)  # so fine that no word is another's by chance
    seen = watched(monkeypatch, place.folder / "runs")
    hand = place.hand()
    place.serve(sections(method, privacy=PRIVATE), hand)
    assert len(seen.plain) == CLIENTS * (3 if method == "fedstats" else 2)
    arrived = [answer for _, _, answer in hand.seen]
    everything = np.unique(np.concatenate([as_words(one) for one in [*arrived, *seen.held]]))
    of_the_masked = np.concatenate([one.astype("<u8") for one in seen.masked.values()])
    assert np.isin(of_the_masked, everything).all()  # what is there would be found
    for where, words in seen.plain.items():
        values = np.concatenate(
            [t.double().numpy().ravel() for _, t in seen.uploads[where].arrays()]
        )
        assert not np.isin(words, everything).any()
        assert not np.isin(values.view(np.uint64), everything).any()
        short = values.astype(np.float32)
        pairs_ = np.frombuffer(short[: len(short) // 2 * 2].tobytes(), "<u8")
        assert not np.isin(pairs_, everything).any()
        check_uniform(seen.masked[where], words)
    for number, phase in seen.totals:
        check_total(seen, number, phase, range(CLIENTS))


def check_total(seen: Seen, number: int, phase: str, clients: Sequence[int]) -> None:
    """An exchange's sum is that of these clients' uploads."""
    for name, found in seen.totals[number, phase].message.arrays():
        parts = [getattr(seen.uploads[number, phase, k], name).double() for k in clients]
        torch.testing.assert_close(found, torch.stack(parts).sum(0), rtol=1e-15, atol=1e-12)


def check_uniform(masked: IntVector, plain: IntVector) -> None:
    """Kolmogorov and Smirnov's distance from the uniform distribution modulo 2^64, and the
    correlation with what was masked: each is beyond these in one of 10^5 honest cases or fewer."""
    n = len(masked)
    share = np.sort(masked.astype(np.float64) / 2.0**64)
    steps = np.arange(1, n + 1) / n
    assert np.abs(share - steps).max() < 2.6 / np.sqrt(n)
    signed = plain.view(np.int64).astype(np.float64)
    found = np.corrcoef(masked.astype(np.float64), signed)[0, 1]
    assert abs(found) < 5 / np.sqrt(n)
    bits = np.unpackbits((masked - plain).view(np.uint8))
    assert abs(bits.mean() - 0.5) < 2.5 / np.sqrt(len(bits))


def test_what_looks_at_masks_sees_a_mask_that_is_none() -> None:
    """The broken twins of the check above: no mask, and one of 32 bits."""
    rng = np.random.default_rng(0)
    plain = rng.normal(0, 2.0**40, 500).astype(np.int64).view(np.uint64)
    check_uniform(plain + rng.integers(0, 2**64, 500, np.uint64), plain)
    for mask in (np.zeros(500, np.uint64), rng.integers(0, 2**32, 500, np.uint64)):
        with pytest.raises(AssertionError):
            check_uniform(plain + mask, plain)


# ----------------------------------------------------------------------------------- who is lost


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
"""Of each round: the question to which these nodes' answers are lost, or cut off."""


def test_who_fails_at_a_question_is_left_out_of_the_sum(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who is lost at the last one has sent its vector, which counts; nonsense is its sender's fault
    alone. Of two, whose noise is what is charged, there is no sum: one of them may look."""
    seen = watched(monkeypatch, place.folder / "runs")
    hand = place.hand(*[place.node(k) for k in range(4)])

    def change(node: int, asked: Frame, answer: bytes) -> bytes | None:
        number = asked.facts.get("round", 9)
        question, nodes, how = FAILURES[number - 1] if number < 9 else ("", set(), "")
        if asked.kind != question or node not in nodes:
            return answer
        frame = Frame.from_bytes(answer)
        return None if how == "lost" else replace(frame, payload=frame.payload[:-1]).to_bytes()

    hand.change = change
    rows = place.serve(of_four(rounds=9), hand).record.rows
    for number, (question, nodes, how) in enumerate(FAILURES, 1):
        row = rows[number - 1]
        if len(nodes) == 2:
            assert (number, "main") not in seen.totals
            assert row["not_counted"] == {"exchange": "main", "uploads": 0, "needed": 3}
            assert "cannot compute the secure sum" in row["rejected"]["0"]
            continue
        counted = (0, 1, 2, 3) if question == "unmask" else (0, 1, 2)
        assert seen.totals[number, "main"].clients == counted
        check_total(seen, number, "main", counted)
        assert "not_counted" not in row
        key = "lost" if how == "lost" else "rejected"
        assert ("3" in row.get(key, {})) == (question != "unmask")
    assert seen.totals[9, "main"].clients == (0, 1, 2, 3)
    assert len(place.ledger(0)) == 2 * 8  # nothing for the step of round 7, which it did not take


def test_a_quorum_below_what_a_sum_needs_is_refused_at_the_start(place: Place) -> None:
    """By the command, before anything is started, and by the run itself; a quorum of H is none."""
    given = sections("fedsum", 5, run={"quorum": 0.6}, method={"honest": 3}, privacy=PRIVATE)
    said = r"quorum=0\.6 must be at least 0\.8, because a secure sum needs 4 of the 5 clients"
    usual = {**given, "method": {**given["method"], "honest": 0}}
    with pytest.raises(SettingError, match="at least 1, because a secure sum needs 5 of the 5"):
        new_proposal(usual)
    with pytest.raises(SettingError, match=said):
        new_proposal(given)
    enough = new_proposal({**given, "run": {**given["run"], "quorum": 0.8}})
    few = replace(enough, settings=replace(enough.settings, quorum=0.6))
    with pytest.raises(SettingError, match=said):
        NetworkedRun(few, Connection(place.hand(), Timeouts(join=0.2)), place.folder / "runs")
    assert not (place.folder / "runs").exists()


# --------------------------------------------------------------------------- what a server asks for


@dataclass
class Asked:
    """A sum of which the test is the server, up to a question."""

    place: Place
    nodes: list[Any]
    proposal: Proposal
    where: dict[str, Any]
    message: bytes

    def ask(self, node: Any, kind: str, payload: bytes = b"", **more: Any) -> Frame:
        return ask(node, self.proposal.run, kind, payload, **{**self.where, **more})

    def shared(self) -> dict[int, Sealed]:
        """The first two questions."""
        keys = {k: Keys.from_bytes(self.ask(n, "keys").payload) for k, n in enumerate(self.nodes)}
        roster = Roster(keys=keys).to_bytes()
        made = {
            k: Sealed.from_bytes(self.ask(n, "shares", roster).payload)
            for k, n in enumerate(self.nodes)
        }
        return {k: Sealed(of={j: made[j].of[k] for j in made if j != k}) for k in made}

    def step(self, number: int, sealed: Sealed) -> Frame:
        sent = sealed.to_bytes().decode()
        return self.ask(self.nodes[number], "step", self.message, sealed=sent)

    def steps(self) -> None:
        """All questions but the last."""
        passed = self.shared()
        for k in passed:
            assert self.step(k, passed[k]).kind == "answer"


@pytest.fixture
def asked(place: Place) -> Asked:
    """Three nodes that have joined a private run of FedSum."""
    return all_asked(place, sections("fedsum", privacy=PRIVATE))


@pytest.fixture
def four_asked(place: Place) -> Asked:
    """Four, of which a sum needs three."""
    return all_asked(place, of_four())


def all_asked(
    place: Place, given: dict[str, dict[str, Any]], policy: Policy | None = None
) -> Asked:
    """Nodes that have joined a run, and what their server asks in its first exchange."""
    proposal = new_proposal(given)
    clients = given["partition"]["clients"]
    nodes = [place.node(k, policy) for k in range(clients)]
    context = public_context(proposal.settings, proposal.spec, torch.device("cpu"))
    method: Any = proposal.settings.method
    state = method.initial_state(context.architecture.state_dict())
    where = {"round": 1, "participants": list(range(clients)), "sum": "ab" * 16}
    if "privacy" in given:
        where |= {"phase": "main", "noise_multiplier": 2.0}
        message = method.broadcast(state, context)
    else:
        where |= {"phase": "first", "sizes": [100] * clients}
        message = method.first_request(state, context)
    for node in nodes:
        assert joined(node, proposal).kind == "answer"
    return Asked(place, nodes, proposal, where, message.to_bytes())


def test_both_shares_of_a_client_are_never_given(four_asked: Asked) -> None:
    """A server that says first that a client is lost, and then that it is there, gets the first
    answer again and no other; nor under another name of the sum, nor after it was begun anew. Only
    its owner can read what a client stores of a sum."""
    asked = four_asked
    asked.steps()
    stored = [path for path in asked.place.folder.glob("owner-0/runs/*/*") if path.is_file()]
    assert {"sum.json", "session.json"} <= {path.name for path in stored}
    assert {path.stat().st_mode & 0o777 for path in stored} == {0o600}
    assert stored[0].parent.stat().st_mode & 0o077 == 0
    first = Present(clients=(0, 1, 2)).to_bytes()
    given = asked.ask(asked.nodes[0], "unmask", first)
    shares = Shares.from_bytes(given.payload)
    assert (set(shares.seeds), set(shares.keys)) == ({0, 1, 2}, {3})
    both = Present(clients=(0, 1, 2, 3)).to_bytes()
    assert asked.ask(asked.nodes[0], "unmask", both).kind == "error"
    assert asked.ask(asked.nodes[0], "unmask", both, sum="cd" * 16).kind == "error"
    assert asked.ask(asked.nodes[0], "unmask", first).payload == given.payload
    assert asked.ask(asked.nodes[0], "keys").kind == "answer"  # the same answer, of the same sum
    assert asked.ask(asked.nodes[0], "unmask", both).kind == "error"
    other = asked.place.node(1)  # another process of an owner's
    assert asked.ask(other, "unmask", first).kind == "answer"
    assert asked.ask(asked.nodes[1], "unmask", both).kind == "error"
    assert asked.ask(asked.nodes[1], "unmask", first).kind == "answer"  # the kept one


def test_an_upload_is_sent_only_in_a_sum(asked: Asked) -> None:
    """The step by itself, in a sum that was not begun, with too few clients, and a second one are
    refused, and nothing is charged but the one step."""

    def rows() -> int:
        found = list(asked.place.folder.glob("owner-0/*.jsonl"))
        return len(asked.place.ledger(0)) if found else 0

    node = asked.nodes[0]
    told = asked.ask(node, "step", asked.message, sum=None)
    assert "only in secure sums" in told.facts["text"]
    assert asked.step(0, Sealed(of={})).kind == "error"
    passed = asked.shared()
    assert asked.step(0, Sealed(of={})).kind == "error"
    assert rows() == 0
    asked.where["sum"] = "cd" * 16  # the one before is over for this client
    passed = asked.shared()
    assert asked.step(0, passed[0]).kind == "answer"
    assert rows() == 2
    other = Sealed(of={k: v for k, v in passed[0].of.items() if k != 2})
    assert asked.step(0, other).kind == "error"
    assert rows() == 2


def test_a_sum_has_a_majority_and_one_more_than_the_honest_clients() -> None:
    """Catches a client whose threshold is only above half: H + 1 of five are four."""
    given = sections("fedsum", 5, run={"quorum": 1.0}, method={"honest": 3}, privacy=PRIVATE)
    run = new_proposal(given)
    context = public_context(run.settings, run.spec, torch.device("cpu"))
    context = PrivacyPlan.checked(run.settings, context).in_context(context)

    def terms(**asked: Any) -> SumTerms:
        arguments = {"phase": "main", "context": context, "name": "ab" * 16, "agreed": "1"}
        return sum_terms(run.settings.method, **{**arguments, **asked})

    assert (terms().threshold, terms().clients) == (4, 5)
    for other in ({"context": replace(context, round=2)}, {"name": "cd" * 16}, {"agreed": "2"}):
        assert terms(**other).name != terms().name


def identified(folder: Path) -> list[Identities]:
    """What `--identity` and `--identities` of each client read."""
    from cryptography.hazmat.primitives import serialization as ser
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    public = folder / "identities"
    public.mkdir()
    for k in range(CLIENTS):
        key = Ed25519PrivateKey.generate()
        secret = key.private_bytes(ser.Encoding.PEM, ser.PrivateFormat.PKCS8, ser.NoEncryption())
        (folder / f"own-{k}.pem").write_bytes(secret)
        shared = key.public_key().public_bytes(
            ser.Encoding.PEM, ser.PublicFormat.SubjectPublicKeyInfo
        )
        (public / f"client-{k:03d}.pem").write_bytes(shared)
    return [read_identities(folder / f"own-{k}.pem", public) for k in range(CLIENTS)]


@pytest.mark.parametrize("known", [True, False])
def test_with_identities_a_server_cannot_take_a_clients_place(asked: Asked, known: bool) -> None:
    """It gives its own keys out as client 2's; without identities nobody can tell."""
    folder = asked.place.folder
    if known:
        for node, one in zip(asked.nodes, identified(folder), strict=True):
            node.identities = one
            assert joined(node, asked.proposal).kind == "answer"
    keys = {k: Keys.from_bytes(asked.ask(n, "keys").payload) for k, n in enumerate(asked.nodes)}
    stolen = primitives.public(primitives.key_of(bytes(range(32))))
    mine = keys[2].model_copy(update={"mask": stolen})
    false = asked.ask(asked.nodes[0], "shares", Roster(keys={**keys, 2: mine}).to_bytes())
    assert false.kind == ("error" if known else "answer")
    true = asked.ask(asked.nodes[1], "shares", Roster(keys=keys).to_bytes())
    assert true.kind == "answer"


def test_a_server_that_starts_again_gets_another_sum_and_is_charged_again(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is killed when all masked vectors are there: what it repeats has fresh noise and masks, as
    two sums of the same uploads with others present would tell one by their difference."""
    given = sections("fedsum", privacy={**PRIVATE, "epsilon": 60.0})
    monkeypatch.setattr(grid, "FINE", 2.0**30)  # so fine that no word is another's by chance
    hand = place.hand()
    seen = watched(monkeypatch, place.folder / "runs")
    folder = killed(place, given, hand, CLIENTS + 1, kind="unmask")
    first = {where: words for where, words in seen.plain.items() if where[0] == 2}
    assert len(first) == CLIENTS
    place.serve(given, place.hand(*hand.nodes_.values()), resume=folder)
    for where, words in first.items():
        assert not np.isin(seen.plain[where], words).any()
    assert len(place.ledger(0)) == 3 * 2


def test_the_reports_say_that_the_sum_was_executed_and_what_it_rests_on(place: Place) -> None:
    given = sections("fedsum", privacy=PRIVATE)
    served = place.serve(given)
    reports = [json.loads(file.read_text()) for file in place.folder.rglob("privacy_report.json")]
    assert len(reports) == CLIENTS + 1
    for report in reports:
        assert (report["shares"], report["min_clients"]) == (2, 3)
        assert "secure aggregation: aggregation executed" in render_markdown(report)
    summary = json.loads((served.folder.path / "summary.json").read_text())
    assert summary["differential_privacy"]["aggregation"] == "executed"
    together = simulate(resolve(given), quiet=True).summary
    assert together["differential_privacy"]["aggregation"] == "assumed, not executed"


def test_a_policy_allows_shared_noise_by_name_or_with_the_others_keys(place: Place) -> None:
    """Catches: a policy's ε that a server gets round, who plays all clients but one."""
    proposal = new_proposal(sections("fedstats", 100, run={"quorum": 1.0}, privacy=PRIVATE))
    policy = Policy(epsilon=1.0, delta=1e-5)
    [said] = policy.objections(proposal)
    assert "each client adds only 1/99 of the noise, so a server with false" in said
    assert not policy.objections(proposal, identified=True)
    assert not replace(policy, settings={"method.aggregation": ("secure",)}).objections(proposal)
    own = new_proposal(sections("fedstats", 100, method={"aggregation": "own"}, privacy=PRIVATE))
    assert not policy.objections(own)
    declined = joined(place.node(0, policy), proposal)
    assert "the other owners' keys" in declined.facts["reason"]


def opened(place: Place, clients: int, policy: Policy | None = None, **method: Any) -> Asked:
    """Nodes that have joined a run of FedStats without differential privacy."""
    given = sections("fedstats", clients, method=method, run={"rounds": 3})
    return all_asked(place, given, policy)


def test_who_takes_part_is_the_settings_and_not_the_servers_to_say(place: Place) -> None:
    """Without differential privacy, too: of fewer a sum would need fewer, down to one."""
    asked = opened(place, 5, honest=2)
    for some in ([0], [0, 1], [0, 1, 2, 3]):
        assert asked.ask(asked.nodes[0], "keys", participants=some).kind == "error"
    for question in ("keys", "shares", "step", "unmask"):
        for number in (10**300, 0, -1):
            assert asked.ask(asked.nodes[0], question, round=number).kind == "error"
    assert asked.ask(asked.nodes[0], "keys").kind == "answer"


def test_an_open_exchange_is_not_repeated_whatever_the_owners_cap(place: Place) -> None:
    """The difference of two sums of the same uploads, one of them without a client, is its
    upload."""
    asked = opened(place, CLIENTS, Policy(open=True, epsilon=8.0, delta=1e-5))
    asked.steps()
    for node in asked.nodes:
        assert joined(node, asked.proposal).kind == "answer"
    asked.where["sum"] = "cd" * 16
    passed = asked.shared()
    assert asked.step(0, passed[0]).kind == "error"
