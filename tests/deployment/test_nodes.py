"""Tests of owners' nodes and a server's run over them, without Flower: policies and ledgers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from fedsynth import FedSum, ModelParameters, register_model, resolve, simulate
from fedsynth.core.sums import sums_securely
from fedsynth.deployment.frames import Connection, Frame, Timeouts
from fedsynth.deployment.networked_run import NetworkedRun
from fedsynth.deployment.node import DatasetPart, Node
from fedsynth.deployment.node_backend import TooFewClientsError
from fedsynth.deployment.policy import ANY, Owner, Policy
from fedsynth.deployment.proposal import Proposal, new_proposal, new_run
from fedsynth.deployment.session import Session
from fedsynth.errors import PrivacySettingError, RequestRefusedError, SettingError
from fedsynth.federation import in_process, position_leak_check
from fedsynth.federation.position_leak_check import StepCheck
from fedsynth.federation.protocol import RunTerms
from fedsynth.formatting import format_epsilon
from fedsynth.methods import METHODS, method_class
from fedsynth.models.small import Mlp
from fedsynth.privacy import BudgetExceededError, Ledger, Release, epsilon, read_ledger
from fedsynth.privacy.mechanisms import BudgetEnforcer, EpsilonCap
from fedsynth.results import active_run
from fedsynth.results.verification import verify_run
from tests.deployment import local_setup
from tests.deployment.local_setup import CLIENTS, PRIVATE, Setup, ask, join, same_model, sections
from tests.quick_runs import NoteRecorder, by_family
from tests.raising import raises

PROTECTING = by_family((m for m in METHODS if method_class(m).dp_mechanisms), ("feddm", "fedstats"))


@pytest.mark.parametrize("method", by_family(METHODS, ("solo", "fedaf", "fedkf")))
def test_runs_over_nodes_match_the_simulation(setup: Setup, method: str) -> None:
    """Server and clients exchange only bytes."""
    settings = sections(method)
    served, simulation = setup.serve(settings), simulate(resolve(settings))
    same_model(served, simulation)
    name = "common_accuracy" if method in ("solo", "fedbn") else "test_accuracy"
    assert served.record.rows[-1].get(name) == simulation.metrics[-1].get(name)


@pytest.mark.parametrize("method", PROTECTING)
def test_private_runs_over_nodes_charge_as_planned(setup: Setup, method: str) -> None:
    """One σ is chosen for all clients, and each charges its own ledger."""
    settings = sections(method, privacy={"epsilon": 8.0})
    if sums_securely(resolve(settings).method):
        settings["run"]["quorum"] = 1.0
    served = setup.serve(settings)
    simulation = simulate(resolve(settings), output=setup.folder / "simulated", quiet=True)
    assert simulation.folder is not None
    assert served.record.rows[-1]["epsilon"] == simulation.metrics[-1]["epsilon"]
    spent = format_epsilon(served.record.rows[-1]["epsilon"])
    assert f"answered, this client's ledger has spent ε = {spent}" in "\n".join(setup.messages)
    for number in range(CLIENTS):
        ledger = read_ledger(simulation.folder / "ledger" / f"client-{number:03d}.jsonl")
        assert setup.ledger(number) == ledger.releases
        private = setup.folder / f"owner-{number}" / "private"
        assert len(list(private.iterdir())) == 2  # a key, and the hashes of the records
    settings["partition"]["alpha"] = 0.3  # with other records of each client
    with raises(TooFewClientsError, "clients.few"):
        setup.serve(settings)
    assert any("carry-over" in line or "belongs to" in line for line in setup.messages)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(sections("fedaf"), id="fedaf"),
        pytest.param(sections("feddm", privacy=PRIVATE), id="feddm"),
        pytest.param(local_setup.secure_sections("fedstats"), id="fedstats"),
        pytest.param(local_setup.secure_sections("fedsum"), id="fedsum", marks=pytest.mark.slow),
    ],
)
def test_each_message_may_reach_another_process(setup: Setup, settings: Any) -> None:
    """Flower's SuperNodes start a process for each message; files keep the states between them."""

    def restart(node: int, request: Frame, answer: bytes) -> bytes:
        link.nodes_[node] = setup.node(node - 100)
        return answer

    link = setup.link(change=restart)
    served = setup.serve(settings, link)
    if "privacy" in settings:
        assert [len(h.releases) for h in served.histories] == [len(setup.ledger(0))] * CLIENTS
    else:
        same_model(served, simulate(resolve(settings), quiet=True))
    assert not list(setup.folder.glob("owner-*/runs/*/sum.json"))  # deleted when the sum ended


