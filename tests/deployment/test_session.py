"""Tests of a client's session with a server that is hostile, or is killed and resumes, and of
`fedsynth privacy verify` on the folders of both."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedsynth import ModelParameters, resolve, simulate
from fedsynth.deployment import session
from fedsynth.deployment.frames import Frame
from fedsynth.deployment.networked_run import NetworkedRun
from fedsynth.deployment.node import Node
from fedsynth.deployment.policy import Policy
from fedsynth.deployment.proposal import new_proposal
from fedsynth.errors import CheckpointError, PrivacyError
from fedsynth.federation.protocol import RunTerms
from fedsynth.methods import METHODS, method_class
from fedsynth.privacy import Ledger, Release, epsilon
from fedsynth.privacy.report.figures import Event
from fedsynth.results.later_reports import unfinished_report
from fedsynth.results.verification import verify_run
from tests.deployment import local_setup
from tests.deployment.local_setup import CLIENTS, PRIVATE, Setup, ask, join, kill, sections
from tests.quick_runs import NoteRecorder, by_family
from tests.raising import raises
from tests.results.test_tampering import Tamper, changed, delete, edit, put, row

ROUND: dict[str, Any] = {"round": 1, "participants": list(range(CLIENTS)), "exchange": "main"}
EPSILON = {"epsilon": 8.0}
# A cap, with which an exchange is answered again after a server restarts.
CAPPED = {"epsilon": 50.0, "noise_multiplier": 5.0}


class Client:
    """A node that has joined a run; the test is its server."""

    def __init__(
        self, setup: Setup, settings: Any, policy: Policy | None = None, **terms: Any
    ) -> None:
        self.proposal = new_proposal(settings)
        self.node: Node = setup.node(0, policy)
        self.terms = terms
        assert join(self.node, self.proposal).kind == "answer"
        self.runtime = self.node._session(self.proposal.run).runtime

    def request(self, kind: str, payload: bytes = b"", **facts: Any) -> Frame:
        """Returns the client's answer to a request."""
        request = {**ROUND, **self.terms, **facts}
        return ask(self.node, self.proposal.run, kind, payload, **request)

    @property
    def rows(self) -> tuple[Release, ...]:
        assert self.runtime.ledger is not None
        return self.runtime.ledger.releases

    def model(self, **other: torch.Tensor) -> dict[str, torch.Tensor]:
        return {**self.runtime.context.architecture.state_dict(), **other}

    def message(self, **other: torch.Tensor) -> bytes:
        return ModelParameters(self.model(**other), 1.0).to_bytes()


def test_hostile_requests_are_answered_with_errors(setup: Setup) -> None:
    client = Client(setup, sections("fedavg"), sizes=[1] * CLIENTS)
    requests: list[tuple[str, dict[str, Any]]] = [
        *(("step", {"exchange": exchange}) for exchange in ("other", "first", None, 7)),
        ("read the disk", {}),
        ("step", {}),  # whose message is junk
        *(("step", {"sizes": sizes}) for sizes in (["many"], [1], [True] * 3, 7, [-1] * 3)),
        *(("step", {"participants": clients}) for clients in ([], [7], [1, 0], [0, 0], "0", None)),
        *(("step", {"round": n}) for n in (-1, 0, 3, 10**300, 10**1000, 1.0, True, "1", None)),
        *((kind, {}) for kind in ("keys", "shares", "unmask")),
        ("end", {"rounds": "2"}),
        ("join", {"last_round": -1}),
    ]
    for kind, facts in requests:
        answer = client.request(kind, b"junk", **facts)
        assert answer.kind == "error", (kind, facts)
        assert 0 < len(answer.facts["text"]) < 400
    for sent in (b"", b"\xff" * 40):
        assert Frame.from_bytes(client.node.answer(client.proposal.run, sent)).kind == "error"
    for _ in range(2):
        assert client.request("step", client.message()).kind == "answer"
    assert [row.unaccounted is not None for row in client.rows] == [True]  # recorded once


