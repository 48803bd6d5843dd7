"""Tests of a federation over Flower on this machine: a SuperLink with TLS, which authenticates three
data owners' nodes by their keys. Every process logs its activity (`watched/sitecustomize.py`).

The tests share the federation and depend on their order: they spend ledgers and kill clients.
"""

from __future__ import annotations

import importlib.util
import ipaddress
import json
import os
import signal
import subprocess
import sys
import time
from ast import literal_eval
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import fedsynth
from fedsynth import resolve, simulate
from fedsynth.deployment.frames import Timeouts
from fedsynth.deployment.proposal import new_proposal
from fedsynth.results.verification import verify_run
from tests.deployment.local_setup import CLIENTS, PRIVATE, sections
from tests.quick_runs import read_rows

pytestmark = pytest.mark.network

# The client that has a policy.
POLICY_CLIENT = 2

POLICY = """
methods = ["feddm", "fedaf", "fedkf", "fedhydra", "scaffold", "fedstats"]
epsilon = 2.6
delta = 1e-5
open = true
"""


def wait_for(condition: Callable[[], Any], description: str, seconds: float = 120.0) -> Any:
    """Returns the condition's value once it is true; fails at the deadline."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.05)
    raise AssertionError(f"{description}: not within {seconds:g} s")


@dataclass
class Run:
    """A run in progress: the parent of its run folder, and the folder in future."""

    output: Path
    future: Future[Path]

    def finished_folder(self, seconds: float = 180.0) -> Path:
        return self.future.result(seconds)

    def unfinished_folder(self) -> Path | None:
        return next(self.output.glob("*.incomplete"), None)

    def rows(self) -> int:
        folder = self.unfinished_folder()
        file = None if folder is None else folder / "metrics.jsonl"
        return 0 if file is None or not file.exists() else len(file.read_text().splitlines())


class Federation:
    """SuperLink and nodes, with all their files in a folder."""

    def __init__(self, folder: Path) -> None:
        from fedsynth.deployment.flower.keys import make_keys
        from fedsynth.deployment.flower.processes import free_port
        from fedsynth.deployment.flower.serving import SuperLinkSettings, superlink

        self.folder = folder
        self.keys = folder / "keys"
        self.watch = folder / "watch.log"
        self.clients: dict[int, subprocess.Popen[bytes]] = {}
        self._stack = ExitStack()
        self._pool = ThreadPoolExecutor()
        patch = self._stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("PYTHONPATH", str(Path(fedsynth.__file__).parents[1]))
        patch.setenv("PYTHONPATH", str(Path(__file__).with_name("watched")), prepend=os.pathsep)
        patch.setenv("FEDSYNTH_TEST_WATCH", str(self.watch))
        patch.setenv("OMP_NUM_THREADS", "1")
        make_keys(self.keys, CLIENTS)
        make_keys(folder / "strangers", 1)
        self.port = free_port()
        link = SuperLinkSettings(self.port, self.keys, CLIENTS)
        self.started = self._stack.enter_context(superlink(link, folder))
        (folder / "policy.toml").write_text(POLICY)
        for number in range(CLIENTS):
            self.start_client(number)

    def home(self, number: int) -> Path:
        return self.folder / f"owner-{number}"

    def log(self, number: int) -> str:
        return (self.folder / f"owner-{number}.log").read_text()

    def client_arguments(
        self, number: int, key: Path | None = None, home: Path | None = None
    ) -> list[str]:
        key_file = key or self.keys / f"client-{number:03d}"
        policy = ["--approve", "any"]
        if number == POLICY_CLIENT:
            policy = ["--policy", str(self.folder / "policy.toml")]
        return [
            *(sys.executable, "-c", "from fedsynth.cli.app import main; main()", "client"),
            *("--server", f"127.0.0.1:{self.port}", "--number", str(number), "--trial"),
            *("--ledger", str(home or self.home(number)), "--ca", str(self.keys / "server.crt")),
            *("--key", str(key_file), "--device", "cpu", *policy),
        ]

    def start_client(self, number: int) -> None:
        arguments = self.client_arguments(number)
        with (self.folder / f"owner-{number}.log").open("ab") as log:
            self.clients[number] = subprocess.Popen(
                arguments, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def kill_client(self, number: int) -> None:
        """Kills the node's processes, as a power failure does."""
        process = self.clients.pop(number)  # its SuperNode ends with it
        process.kill()
        process.wait(20)

    def run(
        self,
        settings: Mapping[str, Mapping[str, Any]],
        answer: float = 60.0,
        resume: Path | None = None,
    ) -> Run:
        output = self.folder / f"runs-{time.monotonic_ns()}" if resume is None else resume.parent
        timeouts = Timeouts(join=90.0, answer=answer)
        arguments = new_proposal(settings), output, timeouts, resume, print
        return Run(output, self._pool.submit(self.started.run, *arguments))

    def rounds(self, number: int) -> int:
        """Returns the last round of a client's steps in the run that it joined last."""
        files = list(self.home(number).glob("runs/*/session.json"))
        newest = max(files, key=lambda file: file.parent.stat().st_ctime_ns)
        return max((step[0] for step in json.loads(newest.read_text())["steps"]), default=0)

    def server_process(self) -> int | None:
        processes = []
        for command in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):
                parts = command.read_bytes().split(b"\0")
                named = any(part.endswith(b"flwr-serverapp") for part in parts)
                if named and f"127.0.0.1:{self.port}".encode() in parts:
                    processes.append(int(command.parent.name))
        return max(processes, default=None)

    def close(self) -> None:
        for process in self.clients.values():
            process.send_signal(signal.SIGTERM)
        for process in self.clients.values():
            try:
                process.wait(40)
            except subprocess.TimeoutExpired:
                process.kill()
        self.clients = {}
        self._stack.close()

    def log_entries(self) -> list[tuple[int, str, str]]:
        """Returns (process, kind, value) of each entry of the activity log."""
        lines = self.watch.read_text().splitlines()
        entries = [line.split("\t", 2) for line in lines]
        return [(int(pid), kind, value) for pid, kind, value in entries]


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    if importlib.util.find_spec("flwr") is None:
        pytest.skip("flwr is not installed: pip install 'fedsynth[flower]'")
    network = Federation(tmp_path_factory.mktemp("federation"))
    yield network
    network.close()


