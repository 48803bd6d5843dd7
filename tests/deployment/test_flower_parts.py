"""Tests of the Flower transport without its processes: records, the SuperLink's gate, connections,
keys, the app folder and usage errors."""

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
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from cryptography import x509
from cryptography.x509.verification import PolicyBuilder, Store, VerificationError
from typer.testing import CliRunner

from fedsynth.cli.app import app
from fedsynth.config.resolve import resolve
from fedsynth.data.registry import dataset_spec
from fedsynth.deployment.flower import joining, processes, serving
from fedsynth.deployment.flower.joining import ServerConnection
from fedsynth.deployment.flower.keys import make_keys
from fedsynth.deployment.flower.processes import FlowerError, Gate
from fedsynth.deployment.flower.serving import SuperLinkSettings, write_app
from fedsynth.deployment.frames import Timeouts
from fedsynth.deployment.node import DatasetPart, Node
from fedsynth.deployment.policy import Owner
from fedsynth.deployment.proposal import Proposal, new_proposal
from fedsynth.errors import BudgetExceededError, FedsynthError, MessageError, SettingError
from fedsynth.results.file_names import CONFIG, METRICS, SERVED
from fedsynth.validation import read_sections, to_toml
from tests.fuzz.mutations import CommandFailedError, command
from tests.raising import raises

SETTINGS = {"run": {"method": "feddm", "rounds": 2}, "partition": {"clients": 3}}


def require_flwr() -> None:
    pytest.importorskip("flwr", reason="flwr is not installed: pip install 'fedsynth[flower]'")


# ---------------------------------------------------------------------------------- records


def test_foreign_records_are_rejected() -> None:
    require_flwr()
    from flwr.app import ConfigRecord, RecordDict

    from fedsynth.deployment.flower.executor import from_record

    for record in ({}, {"weights": {"run": "a"}}, {"fedsynth": {"run": 3, "frames": "text"}}):
        content = RecordDict({name: ConfigRecord(values) for name, values in record.items()})
        with pytest.raises(MessageError, match="the received message"):
            from_record(content)


def test_failures_on_the_grid_are_not_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    require_flwr()
    from flwr.app import Message
    from flwr.app.error import Error
    from flwr.supercore.task_identity import TaskIdentity

    from fedsynth.deployment.flower import server_app
    from fedsynth.deployment.flower.executor import from_record, to_record

    for name in ("run_id", "node_id", "task_id"):
        monkeypatch.setattr(TaskIdentity, f"_{name}", 1)  # which messages contain
    large = os.urandom(70_000)

    class Grid:
        """Five nodes: an answer, another run's answer, an error, silence, and a lost connection."""

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
    start = time.monotonic()
    answers = transport.ask(dict.fromkeys(range(5), b"?"), 2.0)
    assert time.monotonic() - start < 5
    assert answers[0] == large
    assert answers[1] == "the node answered for another run: 'other'"
    assert "it broke" in answers[2]
    assert 3 not in answers
    assert answers[4] == "the node is no longer connected"


# --------------------------------------------------------------------------- the SuperLink's gate


REMOTE = ("192.0.2.7", 1)


@pytest.mark.parametrize(
    ("path", "client", "allowed"),
    [
        ("/v1/fleet/pull-messages", REMOTE, True),
        ("/v1/control/start-run", REMOTE, False),
        ("/v1/fleet/../control/start-run", REMOTE, False),
        ("/v1/fleetcontrol", ("2001:db8::1", 1), False),
        ("/v1/control/start-run", None, False),
        ("/v1/control/start-run", ("localhost.example.org", 1), False),
        ("/v1/control/start-run", ("::1", 1), True),
    ],
)
def test_control_requests_need_a_loopback_address(path: str, client: Any, allowed: bool) -> None:
    state = SimpleNamespace(enable_supernode_auth=False)
    expected = ([], True) if allowed else ([403, None], False)
    assert through_gate(path, client, state) == expected


def through_gate(path: str, client: Any, state: Any, headers: Any = ()) -> tuple[list[Any], bool]:
    """Returns the gate's status codes and whether the SuperLink read the body."""
    read: list[bool] = []
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()

    async def receive() -> None:
        read.append(True)

    async def send(message: dict[str, Any]) -> None:
        sent.append(message.get("status"))

    scope = {"type": "http", "path": path, "client": client, "headers": list(headers)}
    asyncio.run(Gate(app)({**scope, "app": SimpleNamespace(state=state)}, receive, send))
    return sent, bool(read)