def test_owners_are_warned_of_position_leaks(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """The warning appears at the first join, not at later joins or steps, and in all reports."""

    def trials(plan: Any, context: Any, clients: Any) -> list[Any]:
        return [SimpleNamespace(moved=not context.isolated, finding="", opaque=())]

    monkeypatch.setattr(position_leak_check, "_trials", trials)
    settings = sections("feddm", privacy=PRIVATE)
    node, proposal = setup.node(0, home="other"), new_proposal(settings)
    for _ in range(2):
        join(node, proposal)
        assert "".join(setup.messages).count("position of an example") == 1
    setup.serve(settings)
    assert "".join(setup.messages).count("position of an example") == 1 + CLIENTS
    for report in setup.verified_reports():
        [warning] = report["verdict"]["warnings"]
        assert "position of an example" in warning


def test_models_that_draw_are_declined(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    class Drawing(Mlp):
        def embed(self, x: Tensor) -> Tensor:
            return torch.nn.functional.dropout(super().embed(x), 0.5)

    register_model("own-drawing", lambda image_shape, classes: Drawing(image_shape, classes, 16))
    settings = {**sections("feddm", privacy=PRIVATE), "model": {"name": "own-drawing"}}
    with raises(SettingError, "model.name"):
        setup.serve(settings)
    monkeypatch.setattr(
        active_run, "check_private_steps", lambda *args: StepCheck()
    )  # servers may skip it
    with raises(TooFewClientsError, "clients.few"):
        setup.serve(settings)
    declined = [line for line in setup.messages if "declines: model.name=own-drawing draws" in line]
    assert len(declined) == CLIENTS
    assert not list(setup.folder.glob("owner-*/*.jsonl"))


# ------------------------------------------------------------------------------ policies


CAPPED = Policy(epsilon=1.5, delta=1e-5)


def serve_with_policy(setup: Setup, policy: Policy) -> NetworkedRun:
    link = setup.link(*map(setup.node, range(2)), setup.node(2, policy))
    return setup.serve(sections("feddm", privacy=PRIVATE), link)


@pytest.mark.parametrize(
    ("privacy", "policy", "reason"),
    [
        (PRIVATE, {"methods": ["fedavg"]}, "the owner allows only fedavg, not feddm"),
        (PRIVATE, {"rounds": 1}, "the owner allows at most 1 rounds, not 2"),
        (PRIVATE, {"delta": 1e-6}, "the owner allows δ up to 1e-06, not"),
        (PRIVATE, {"settings": {"model.width": [8, 64]}}, "does not allow model.width = 4"),
        (PRIVATE, {"settings": {"model.name": ["linear"]}}, "model.name = 'convnet'"),
        (PRIVATE, {"settings": {"method.nothing": ["x"]}}, "the run has no method.nothing"),
        ({**PRIVATE, "mechanism": "paper"}, {}, "has no privacy guarantee"),
        ({}, {}, "without differential privacy"),
    ],
)
def test_policy_objections_name_the_setting(privacy: Any, policy: Any, reason: str) -> None:
    proposal = new_proposal(sections("feddm", **({"privacy": privacy} if privacy else {})))
    [objection] = Policy(**policy).objections(proposal)
    assert reason in objection


def test_runs_continue_without_clients_that_decline(setup: Setup) -> None:
    served = serve_with_policy(setup, Policy(methods=("fedavg",)))
    for row in served.record.rows:
        assert "the owner allows only fedavg" in row["lost"]["2"]
    assert not list((setup.folder / "owner-2").glob("*.jsonl"))  # not even a ledger was made
    assert any("the owner allows only fedavg" in text for text in setup.messages)
    assert len(served.histories) == 2
    assert any("client 2 did not take part" in text for text in served.record.deviations)
    setup.verified_reports(CLIENTS)


def test_policy_budgets_hold_at_each_charge(setup: Setup) -> None:
    """The run has no cap, and its server repeats the requests: the ledger does not grow. Owners
    read a run's cost and the spent budget."""
    served, second_run = (serve_with_policy(setup, CAPPED) for _ in range(2))
    assert "lost" not in served.record.rows[0]
    assert served.record.rows[1]["lost"]["2"].startswith("declines: ")
    assert all("2" in row["lost"] for row in second_run.record.rows)
    assert len(setup.ledger(2)) * 4 == len(setup.ledger(0))
    summaries = [text for text in setup.messages if "asks client 0 of 3: feddm, 2 rounds" in text]
    assert "privacy: ε = 1.95" in summaries[0]
    assert "earlier runs have already spent ε = 1.95 of this budget" in summaries[1]


def test_owners_read_which_rounds_their_budget_refuses(setup: Setup) -> None:
    """Before they join, how many rounds it allows, and then each refusal."""
    for allowed in (1, 0):
        setup.messages.clear()
        serve_with_policy(setup, CAPPED)
        [warning] = [text for text in setup.messages if "policy's epsilon" in text]
        assert "asks client 2 of 3" in warning
        assert f"epsilon = 1.5 (at δ = 1e-05) allows only {allowed} of 2 rounds" in warning
        refused = [text for text in setup.messages if ": refused: the planned release" in text]
        assert [text[:9] for text in refused] == ["round 1/2", "round 2/2"][allowed:]
        assert all("above the cap 1.5" in text for text in refused)
    setup.messages.clear()
    serve_with_policy(setup, Policy(epsilon=50.0, delta=1e-5))
    assert "policy's epsilon" not in "".join(setup.messages)
    assert "refused" not in "".join(setup.messages)


def test_runs_without_a_round_end_with_an_error_and_no_folder(setup: Setup) -> None:
    """As simulations do. A folder remains if a client may have been charged."""
    settings = sections("feddm", privacy=PRIVATE)
    nodes = [setup.node(k, Policy(epsilon=0.5, delta=1e-5)) for k in range(CLIENTS)]
    with raises(BudgetExceededError, "budget.exceeded") as caught:
        setup.serve(settings, setup.link(*nodes))
    assert str(caught.value).startswith("ended after 0 of 2 rounds: ")
    assert not list((setup.folder / "runs").iterdir())
    assert [node.ended for node in nodes] == [1] * CLIENTS
    with raises(BudgetExceededError, "budget.exceeded"):
        setup.serve(settings, with_faults(setup.link(setup.node(0), *nodes[1:]), ["silence"], 100))
    [folder] = (setup.folder / "runs").iterdir()
    assert len(setup.ledger(0)) > 0
    assert verify_run(folder).problems == []
    setup.serve(sections("feddm", privacy={"epsilon": 2.0}))
    with raises(BudgetExceededError, "budget.spent"):
        setup.serve(sections("feddm", privacy={"epsilon": 2.0}))
    assert len(list((setup.folder / "runs").iterdir())) == 2


@pytest.mark.parametrize("policy", [CAPPED, None], ids=["owners", "run"])
def test_run_ends_when_all_budgets_are_exhausted(setup: Setup, policy: Policy | None) -> None:
    privacy = PRIVATE if policy else {**PRIVATE, "epsilon": 1.5}
    nodes = [setup.node(k, policy) for k in range(CLIENTS)]
    served = setup.serve(sections("feddm", privacy=privacy), setup.link(*nodes))
    assert len(served.record.rows) == 1
    assert [node.ended for node in nodes] == [1] * CLIENTS
    assert any("ended after 1 of 2 rounds" in text for text in served.record.deviations)
    setup.verified_reports()


class UnmaskedFedSum(FedSum):
    @property
    def requires_secure_sum(self) -> bool:
        return False

    def release_plans(self, privacy: Any, context: Any) -> Any:
        return [replace(plan, shares=2) for plan in super().release_plans(privacy, context)]


def test_shared_noise_without_secure_sums_is_refused(setup: Setup) -> None:
    """An upload would have only σ/√H of noise."""
    accepted = new_proposal(local_setup.secure_sections("fedsum", privacy=PRIVATE))
    method = UnmaskedFedSum(aggregation="secure")
    proposal = replace(accepted, settings=replace(accepted.settings, method=method))
    with raises(PrivacySettingError, "method.aggregation"):
        setup.serve(proposal)
    session = Session(setup.node(0), proposal, DatasetPart().read(proposal, 0), Ledger("c"), None)
    with raises(PrivacySettingError, "method.aggregation"):
        session.accept(RunTerms(None, 5.0))
    assert join(setup.node(0), accepted).kind == "answer"


def test_owner_budgets_use_the_owners_delta() -> None:
    """The server chooses a run's δ: with a larger one the same releases have a smaller ε."""
    row = Release(1, "sums", "residual", "each", 5.0, 1.0, 1.0, "full", 3, 10)
    owner_epsilon = epsilon([row], 1e-5)
    assert epsilon([row], 1e-2) < 0.9 * owner_epsilon < owner_epsilon < 0.9 * epsilon([row], 1e-9)
    for factor, refused in ((0.95, True), (1.05, False)):
        cap = Owner(Policy(epsilon=factor * owner_epsilon, delta=1e-5)).cap
        assert cap is not None
        for server_delta in (1e-2, 1e-9):
            guard = BudgetEnforcer(Ledger("c"), [cap, EpsilonCap(1e9, server_delta)])
            if refused:
                with raises(BudgetExceededError, "budget.exceeded"):
                    guard.check([row])
            else:
                guard.check([row])


def test_approvals_hold_for_one_agreement(setup: Setup) -> None:
    proposal = new_proposal(sections("feddm", privacy=PRIVATE))
    assert Owner(approved=frozenset({proposal.agreement})).objections(proposal) == []
    other_proposal = new_proposal(sections("feddm", privacy={"noise_multiplier": 4.0}))
    assert Owner(approved=frozenset({proposal.agreement})).objections(other_proposal)
    assert Owner().objections(proposal)
    assert replace(proposal, run=new_run()).agreement == proposal.agreement
    policy = Policy(methods=("fedavg",))  # an approval does not override the policy
    assert Owner(policy, frozenset({ANY})).objections(proposal)
    assert Owner(Policy(), frozenset({"0" * 16})).objections(proposal)


INVALID_POLICIES: list[dict[str, Any]] = [
    {"method": ["feddm"]},
    *({"methods": odd} for odd in ("feddm", [], [1], ["fedmd"])),
    *({"epsilon": odd} for odd in (0, 8.0, "8", True)),
    {"epsilon": 8.0, "delta": 1.0},
    {"epsilon": float("nan"), "delta": 1e-5},
    {"delta": 1e300},
    {"open": "no"},
    {"classes": ["a", ["b"]]},
    *({"rounds": odd} for odd in (1.5, 10**30)),
    *({"height": 64.0}, {"channels": True}),
    {"settings": ["model.width"]},
    *({"settings": {"model.width": odd}} for odd in (8, [[1]], [{"a": 1}])),
]


def test_invalid_policies_are_rejected() -> None:
    for settings in INVALID_POLICIES:
        with pytest.raises(ValidationError):
            Policy(**settings)


# ------------------------------------------------------------------------------ faults


Fault = Callable[[Frame], bytes | str | None]


def altered(kind: str = "answer", /, **facts: Any) -> Fault:
    return lambda answer: replace(answer, kind=kind, facts={**answer.facts, **facts}).to_bytes()


# Faults in place of an answer to a step, and the server's message.
FAULTS: dict[str, tuple[Fault, str]] = {
    "silence": (lambda answer: None, "does not answer in time"),
    "disconnected": (lambda answer: "is gone", "is gone"),
    "empty": (lambda answer: b"", "invalid header length"),
    "junk": (lambda answer: b"\xff" * 40, "invalid header length"),
    "unnumbered": (lambda answer: Frame("answer", {}).to_bytes(), "must come from client 1 and"),
    "another client": (altered(client=2), "must come from client 1 and"),
    "an earlier request": (altered(number=1), "must come from client 1 and"),
    "long": (lambda answer: answer.to_bytes() + bytes(140 * 2**20), "bytes, but at most"),
    "error": (altered("error", text="x" * 9999), "failed: xxx"),
    "refusal": (altered("refusal", kind="request", reason="no"), "refuses: no"),
    "declined": (altered("refusal", kind="budget", reason="spent"), "declines: spent"),
    "damaged ledger": (altered(history={"releases": 7}), "ledger history is damaged"),
    "damaged row": (
        altered(history={"client": "client-001", "releases": [{}], "chain": None}),
        "ledger history is damaged",
    ),
    "no message": (lambda answer: replace(answer, payload=b"x" * 99).to_bytes(), "not a valid fed"),
}


def with_faults(link: local_setup.Link, faults: Sequence[str], *nodes: int) -> local_setup.Link:
    """Applies one of the faults to these nodes' steps in each of the first rounds."""

    def fail(node: int, request: Frame, answer: bytes) -> bytes | str | None:
        if node not in nodes or request.kind != "step" or request.facts["round"] > len(faults):
            return answer
        fault, _ = FAULTS[faults[request.facts["round"] - 1]]
        return fault(Frame.from_bytes(answer))

    link.change = fail
    return link


def test_failing_clients_are_lost_for_one_round(setup: Setup) -> None:
    """Each round has another fault. The reason is short, and the other clients finish the round."""
    small = {"iterations": 1, "ipc": 1, "server_epochs": 1}
    run = {"rounds": len(FAULTS) + 1}
    settings = sections("feddm", run=run, method=small, privacy=PRIVATE)
    served = setup.serve(settings, with_faults(setup.link(), list(FAULTS), 101))
    for (name, (_, reason)), row in zip(FAULTS.items(), served.record.rows, strict=False):
        key = "rejected" if name == "no message" else "lost"
        assert list(row.get(key, [])) == ["1"], name
        assert reason in row[key]["1"]
        assert len(row[key]["1"]) < 600
        assert [bool(sent) for sent in row["client_upload_bytes"]] == [True, False, True]
    assert "lost" not in served.record.rows[-1]


def test_runs_without_a_quorum_raise_errors(setup: Setup) -> None:
    """To start, or after a refusal by all clients."""
    with raises(RequestRefusedError, "request.refused"):
        setup.serve(sections("fedavg"), with_faults(setup.link(), ["refusal"], 100, 101, 102))
    with raises(TooFewClientsError, "clients.few"):
        setup.serve(sections("fedavg"), setup.link(setup.node(0)))


def test_client_index_belongs_to_only_one_node(setup: Setup) -> None:
    """Two nodes with the same number, and a node with another client's key, are refused."""
    settings, notes, link = sections("fedavg"), NoteRecorder(), setup.link()
    link.nodes_[200] = setup.node(1, home="thief")
    served = setup.serve(settings, link, observer=notes)
    assert "lost" not in served.record.rows[0]
    assert "node 200 cannot join" in "\n".join(notes.lines)
    connection = Connection(link, Timeouts(join=0.2, poll=0.05), {100: 0, 101: 2, 102: 1, 200: 1})
    served = NetworkedRun(new_proposal(settings), connection, setup.folder / "more", observer=notes)
    served.run()
    assert set(served.record.rows[0]["lost"]) == {"2"}  # 200 holds the key of client 1
    assert "key does not match client" in "\n".join(notes.lines)


# ------------------------------------------------------------------------------ proposals


def test_invalid_proposals_are_refused(setup: Setup) -> None:
    """Folders of ledgers and data and the device in a valid one are replaced by the owner's."""
    valid = new_proposal(sections("feddm", privacy=PRIVATE)).to_json()
    wrong: Any = ({"run": []}, {"own": {"x": 1}}, {"run": {"method": "x"}}, {"run": {"rounds": -1}})
    specs: Any = ({}, {**valid["spec"], "classes": "10"}, {**valid["spec"], "more": 1})
    proposals: list[Any] = [None, [], {}]
    proposals += [{**valid, "run": name} for name in ("../../home", "0" * 15 + "/")]
    proposals += [{**valid, "settings": settings} for settings in wrong]
    proposals += [{**valid, "spec": spec} for spec in specs]
    for stated in proposals:
        run = str(stated.get("run", "")) if isinstance(stated, dict) else ""
        assert ask(setup.node(0), run, "join", proposal=stated).kind == "error", stated
    assert not (setup.folder / "owner-0").exists()
    valid["settings"]["privacy"]["ledger"] = str(setup.folder / "theirs")
    valid["settings"]["data"]["data_root"] = "/etc"
    valid["settings"]["run"]["device"] = "cuda"
    read = Proposal.from_json(valid).settings
    assert (read.privacy.ledger, read.data_root, read.device) == (None, None, "auto")


def test_clients_answer_only_joined_runs_whose_settings_cannot_change(setup: Setup) -> None:
    node = setup.node(0)
    for run in ("0" * 16, "..", "", "/etc/passwd", "a" * 300):
        answer = ask(node, run, "step", round=1)
        assert answer.kind == "error"
        assert "has not joined" in answer.facts["text"]
    first = new_proposal(sections("feddm", privacy=PRIVATE))
    changed = new_proposal(sections("feddm", privacy={"noise_multiplier": 0.1}))
    assert join(node, first).kind == "answer"
    assert join(node, replace(changed, run=first.run)).kind == "error"


# ------------------------------------------------------------------------------ repeated requests


def recorded_steps(setup: Setup, settings: Any) -> tuple[Proposal, list[Frame]]:
    """Serves a run and returns its proposal and the first client's step requests."""
    link = setup.link()
    setup.serve(settings, link)
    requests = [frame for node, frame, _ in link.seen if node == 100]
    proposal = Proposal.from_json(requests[0].facts["proposal"])
    return proposal, [frame for frame in requests if frame.kind == "step"]


def perturbed(request: Frame) -> Frame:
    """Returns a step request with another model; other requests are unchanged."""
    if request.kind != "step":
        return request
    model = ModelParameters.from_bytes(request.payload)
    moved = {name: value + 1e-3 for name, value in model.parameters.items()}
    return replace(request, payload=replace(model, parameters=moved).to_bytes())


def replay(node: Node, run: str, request: Frame) -> Frame:
    return Frame.from_bytes(node.answer(run, request.to_bytes()))


def test_rejoining_permits_no_more_releases(setup: Setup) -> None:
    """Requests with other models are answered only as often as a restarting server needs, and once
    without a cap, in any process of the node; an approval is for one run."""
    proposal, steps = recorded_steps(setup, sections("feddm", privacy=PRIVATE))
    assert len(steps) == 2  # one message per exchange
    round_rows = len(setup.ledger(0)) // 2
    for home, policy, limit in (("capped", Policy(epsilon=50.0, delta=1e-5), 3), ("open", None, 1)):
        new_node = partial(setup.node, 0, policy, home=home, approved=proposal.agreement)
        refused = []
        request = steps[0]
        for _ in range(5):
            node = new_node()
            join(node, proposal)
            reply = replay(node, proposal.run, request)
            refused.append("already answered round" in reply.facts.get("text", ""))
            request = perturbed(request)
        assert refused == [False] * limit + [True] * (5 - limit)
        assert len(setup.ledger(0, home)) == limit * round_rows
        reply = join(new_node(), replace(proposal, run=new_run()))
        assert reply.kind == ("answer" if policy is not None else "refusal")


def test_an_approval_is_used_by_the_first_run_that_begins(setup: Setup) -> None:
    """Regression: a server that joined several runs first got all of them."""
    proposal, (request, *_) = recorded_steps(setup, sections("feddm", privacy=PRIVATE))
    node = setup.node(0, home="joined", approved=proposal.agreement)
    runs = [replace(proposal, run=new_run()) for _ in range(3)]
    assert {join(node, run).kind for run in runs} == {"answer"}
    replies = [replay(node, run.run, request) for run in runs]
    assert [reply.kind for reply in replies] == ["answer", "error", "error"]
    assert "approval was already used" in replies[1].facts["text"]


def test_a_changed_policy_holds_for_joined_runs(setup: Setup) -> None:
    proposal, (request, *_) = recorded_steps(setup, sections("feddm", privacy=PRIVATE))
    join(setup.node(0, home="changed"), proposal)
    for changed in ({"policy": Policy(methods=("fedavg",))}, {"approved": "0" * 32}):
        reply = replay(setup.node(0, home="changed", **changed), proposal.run, request)
        assert reply.facts["text"].startswith("declines: ")
    assert replay(setup.node(0, home="changed"), proposal.run, request).kind == "answer"


def test_two_clients_do_not_share_a_folder(setup: Setup) -> None:
    """Regression: the second client sent the answers of the first one."""
    proposal, (request, *_) = recorded_steps(setup, sections("feddm", privacy=PRIVATE))
    assert join(setup.node(0, home="shared"), proposal).kind == "answer"
    other = setup.node(1, home="shared")
    for reply in (join(other, proposal), replay(other, proposal.run, request)):
        assert "Give each client its own folder" in reply.facts["text"]


def test_the_end_of_a_run_has_no_more_rounds_than_the_run(setup: Setup) -> None:
    """Regression: the owner's report was deleted, and could not be written again."""
    link = setup.link()
    proposal = setup.serve(sections("feddm", privacy=PRIVATE), link).backend.proposal
    node = setup.node(0)
    reply = ask(node, proposal.run, "end", rounds=999, noise_multiplier=5.0)
    assert "at most 2, got 999" in reply.facts["text"]
    assert not verify_run(node.folder(proposal.run)).problems


@pytest.mark.parametrize("method", ["feddm", "fedaf"])
def test_repeated_requests_repeat_the_answer_without_charge(
    setup: Setup, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If an answer is lost or the server restarts, the stored bytes are sent again, in this process
    and in another one, even with an exhausted budget; no step is taken, and the client's state is
    unchanged."""
    settings = sections(method, privacy={"noise_multiplier": 50.0})
    if method == "fedaf":  # whose first exchange is an exchange of its own
        settings["method"]["knowledge_from"] = "first-exchange"
    proposal, steps = recorded_steps(setup, settings)
    nodes = [setup.node(0, home="another") for _ in range(3)]
    join(nodes[0], proposal)

    def payload(node: Node, request: Frame) -> bytes:
        answer = replay(node, proposal.run, request)
        assert answer.kind == "answer"
        assert ("history" in answer.facts) == (request.facts["exchange"] == "main")
        return answer.payload

    def stored() -> tuple[Any, dict[str, bytes]]:
        files = (setup.folder / "another").glob("runs/*/main-*")
        return setup.ledger(0, "another"), {file.name: file.read_bytes() for file in files}

    first = [payload(nodes[0], request) for request in steps]
    before = stored()
    monkeypatch.setattr(in_process, "view", Mock(side_effect=AssertionError))
    assert payload(nodes[0], steps[-1]) == first[-1]
    assert payload(nodes[1], steps[-1]) == first[-1]  # another process
    join(nodes[2], proposal)  # and one whose server restarts
    assert [payload(nodes[2], request) for request in steps] == first
    assert stored() == before


def test_resumed_server_must_keep_its_initial_noise(setup: Setup) -> None:
    """With a budget the server chooses σ for all clients; a restart must keep it."""
    proposal, steps = recorded_steps(setup, sections("feddm", privacy={"epsilon": 5.0}))
    new_node = partial(setup.node, 0, home="again")
    node = new_node()
    join(node, proposal)
    replay(node, proposal.run, steps[0])
    rows = len(setup.ledger(0, "again"))
    request = perturbed(steps[0])
    for factor, kind in ((0.5, "error"), (2.0, "error"), (1.0, "answer")):
        facts = {**request.facts, "noise_multiplier": request.facts["noise_multiplier"] * factor}
        rejoined = new_node()
        join(rejoined, proposal)
        for node in (rejoined, new_node()) if kind == "error" else (new_node(),):
            assert replay(node, proposal.run, replace(request, facts=facts)).kind == kind
        assert (len(setup.ledger(0, "again")) > rows > 0) == (kind == "answer")


def test_errors_in_a_step_give_one_answer(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kind of error could depend on the records; only the owner sees it."""
    proposal, steps = recorded_steps(setup, sections("feddm", privacy=PRIVATE))
    answers = set()
    for number, error in enumerate((ValueError("row 7"), KeyError(3), RuntimeError("1 image"))):
        node = setup.node(0, home=f"fails-{number}")
        join(node, proposal)
        with monkeypatch.context() as patch:
            patch.setattr(in_process, "view", Mock(side_effect=error))
            answers.add(replay(node, proposal.run, steps[0]).to_bytes())
        assert any(f"{type(error).__name__}: {error}" in line for line in setup.messages)
    assert len(answers) == 1
    assert "Only the data owner sees the reason" in Frame.from_bytes(answers.pop()).facts["text"]
