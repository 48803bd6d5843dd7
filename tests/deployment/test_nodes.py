"""Data owners' nodes and a server's run over them, without Flower: what a message carries, what a
policy allows, and what a ledger refuses."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from fedsynth import DatasetSpec, FedSum, ModelParameters, register_model, resolve, simulate
from fedsynth.data.describe import proposal as declaration
from fedsynth.deployment import networked_run as served
from fedsynth.deployment.frames import Connection, Frame, Timeouts
from fedsynth.deployment.networked_run import NetworkedRun
from fedsynth.deployment.node import ClassFolders, DatasetPart, Node
from fedsynth.deployment.node_exchange import TooFewClientsError
from fedsynth.deployment.policy import ANY, Owner, Policy
from fedsynth.deployment.proposal import Proposal, new_proposal, new_run
from fedsynth.deployment.session import Session
from fedsynth.errors import DataError, SettingError
from fedsynth.federation import in_process, position_leak_check
from fedsynth.federation.protocol import RunTerms
from fedsynth.methods import METHODS, method_class
from fedsynth.models.small import Mlp
from fedsynth.privacy import BudgetExceededError, Ledger, Release, epsilon, read_ledger
from fedsynth.privacy.errors import PrivacySettingError, RequestRefusedError
from fedsynth.privacy.mechanisms import BudgetEnforcer
from fedsynth.results.verification import verify_run
from tests.deployment.place import (
    CLIENTS,
    PRIVATE,
    FreshProcesses,
    Hand,
    Place,
    ask,
    close,
    joined,
    killed,
    sections,
)
from tests.families import by_family
from tests.observers import NoteRecorder

PROTECTING = by_family((m for m in METHODS if method_class(m).dp_mechanisms), ("feddm", "fedstats"))


@pytest.mark.parametrize("method", by_family(METHODS, ("solo", "fedaf", "fedkf")))
def test_a_run_over_nodes_ends_as_a_simulation(place: Place, method: str) -> None:
    """All that passes between a server and its clients is bytes."""
    given = sections(method)
    served, together = place.serve(given), simulate(resolve(given))
    close(served, together)
    name = "common_accuracy" if method in ("solo", "fedbn") else "test_accuracy"
    assert served.record.rows[-1].get(name) == together.metrics[-1].get(name)


@pytest.mark.parametrize("method", PROTECTING)
def test_a_private_run_over_nodes_charges_as_planned(place: Place, method: str) -> None:
    """σ is found for all clients, and each charges its own ledger by it."""
    given = sections(method, privacy={"epsilon": 8.0})
    if resolve(given).method.requires_secure_sum:
        given["run"]["quorum"] = 1.0
    served = place.serve(given)
    together = simulate(resolve(given), output=place.folder / "simulated", quiet=True)
    assert together.folder is not None
    assert served.record.rows[-1]["epsilon"] == together.metrics[-1]["epsilon"]
    for number in range(CLIENTS):
        ledger = read_ledger(together.folder / "ledger" / f"client-{number:03d}.jsonl")
        assert place.ledger(number) == ledger.releases


def test_each_message_may_find_another_process(place: Place) -> None:
    """As Flower's plain SuperNodes start one for each: what a client keeps is in its files."""
    served = place.serve(sections("fedaf"), FreshProcesses({}, place=place))
    close(served, simulate(resolve(sections("fedaf"))))
    served = place.serve(sections("feddm", privacy=PRIVATE), FreshProcesses({}, place=place))
    assert [len(h.releases) for h in served.histories] == [len(place.ledger(0))] * CLIENTS