@pytest.mark.parametrize(
    "headers", ["valid", "none", "unknown key", "wrong signature", "old", "no base64"]
)
def test_unauthenticated_requests_are_refused_before_reading_the_body(headers: str) -> None:
    require_flwr()
    from flwr.supercore.date import now
    from flwr.supercore.primitives import asymmetric

    (private, public), (other_private, other_public) = (
        asymmetric.generate_key_pairs() for _ in range(2)
    )
    raw = asymmetric.public_key_to_bytes(other_public if headers == "unknown key" else public)
    timestamp = (now() - timedelta(days=headers == "old")).isoformat()
    signer = private if headers in ("valid", "old") else other_private
    signed = asymmetric.sign_message(signer, timestamp.encode())
    fields = {
        b"flwr-public-key": b"\xff!" if headers == "no base64" else b64encode(raw),
        b"flwr-timestamp": timestamp.encode(),
        b"flwr-signature": b64encode(signed),
    }
    known_keys = {asymmetric.public_key_to_bytes(public): 7}
    linkstate = SimpleNamespace(get_node_id_by_public_key=known_keys.get)
    factory = SimpleNamespace(state=lambda: linkstate)
    state = SimpleNamespace(enable_supernode_auth=True, linkstate_factory=factory)
    sent = [] if headers == "none" else fields.items()
    expected = ([], True) if headers == "valid" else ([401, None], False)
    assert through_gate("/v1/fleet/push-object", REMOTE, state, sent) == expected


# ---------------------------------------------------------------------------------- connecting


