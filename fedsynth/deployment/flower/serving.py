"""`fedsynth server`: Flower's SuperLink and one run on it, from its start to its end; and the
Flower app folder of a run, which `flwr run` reads and `fedsynth deploy init` writes.

The app is part of this package; the folder names it and holds the run's proposal. A data owner's
node does not need it (`fedsynth client` answers with the installed package).
"""

from __future__ import annotations

import json
import secrets
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedsynth.deployment.carrier import Timeouts
from fedsynth.deployment.flower.processes import (
    HERE,
    FlowerError,
    command,
    environment,
    listening,
    stop,
)
from fedsynth.deployment.proposal import Proposal
from fedsynth.errors import OutputError, SettingError
from fedsynth.privacy.files import last_line, load_json
from fedsynth.toml_file import to_toml
from fedsynth.version import __version__

PACKAGE = "fedsynth_run"
APPS = ("server", "client")
DEFAULTS: Mapping[str, Any] = {
    "output": "runs",
    "resume": "",
    "numbers": "{}",
    "token": "run",
    "join": 600.0,
    "answer": 3600.0,
    "home": "",
}
"""A run's configuration except its proposal; read by `server_app` and `client_app`."""


def write_app(folder: Path, proposal: Proposal, options: Mapping[str, Any]) -> None:
    """Writes the folder.

    Args:
        folder: created if it is missing.
        proposal: the run.
        options: the differences from `DEFAULTS`.

    Raises:
        OutputError: it cannot be written.
    """
    package = folder / PACKAGE
    try:
        package.mkdir(parents=True, exist_ok=True)
        (folder / "pyproject.toml").write_text(_project(proposal, options), encoding="utf-8")
        (package / "__init__.py").write_text('"""A run of fedsynth."""\n', encoding="utf-8")
        for name in APPS:
            module = f"fedsynth.deployment.flower.{name}_app"
            text = f'from {module} import app\n\n__all__ = ["app"]\n'  # Flower imports a name
            (package / f"{name}.py").write_text(text, encoding="utf-8")
    except OSError as error:
        raise OutputError(f"cannot write {folder}: {error.strerror or error}") from None


def _project(proposal: Proposal, options: Mapping[str, Any]) -> str:
    return to_toml(
        {
            "build-system": {"requires": ["hatchling"], "build-backend": "hatchling.build"},
            "project": {
                "name": PACKAGE.replace("_", "-"),
                "version": "1.0.0",
                "description": f"A run of fedsynth {__version__}",
                "license": "Apache-2.0",
                "dependencies": [f"fedsynth[flower]=={__version__}"],
            },
            "tool.hatch.build.targets.wheel": {"packages": [PACKAGE]},
            "tool.flwr.app": {"publisher": "fedsynth"},
            "tool.flwr.app.components": {f"{name}app": f"{PACKAGE}.{name}:app" for name in APPS},
            "tool.flwr.app.config": {
                "proposal": json.dumps(proposal.to_json()),
                **DEFAULTS,
                **options,
            },
        }
    )


HOSTS = (HERE, "0.0.0.0")
CONNECTION = "here"
LOG = "superlink.log"
"""The SuperLink's output, next to the run folders."""