def test_an_owner_is_warned_once_of_rows_that_depend_on_their_position(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When it joins, and not again when it joins again or takes a step; and in all reports."""
    moved = SimpleNamespace(moved=True, finding="")
    monkeypatch.setattr(position_leak_check, "_trials", lambda *args: [moved])
    given = sections("feddm", privacy=PRIVATE)
    node, proposal = place.node(0, home="other"), new_proposal(given)
    for _ in range(2):
        joined(node, proposal)
        assert "".join(place.said).count("position of an example") == 1
    place.serve(given)
    assert "".join(place.said).count("position of an example") == 1 + CLIENTS
    reports = list(place.folder.rglob("privacy_report.json"))
    assert len(reports) == CLIENTS + 1
    for file in reports:
        [warning] = json.loads(file.read_text())["verdict"]["warnings"]
        assert "position of an example" in warning
        assert verify_run(file.parent).problems == []


def test_a_model_that_draws_is_declined_before_a_ledger_is_made(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Drawing(Mlp):
        def embed(self, x: Tensor) -> Tensor:
            return torch.nn.functional.dropout(super().embed(x), 0.5)

    register_model("own-drawing", lambda image_shape, classes: Drawing(image_shape, classes, 16))
    given = {**sections("feddm", privacy=PRIVATE), "model": {"name": "own-drawing"}}
    with pytest.raises(SettingError, match="draws random numbers"):
        place.serve(given)
    monkeypatch.setattr(served, "check_private_steps", lambda *args: [])  # a server may not look
    with pytest.raises(TooFewClientsError, match="of 3 clients, but 0 joined"):
        place.serve(given)
    declined = [line for line in place.said if "declines: model.name=own-drawing draws" in line]
    assert len(declined) == CLIENTS
    assert not list(place.folder.glob("owner-*/*.jsonl"))


def test_nothing_but_the_ledgers_rows_and_released_values_leaves_a_private_node(
    place: Place,
) -> None:
    """No record, no count, no name of a file: every byte of every answer is looked at. A round is
    one message an exchange."""
    given = sections("feddm", privacy=PRIVATE)
    hand = place.hand()
    served = place.serve(given, hand)
    asked = [asked.kind for node, asked, _ in hand.seen if node == 101]
    assert asked == ["join", "step", "step", "end"]
    assert '"seconds"' not in (served.folder.path / "metrics.jsonl").read_text()
    everything = b"".join(answer for _, _, answer in hand.seen)
    assert str(place.folder).encode() not in everything
    for number in range(CLIENTS):
        data = DatasetPart().read(new_proposal(given), number)
        assert f'"size": {len(data)}'.encode() not in everything
        assert not any(image.numpy().tobytes() in everything for image in data.images[:20])


# ------------------------------------------------------------------------------ who says no


def decided(place: Place, policy: Policy, given: Any) -> NetworkedRun:
    """A run in which the last client goes by a policy."""
    return place.serve(given, place.hand(*map(place.node, range(2)), place.node(2, policy)))


@pytest.mark.parametrize(
    ("method", "policy", "why"),
    [
        ("feddm", {"methods": ["fedavg"]}, "the owner allows only fedavg, not feddm"),
        ("feddm", {"rounds": 1}, "the owner allows at most 1 rounds, and the run has 2"),
        ("feddm", {"delta": 1e-6}, "the owner allows δ up to 1e-06, and"),
        ("feddm", {"settings": {"model.width": [8, 64]}}, "does not allow model.width = 4"),
        ("feddm", {"settings": {"model.name": ["linear"]}}, "model.name = 'convnet'"),
        ("feddm", {"settings": {"method.nothing": ["x"]}}, "method.nothing = None"),
        ("paper", {}, "has no privacy guarantee"),
        ("open", {}, "without differential privacy"),
    ],
)
def test_a_policy_names_what_it_does_not_allow(
    method: str, policy: dict[str, Any], why: str
) -> None:
    privacy = {"privacy": {**PRIVATE, **({"mechanism": "paper"} if method == "paper" else {})}}
    proposal = new_proposal(sections("feddm", **({} if method == "open" else privacy)))
    [objection] = Policy.from_mapping(policy).objections(proposal)
    assert why in objection


def test_a_policy_declines_and_the_run_continues(place: Place) -> None:
    served = decided(place, Policy(methods=("fedavg",)), sections("feddm", privacy=PRIVATE))
    for row in served.record.rows:
        assert "the owner allows only fedavg" in row["lost"]["2"]
    assert not list((place.folder / "owner-2").glob("*.jsonl"))  # not even a ledger was made
    assert any("the owner allows only fedavg" in one for one in place.said)
    assert len(served.histories) == 2
    assert any("client 2 did not take part" in one for one in served.record.deviations)


class InTheOpen(FedSum):
    """A method that shares noise and sends its uploads as they are."""

    @property
    def requires_secure_sum(self) -> bool:
        return False

    def release_plans(self, privacy: Any, context: Any) -> Any:
        plans = super().release_plans(privacy, context)
        return [replace(plan, shares=2) for plan in plans]


def test_noise_that_needs_a_sum_is_refused_where_none_is_made(place: Place) -> None:
    """An upload would have σ/√H of noise, by an H that the server derives of its own number of
    clients."""
    secure = {"aggregation": "secure"}
    given = sections("fedsum", run={"quorum": 1.0}, method=secure, privacy=PRIVATE)
    known = new_proposal(given)
    method = InTheOpen(aggregation="secure")
    proposal = replace(known, settings=replace(known.settings, method=method))
    with pytest.raises(PrivacySettingError, match="of the noise without secure aggregation"):
        NetworkedRun(proposal, Connection(place.hand(), Timeouts(join=0.2)), place.folder / "runs")
    session = Session(place.node(0), proposal, DatasetPart().read(proposal, 0), Ledger("c"), None)
    with pytest.raises(PrivacySettingError, match="of the noise without secure aggregation"):
        session.accept(RunTerms(None, 5.0))
    assert joined(place.node(0), known).kind == "answer"


def test_a_policys_cap_holds_at_each_charge(place: Place) -> None:
    """The run has no cap of its own, and its server asks on: the ledger stays where it was. An owner
    reads what a run costs on top of what was spent."""
    given, policy = sections("feddm", privacy=PRIVATE), Policy(epsilon=1.5, delta=1e-5)
    served = decided(place, policy, given)
    assert "lost" not in served.record.rows[0]
    assert served.record.rows[1]["lost"]["2"].startswith("declines: ")
    assert len(place.ledger(2)) * 2 == len(place.ledger(0))
    again = decided(place, policy, given)
    assert all("2" in row["lost"] for row in again.record.rows)
    assert len(place.ledger(2)) * 4 == len(place.ledger(0))
    shown = [text for text in place.said if "asks client 0 of 3: feddm, 2 rounds" in text]
    assert "privacy: ε = 1.95" in shown[0]
    assert "earlier runs have already spent ε = 1.95 of this budget" in shown[1]


def test_an_owners_cap_is_at_the_owners_delta() -> None:
    """A run's δ is its server's: with a larger one the same releases have a smaller ε."""
    row = Release(1, "sums", "residual", "each", 5.0, 1.0, 1.0, "full", 3, 10)
    at_owners = epsilon([row], 1e-5)
    assert epsilon([row], 1e-2) < 0.9 * at_owners < at_owners < 0.9 * epsilon([row], 1e-9)
    for factor, refused in ((0.95, True), (1.05, False)):
        cap = Owner(Policy(epsilon=factor * at_owners, delta=1e-5)).cap
        for servers in (1e-2, 1e-9):
            guard = BudgetEnforcer(Ledger("c"), servers, None, owner=cap)
            if refused:
                with pytest.raises(BudgetExceededError, match="δ = 1e-05"):
                    guard.check([row])
            else:
                guard.check([row])


def test_the_run_ends_when_all_budgets_are_exhausted(place: Place) -> None:
    policy = Policy(epsilon=1.5, delta=1e-5)
    hand = place.hand(*(place.node(k, policy) for k in range(CLIENTS)))
    served = place.serve(sections("feddm", privacy=PRIVATE), hand)
    assert len(served.record.rows) == 1
    assert any("ended after 1 of 2 rounds" in one for one in served.record.deviations)


def test_an_approval_is_of_one_agreement(place: Place) -> None:
    proposal = new_proposal(sections("feddm", privacy=PRIVATE))
    assert Owner(approved=frozenset({proposal.agreement})).objections(proposal) == []
    other = new_proposal(sections("feddm", privacy={"noise_multiplier": 4.0}))
    assert Owner(approved=frozenset({proposal.agreement})).objections(other)
    assert Owner().objections(proposal)
    assert replace(proposal, run=new_run()).agreement == proposal.agreement
    policy = Policy(methods=("fedavg",))  # a hand's approval does not lift what the policy says
    assert Owner(policy, frozenset({ANY})).objections(proposal)
    assert Owner(Policy(), frozenset({"0" * 16})).objections(proposal)


SLIPS: list[dict[str, Any]] = [
    {"method": ["feddm"]},
    *({"methods": odd} for odd in ("feddm", [], [1])),
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


def test_a_slip_in_a_policy_allows_nothing() -> None:
    for given in SLIPS:
        with pytest.raises(SettingError, match="policy"):
            Policy.from_mapping(given)


# ------------------------------------------------------------------------------ what is not sound


Fault = Callable[[Frame], bytes | str | None]


def other(kind: str = "answer", /, **facts: Any) -> Fault:
    """The answer as a frame of this kind, with these facts."""
    return lambda answer: replace(answer, kind=kind, facts={**answer.facts, **facts}).to_bytes()


FAULTS: dict[str, tuple[Fault, str]] = {
    "silence": (lambda answer: None, "does not answer in time"),
    "is gone": (lambda answer: "is gone", "is gone"),
    "empty": (lambda answer: b"", "header of the frame"),
    "junk": (lambda answer: b"\xff" * 40, "header of the frame"),
    "unnumbered": (lambda answer: Frame("answer", {}).to_bytes(), "the answer must be from"),
    "another client": (other(client=2), "the answer must be from"),
    "an earlier request": (other(number=1), "the answer must be from"),
    "long": (lambda answer: answer.to_bytes() + bytes(140 * 2**20), "an answer may have at most"),
    "error": (other("error", text="x" * 9999), "reports an error: xxx"),
    "refusal": (other("refusal", kind="request", reason="no"), "refuses: no"),
    "declined": (other("refusal", kind="budget", reason="spent"), "declines: spent"),
    "damaged ledger": (other(history={"releases": 7}), "ledger history is damaged"),
    "damaged row": (
        other(history={"client": "client-001", "releases": [{}], "chain": None}),
        "ledger history is damaged",
    ),
    "no message": (
        lambda answer: replace(answer, payload=b"\xff" * 100).to_bytes(),
        "not a valid fedsynth message",
    ),
}
"""What arrives in place of an answer to a step, and what the server says of it."""


def failing(hand: Hand, faults: Sequence[str], *nodes: int) -> Hand:
    """These nodes fail in the step of each of the first rounds, in these ways."""

    def fails(node: int, asked: Frame, answer: bytes) -> bytes | str | None:
        if node not in nodes or asked.kind != "step" or asked.facts["round"] > len(faults):
            return answer
        fault, _ = FAULTS[faults[asked.facts["round"] - 1]]
        return fault(Frame.from_bytes(answer))

    hand.change = fails
    return hand


def test_a_client_that_fails_is_lost_for_the_round_and_no_more(place: Place) -> None:
    """It fails in another way in each round. The reason is short, and the round is the others'."""
    small = {"iterations": 1, "ipc": 1, "server_epochs": 1}
    run = {"rounds": len(FAULTS) + 1}
    given = sections("feddm", run=run, method=small, privacy=PRIVATE)
    served = place.serve(given, failing(place.hand(), list(FAULTS), 101))
    for (name, (_, why)), row in zip(FAULTS.items(), served.record.rows, strict=False):
        key = "rejected" if name == "no message" else "lost"
        assert list(row.get(key, [])) == ["1"], name
        assert why in row[key]["1"]
        assert len(row[key]["1"]) < 600
        assert [bool(sent) for sent in row["client_upload_bytes"]] == [True, False, True]
    assert "lost" not in served.record.rows[-1]


def test_what_all_clients_refuse_is_the_servers_mistake(place: Place) -> None:
    with pytest.raises(RequestRefusedError, match="no"):
        place.serve(sections("fedavg"), failing(place.hand(), ["refusal"], 100, 101, 102))


def test_no_client_starts_below_the_quorum(place: Place) -> None:
    with pytest.raises(TooFewClientsError, match="at least 2 of 3 clients, but 1 joined"):
        place.serve(sections("fedavg"), place.hand(place.node(0)))


def test_a_client_index_belongs_to_only_one_node(place: Place) -> None:
    """Two nodes of the same number, and one whose key is for another: neither takes its place."""
    given, notes, hand = sections("fedavg"), NoteRecorder(), place.hand()
    hand.nodes_[200] = place.node(1, home="thief")
    served = place.serve(given, hand, observer=notes)
    assert "lost" not in served.record.rows[0]
    assert "node 200 cannot join" in "\n".join(notes.lines)
    post = Connection(hand, Timeouts(join=0.2, poll=0.05), {100: 0, 101: 2, 102: 1, 200: 1})
    served = NetworkedRun(new_proposal(given), post, place.folder / "more", observer=notes)
    served.run()
    assert set(served.record.rows[0]["lost"]) == {"2"}  # 200 holds the key of client 1
    assert "is not the key of client" in "\n".join(notes.lines)


def test_a_resumed_private_run_charges_changed_requests(place: Place) -> None:
    """Two clients had not answered the round that is repeated; the first is asked with another
    model than before."""
    given = sections("feddm", privacy=PRIVATE)
    policy = Policy(epsilon=8.0, delta=1e-5)
    hand = place.hand(*(place.node(k, policy) for k in range(CLIENTS)))

    class Moves(Hand):
        def ask(self, messages: Mapping[int, bytes], seconds: float) -> dict[int, bytes | str]:
            moved = {k: otherwise(Frame.from_bytes(one)) for k, one in messages.items()}
            return super().ask({k: one.to_bytes() for k, one in moved.items()}, seconds)

    folder = killed(place, given, hand, CLIENTS + 1)
    served = place.serve(given, Moves(hand.nodes_), resume=folder)
    rows = [len(place.ledger(k)) for k in range(CLIENTS)]
    assert rows[0] * 2 == rows[1] * 3 == rows[2] * 3
    assert served.record.rows[-1]["epsilon"] > simulate(resolve(given)).metrics[-1]["epsilon"]
    assert served.report["ledger_heads"]["client-000"]["rows_before"] == 0


# ------------------------------------------------------------------------------ what a server says


def proposed(**more: Any) -> dict[str, Any]:
    stated = new_proposal(sections("feddm", privacy=PRIVATE)).to_json()
    return {**stated, **more}


def test_an_unsound_proposal_is_refused(place: Place) -> None:
    spec = proposed()["spec"]
    odd_settings: tuple[Any, ...] = ({"run": []}, {"own": {"x": 1}}, {"run": {"method": "nothing"}})
    odd_specs: tuple[Any, ...] = ({}, {**spec, "classes": "10"}, {**spec, "more": 1})
    unsound: list[Any] = [None, [], {}, proposed(settings={"run": {"rounds": -1}})]
    unsound += [proposed(run=run) for run in ("../../home", "0" * 15 + "/")]
    unsound += [proposed(settings=odd) for odd in odd_settings]
    unsound += [proposed(spec=odd) for odd in odd_specs]
    for stated in unsound:
        run = str(stated.get("run", "")) if isinstance(stated, dict) else ""
        assert ask(place.node(0), run, "join", proposal=stated).kind == "error", stated
    assert not (place.folder / "owner-0").exists()


def test_a_server_names_no_place_of_an_owners(place: Place) -> None:
    """Neither a folder of ledgers or of data, nor a device: these are the owner's own."""
    stated = proposed()
    stated["settings"]["privacy"]["ledger"] = str(place.folder / "theirs")
    stated["settings"]["data"]["data_root"] = "/etc"
    stated["settings"]["run"]["device"] = "cuda"
    settings = Proposal.from_json(stated).settings
    assert settings.privacy is not None
    assert (settings.privacy.ledger, settings.data_root, settings.device) == (None, None, "auto")


def test_a_client_answers_only_runs_that_it_has_joined(place: Place) -> None:
    node = place.node(0)
    for run in ("0" * 16, "..", "", "/etc/passwd", "a" * 300):
        said = ask(node, run, "step", round=1)
        assert said.kind == "error"
        assert "has not joined" in said.facts["text"]


def test_settings_cannot_change_after_a_client_has_joined(place: Place) -> None:
    node = place.node(0)
    first = new_proposal(sections("feddm", privacy=PRIVATE))
    other = new_proposal(sections("feddm", privacy={"noise_multiplier": 0.1}))
    assert joined(node, first).kind == "answer"
    assert joined(node, replace(other, run=first.run)).kind == "error"


# ------------------------------------------------------------------------------ own data


def scans(**more: Any) -> DatasetSpec:
    known = DatasetSpec("scans", 1, 8, 8, 2, 9, 9, (0.5,), (0.5,), ("healthy", "ill"), "x")
    return replace(known, **more)


def of_scans(spec: DatasetSpec, **privacy: Any) -> Proposal:
    given = sections("feddm", privacy=privacy)
    del given["run"]["device"]  # a party's own setting
    return Proposal(new_run(), resolve(given, own_data="scans"), spec)


def with_scans(folder: Path) -> Path:
    """An owner's folder of images of both classes; the second half are healthy."""
    drawn = np.random.default_rng(0).integers(0, 256, (20, 8, 8), np.uint8)
    for k, image in enumerate(drawn):
        place = folder / ("ill" if k < 10 else "healthy")
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(place / f"{k}.png")
    return folder


def test_an_owners_images_are_read_by_class(tmp_path: Path) -> None:
    folder = with_scans(tmp_path / "data")
    proposal = of_scans(scans())
    data = ClassFolders(folder).read(proposal, 0)
    assert data.labels.tolist() == [0] * 10 + [1] * 10
    first = np.asarray(Image.open(folder / "healthy" / "10.png"))
    np.testing.assert_array_equal(data.images[0, 0], first)
    assert Proposal.from_json(json.loads(json.dumps(proposal.to_json()))) == proposal
    with pytest.raises(DataError, match="has the class 'ill', which the data set scans"):
        ClassFolders(folder).read(of_scans(scans(class_names=("healthy", "flu"))), 0)
    with pytest.raises(DataError, match="does not exist"):
        ClassFolders(tmp_path / "nothing").read(proposal, 0)


def test_a_class_is_a_folder_of_the_owners_and_no_other_place(tmp_path: Path) -> None:
    """Images lie wherever such a name would lead, so that a name which is followed is read."""
    own = tmp_path / "data" / "own"
    for place in (own.parent, own / "ill", tmp_path / "secret"):
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.zeros((8, 8), np.uint8)).save(place / "a.png")
    (own.parent / "link").symlink_to(tmp_path / "secret")
    for name in ("nobody", "..", ".", "../../secret", "../link", "ill/..", "ä" * 200):
        data = ClassFolders(own).read(of_scans(scans(class_names=("ill", name))), 0)
        assert data.labels.tolist() == [0]


