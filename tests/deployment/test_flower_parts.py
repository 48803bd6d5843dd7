"""Flower's side, without its processes: records, what a SuperLink answers, keys, the app folder,
and what the commands refuse."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import stat
import sys
import time
import tomllib
from base64 import b64encode
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from fedsynth.cli.app import app
from fedsynth.deployment.flower import joining
from fedsynth.deployment.flower.joining import ServerConnection
from fedsynth.deployment.flower.processes import FlowerError, Gate
from fedsynth.deployment.flower.serving import SuperLinkSettings, write_app
from fedsynth.deployment.node import DatasetPart, Node
from fedsynth.deployment.policy import Owner
from fedsynth.deployment.proposal import Proposal, new_proposal
from fedsynth.errors import MessageError, OutputError, SettingError

GIVEN = {"run": {"method": "feddm", "rounds": 2}, "partition": {"clients": 3}}


def flwr() -> None:
    pytest.importorskip("flwr", reason="flwr is not installed: pip install 'fedsynth[flower]'")


@pytest.fixture
def in_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process of a run, whose messages are made with its numbers."""
    flwr()
    from flwr.supercore.task_identity import TaskIdentity

    for name in ("run_id", "node_id", "task_id"):
        monkeypatch.setattr(TaskIdentity, f"_{name}", 1)


# ---------------------------------------------------------------------------------- the mapping


def test_a_foreign_record_is_not_a_message() -> None:
    flwr()
    from flwr.app import ConfigRecord, RecordDict

    from fedsynth.deployment.flower.executor import from_record

    records: tuple[dict[str, Any], ...]
    records = ({}, {"weights": {"run": "a"}}, {"fedsynth": {"run": 3, "frames": "text"}})
    for record in records:
        content = RecordDict({name: ConfigRecord(values) for name, values in record.items()})
        with pytest.raises(MessageError, match="a fedsynth message needs"):
            from_record(content)


@pytest.mark.usefixtures("in_a_run")
def test_over_the_grid_silence_errors_and_other_runs_are_no_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from flwr.app import Message
    from flwr.app.error import Error

    from fedsynth.deployment.flower import server_app
    from fedsynth.deployment.flower.executor import from_record, to_record

    large = os.urandom(70_000)

    class Grid:
        """Five nodes: an answer, one of another run, an error, silence, and one that is gone."""

        def push_messages(self, messages: Any) -> list[str]:
            self.sent = {}
            for number, message in enumerate(messages):
                assert message.metadata.dst_node_id == number
                assert from_record(message.content) == ("mine", b"?")
                message.metadata.__dict__["_message_id"] = f"m{number}"
                self.sent[f"m{number}"] = message
            return [*list(self.sent)[:-1], ""]

        def pull_messages(self, names: list[str]) -> list[Any]:
            answers = {
                "m0": lambda to: Message(to_record("mine", large), reply_to=to),
                "m1": lambda to: Message(to_record("other", b"yes"), reply_to=to),
                "m2": lambda to: Message(Error(1, "it broke"), reply_to=to),
            }
            return [answers[name](self.sent[name]) for name in names if name in answers]

    monkeypatch.setattr(server_app, "POLL_SECONDS", 0.01)
    transport = server_app.GridTransport(Grid())
    transport.run = "mine"
    started = time.monotonic()
    found = transport.ask(dict.fromkeys(range(5), b"?"), 0.3)
    assert time.monotonic() - started < 5
    assert found[0] == large
    assert found[1] == "the node answered for another run: 'other'"
    assert "it broke" in found[2]
    assert 3 not in found
    assert found[4] == "the node is no longer connected"


# -------------------------------------------------------------------------- what a SuperLink answers


AWAY = ("192.0.2.7", 1)


@pytest.mark.parametrize(
    ("path", "client", "answered"),
    [
        ("/v1/fleet/pull-messages", AWAY, True),
        ("/v1/control/start-run", AWAY, False),
        ("/v1/fleet/../control/start-run", AWAY, False),
        ("/v1/fleetcontrol", ("2001:db8::1", 1), False),
        ("/v1/control/start-run", None, False),
        ("/v1/control/start-run", ("localhost.example.org", 1), False),
        ("/v1/control/start-run", ("::1", 1), True),
    ],
)
def test_control_is_for_the_machine_itself(
    path: str, client: tuple[str, int] | None, answered: bool
) -> None:
    state = SimpleNamespace(enable_supernode_auth=False)
    expected = ([], True) if answered else ([403, None], False)
    assert through_gate(path, client, state) == expected


