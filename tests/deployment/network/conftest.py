"""A federation on this machine: Flower's SuperLink with TLS, and three data owners' nodes that it
knows by their keys. Every process of it is watched (`watched/sitecustomize.py`)."""

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
BOUNDED = 2
"""The client whose policy bounds what it does."""
POLICY = """
methods = ["feddm", "fedaf", "fedkf", "fedhydra", "scaffold", "fedstats"]
epsilon = 2.6
delta = 1e-5
open = true
"""


def eventually(said: Callable[[], Any], what: str, seconds: float = 120.0) -> Any:
    """What is said when it is something; fails where that takes too long."""
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        found = said()
        if found:
            return found
        time.sleep(0.05)
    raise AssertionError(f"{what}: not within {seconds:g} s")


@dataclass
class Run:
    """A run that is under way.

    Args:
        output: the folder of its run folder.
        lines: what its server has said.
    """

    output: Path
    lines: list[str] = field(default_factory=list)
    folder: Path | None = None
    error: Exception | None = None

    def ended(self, seconds: float = 180.0) -> Path:
        """Its folder, when it has ended."""
        eventually(lambda: self.folder or self.error, "\n".join(self.lines[-40:]), seconds)
        assert self.folder is not None, (self.error, self.lines[-40:])
        return self.folder

    def under_way(self) -> Path | None:
        """Its folder, while it lasts."""
        return next(self.output.glob("*.incomplete"), None)

    def rows(self) -> int:
        """How many rounds have ended."""
        folder = self.under_way()
        file = None if folder is None else folder / "metrics.jsonl"
        return 0 if file is None or not file.exists() else len(file.read_text().splitlines())


class Federation:
    """SuperLink and nodes.

    Args:
        folder: for all that they leave.
    """

    def __init__(self, folder: Path) -> None:
        from fedsynth.deployment.flower.keys import make_keys
        from fedsynth.deployment.flower.processes import free_port
        from fedsynth.deployment.flower.serving import SuperLinkSettings, superlink

        self.folder = folder
        self.keys = folder / "keys"
        self.watch = folder / "watch.log"
        self.clients: dict[int, subprocess.Popen[bytes]] = {}
        self._stack = ExitStack()
        self._before = dict(os.environ)
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
        """A data owner's folder of ledgers."""
        return self.folder / f"owner-{number}"

    def log(self, number: int) -> str:
        """What a data owner has read."""
        return (self.folder / f"owner-{number}.log").read_text()

    def client_arguments(
        self, number: int, key: Path | None = None, home: Path | None = None
    ) -> list[str]:
        """Of the command that a data owner types."""
        own = key or self.keys / f"client-{number:03d}"
        allowed = ["--approve", "any"]
        if number == BOUNDED:
            allowed = ["--policy", str(self.folder / "policy.toml")]
        return [
            *(sys.executable, "-c", "from fedsynth.cli.app import main; main()", "client"),
            *("--server", f"127.0.0.1:{self.port}", "--number", str(number), "--trial"),
            *("--ledger", str(home or self.home(number)), "--ca", str(self.keys / "ca.crt")),
            *("--key", str(own), "--device", "cpu", *allowed),
        ]

    def start_client(self, number: int) -> None:
        """Starts a data owner's process."""
        arguments = self.client_arguments(number)
        with (self.folder / f"owner-{number}.log").open("ab") as log:
            self.clients[number] = subprocess.Popen(
                arguments, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def kill_client(self, number: int) -> None:
        """As a machine that loses its power: the node's processes are gone at once."""
        process = self.clients.pop(number)  # its SuperNode ends with it
        process.kill()
        process.wait(20)

    def run(
        self,
        given: Mapping[str, Mapping[str, Any]],
        answer: float = 60.0,
        resume: Path | None = None,
    ) -> Run:
        """Starts a run."""
        from fedsynth.deployment.frames import Timeouts

        output = self.folder / f"runs-{time.monotonic_ns()}" if resume is None else resume.parent
        run = Run(output)
        proposal: Proposal = new_proposal(given)

        def work() -> None:
            try:
                timeouts = Timeouts(join=90.0, answer=answer)
                run.folder = self.started.run(proposal, output, timeouts, resume, run.lines.append)
            except Exception as error:
                run.error = error

        threading.Thread(target=work, daemon=True).start()
        return run

    def rounds(self, number: int) -> int:
        """The last round that a client has taken a step of, in the run that it joined last."""
        files = list(self.home(number).glob("runs/*/session.json"))
        newest = max(files, key=lambda file: file.parent.stat().st_ctime_ns)
        return max((one[0] for one in json.loads(newest.read_text())["steps"]), default=0)

    def server_process(self) -> int | None:
        """The ServerApp's process of the run that was started last."""
        found = []
        for command in Path("/proc").glob("[0-9]*/cmdline"):
            with suppress(OSError):
                parts = command.read_bytes().split(b"\0")
                named = any(part.endswith(b"flwr-serverapp") for part in parts)
                if named and f"127.0.0.1:{self.port}".encode() in parts:
                    found.append(int(command.parent.name))
        return max(found, default=None)

    def close(self) -> None:
        """Ends all of it, as its owners would."""
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
        os.environ.update(self._before)

    def watched(self) -> list[tuple[int, str, str]]:
        """(process, what, of what) of everything that the processes did, as far as it is
        watched."""
        lines = self.watch.read_text().splitlines()
        parted = [line.split("\t", 2) for line in lines]
        return [(int(pid), kind, what) for pid, kind, what in parted]


@pytest.fixture(scope="package")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    if importlib.util.find_spec("flwr") is None:
        pytest.skip("flwr is not installed: pip install 'fedsynth[flower]'")
    torch.set_num_threads(1)
    made = Federation(tmp_path_factory.mktemp("federation"))
    yield made
    made.close()


def report_of(folder: Path) -> dict[str, Any]:
    """The privacy report in a folder."""
    found: dict[str, Any] = json.loads((folder / "privacy_report.json").read_text())
    return found