SAYS = {"classes": ("healthy", "ill"), "height": 8, "width": 8, "channels": 1}


@pytest.mark.parametrize("declared", [False, True])
def test_a_server_does_not_learn_which_images_fit(place: Place, declared: bool) -> None:
    """What an owner says of its images decides, also where images of what is asked are there."""
    folder = with_scans(place.folder / "data")
    policy = Policy() if declared else Policy(**SAYS)
    if declared:
        text = declaration(scans(), [], 20, 0).replace('by = ""', 'by = "A"')
        (folder / "fedsynth.toml").write_text(text.replace('date = ""', 'date = "2026-01-01"'))

    def answer(home: str, policy: Policy | None, **spec: Any) -> Frame:
        node = place.node(0, policy, home=home, source=ClassFolders(folder))
        return joined(node, of_scans(scans(**spec), **PRIVATE))

    assert answer("same", policy).kind == "answer"
    classes = (("ill", "healthy"), ("healthy", "flu"))
    others: list[dict[str, Any]] = [{"class_names": names} for names in classes]
    others += [{"height": 16}, {"width": 16}]
    (folder / "flu").mkdir()
    for number, spec in enumerate(others):
        told = answer(str(number), policy, **spec)
        assert told.kind == "refusal"
        assert "owner" in told.facts["reason"]
    if not declared:
        told = answer("approved", None)
        assert "has not declared the classes" in told.facts["reason"]