class Attempts:
    """Simulates attempts to connect: each outcome has the reason that no server listens, the reason
    that the SuperNode ends, and whether it was connected; the last one repeats."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, outcomes: list[Any]) -> None:
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

    def connect(self, *arguments: Any, once: bool) -> tuple[str, bool]:
        self.clock += 100 * self.outcomes[0][2]
        return self.outcomes[0][1:]


ABSENT = ("no server listens", "", False)
IN_USE = ("", "a client with this key is already connected", False)
LOST = ("", "the server no longer answers", True)
WORKS = ("", "", True)


@pytest.mark.parametrize(
    ("outcomes", "expected", "seconds"),
    [
        ([IN_USE, IN_USE, ABSENT, WORKS], ["a client with this key", "no server listens"], 109),
        ([LOST, ABSENT, LOST, WORKS], ["no longer answers", "no server", "no longer answers"], 309),
        ([ABSENT], ["no server listens", "cannot connect"], 60),
        ([LOST, *[IN_USE] * 99], ["no longer answers", "with this key", "cannot connect"], 160),
        ([WORKS], ["refused this client: its ledger does not"], 100),
    ],
)
def test_client_reconnects_and_prints_reasons_until_its_timeout(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, outcomes: Any, expected: Any, seconds: float
) -> None:
    """Refused clients disconnect, so that another client with the same key can connect."""
    attempts = Attempts(monkeypatch, outcomes)
    lines: list[str] = []
    node = Node(0, tmp_path, Owner(), say=lines.append, source=DatasetPart())
    monkeypatch.setattr(Node, "write_reports", lambda _: lines.append("reports"))
    if outcomes == [WORKS]:
        node.refused = "its ledger does not continue"
    try:
        joining.join(node, ServerConnection("127.0.0.1:9", None), wait=60.0)
    except FlowerError as error:
        lines.insert(-1, str(error))
    assert lines.pop() == "reports"
    assert len(lines) == len(expected)
    assert all(text in line for text, line in zip(expected, lines, strict=True))
    assert seconds <= attempts.clock <= seconds + 3


def test_missing_servers_are_detected_before_connecting() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        assert "no server listens" in ServerConnection(f"127.0.0.1:{port}", None).unreachable()
        listener.listen()
        assert not ServerConnection(f"127.0.0.1:{port}", None).unreachable()


# ---------------------------------------------------------------------------------- keys


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys", 2, ("federation.example.org", "192.0.2.7"))
    return tmp_path / "keys"


def test_keys_are_private_never_replaced_and_valid_for_their_names(keys: Path) -> None:
    for name in ("server.key", "client-000", "client-001"):
        assert stat.S_IMODE((keys / name).stat().st_mode) == 0o600
    with pytest.raises(FileExistsError):
        make_keys(keys, 2)
    server = x509.load_pem_x509_certificate((keys / "server.crt").read_bytes())
    assert not server.extensions.get_extension_for_class(x509.KeyUsage).value.key_cert_sign
    policy = PolicyBuilder().store(Store([server]))
    for host in ("federation.example.org", "localhost"):
        verifier = policy.build_server_verifier(x509.DNSName(host))
        assert verifier.verify(server, []) == [server]
    with pytest.raises(VerificationError):
        policy.build_server_verifier(x509.DNSName("elsewhere.example.org")).verify(server, [])


# ---------------------------------------------------------------------------------- the commands


def test_public_superlinks_need_keys(keys: Path) -> None:
    with raises(SettingError, "--keys"):
        SuperLinkSettings(9092, None, 2, "0.0.0.0")
    with raises(SettingError, "files.key"):
        SuperLinkSettings(9092, keys, 3)
    link = SuperLinkSettings(9092, keys, 2, "0.0.0.0")
    assert "--enable-supernode-auth" in link.arguments
    assert "--disable-runtime-dependency-installation" in link.arguments
    assert tomllib.loads(link.flwr_config)["superlink"]["local"]["address"] == "127.0.0.1:9092"
    assert [file.name for file in link.public_keys] == ["client-000.pub", "client-001.pub"]
    assert "--insecure" in SuperLinkSettings(9092, None, 2).arguments


def test_remote_connections_need_tls(keys: Path) -> None:
    for server in ("federation.example.org:9092", "192.0.2.7:9092"):
        with raises(SettingError, "--ca"):
            ServerConnection(server, None)
    with raises(SettingError, "server"):
        ServerConnection("federation.example.org", keys / "server.crt")
    with raises(SettingError, "--ca"):
        ServerConnection("127.0.0.1:9092", None, keys / "client-000")
    link = ServerConnection("192.0.2.7:9092", keys / "server.crt", keys / "client-000")
    assert "--insecure" not in link.arguments


def test_app_folder_is_readable_by_flower_and_the_server(tmp_path: Path) -> None:
    proposal = new_proposal(SETTINGS)
    write_app(tmp_path / "app", proposal, {"output": "/somewhere"})
    project = tomllib.loads((tmp_path / "app" / "pyproject.toml").read_text())
    app = project["tool"]["flwr"]["app"]
    assert app["config"]["output"] == "/somewhere"
    stated = json.loads(app["config"]["proposal"])
    assert Proposal.from_json(stated).agreement == proposal.agreement
    require_flwr()
    from flwr.supercore.object_ref import validate

    for component in app["components"].values():
        assert validate(component, project_dir=tmp_path / "app") == (True, None)


def test_usage_errors_are_one_line() -> None:
    require_flwr()
    for line, message in (
        ("client --server 127.0.0.1:1 --number 0 --ledger L", "--data"),
        ("server", "--keys is required"),
    ):
        with pytest.raises(CommandFailedError, match=message):
            command(*line.split())


def test_resumed_server_has_the_specification_of_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = replace(dataset_spec("digits"), name="scans")
    proposal = new_proposal(SETTINGS, own)
    (tmp_path / CONFIG).write_text(to_toml(proposal.settings.to_mapping()))
    monkeypatch.setattr(processes, "require_flower", lambda: None)
    started = Mock()
    monkeypatch.setattr(serving, "superlink", lambda *_: nullcontext(started))
    line = ("server", "--insecure", "--resume", str(tmp_path))
    with pytest.raises(CommandFailedError, match=r"contains no run\.json"):
        command(*line)
    (tmp_path / SERVED).write_text(json.dumps(proposal.to_json()))
    with pytest.raises(CommandFailedError, match="Remove --config, --spec and all settings"):
        command(*line, "--spec", "scans.toml")
    command(*line)
    resumed = started.run.call_args.args[0]
    assert (resumed.spec, resumed.agreement) == (own, proposal.agreement)


def test_settings_file_describes_the_run(tmp_path: Path) -> None:
    line = f"deploy settings {tmp_path / 'run.toml'} --set ipc=2 --set model.width=8 --clients 3"
    command(*line.split())
    settings = resolve(read_sections(tmp_path / "run.toml"))
    assert (settings.method.ipc, settings.partition.clients, settings.model.width) == (2, 3, 8)
    with pytest.raises(CommandFailedError, match="already exists"):
        command(*line.split())


def test_runs_without_privacy_are_announced(tmp_path: Path) -> None:
    for name, option in (("open", []), ("private", ["--dp-epsilon", "8"])):
        line = ["deploy", "settings", str(tmp_path / f"{name}.toml"), *option]
        result = CliRunner().invoke(app, line)
        assert ("no differential privacy" in result.stderr) == (name == "open")
        privacy = resolve(read_sections(tmp_path / f"{name}.toml")).privacy
        assert (privacy and privacy.epsilon) == (8.0 if option else None)


def test_failed_runs_write_their_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: if owners declined, the server printed Flower's traceback."""
    require_flwr()
    from fedsynth.deployment.flower import server_app

    def fail(grid: Any, config: Any) -> Any:
        raise MessageError("0 joined")

    monkeypatch.setattr(server_app, "configured_run", fail)
    file = tmp_path / "result.json"
    server_app.main(None, SimpleNamespace(run_config={"result": str(file)}))
    assert json.loads(file.read_text()) == {"error": "0 joined", "code": "message.invalid"}
    with pytest.raises(MessageError):
        server_app.main(None, SimpleNamespace(run_config={"result": ""}))