def same_model(folder: Path, settings: Any) -> None:
    simulation = simulate(resolve(settings))
    tensors = load_file(folder / "model.safetensors")
    expected = dict(simulation.model.state_dict())
    torch.testing.assert_close(tensors, expected, rtol=1e-5, atol=1e-5)


def test_private_runs_charge_each_ledger_as_simulations(federation: Federation) -> None:
    """Each owner and the server write a privacy report."""
    settings = sections("feddm", privacy=PRIVATE)
    folder = federation.run(settings).finished_folder()
    simulation = simulate(resolve(settings))
    rows = read_rows(folder)
    assert [row["round"] for row in rows] == [1, 2]
    assert rows[-1]["epsilon"] == pytest.approx(simulation.metrics[-1]["epsilon"], rel=1e-12)
    assert "seconds" not in rows[-1]
    assert not (folder / "simulation_only").exists()
    assert verify_run(folder).problems == []
    for number in range(CLIENTS):
        [report] = federation.home(number).glob("runs/*/privacy_report.json")
        assert verify_run(report.parent).problems == []
        assert "asks client" in federation.log(number)
        assert "privacy: ε = " in federation.log(number)


def test_open_runs_match_the_model_of_a_simulation(federation: Federation) -> None:
    runs: dict[str, tuple[Any, Run]] = {}
    for method in ("feddm", "fedaf", "fedstats"):
        settings = sections(method)
        if method == "fedstats":  # the server sees only sums
            settings["method"] |= {"second_moments": "no", "aggregation": "secure"}
        runs[method] = (settings, federation.run(settings))
    for settings, run in runs.values():
        folder = run.finished_folder()
        assert not any("lost" in row for row in read_rows(folder))
        same_model(folder, settings)