def test_data_that_cannot_be_read_as_a_whole_are_one_answer(place: Place) -> None:
    answers = set()
    for name in ("folder", "list", "link"):
        folder = place.folder / name
        if name != "folder":
            with_scans(folder)
        if name == "list":
            (folder / "manifest.csv").write_bytes(b"path,label\n\xff\xfe")
        if name == "link":
            (folder / "again").symlink_to(folder / "ill")
        node = place.node(0, Policy(**SAYS), home=f"home-{name}", source=ClassFolders(folder))
        answers.add(joined(node, of_scans(scans(), **PRIVATE)).to_bytes())
        assert str(folder) in place.said[-1]
    assert len(answers) == 1
    assert b"cannot take part" in answers.pop()


def asked_of(place: Place, given: Any) -> tuple[Proposal, list[Frame]]:
    """A run, and the steps that its server has asked its first client for."""
    hand = place.hand()
    place.serve(given, hand)
    asked = [frame for node, frame, _ in hand.seen if node == 100]
    proposal = Proposal.from_json(asked[0].facts["proposal"])
    return proposal, [frame for frame in asked if frame.kind == "step"]


def otherwise(asked: Frame) -> Frame:
    """The same question with another model, if it is a step."""
    if asked.kind != "step":
        return asked
    model = ModelParameters.from_bytes(asked.payload)
    moved = {name: value + 1e-3 for name, value in model.parameters.items()}
    return replace(asked, payload=replace(model, parameters=moved).to_bytes())