@pytest.mark.parametrize(
    "method", by_family((n for n in METHODS if method_class(n).dp_mechanisms), ("fedavg", "feddm"))
)
def test_private_requests_without_noise_terms_are_errors(setup: Setup, method: str) -> None:
    """A client is private by its own settings, not by the server's request."""
    client = Client(setup, sections(method, privacy=EPSILON))
    state = client.runtime.method.initial_state(client.model())
    sent = client.runtime.method.broadcast(state, client.runtime.context).to_bytes()
    for kind in ("step", "keys"):
        for facts in ({}, {"exchange": "first"}, {"sizes": [1] * CLIENTS}):
            assert client.request(kind, sent, **facts).kind == "error", kind
    assert client.rows == ()


def test_noise_must_match_the_settings_or_the_first_terms(setup: Setup) -> None:
    """The settings' σ is required, or else the server's first one, if the budget allows it."""
    client = Client(setup, sections("fedavg", privacy=PRIVATE))
    for sigma in ("3", None, 3, 0.0, -1.0, 1e-300, 0.001, 4.999):
        answer = client.request("step", client.message(), noise_multiplier=sigma)
        assert answer.kind == "error", sigma
    assert client.rows == ()
    for folder, sigma in (("low", 0.05), ("high", 6.0)):
        client = Client(Setup(setup.folder / folder), sections("fedavg", privacy=EPSILON))
        answer = client.request("step", client.message(), noise_multiplier=sigma)
        if folder == "low":
            assert (answer.kind, answer.facts["kind"]) == ("refusal", "budget")
            assert answer.facts["history"]["releases"] == []
            assert client.rows == ()
    assert answer.kind == "answer"
    again = client.request("step", client.message(), noise_multiplier=5.0, round=2)
    assert again.kind == "error"
    assert {row.noise_multiplier for row in client.rows} == {6.0}


def test_rounds_that_exceed_the_budget_are_declined_before_the_first_exchange(setup: Setup) -> None:
    settings = sections("fedaf", privacy=PRIVATE)
    settings["method"]["knowledge_from"] = "first-exchange"
    client = Client(setup, settings, noise_multiplier=5.0)
    client.node._session(client.proposal.run).accept(RunTerms(noise_multiplier=5.0))
    context = replace(client.runtime.context, participants=tuple(range(CLIENTS)))
    budget = client.runtime.budget
    assert budget is not None
    rows = budget.plan.client_rows(0, context)
    plans = budget.plan.client_plans(0, context)
    first = [row for row, plan in zip(rows, plans, strict=True) if plan.exchange == "first"]
    first_epsilon, round_epsilon = epsilon(first, 1e-5), epsilon(rows, 1e-5)
    assert first_epsilon < 0.9 * round_epsilon
    method: Any = client.runtime.method
    state = method.initial_state(client.model())
    sent = method.first_broadcast(state, client.runtime.context).to_bytes()
    for share, kind in ((0.5, "refusal"), (1.01, "answer")):
        policy = Policy(epsilon=first_epsilon + share * (round_epsilon - first_epsilon), delta=1e-5)
        capped = Client(Setup(setup.folder / kind), settings, policy, **client.terms)
        assert capped.request("step", sent, exchange="first").kind == kind
        assert bool(capped.rows) == (kind == "answer")


def test_malformed_requests_are_refused_before_charging(setup: Setup) -> None:
    """`has_anchor` as a matrix would make each example's loss depend on the others."""
    settings = sections("fedfm-lite", privacy=PRIVATE)
    client = Client(setup, settings, noise_multiplier=5.0)
    name, tensor = next(iter(client.model().items()))
    tensors = [
        {name: tensor[None]},
        {name: torch.full_like(tensor, 7).to(torch.int64)},
        {name: tensor.to(torch.complex64)},
        {name: torch.full_like(tensor, float("inf"))},
        {"other": tensor},
    ]
    changes: list[Any] = [{"parameters": client.model(**changed)} for changed in tensors]
    changes += [{"has_anchor": torch.ones(10, 64).bool()}, {"anchors": torch.ones(64)}]
    state = client.runtime.method.initial_state(client.model())
    sent = client.runtime.method.broadcast(state, client.runtime.context)
    assert client.request("step", sent.to_bytes()).kind == "answer"
    for number, change in enumerate(changes):
        client = Client(Setup(setup.folder / str(number)), settings, noise_multiplier=5.0)
        answer = client.request("step", replace(sent, **change).to_bytes())
        assert answer.kind in ("refusal", "error"), change
        [field] = change
        assert field == "parameters" or field in answer.facts["reason"]
        assert client.rows == ()