def test_server_resumes_from_its_checkpoint(federation: Federation) -> None:
    """The server is killed inside a round; the model equals that of an uninterrupted run.
    SCAFFOLD's clients have memories.

    One client is paused so that the server waits: if the server died while it sends, SuperNodes
    would wait three minutes until the SuperLink drops its message.
    """
    settings = sections("scaffold", run={"rounds": 3})
    run = federation.run(settings)
    wait_for(lambda: run.rows() >= 1, "a first round")
    paused = federation.clients[1]
    paused.send_signal(signal.SIGSTOP)
    try:
        wait_for(
            lambda: federation.rounds(0) == federation.rounds(POLICY_CLIENT) == run.rows() + 1,
            "others' answers",
        )
        os.kill(wait_for(federation.server_process, "the ServerApp's process"), signal.SIGKILL)
    finally:
        paused.send_signal(signal.SIGCONT)
    folder = wait_for(run.unfinished_folder, "the run's folder")
    assert 1 <= run.rows() < 3
    resumed_run = federation.run(settings, resume=folder)
    finished = resumed_run.finished_folder()
    assert [row["round"] for row in read_rows(finished)] == [1, 2, 3]
    same_model(finished, settings)


UNKNOWN = "does not know this client's key, or is still starting"
DUPLICATE = "with this key is connected"


@pytest.mark.parametrize(("folder", "reason"), [("strangers", UNKNOWN), ("keys", DUPLICATE)])
def test_unknown_and_duplicate_keys_are_refused(
    federation: Federation, folder: str, reason: str
) -> None:
    """The second client of a key is refused while the first one is connected."""
    key = federation.folder / folder / "client-000"
    home = federation.folder / f"second-{folder}"
    process = subprocess.run(
        [*federation.client_arguments(0, key, home), "--wait", "1"],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert process.returncode == 2, process.stdout + process.stderr
    assert "cannot connect to 127.0.0.1" in process.stderr
    assert reason in process.stderr
    assert not list(home.glob("*.jsonl"))


def test_secure_sums_continue_without_a_killed_node(federation: Federation) -> None:
    """One client is paused while another is killed: this round's sum and all later ones contain the
    remaining clients. (One of the three may collude and one may be lost: each adds all the
    noise.)"""
    settings = sections("fedstats", run={"rounds": 4})
    settings["method"] |= {"aggregation": "secure", "honest": 1, "second_moments": "no"}
    run = federation.run(settings, answer=20.0)
    wait_for(lambda: run.rows() >= 1, "a first round")
    paused = federation.clients[1]
    paused.send_signal(signal.SIGSTOP)
    try:
        federation.kill_client(POLICY_CLIENT)
    finally:
        paused.send_signal(signal.SIGCONT)
    rows = read_rows(run.finished_folder(240.0))
    assert [row["round"] for row in rows] == [1, 2, 3, 4]
    assert "lost" not in rows[0]
    assert set(rows[-1]["lost"]) == {str(POLICY_CLIENT)}
    assert not any("not_counted" in row for row in rows)
    assert [bool(sent) for sent in rows[-1]["client_upload_bytes"]] == [True, True, False]


def test_federation_contacts_no_other_machine_and_leaves_no_process(
    federation: Federation,
) -> None:
    federation.close()
    entries = federation.log_entries()
    processes = {pid for pid, kind, _ in entries if kind == "process"}
    started = " ".join(value for _, kind, value in entries if kind == "process")
    for name in ("'superlink'", "'supernode'", "flower-superexec", "flwr-serverapp"):
        assert name in started, name
    assert "flwr-clientapp" not in started  # no server code ran at an owner
    contacts = [(kind, literal_eval(value)) for _, kind, value in entries if kind != "process"]
    assert contacts
    for kind, address in contacts:
        assert is_local(address[0] if isinstance(address, tuple) else address), (kind, address)
    wait_for(lambda: not [pid for pid in processes if is_running(pid)], "the processes' end", 20)


def is_local(host: Any) -> bool:
    """Returns True for a name, address or socket file of this machine; None is any of its
    addresses."""
    name = host.decode() if isinstance(host, bytes) else host
    if name is None or name == "localhost" or name.startswith("/"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def is_running(pid: int) -> bool:
    with suppress(OSError):
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
        return state != "Z" and any(name in command for name in (b"flwr", b"flower", b"fedsynth"))
    return False
