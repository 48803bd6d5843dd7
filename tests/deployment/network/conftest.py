"""A federation on this machine: Flower's SuperLink with TLS, and three data owners' nodes that it
authenticates by their keys. Every process logs its activity (`watched/sitecustomize.py`)."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import fedsynth
from fedsynth.deployment.proposal import Proposal, new_proposal

HERE = Path(__file__).parent
CLIENTS = 3
POLICY_CLIENT = 2
"""The client that has a policy."""
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
    """A run in progress: the parent of its run folder, and its server's messages."""

    output: Path
    lines: list[str] = field(default_factory=list)
    folder: Path | None = None
    error: Exception | None = None

    def finished_folder(self, seconds: float = 180.0) -> Path:
        wait_for(lambda: self.folder or self.error, "\n".join(self.lines[-40:]), seconds)
        assert self.folder is not None, (self.error, self.lines[-40:])
        return self.folder

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
        self._environment = dict(os.environ)
        paths = [str(HERE / "watched"), str(Path(fedsynth.__file__).parents[1])]
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
        os.environ["FEDSYNTH_TEST_WATCH"] = str(self.watch)
        os.environ["OMP_NUM_THREADS"] = "1"
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
            *("--ledger", str(home or self.home(number)), "--ca", str(self.keys / "ca.crt")),
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
        from fedsynth.deployment.frames import Timeouts

        output = self.folder / f"runs-{time.monotonic_ns()}" if resume is None else resume.parent
        run = Run(output)
        proposal: Proposal = new_proposal(settings)

        def work() -> None:
            try:
                timeouts = Timeouts(join=90.0, answer=answer)
                run.folder = self.started.run(proposal, output, timeouts, resume, run.lines.append)
            except Exception as error:
                run.error = error

        threading.Thread(target=work, daemon=True).start()
        return run

    def rounds(self, number: int) -> int:
        """Returns the last round of a client's steps in the run that it joined last."""
        files = list(self.home(number).glob("runs/*/session.json"))
        newest = max(files, key=lambda file: file.parent.stat().st_ctime_ns)
        return max((step[0] for step in json.loads(newest.read_text())["steps"]), default=0)

    def server_process(self) -> int | None:
        """Returns the process id of the newest run's ServerApp."""
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
        os.environ.clear()
        os.environ.update(self._environment)

    def log_entries(self) -> list[tuple[int, str, str]]:
        """Returns (process, kind, value) of each entry of the activity log."""
        lines = self.watch.read_text().splitlines()
        entries = [line.split("\t", 2) for line in lines]
        return [(int(pid), kind, value) for pid, kind, value in entries]


@pytest.fixture(scope="package")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    if importlib.util.find_spec("flwr") is None:
        pytest.skip("flwr is not installed: pip install 'fedsynth[flower]'")
    torch.set_num_threads(1)
    network = Federation(tmp_path_factory.mktemp("federation"))
    yield network
    network.close()


def report_of(folder: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((folder / "privacy_report.json").read_text())
    return report