def test_only_scheduled_rounds_are_answered_once(setup: Setup) -> None:
    """In new processes, too, which continue the stored session; a damaged state is refused."""
    client = Client(setup, sections("fedavg", privacy=CAPPED), noise_multiplier=5.0)
    answer = client.request("step", client.message())
    assert answer.kind == "answer"
    charged = len(client.rows)
    assert len(answer.facts["history"]["releases"]) == charged
    other = client.message(**{k: v + 1 for k, v in client.model().items()})
    others = ({"round": 2, "participants": clients} for clients in ([1, 2], [0]))
    for facts in ({}, {"round": 0}, {"round": 3}, {"round": 10**9}, *others):
        assert client.request("step", other, **facts).kind == "error", facts
    assert client.request("step", client.message()).payload == answer.payload  # the stored one
    assert len(client.rows) == charged
    client.node = setup.node(0)
    assert "already answered" in client.request("step", other).facts["text"]
    [state] = setup.folder.glob("owner-0/runs/*/session.json")
    text = state.read_text()
    for damaged in (text[:-9], "{}", text.replace('"initial_rows"', '"rows"')):
        state.write_text(damaged)
        client.node = setup.node(0)
        answer = client.request("step", other, round=2)
        assert "Only the data owner sees the reason" in answer.facts["text"]
        assert "damaged" in setup.messages[-1]
    state.write_text(text)
    client.node = setup.node(0)
    assert client.request("step", other, round=2).kind == "answer"