def through_gate(path: str, client: Any, state: Any, headers: Any = ()) -> tuple[list[Any], bool]:
    """The answers of the gate, and whether the SuperLink has read the body."""
    read: list[bool] = []
    sent: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()

    async def receive() -> None:
        read.append(True)

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {"type": "http", "path": path, "client": client, "headers": list(headers)}
    scope["app"] = SimpleNamespace(state=state)
    asyncio.run(Gate(app)(scope, receive, send))
    return [message.get("status") for message in sent], bool(read)


@pytest.mark.parametrize(
    "headers", ["known", "none", "unknown key", "another's signature", "old", "no base64"]
)
def test_a_strangers_request_is_refused_before_its_body_is_read(headers: str) -> None:
    flwr()
    from flwr.supercore.date import now
    from flwr.supercore.primitives.asymmetric import (
        generate_key_pairs,
        public_key_to_bytes,
        sign_message,
    )

    (known, public), (other, others) = generate_key_pairs(), generate_key_pairs()
    raw = public_key_to_bytes(others if headers == "unknown key" else public)
    at = (now() - timedelta(days=headers == "old")).isoformat()
    signed = sign_message(known if headers in ("known", "old") else other, at.encode())
    key = b"\xff!" if headers == "no base64" else b64encode(raw)
    fields = {
        b"flwr-public-key": key,
        b"flwr-timestamp": at.encode(),
        b"flwr-signature": b64encode(signed),
    }
    linkstate = SimpleNamespace(get_node_id_by_public_key={public_key_to_bytes(public): 7}.get)
    state = SimpleNamespace(
        enable_supernode_auth=True,
        linkstate_factory=SimpleNamespace(state=lambda: linkstate),
    )
    sent = [] if headers == "none" else fields.items()
    expected = ([], True) if headers == "known" else ([401, None], False)
    assert through_gate("/v1/fleet/push-object", AWAY, state, sent) == expected


# ---------------------------------------------------------------------------------- connecting