def again(node: Node, run: str, asked: Frame) -> Frame:
    """What a node answers to a question that was caught."""
    return Frame.from_bytes(node.answer(run, asked.to_bytes()))


def test_joining_again_gives_no_more_releases(place: Place) -> None:
    """What is asked with another model is answered so often as a server that goes on needs it, and
    without a cap once, whichever process of the node is asked; an approval is of one run."""
    proposal, caught = asked_of(place, sections("feddm", privacy=PRIVATE))
    once = len(place.ledger(0)) // 2
    for home, policy, most in (("capped", Policy(epsilon=50.0, delta=1e-5), 3), ("open", None, 1)):
        make = partial(place.node, 0, policy, home=home, approved=proposal.agreement)
        refused = []
        asked = caught[0]
        for _ in range(5):
            node = make()
            joined(node, proposal)
            told = again(node, proposal.run, asked)
            refused.append("has already answered" in told.facts.get("text", ""))
            asked = otherwise(asked)
        assert refused == [False] * most + [True] * (5 - most)
        assert len(place.ledger(0, home)) == most * once
        told = joined(make(), replace(proposal, run=new_run()))
        assert told.kind == ("answer" if policy is not None else "refusal")


@pytest.mark.parametrize("method", ["feddm", "fedaf"])
def test_the_same_question_has_the_same_answer_and_costs_nothing(
    place: Place, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer was lost, or the server begins again: the same bytes come from what is kept, in
    this process and in another one, though the policy allows no release more; no step is taken, and
    the client goes on from where that step left it."""
    given = sections(method, privacy={"noise_multiplier": 50.0})
    if method == "fedaf":  # whose first phase is an exchange of its own
        given["method"] = {**given["method"], "knowledge_from": "first-phase"}
    proposal, steps = asked_of(place, given)
    nodes = [place.node(0, home="another") for _ in range(3)]
    joined(nodes[0], proposal)

    def payload(node: Node, asked: Frame) -> bytes:
        answer = again(node, proposal.run, asked)
        assert answer.kind == "answer"
        assert ("history" in answer.facts) == (asked.facts["phase"] == "main")
        return answer.payload

    first = [payload(nodes[0], asked) for asked in steps]
    rows = place.ledger(0, "another")

    def memories() -> dict[str, bytes]:
        files = (place.folder / "another").glob("runs/*/memory-*")
        return {file.name: file.read_bytes() for file in files}

    kept = memories()

    def never(*given: Any, **more: Any) -> Any:
        raise AssertionError("a step is taken again")

    monkeypatch.setattr(in_process, "view", never)
    assert payload(nodes[0], steps[-1]) == first[-1]
    assert payload(nodes[1], steps[-1]) == first[-1]  # another process
    joined(nodes[2], proposal)  # and one whose server begins anew
    assert [payload(nodes[2], asked) for asked in steps] == first
    assert place.ledger(0, "another") == rows
    assert memories() == kept


def test_a_resumed_server_has_its_initial_noise(place: Place) -> None:
    """Where a budget is given, the server finds σ for all clients; told anew it is the same one."""
    proposal, caught = asked_of(place, sections("feddm", privacy={"epsilon": 5.0}))
    make = partial(place.node, 0, home="again")
    node = make()
    joined(node, proposal)
    again(node, proposal.run, caught[0])
    rows = len(place.ledger(0, "again"))
    asked = otherwise(caught[0])
    for factor, kind in ((0.5, "error"), (2.0, "error"), (1.0, "answer")):
        told = {**asked.facts, "noise_multiplier": asked.facts["noise_multiplier"] * factor}
        again_joined = make()
        joined(again_joined, proposal)
        for node in (again_joined, make()) if kind == "error" else (make(),):
            assert again(node, proposal.run, replace(asked, facts=told)).kind == kind
        assert (len(place.ledger(0, "again")) > rows > 0) == (kind == "answer")


def test_what_fails_in_a_step_is_one_answer_whatever_it_was(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its kind could go by the records; the owner reads it."""
    given = sections("feddm", privacy=PRIVATE)
    proposal, caught = asked_of(place, given)
    answers = set()
    for number, error in enumerate((ValueError("row 7"), KeyError(3), RuntimeError("1 image"))):

        def fails(*given: Any, error: Exception = error) -> Any:
            raise error

        node = place.node(0, home=f"fails-{number}")
        joined(node, proposal)
        with monkeypatch.context() as patch:
            patch.setattr(in_process, "view", fails)
            answers.add(again(node, proposal.run, caught[0]).to_bytes())
        assert any(f"{type(error).__name__}: {error}" in line for line in place.said)
    assert len(answers) == 1
    assert "Only the data owner sees the reason" in Frame.from_bytes(answers.pop()).facts["text"]


def test_an_owners_ledger_is_for_its_own_records(place: Place) -> None:
    """A trial with another partition has other records: the ledger says so, and nothing runs."""
    place.serve(sections("feddm", privacy=PRIVATE))
    other = sections("feddm", privacy=PRIVATE)
    other["partition"]["alpha"] = 0.3
    with pytest.raises(TooFewClientsError, match="of 3 clients, but 0 joined"):
        place.serve(other)
    assert any("carry-over" in line or "belongs to" in line for line in place.said)