@dataclass(frozen=True)
class Link:
    """A SuperLink as `fedsynth server` starts it.

    Args:
        port: the port that it listens on.
        keys: the folder of server.crt, server.key, ca.crt and each client's client-NNN.pub: no
            other nodes connect. The certificate must name 127.0.0.1, too. None: without TLS and
            without node authentication, for trials on one machine.
        clients: the number of clients.
        host: "127.0.0.1", or "0.0.0.0" for nodes elsewhere.

    Raises:
        SettingError: another host, nodes elsewhere without keys, or a file of `keys` is missing.
    """

    port: int
    keys: Path | None
    clients: int
    host: str = HERE

    def __post_init__(self) -> None:
        if self.host not in HOSTS:
            raise SettingError(None, "host", f"must be {' or '.join(HOSTS)}, got {self.host!r}")
        if self.keys is None and self.host != HERE:
            raise SettingError(
                None, "keys", "are required for nodes on other machines, which connect over TLS"
            )
        for path in [*self._tls.values(), *self.public_keys]:
            if not path.is_file():
                raise SettingError(
                    None,
                    str(path),
                    "is missing: TLS needs the server's certificate, key and CA, and each client "
                    "a key",
                )

    @property
    def _tls(self) -> dict[str, Path]:
        if self.keys is None:
            return {}
        files = {"cert": "server.crt", "key": "server.key", "ca-cert": "ca.crt"}
        return {option: self.keys / name for option, name in files.items()}

    @property
    def public_keys(self) -> list[Path]:
        """The clients' keys, in their order."""
        if self.keys is None:
            return []
        return [self.keys / f"client-{number:03d}.pub" for number in range(self.clients)]

    @property
    def arguments(self) -> list[str]:
        """Options of `flower-superlink`."""
        options = ["--host", self.host, "--port", str(self.port)]
        options.append("--disable-runtime-dependency-installation")
        if self.keys is None:
            return [*options, "--insecure"]
        for option, path in self._tls.items():
            options += [f"--ssl-{option}file", str(path)]
        return [*options, "--enable-supernode-auth"]

    def connection(self) -> str:
        """Returns the configuration of Flower's commands, as TOML."""
        connection: dict[str, Any] = {"address": f"{HERE}:{self.port}"}
        if self.keys is None:
            connection["insecure"] = True
        else:
            connection["root-certificates"] = str((self.keys / "ca.crt").absolute())
        return to_toml(
            {"superlink": {"default": CONNECTION}, f"superlink.{CONNECTION}": connection}
        )


@dataclass
class Started:
    """A SuperLink that listens.

    Args:
        link: its settings.
        home: its FLWR_HOME.
        numbers: node -> client, by the given keys.
    """

    link: Link
    home: Path
    numbers: dict[int, int] = field(default_factory=dict)

    def flwr(self, *arguments: str) -> str:
        """Returns the output of one of Flower's commands.

        Raises:
            FlowerError: it fails.
        """
        process = subprocess.run(
            [command("flwr"), *arguments],
            env=environment(self.home),
            cwd=self.home,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        if process.returncode:
            output = " ".join(f"{process.stdout} {process.stderr}".split())
            raise FlowerError(f"flwr {arguments[0]} fails: {output[-300:]}")
        return process.stdout

    def register(self) -> None:
        """Registers the nodes' keys: no other node can connect.

        Raises:
            FlowerError: a file has no key.
        """
        for number, key in enumerate(self.link.public_keys):
            output = self.flwr(
                "supernode", "register", str(key.absolute()), CONNECTION, "--format", "json"
            )
            try:
                self.numbers[int(json.loads(output)["node-id"])] = number
            except (ValueError, KeyError, TypeError):
                raise FlowerError(f"{key} is not registered: {output:.300}") from None

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
    """Runs a SuperLink, with its nodes' keys registered, for the duration of the block.

    Args:
        link: its settings.
        logs: the folder of its log.

    Raises:
        FlowerError: it does not start.
    """
    with tempfile.TemporaryDirectory(prefix="fedsynth-server-") as folder:
        home = Path(folder)
        (home / "config.toml").write_text(link.connection(), encoding="utf-8")
        logs.mkdir(parents=True, exist_ok=True)
        log = logs / LOG
        with listening("superlink", link.arguments, link.port, home, log) as process:
            started = Started(link, home)
            started.register()
            if process.poll() is not None:
                raise FlowerError(f"the superlink has ended: {last_line(log)}")
            yield started


def _ended(output: Path, token: str) -> Path:
    """Returns the run folder that the ServerApp has written for the process that started it."""
    file = output / f".{token}-done.json"
    try:
        facts = load_json(file)
        file.unlink()
    except (OSError, ValueError):
        raise FlowerError("the run did not finish: see the server's messages above") from None
    if "error" in facts:
        raise OutputError(f"the run has failed: {facts['error']}")
    return Path(facts["folder"])