class Attempts:
    """Plays a server that is there or not, and SuperNodes that end."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, outcomes: list[tuple[str, str, bool]]
    ) -> None:
        """outcomes: of each attempt why no server listens, why the SuperNode ends, and whether it was
        connected; the last one stays."""
        self.outcomes = outcomes
        self.clock = 0.0
        monkeypatch.setattr(joining, "require_flower", lambda: None)
        monkeypatch.setattr(joining, "time", self)
        monkeypatch.setattr(ServerConnection, "unreachable", lambda _: self.outcomes[0][0])
        monkeypatch.setattr(joining, "run_supernode", self.connect)

    def monotonic(self) -> float:
        return self.clock

    def sleep(self, seconds: float) -> None:
        self.clock += seconds
        self.outcomes = self.outcomes[1:] or self.outcomes

    def connect(self, *given: Any, once: bool) -> tuple[str, bool]:
        _, reason, connected = self.outcomes[0]
        self.clock += 100 * connected
        return reason, connected


NOBODY = ("no server listens", "", False)
TAKEN = ("", "a client with this key is already connected", False)
LOST = ("", "the server no longer answers", True)
WORKS = ("", "", True)


@pytest.mark.parametrize(
    ("outcomes", "said", "seconds"),
    [
        ([TAKEN, TAKEN, NOBODY, WORKS], ["a client with this key", "no server listens"], 109),
        ([LOST, NOBODY, LOST, WORKS], ["no longer answers", "no server", "no longer answers"], 309),
        ([NOBODY], ["no server listens", "no connection"], 60),
        ([LOST, *[TAKEN] * 99], ["no longer answers", "with this key", "no connection"], 160),
    ],
)
def test_a_client_reconnects_and_prints_reasons_until_its_timeout(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    outcomes: list[tuple[str, str, bool]],
    said: list[str],
    seconds: float,
) -> None:
    attempts = Attempts(monkeypatch, outcomes)
    lines: list[str] = []
    node = Node(0, tmp_path, DatasetPart(), Owner(), say=lines.append)
    try:
        joining.join(node, ServerConnection("127.0.0.1:9", None), wait=60.0)
    except FlowerError as error:
        lines.append(str(error))
    assert len(lines) == len(said)
    assert all(part in line for part, line in zip(said, lines, strict=True))
    assert seconds <= attempts.clock <= seconds + 3


def test_a_client_that_the_server_refuses_leaves(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """So that another one with the same key can connect."""
    Attempts(monkeypatch, [WORKS])
    node = Node(0, tmp_path, DatasetPart(), Owner())
    node.refused = "its ledger does not continue"
    with pytest.raises(FlowerError, match="refuses this client: its ledger does not"):
        joining.join(node, ServerConnection("127.0.0.1:9", None))


def test_a_missing_server_is_noticed_at_once() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        assert "no server listens" in ServerConnection(f"127.0.0.1:{port}", None).unreachable()
        taken.listen()
        assert not ServerConnection(f"127.0.0.1:{port}", None).unreachable()


# ---------------------------------------------------------------------------------- keys


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    pytest.importorskip("cryptography", reason="the flower extra is not installed")
    from fedsynth.deployment.flower.keys import make_keys

    make_keys(tmp_path / "keys", 2, ("federation.example.org", "192.0.2.7"))
    return tmp_path / "keys"


def test_a_servers_certificate_is_its_cas_and_has_its_names(keys: Path) -> None:
    from cryptography import x509
    from cryptography.x509.verification import PolicyBuilder, Store, VerificationError

    authority, server = (
        x509.load_pem_x509_certificate((keys / name).read_bytes())
        for name in ("ca.crt", "server.crt")
    )
    policy = PolicyBuilder().store(Store([authority]))
    for host in ("federation.example.org", "localhost"):
        verifier = policy.build_server_verifier(x509.DNSName(host))
        assert verifier.verify(server, []) == [server, authority]
    with pytest.raises(VerificationError):
        policy.build_server_verifier(x509.DNSName("elsewhere.example.org")).verify(server, [])


def test_keys_are_readable_only_by_their_owner_and_never_replaced(keys: Path) -> None:
    from fedsynth.deployment.flower.keys import make_keys

    for name in ("server.key", "client-000", "client-001"):
        assert stat.S_IMODE((keys / name).stat().st_mode) == 0o600
    with pytest.raises(OutputError, match="cannot write keys"):
        make_keys(keys, 2)


# ---------------------------------------------------------------------------------- the commands


def test_a_link_beyond_this_machine_needs_keys(keys: Path) -> None:
    with pytest.raises(SettingError, match="--keys must be set"):
        SuperLinkSettings(9092, None, 2, "0.0.0.0")
    with pytest.raises(SettingError, match=r"client-002\.pub is missing"):
        SuperLinkSettings(9092, keys, 3)
    link = SuperLinkSettings(9092, keys, 2, "0.0.0.0")
    assert "--enable-supernode-auth" in link.arguments
    assert "--disable-runtime-dependency-installation" in link.arguments
    assert tomllib.loads(link.flwr_config)["superlink"]["local"]["address"] == "127.0.0.1:9092"
    assert [file.name for file in link.public_keys] == ["client-000.pub", "client-001.pub"]
    assert "--insecure" in SuperLinkSettings(9092, None, 2).arguments


def test_a_door_beyond_this_machine_needs_tls(keys: Path) -> None:
    for server in ("federation.example.org:9092", "192.0.2.7:9092"):
        with pytest.raises(SettingError, match="--ca must be set"):
            ServerConnection(server, None)
    with pytest.raises(SettingError, match="HOST:PORT"):
        ServerConnection("federation.example.org", keys / "ca.crt")
    with pytest.raises(SettingError, match="--ca must be set"):
        ServerConnection("127.0.0.1:9092", None, keys / "client-000")
    arguments = ServerConnection("192.0.2.7:9092", keys / "ca.crt", keys / "client-000").arguments
    assert "--insecure" not in arguments


def test_an_app_folder_is_what_flower_and_our_server_read(tmp_path: Path) -> None:
    proposal = new_proposal(GIVEN)
    write_app(tmp_path / "app", proposal, {"output": "/somewhere"})
    project = tomllib.loads((tmp_path / "app" / "pyproject.toml").read_text())
    app = project["tool"]["flwr"]["app"]
    assert app["config"]["output"] == "/somewhere"
    stated = json.loads(app["config"]["proposal"])
    assert Proposal.from_json(stated).agreement == proposal.agreement
    flwr()
    from flwr.supercore.object_ref import validate

    for component in app["components"].values():
        assert validate(component, project_dir=tmp_path / "app") == (True, None)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["client", "--server", "127.0.0.1:1", "--number", "0", "--ledger", "L"], "--data"),
        (["server"], "--keys is required"),
        (["deploy", "init", "A", "--spec", "/nothing.toml"], "must be the specification"),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], said: str) -> None:
    if arguments[0] in ("client", "server"):
        flwr()
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2
    assert said in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_without_flower_the_commands_say_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from fedsynth.deployment.flower import processes

    monkeypatch.setitem(sys.modules, "flwr", None)
    with pytest.raises(processes.FlowerError, match="pip install"):
        processes.require_flower()


@pytest.mark.parametrize("own", ["data", "policy"])
def test_a_server_does_not_choose_an_owners_ledger(own: str, tmp_path: Path) -> None:
    """Flower's app takes the folder of homes from the server's run, for trials."""
    flwr()
    from fedsynth.deployment.flower.executor import node_of

    with pytest.raises(MessageError, match="must also set home"):
        node_of({"partition-id": 0, own: str(tmp_path / own)}, str(tmp_path / "elsewhere"))
