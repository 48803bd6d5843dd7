"""`fedsynth server`: Flower's SuperLink and one run on it, from its start to its end; and the
Flower app folder of a run, which `flwr run` reads and `fedsynth deploy init` writes.

The app is part of this package; the folder names it and holds the run's proposal. A data owner's
node does not need it (`fedsynth client` answers with the installed package).
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedsynth.deployment.connection import Timeouts
from fedsynth.deployment.flower.processes import LOCALHOST, FlowerError, listening, start, stop
from fedsynth.deployment.proposal import Proposal
from fedsynth.errors import OutputError, SettingError
from fedsynth.privacy.files import load_json
from fedsynth.toml_file import to_toml
from fedsynth.version import __version__

DEFAULTS: Mapping[str, Any] = {
    "output": "runs",  # the parent folder of run folders
    "resume": "",  # the folder of the run to resume
    "clients": "{}",  # which client each node is, as JSON; "{}": each node states it
    "result": "",  # the file that receives the run folder's path, or the error
    "join": 600.0,  # how many seconds the server waits
    "answer": 3600.0,
    "home": "",  # the parent folder of the clients' homes, in a trial on one machine
}
"""A run's configuration, in addition to its proposal; read by `server_app` and `client_app`."""
APPS = "fedsynth.deployment.flower"
COMMANDS = "flwr.cli.app"
"""The module of Flower's command `flwr`."""
SUPERLINK = "local"
"""The SuperLink's name in the configuration of `flwr`."""
LOG = "superlink.log"
"""The SuperLink's output, next to the run folders."""
HOSTS = (LOCALHOST, "0.0.0.0")
TLS_FILES = {
    "--ssl-certfile": "server.crt",
    "--ssl-keyfile": "server.key",
    "--ssl-ca-certfile": "ca.crt",
}
"""Options of `flower-superlink`, with the file in the folder of keys."""


def write_app(folder: Path, proposal: Proposal, options: Mapping[str, Any]) -> None:
    """Writes the folder of a Flower app.

    Args:
        folder: created if it is missing.
        proposal: the run.
        options: the differences from `DEFAULTS`.

    Raises:
        OutputError: it cannot be written.
    """
    project: dict[str, dict[str, Any]] = {
        "project": {
            "name": "fedsynth-run",
            "version": "1.0.0",
            "description": f"A run of fedsynth {__version__}",
            "license": "Apache-2.0",
            "dependencies": [f"fedsynth[flower]=={__version__}"],
        },
        "tool.flwr.app": {"publisher": "fedsynth"},
        "tool.flwr.app.components": {
            "serverapp": f"{APPS}.server_app:app",
            "clientapp": f"{APPS}.client_app:app",
        },
        "tool.flwr.app.config": {
            "proposal": json.dumps(proposal.to_json()),
            **DEFAULTS,
            **options,
        },
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "pyproject.toml").write_text(to_toml(project), encoding="utf-8")
    except OSError as error:
        raise OutputError(f"cannot write {folder}: {error.strerror or error}") from None


@dataclass(frozen=True)
class SuperLinkSettings:
    """The settings of the SuperLink that `fedsynth server` starts.

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
    host: str = LOCALHOST

    def __post_init__(self) -> None:
        if self.host not in HOSTS:
            raise SettingError(None, "host", f"must be {' or '.join(HOSTS)}, got {self.host!r}")
        if self.keys is None:
            if self.host != LOCALHOST:
                raise SettingError(None, "keys", "are required for nodes on other machines")
            return
        for path in [*map(self.keys.joinpath, TLS_FILES.values()), *self.public_keys]:
            if not path.is_file():
                raise SettingError(None, str(path), "is missing: see `fedsynth deploy keys`")

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
        for option, name in TLS_FILES.items():
            options += [option, str(self.keys / name)]
        return [*options, "--enable-supernode-auth"]

    @property
    def flwr_config(self) -> str:
        """The configuration of Flower's commands, as TOML."""
        connection: dict[str, Any] = {"address": f"{LOCALHOST}:{self.port}"}
        if self.keys is None:
            connection["insecure"] = True
        else:
            connection["root-certificates"] = str((self.keys / "ca.crt").absolute())
        return to_toml({"superlink": {"default": SUPERLINK}, f"superlink.{SUPERLINK}": connection})


@dataclass
class SuperLink:
    """A SuperLink that listens.

    Args:
        settings: its settings.
        home: its FLWR_HOME.
        clients: node -> client, by the given keys.
    """

    settings: SuperLinkSettings
    home: Path
    clients: dict[int, int] = field(default_factory=dict)

    def register(self) -> None:
        """Registers the nodes' keys: no other node can connect.

        Raises:
            FlowerError: a file has no key.
        """
        for number, key in enumerate(self.settings.public_keys):
            register = ["supernode", "register", str(key.absolute()), SUPERLINK, "--format", "json"]
            with start(COMMANDS, register, self.home, subprocess.PIPE) as process:
                output, _ = process.communicate()
            try:
                answer = json.loads(output[output.index("{") :])
                self.clients[int(answer["node-id"])] = number
            except (ValueError, KeyError, TypeError):
                raise FlowerError(f"{key} is not registered: {output[-300:]}") from None

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
            FlowerError: it did not finish.
            OutputError: it has failed.
        """
        app = Path(tempfile.mkdtemp(prefix="app-", dir=self.home))
        result = app / "result.json"
        options = {
            "output": str(output.absolute()),
            "resume": str(resume.absolute()) if resume else "",
            "clients": json.dumps(self.clients),
            "result": str(result),
            "join": timeouts.join,
            "answer": timeouts.answer,
        }
        write_app(app, proposal, options)
        arguments = ["run", str(app), SUPERLINK, "--stream"]
        process = start(COMMANDS, arguments, self.home, subprocess.PIPE)
        try:
            for line in process.stdout or ():
                say(line.rstrip())
        finally:
            stop(process)
        try:
            outcome = load_json(result)
        except (OSError, ValueError):
            outcome = {}
        if "error" in outcome:
            raise OutputError(f"the run has failed: {outcome['error']}")
        if "folder" not in outcome:
            raise FlowerError("the run did not finish: see the server's messages above")
        return Path(outcome["folder"])


@contextmanager
def superlink(settings: SuperLinkSettings, logs: Path) -> Iterator[SuperLink]:
    """Runs a SuperLink, with its nodes' keys registered, for the duration of the block.

    Args:
        settings: the SuperLink's.
        logs: the folder of its log.

    Raises:
        FlowerError: it does not start.
    """
    logs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="fedsynth-server-") as folder:
        home = Path(folder)
        (home / "config.toml").write_text(settings.flwr_config, encoding="utf-8")
        with listening("superlink", settings.arguments, settings.port, home, logs / LOG):
            started = SuperLink(settings, home)
            started.register()
            yield started