def started_run(monkeypatch: pytest.MonkeyPatch, folder: Path, outcome: Any, signal: Any) -> Any:
    """Starts a run whose process has written an outcome when its output ends or raises an error."""

    def output(app: Path) -> Iterator[str]:
        (app / "result.json").write_text(json.dumps(outcome))
        yield "round 2/5"
        if signal is not None:
            raise signal

    monkeypatch.setattr(
        serving, "start", lambda _, line, *rest: SimpleNamespace(stdout=output(Path(line[1])))
    )
    monkeypatch.setattr(serving, "stop", lambda process: None)
    lines: list[str] = []
    link = serving.SuperLink(SuperLinkSettings(9092, None, 3), folder)
    settings = {**SETTINGS, "run": {"method": "feddm", "rounds": 5}, "privacy": {"epsilon": 8.0}}
    try:
        link.run(new_proposal(settings), folder, Timeouts(), say=lines.append)
    except (KeyboardInterrupt, FedsynthError) as error:
        return error, lines
    raise AssertionError


def test_interrupted_servers_print_progress_cost_and_how_to_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"round": 1, "epsilon": 3.27}, {"round": 2, "epsilon": 4.871}]
    (tmp_path / METRICS).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    begun = {"begun": str(tmp_path)}
    error, lines = started_run(monkeypatch, tmp_path, begun, KeyboardInterrupt())
    assert isinstance(error, KeyboardInterrupt)
    assert lines == [
        "round 2/5",
        "interrupted after 2 of 5 rounds. Spent by then: ε = 4.88 at δ = 1e-05. To resume: "
        f"fedsynth server --resume {tmp_path}",
    ]
    assert started_run(monkeypatch, tmp_path, {}, KeyboardInterrupt())[1] == ["round 2/5"]


def test_servers_report_that_budgets_allow_no_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = {"error": "ended after 0 of 5 rounds", "code": BudgetExceededError.code}
    error, _ = started_run(monkeypatch, tmp_path, outcome, None)
    assert (type(error), str(error)) == (BudgetExceededError, "ended after 0 of 5 rounds")


def test_missing_flower_error_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flwr", None)
    with raises(FlowerError, "flower.process"):
        processes.require_flower()


@pytest.mark.parametrize("option", ["data", "policy"])
def test_servers_cannot_choose_the_ledger_folder(option: str, tmp_path: Path) -> None:
    """In trials Flower's app takes the parent folder from the server's run."""
    require_flwr()
    from fedsynth.deployment.flower.executor import node_of

    with pytest.raises(MessageError, match="but not home"):
        node_of({"partition-id": 0, option: str(tmp_path / option)}, str(tmp_path / "elsewhere"))
