"""`fedsynth server`: Flower's SuperLink and one run on it, from its start to its end."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from fedsynth.errors import OutputError, SettingError
from fedsynth.federation.flower.app_folder import write_app
from fedsynth.federation.flower.processes import (
    FlowerError,
    command,
    environment,
    running,
    stop,
    wait_for_port,
)
from fedsynth.federation.nodes.carrier import Timeouts
from fedsynth.federation.nodes.proposal import Proposal
from fedsynth.privacy.files import last_line, load_json

HERE = "127.0.0.1"
HOSTS = (HERE, "0.0.0.0")
CONNECTION = "here"
LOG = "superlink.log"
"""Beside the run folders: what the SuperLink has said."""


@dataclass(frozen=True)
class Tls:
    """A server's certificate; its names must have 127.0.0.1, since runs reach it there.

    Args:
        certificate: PEM, with the names and addresses that nodes know the server by.
        key: of the certificate, PEM.
        authority: the certificate of who has signed it, PEM; nodes need this one, too.
    """

    certificate: Path
    key: Path
    authority: Path

    def __post_init__(self) -> None:
        for path in (self.certificate, self.key, self.authority):
            if not path.is_file():
                raise SettingError(None, str(path), "is no file: TLS needs certificate, key and CA")


@dataclass(frozen=True)
class Link:
    """A SuperLink as `fedsynth server` starts it.

    Args:
        port: it listens there.
        tls: None: without TLS, and without node authentication, for trials on one machine.
        host: "127.0.0.1", or "0.0.0.0" for nodes elsewhere.
        keys: of nodes, their public keys in the order of the clients; with TLS no others connect.
        database: the file of the SuperLink's state, where it is to outlive it.
    """

    port: int
    tls: Tls | None
    host: str = HERE
    keys: Sequence[Path] = ()
    database: Path | None = None

    def __post_init__(self) -> None:
        if self.host not in HOSTS:
            raise SettingError(None, "host", f"must be {' or '.join(HOSTS)}, got {self.host!r}")
        if self.tls is None and (self.keys or self.host != HERE):
            raise SettingError(
                None,
                "TLS",
                "is needed for nodes elsewhere and for their authentication: give the server's "
                "certificate, its key and its CA",
            )
        if self.tls is not None and not self.keys:
            raise SettingError(
                None, "keys", "must have each client's public key: nobody else connects then"
            )

    @property
    def arguments(self) -> list[str]:
        """Of the SuperLink's command."""
        found = ["--host", self.host, "--port", str(self.port)]
        found.append("--disable-runtime-dependency-installation")
        if self.database is not None:
            found += ["--database", str(self.database)]
        if self.tls is None:
            return [*found, "--insecure"]
        tls = self.tls
        files = {"cert": tls.certificate, "key": tls.key, "ca-cert": tls.authority}
        for name, path in files.items():
            found += [f"--ssl-{name}file", str(path)]
        return [*found, "--enable-supernode-auth"]

    def connection(self) -> str:
        """What Flower's commands are told of it, as TOML."""
        lines = ["[superlink]", f'default = "{CONNECTION}"', f"[superlink.{CONNECTION}]"]
        lines.append(f'address = "{HERE}:{self.port}"')
        if self.tls is None:
            lines.append("insecure = true")
        else:
            lines.append(f"root-certificates = {json.dumps(str(self.tls.authority.absolute()))}")
        return "\n".join(lines) + "\n"


@dataclass
class Started:
    """A SuperLink that listens.

    Args:
        link: as it was asked for.
        home: its FLWR_HOME.
        numbers: which client each node is, by the keys that were given.
    """

    link: Link
    home: Path
    numbers: dict[int, int] = field(default_factory=dict)

    def flwr(self, *arguments: str) -> str:
        """What one of Flower's commands prints.

        Raises:
            FlowerError: it fails.
        """
        done = subprocess.run(
            [command("flwr"), *arguments],
            env=environment(self.home),
            cwd=self.home,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        if done.returncode:
            said = " ".join(f"{done.stdout} {done.stderr}".split())
            raise FlowerError(f"flwr {arguments[0]} fails: {said[-300:]}")
        return done.stdout

    def register(self) -> None:
        """Registers the nodes' keys: nobody else's node connects.

        Raises:
            FlowerError: a file holds no key.
        """
        for number, key in enumerate(self.link.keys):
            said = self.flwr(
                "supernode", "register", str(key.absolute()), CONNECTION, "--format", "json"
            )
            try:
                self.numbers[int(json.loads(said)["node-id"])] = number
            except (ValueError, KeyError, TypeError):
                raise FlowerError(f"{key} is not registered: {said:.300}") from None

    def run(
        self,
        proposal: Proposal,
        output: Path,
        timeouts: Timeouts,
        resume: Path | None = None,
        say: Callable[[str], None] = print,
    ) -> Path:
        """Starts a run, and waits for its end.

        Returns:
            The run's folder.

        Raises:
            FlowerError: it has failed.
        """
        token = secrets.token_hex(8)
        app = self.home / f"app-{token}"
        options = {
            "output": str(output.absolute()),
            "resume": "" if resume is None else str(resume.absolute()),
            "numbers": json.dumps(self.numbers),
            "token": token,
            "join": timeouts.join,
            "answer": timeouts.answer,
        }
        write_app(app, proposal, options)
        arguments = [command("flwr"), "run", str(app), CONNECTION, "--stream"]
        process = subprocess.Popen(
            arguments,
            env=environment(self.home),
            cwd=self.home,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            for line in process.stdout or ():
                say(line.rstrip())
            process.wait()
        finally:
            stop(process)
        return _ended(output, token)


@contextmanager
def superlink(link: Link, logs: Path) -> Iterator[Started]:
    """A SuperLink, as long as the block lasts, with its nodes' keys registered.

    Args:
        link: what to start.
        logs: the folder that its log goes into.

    Raises:
        FlowerError: it does not start.
    """
    with tempfile.TemporaryDirectory(prefix="fedsynth-server-") as folder:
        home = Path(folder)
        (home / "config.toml").write_text(link.connection(), encoding="utf-8")
        logs.mkdir(parents=True, exist_ok=True)
        log = logs / LOG
        module = [sys.executable, "-m", "fedsynth.federation.flower.superlink"]
        with running([*module, *link.arguments], home, log) as process:
            wait_for_port(HERE, link.port, process, log)
            started = Started(link, home)
            started.register()
            if process.poll() is not None:
                raise FlowerError(f"the SuperLink has ended: {last_line(log)}")
            yield started


def key_files(folder: Path, clients: int) -> list[Path]:
    """The public keys of all clients in a folder, in their order.

    Raises:
        SettingError: one is missing.
    """
    files = [folder / f"client-{number:03d}.pub" for number in range(clients)]
    for file in files:
        if not file.is_file():
            raise SettingError(None, str(file), "is missing: each client has a key")
    return files


def _ended(output: Path, token: str) -> Path:
    """What the ServerApp has left for who has started it."""
    file = output / f".{token}-done.json"
    try:
        facts = load_json(file)
        file.unlink()
    except (OSError, ValueError):
        raise FlowerError(
            "the run has not come to its end: what its server said stands above"
        ) from None
    if "error" in facts:
        raise OutputError(f"the run has failed: {facts['error']}")
    return Path(facts["folder"])
