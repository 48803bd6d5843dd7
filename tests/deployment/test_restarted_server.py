"""A server that was killed and resumes: its report covers every client that was ever charged, and
its clients come back, each with its own ledger."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from fedsynth import resolve, simulate
from fedsynth.deployment.frames import Frame
from fedsynth.deployment.networked_run import NetworkedRun
from fedsynth.deployment.policy import Policy
from fedsynth.errors import CheckpointError
from fedsynth.privacy import epsilon
from fedsynth.results.verification import verify_run
from tests.deployment.place import CLIENTS, PRIVATE, Hand, Place, close, killed, sections
from tests.observers import NoteRecorder

LAST = CLIENTS - 1


def covers_everybody(place: Place, served: NetworkedRun, ever: Sequence[int]) -> None:
    """The report has a row for each one in the ledgers, and its ε never falls."""
    heads: Any = served.report["ledger_heads"]
    assert sorted(heads) == [f"client-{k:03d}" for k in ever]
    spent = max(epsilon(place.ledger(k), 1e-5) for k in ever)
    guarantee: Any = served.report["guarantee"]
    assert guarantee["epsilon"] >= spent * (1 - 1e-9)
    for k in ever:
        assert heads[f"client-{k:03d}"]["rows"] >= len(place.ledger(k))
    stated = [row["epsilon"] for row in served.record.rows]
    assert stated == sorted(stated)
    assert verify_run(served.folder.path).problems == []


@pytest.mark.parametrize(
    ("count", "kind"), [(CLIENTS + 1, "step"), (2 * CLIENTS, "step"), (1, "end")]
)
def test_a_client_that_does_not_join_again_stays_in_the_report(
    place: Place, count: int, kind: str
) -> None:
    """Killed in round 2, before and after the last client took its step: it may be charged more
    than its last statement says, and the report counts it. Killed after all rounds, the server
    repeats no request. A report that drops such a client is noticed."""
    given = sections("feddm", privacy=PRIVATE, run={"rounds": 3})
    folder = killed(place, given, place.hand(), count, kind=kind)
    served = place.serve(given, place.hand(*map(place.node, range(LAST))), resume=folder)
    covers_everybody(place, served, range(CLIENTS))
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


def test_a_client_that_is_away_for_one_restart_is_taken_by_its_word_again(place: Place) -> None:
    given = sections("feddm", privacy=PRIVATE, run={"rounds": 4})
    hand = place.hand()
    folder = killed(place, given, hand, CLIENTS + 1)  # the last one is not asked for round 2
    killed(place, given, place.hand(*map(place.node, range(LAST))), LAST + 1, folder)
    served = place.serve(given, place.hand(*hand.nodes_.values()), resume=folder)
    covers_everybody(place, served, range(CLIENTS))
    assert not any("has not stated" in one for one in served.record.deviations)
    for number in range(CLIENTS):  # their own reports count the run's rows as the run's
        [own] = (place.folder / f"owner-{number}").glob("runs/*/privacy_report.json")
        head = json.loads(own.read_text())["ledger_heads"][f"client-{number:03d}"]
        assert head["rows_before"] == 0
        assert verify_run(own.parent).problems == []


def silent(node: int, asked: Frame, answer: bytes, rounds: Sequence[int]) -> bytes | None:
    """The last client does not answer in these rounds, and not at the end."""
    gone = asked.facts.get("round") in rounds or asked.kind == "end"
    return None if node == 100 + LAST and gone else answer


def test_a_client_that_falls_silent_is_counted_as_charged(place: Place) -> None:
    """Without any restart: its answer to the last round is lost, and it never answers again."""
    hand = place.hand()
    hand.change = partial(silent, rounds=[2])
    served = place.serve(sections("feddm", privacy=PRIVATE), hand)
    covers_everybody(place, served, range(CLIENTS))
    words = "in round 2. The step is counted as charged"
    assert any(words in text for text in served.record.deviations)


def test_a_client_that_declines_a_round_is_not_counted_as_charged(place: Place) -> None:
    """Its policy's budget is spent before the step, and then it is gone."""
    capped = place.node(LAST, Policy(epsilon=1.5, delta=1e-5))
    hand = place.hand(place.node(0), place.node(1), capped)
    hand.change = partial(silent, rounds=[])
    served = place.serve(sections("feddm", privacy=PRIVATE), hand)
    heads: Any = served.report["ledger_heads"]
    assert heads[f"client-{LAST:03d}"]["rows"] == len(place.ledger(LAST))
    covers_everybody(place, served, range(CLIENTS))


def test_an_open_run_keeps_the_terms_that_it_began_with(place: Place) -> None:
    """The sizes of those that are away, by which clients are drawn, are still what they were."""
    run = {"rounds": 3, "sampling": "size", "participation": 0.67, "quorum": 0.3}
    given = sections("fedavg", run=run)
    hand, again = place.hand(), place.hand(*map(place.node, range(LAST)))
    folder = killed(place, given, hand, LAST + 1)
    place.serve(given, again, resume=folder)
    steps = [asked for _, asked, _ in [*hand.seen, *again.seen] if asked.kind == "step"]
    assert len({tuple(asked.facts["sizes"]) for asked in steps}) == 1