def test_a_full_disk_does_not_apply_a_step_twice(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer finds no place, the small state does."""
    link = setup.link()
    proposal = setup.serve(sections("scaffold", model={"depth": 1}), link).backend.proposal
    requests = [request for node, request, _ in link.seen if node == 100 and request.kind == "step"]
    original = session.write_whole

    def full(path: Path, content: Any, **options: Any) -> None:
        if path.name.startswith("answer-1-main-step"):
            raise OSError(errno.ENOSPC, "full")
        original(path, content, **options)

    uploads = []
    for home in ("clean", "full"):
        node = setup.node(0, home=home)
        join(node, proposal)
        if home == "full":
            with monkeypatch.context() as patch:
                patch.setattr(session, "write_whole", full)
                reply = Frame.from_bytes(node.answer(proposal.run, requests[0].to_bytes()))
                assert reply.kind == "error"
        replies = (node.answer(proposal.run, request.to_bytes()) for request in requests)
        uploads.append([Frame.from_bytes(reply).payload for reply in replies])
    assert uploads[0] == uploads[1]
    assert len(set(uploads[0])) == len(requests) > 1


def test_attempts_are_stored_before_the_charge(
    setup: Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is killed in each attempt would otherwise charge without end."""
    stored: list[dict[str, int]] = []
    original = session.step_together

    def observed(clients: Any, *rest: Any) -> Any:
        (file,) = (setup.folder / f"owner-{clients[0].number}").rglob("session.json")
        stored.append(json.loads(file.read_text())["attempts"])
        return original(clients, *rest)

    monkeypatch.setattr(session, "step_together", observed)
    setup.serve(sections("feddm", privacy=PRIVATE))
    assert stored[0] == {"1-main": 1}
    assert stored[-1] == {"1-main": 1, "2-main": 1}


# -------------------------------------------------------------------------- restarted servers


LAST = CLIENTS - 1


def heads(served: NetworkedRun) -> Any:
    """Returns the facts of the clients' ledgers in a run's report."""
    return served.report["ledger_heads"]


def assert_reported(setup: Setup, served: NetworkedRun, clients: Sequence[int]) -> None:
    """Checks that the report has all rows of the ledgers and that ε never decreases."""
    assert sorted(heads(served)) == [f"client-{k:03d}" for k in clients]
    spent = max(epsilon(setup.ledger(k), 1e-5) for k in clients)
    guarantee: Any = served.report["guarantee"]
    assert guarantee["epsilon"] >= spent * (1 - 1e-9)
    for k in clients:
        assert heads(served)[f"client-{k:03d}"]["rows"] >= len(setup.ledger(k))
    stated = [row["epsilon"] for row in served.record.rows]
    assert stated == sorted(stated)
    assert verify_run(served.folder.path).problems == []


@pytest.mark.parametrize(
    ("count", "kind"), [(CLIENTS + 1, "step"), (2 * CLIENTS, "step"), (1, "end")]
)
def test_clients_that_do_not_rejoin_stay_in_the_report(setup: Setup, count: int, kind: str) -> None:
    """The server is killed in round 2, before and after the last client's step: the client may be
    charged more than its last statement, and the report counts it. After the last round no request
    is repeated. A report without this client fails verification. The owner has a report, too."""
    settings = sections("feddm", privacy=PRIVATE, run={"rounds": 3})
    folder = kill(setup, settings, setup.link(), count, kind=kind)
    served = setup.serve(settings, setup.link(*map(setup.node, range(LAST))), resume=folder)
    assert_reported(setup, served, range(CLIENTS))
    [own] = (setup.folder / f"owner-{LAST}").glob("runs/*")
    with raises(PrivacyError, "privacy.refused"):
        verify_run(own)
    killed = unfinished_report(own)
    setup.node(LAST).write_reports()
    report = json.loads((own / "privacy_report.json").read_text())
    assert report == killed
    assert report["ledger_heads"][f"client-{LAST:03d}"]["rows"] == len(setup.ledger(LAST)) > 0
    assert verify_run(own).problems == []
    assert not (served.folder.path / "checkpoint").exists()
    deviations = served.record.deviations
    if kind == "end":
        assert deviations == ()
        return
    assert all("did not join" in row["lost"][str(LAST)] for row in served.record.rows[1:])
    assert any(f"client {LAST} has not stated its ledger" in text for text in deviations)
    file = served.folder.path / "privacy_report.json"
    report = json.loads(file.read_text())
    *events, unstated = report["events"]
    for other in ({"rounds": [1]}, {"client": "7"}):  # the client stated its ledger in round 1
        file.write_text(json.dumps({**report, "events": [*events, {**unstated, **other}]}))
        assert verify_run(served.folder.path).problems


def test_clients_that_miss_a_restart_state_their_ledger_again(setup: Setup) -> None:
    """σ follows from the budget before the first round, and not from what is left of it."""
    settings = sections("feddm", privacy=EPSILON, run={"rounds": 4})
    link = setup.link()
    folder = kill(setup, settings, link, CLIENTS + 1)  # the last one is not asked for round 2
    kill(setup, settings, setup.link(*map(setup.node, range(LAST))), LAST + 1, resume=folder)
    served = setup.serve(settings, setup.link(*link.nodes_.values()), resume=folder)
    assert_reported(setup, served, range(CLIENTS))
    assert not any("has not stated" in text for text in served.record.deviations)
    for number in range(CLIENTS):  # the owners' reports attribute the rows to the run
        [report] = (setup.folder / f"owner-{number}").glob("runs/*/privacy_report.json")
        head = json.loads(report.read_text())["ledger_heads"][f"client-{number:03d}"]
        assert head["rows_before"] == 0
        assert verify_run(report.parent).problems == []


@pytest.mark.parametrize("declines", [False, True])
def test_unanswered_steps_count_as_charged(setup: Setup, declines: bool) -> None:
    """The client's answer to the last round is lost, without a restart. A round that its policy's
    budget declines before the step is not charged."""

    def drop_answers(node: int, request: Frame, answer: bytes) -> bytes | None:
        lost = request.kind == "end" or (request.facts.get("round") == 2 and not declines)
        return None if node == 100 + LAST and lost else answer

    policy = Policy(epsilon=1.5, delta=1e-5) if declines else None
    link = setup.link(setup.node(0), setup.node(1), setup.node(LAST, policy), change=drop_answers)
    served = setup.serve(sections("feddm", privacy=PRIVATE), link)
    assert_reported(setup, served, range(CLIENTS))
    if declines:
        assert heads(served)[f"client-{LAST:03d}"]["rows"] == len(setup.ledger(LAST))
    else:
        expected = "in round 2. The step is counted as charged"
        assert any(expected in text for text in served.record.deviations)


def test_resumed_open_run_keeps_its_client_sizes(setup: Setup) -> None:
    """Sampling by size still uses the sizes of the missing clients."""
    run = {"rounds": 3, "sampling": "size", "participation": 0.67, "quorum": 0.3}
    settings = sections("fedavg", run=run)
    link, later = setup.link(), setup.link(*map(setup.node, range(LAST)))
    folder = kill(setup, settings, link, LAST + 1)
    setup.serve(settings, later, resume=folder)
    steps = [request for _, request, _ in [*link.seen, *later.seen] if request.kind == "step"]
    assert len({tuple(request.facts["sizes"]) for request in steps}) == 1


# ----------------------------------------------------------------------------------- rejoining


def test_resumed_run_equals_uninterrupted_run(setup: Setup) -> None:
    """One client's newest client state is of an earlier round than the checkpoint, another has none."""
    settings = sections("scaffold", run={"rounds": 6, "participation": 0.34, "seed": 45})
    folder = kill(setup, settings, setup.link(), 4)
    served = setup.serve(settings, setup.link(*map(setup.node, range(CLIENTS))), resume=folder)
    assert not any("lost" in row for row in served.record.rows)
    assert any("resumed after" in text for text in served.record.deviations)
    local_setup.same_model(served, simulate(resolve(settings)))


@pytest.mark.parametrize("home", ["fresh", "earlier"])
def test_second_client_with_a_key_is_refused(setup: Setup, home: str) -> None:
    """After a restart the second client connects first: its ledger is not the charged one. It
    leaves, and the first one joins."""
    settings = sections("feddm", privacy=PRIVATE, run={"rounds": 3})

    def copy_ledger(node: int, request: Frame, answer: bytes) -> bytes:
        if request.kind == "step" and request.facts["round"] == 1 and node == 101:
            shutil.copytree(setup.folder / "owner-0", setup.folder / "earlier")
        return answer

    link = setup.link(change=copy_ledger)
    folder = kill(setup, settings, link, 2 * CLIENTS + 1)
    first, second = link.nodes_[100], setup.node(0, home=home)

    class OneConnection(local_setup.Link):
        """Connects only one of the two clients."""

        def nodes(self) -> Sequence[int]:
            if second.refused and self.nodes_[100] is second:
                self.nodes_[100] = first
                return [101, 102]
            return list(self.nodes_)

    later = OneConnection({**link.nodes_, 100: second})
    served = setup.serve(settings, later, resume=folder, join=60)
    assert "the client's ledger does not begin with the" in second.refused
    assert not first.refused
    assert not any("lost" in row for row in served.record.rows)
    assert_reported(setup, served, range(CLIENTS))
    assert heads(served)["client-000"]["rows"] == len(setup.ledger(0))


def test_ledgers_replaced_within_a_run_are_rejected(setup: Setup) -> None:
    """The upload is not used, and the first ledger's charges are kept. A client with another one's
    ledger is refused and receives the reason."""

    def drop_release(node: int, request: Frame, answer: bytes) -> bytes:
        if node != 100 or request.facts.get("round") != 2:
            return answer
        frame = Frame.from_bytes(answer)
        history = {**frame.facts["history"], "releases": frame.facts["history"]["releases"][1:]}
        return replace(frame, facts={**frame.facts, "history": history}).to_bytes()

    link = setup.link(change=drop_release)
    link.nodes_[102].name = "client-001"
    notes = NoteRecorder()
    served = setup.serve(sections("feddm", privacy=PRIVATE), link, observer=notes)
    assert [set(row["lost"]) for row in served.record.rows] == [{"2"}, {"0", "2"}]
    assert "sent the ledger of 'client-001'" in "\n".join([*notes.lines, *setup.messages])
    assert heads(served)["client-000"]["rows"] == heads(served)["client-001"]["rows"]


def test_resuming_needs_same_settings_and_intact_checkpoint(setup: Setup) -> None:
    settings = sections("feddm", privacy=PRIVATE)
    folder = kill(setup, settings, setup.link(), CLIENTS + 1)
    with pytest.raises(CheckpointError, match=r"have changed\. Restore"):
        setup.serve(sections("feddm", privacy=PRIVATE, run={"rounds": 5}), resume=folder)
    file = folder / "checkpoint" / "clients.json"
    text = file.read_text()
    for damaged in (text[:-9], text.replace('"steps":', '"steps":1'), None):
        file.unlink()
        if damaged is not None:
            file.write_text(damaged)
        with pytest.raises(CheckpointError):
            setup.serve(settings, resume=folder)
    shutil.rmtree(folder / "checkpoint")
    with pytest.raises(CheckpointError, match="contains no checkpoint"):
        setup.serve(settings, resume=folder)


# ------------------------------------------------------------------------------- verification


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs two rounds; one client's policy declines the second."""
    setup = Setup(tmp_path_factory.mktemp("served"))
    nodes = [setup.node(0), setup.node(1), setup.node(2, Policy(epsilon=1.5, delta=1e-5))]
    setup.serve(sections("feddm", privacy=PRIVATE), setup.link(*nodes))
    return setup.folder


@pytest.fixture
def folder(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def run_folder(folder: Path, home: str = "") -> Path:
    """Returns the run folder of an owner or of the server."""
    [found] = (folder / home / "runs").iterdir()
    return found


def fewer_rounds(report: Any) -> None:
    """Removes a round of each release."""
    for release in report["ledger"]:
        release["rounds"] = release["rounds"][:-1] or release["rounds"]
    for head in report["ledger_heads"].values():
        head["rows"] //= 2


ROW, PAGE = edit(fewer_rounds), delete("privacy_report.html")
ABSENT = Event(kind="absent", client="1", why="ill").to_json()
TAMPERS: list[tuple[str, str, Tamper]] = [
    ("", "missing row", ROW),
    ("", "missing page", PAGE),
    ("", "unknown event", put("events", [ABSENT])),
    ("", "changed epsilon", row(2, "epsilon", 99.0)),
    ("", "removed loss", row(2, "lost", {})),
    ("", "unknown client lost", row(2, "lost", {"7": "away"})),
    ("", "repeated round", row(1, "round", 2)),
    ("", "marked as simulated", changed("privacy_start.json", "simulated", True)),
    ("owner-0", "missing row", ROW),
    ("owner-0", "missing page", PAGE),
    ("owner-0", "another client's number", changed("owner.json", "client", 7)),
    ("owner-0", "more rounds", changed("owner.json", "rounds", 9)),
    ("owner-0", "fewer rounds", changed("owner.json", "rounds", 1)),
    ("owner-0", "repeatable noise", changed("owner.json", "secret_noise", False)),
    ("owner-0", "initial rows", changed("privacy_start.json", "ledgers/client-000/rows", 1)),
]


@pytest.mark.parametrize(("home", "name", "tamper"), TAMPERS)
def test_tampering_is_detected(folder: Path, home: str, name: str, tamper: Tamper) -> None:
    tamper(run_folder(folder, home))
    assert verify_run(run_folder(folder, home)).problems


def test_owner_reports_are_compared_with_the_ledger(folder: Path) -> None:
    """Rows of later runs are allowed; a lost or replaced row is detected."""
    file = folder / "owner-0" / "client-000.jsonl"
    text = file.read_text()
    row = Release(1, "sums", "residual", "each", 5.0, 1.0, 1.0, "full", 3, 10)
    Ledger("client-000", file, dataset=None).charge(row)
    assert verify_run(run_folder(folder, "owner-0")).problems == []
    lines = text.splitlines(keepends=True)
    for fewer in (lines[:-1], [lines[0], *lines[2:]]):
        file.write_text("".join(fewer))
        assert verify_run(run_folder(folder, "owner-0")).problems