# --------------------------------------------------------------------------------- coming back


def test_a_client_that_missed_the_last_rounds_comes_back(place: Place) -> None:
    """Its memory is of an earlier round than the server resumes after, and the newest that it
    has."""
    given = sections("scaffold", run={"rounds": 4})
    hand = place.hand()
    hand.change = partial(silent, rounds=[2])
    # the step was taken and its answer lost; without it the client has no memory of round 2
    folder = killed(place, given, hand, 2 * CLIENTS + 1)
    for file in (place.folder / f"owner-{LAST}").glob("runs/*/*-2*"):
        file.unlink()
    served = place.serve(given, place.hand(*map(place.node, range(CLIENTS))), resume=folder)
    assert "lost" in served.record.rows[1]
    assert not any("lost" in row for row in served.record.rows[2:])


def test_a_resumed_run_equals_an_uninterrupted_run(place: Place) -> None:
    """With partial participation most clients have no memory of the round before the restart."""
    given = sections("scaffold", run={"rounds": 6, "participation": 0.34})
    folder = killed(place, given, place.hand(), 5)
    served = place.serve(given, place.hand(*map(place.node, range(CLIENTS))), resume=folder)
    assert not any("lost" in row for row in served.record.rows)
    assert any("resumed after" in text for text in served.record.deviations)
    close(served, simulate(resolve(given)))


# ------------------------------------------------------------------------- two clients, one key


@pytest.mark.parametrize("how", ["fresh", "earlier"])
def test_a_second_client_with_a_key_does_not_take_the_firsts_place(place: Place, how: str) -> None:
    """After a restart it is asked first: its ledger is not the one that was charged. It leaves, and
    the first one joins."""
    given = sections("feddm", privacy=PRIVATE, run={"rounds": 3})
    hand = place.hand()

    def copies(node: int, asked: Frame, answer: bytes) -> bytes:
        if asked.kind == "step" and asked.facts["round"] == 1 and node == 101:
            shutil.copytree(place.folder / "owner-0", place.folder / "earlier")
        return answer

    hand.change = copies
    folder = killed(place, given, hand, 2 * CLIENTS + 1)
    first, second = hand.nodes_[100], place.node(0, home=how)

    class Taken(Hand):
        """Where one is connected, the other one is not."""

        def nodes(self) -> Sequence[int]:
            if second.refused and self.nodes_[100] is second:
                self.nodes_[100] = first
                return [101, 102]
            return list(self.nodes_)

    again = Taken({**hand.nodes_, 100: second})
    served = place.serve(given, again, resume=folder, join=60)
    assert "must begin with the" in second.refused
    assert not first.refused
    assert not any("lost" in row for row in served.record.rows)
    covers_everybody(place, served, range(CLIENTS))
    heads: Any = served.report["ledger_heads"] if served.report else {}
    assert heads["client-000"]["rows"] == len(place.ledger(0))


def test_a_ledger_replaced_within_a_run_is_rejected(place: Place) -> None:
    """Its upload is not used, and what the first one was charged stays."""
    hand = place.hand()

    def replaced(node: int, asked: Frame, answer: bytes) -> bytes:
        if node != 100 or asked.facts.get("round") != 2:
            return answer
        frame = Frame.from_bytes(answer)
        history = {**frame.facts["history"], "releases": frame.facts["history"]["releases"][1:]}
        return replace(frame, facts={**frame.facts, "history": history}).to_bytes()

    hand.change = replaced
    served = place.serve(sections("feddm", privacy=PRIVATE), hand)
    assert served.record.rows[1]["lost"].keys() == {"0"}
    heads: Any = served.report["ledger_heads"] if served.report else {}
    assert heads["client-000"]["rows"] == heads["client-001"]["rows"]


def test_a_refused_client_receives_the_reason(place: Place) -> None:
    nodes = [place.node(k) for k in range(CLIENTS)]
    nodes[2].name = "client-001"
    notes = NoteRecorder()
    hand = place.hand(*nodes)
    served = place.serve(sections("feddm", privacy=PRIVATE), hand, observer=notes)
    assert "lost" in served.record.rows[0]
    assert "another client of the run" in "\n".join([*notes.lines, *place.said])


def test_a_run_resumes_only_with_its_settings_and_its_whole_checkpoint(place: Place) -> None:
    given = sections("feddm", privacy=PRIVATE)
    folder = killed(place, given, place.hand(), CLIENTS + 1)
    with pytest.raises(CheckpointError, match="settings have changed"):
        place.serve(sections("feddm", privacy=PRIVATE, run={"rounds": 5}), resume=folder)
    file = folder / "checkpoint" / "clients.json"
    text = file.read_text()
    for damaged in (text[:-9], text.replace('"steps": ', '"steps": 1')):
        file.write_text(damaged)
        with pytest.raises(CheckpointError):
            place.serve(given, resume=folder)
    file.unlink()
    with pytest.raises(CheckpointError):
        place.serve(given, resume=folder)
    shutil.rmtree(folder / "checkpoint")
    with pytest.raises(CheckpointError, match="is missing"):
        place.serve(given, resume=folder)
