"""Runs a federation's server on a Flower SuperLink, for `fedsynth server`.

The command starts the SuperLink, executes one run and stops the SuperLink. The module also writes a
run's Flower app folder for `flwr run` and `fedsynth deploy init`. The code of the app is part of
this package, and the folder only refers to it and contains the run's proposal. A data owner's node
does not need the folder, because `fedsynth client` answers with the installed package.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedsynth.config.settings import RunSettings
from fedsynth.deployment.flower.processes import LOCALHOST, FlowerError, listening, start, stop
from fedsynth.deployment.frames import Timeouts
from fedsynth.deployment.proposal import Proposal
from fedsynth.errors import BudgetExceededError, OutputError, SettingError
from fedsynth.files import load_json, write_output
from fedsynth.formatting import format_epsilon
from fedsynth.results.file_names import METRICS
from fedsynth.results.finished import read_rows
from fedsynth.validation import to_toml
from fedsynth.version import __version__

# The configuration of an app, in addition to the run's proposal. `server_app` and `executor`
# read it.
DEFAULTS: Mapping[str, Any] = {
    "output": "runs",  # the parent folder of run folders
    "resume": "",  # the folder of the run to resume
    "clients": "{}",  # which client each node is, as JSON; "{}": each node states it
    "result": "",  # the file that receives the run folder's path, or the error
    "join": 600.0,  # how many seconds the server waits
    "answer": 3600.0,
    "home": "",  # the parent folder of the clients' homes, in a trial on one machine
}

APPS = "fedsynth.deployment.flower"
# The module that implements Flower's command `flwr`.
COMMANDS = "flwr.cli.app"
# The name of the SuperLink in the configuration of `flwr`.
SUPERLINK = "local"
# The name of the SuperLink's log file, which is written next to the run folders.
LOG = "superlink.log"

_COLOUR_CODE = re.compile("\x1b\\[[0-9;]*m")
HOSTS = (LOCALHOST, "0.0.0.0")
# Maps options of `flower-superlink` to names of files in the folder of keys.
TLS_FILES = {
    "--ssl-certfile": "server.crt",
    "--ssl-keyfile": "server.key",
    "--ssl-ca-certfile": "server.crt",
}


def write_app(folder: Path, proposal: Proposal, options: Mapping[str, Any]) -> None:
    """Writes the folder of the Flower app that executes a proposed run.

    Args:
        folder: the folder, which is created if it does not exist.
        proposal: the proposal of the run.
        options: the values that differ from `DEFAULTS`.
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
            "clientapp": f"{APPS}.executor:app",
        },
        "tool.flwr.app.config": {"proposal": json.dumps(proposal.to_json()), **DEFAULTS, **options},
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_output(folder / "pyproject.toml", to_toml(project).encode())


@dataclass(frozen=True)
class SuperLinkSettings:
    """The settings of the SuperLink that `fedsynth server` starts.

    Args:
        port: the port on which the SuperLink listens.
        keys: the folder with server.crt, server.key and a client-NNN.pub for each client. Only
            nodes with these keys can connect. The server's certificate must also name 127.0.0.1.
            None: the SuperLink uses no TLS and does not authenticate nodes, which is for trials on
            one machine.
        clients: the number of clients.
        host: "127.0.0.1", or "0.0.0.0" if nodes on other machines connect.

    Raises:
        SettingError: if `host` has another value, if nodes on other machines may connect without
            keys, or if a file in `keys` is missing.
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
                raise SettingError(
                    None,
                    "--keys",
                    (
                        f"is missing, but host={self.host} lets nodes on other machines connect. "
                        "Create keys with fedsynth deploy keys"
                    ),
                )
            return
        for path in [*map(self.keys.joinpath, TLS_FILES.values()), *self.public_keys]:
            if not path.is_file():
                reason = "is missing. Create keys with `fedsynth deploy keys`"
                raise SettingError(None, f"the file {path}", reason).with_code("files.key")

    @property
    def public_keys(self) -> list[Path]:
        """The clients' public-key files, in client order."""
        if self.keys is None:
            return []
        return [self.keys / f"client-{number:03d}.pub" for number in range(self.clients)]

    @property
    def arguments(self) -> list[str]:
        """The command-line options of `flower-superlink`."""
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
            connection["root-certificates"] = str((self.keys / "server.crt").absolute())
        return to_toml({"superlink": {"default": SUPERLINK}, f"superlink.{SUPERLINK}": connection})


@dataclass
class SuperLink:
    """A running SuperLink that can execute a run.

    Args:
        settings: the settings of the SuperLink.
        home: the folder for FLWR_HOME.
        clients: maps each registered node to its client, according to the client's key.
    """

    settings: SuperLinkSettings
    home: Path
    clients: dict[int, int] = field(default_factory=dict)

    def register(self) -> None:
        """Registers the public keys of all nodes. Nodes without a registered key cannot connect.

        Raises:
            FlowerError: if Flower does not register a key, for example because the file contains
                none.
        """
        for number, key in enumerate(self.settings.public_keys):
            register = ["supernode", "register", str(key.absolute()), SUPERLINK, "--format", "json"]
            with start(COMMANDS, register, self.home, subprocess.PIPE) as process:
                output, _ = process.communicate()
            try:
                answer = json.loads(output[output.index("{") :])
                self.clients[int(answer["node-id"])] = number
            except (ValueError, KeyError, TypeError):
                raise FlowerError(
                    f"Flower cannot register the public key {key}. Create it with `fedsynth deploy "
                    f"keys`. Flower's output: {output[-300:]}"
                ) from None

    def run(
        self,
        proposal: Proposal,
        output: Path,
        timeouts: Timeouts,
        resume: Path | None = None,
        say: Callable[[str], None] = print,
    ) -> Path:
        """Starts a run, and waits until it ends.

        If it is interrupted, `say` receives its progress and how to resume it.

        Returns:
            The run's folder.

        Raises:
            BudgetExceededError: if the clients' budgets allow no round.
            FlowerError: if the run did not finish.
            OutputError: if the run failed with an error.
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
                say(_COLOUR_CODE.sub("", line).rstrip())
        except KeyboardInterrupt:
            if folder := _outcome(result).get("begun"):
                say(_interrupted(Path(folder), proposal.settings))
            raise
        finally:
            stop(process)
        outcome = _outcome(result)
        if outcome.get("code", "").startswith("budget."):
            raise BudgetExceededError(outcome["error"])
        if "error" in outcome:
            raise OutputError(
                f"the run failed: {outcome['error']}. Correct the cause and resume the run"
            )
        if "folder" not in outcome:
            raise FlowerError("the run did not finish. Read the server's messages above")
        return Path(outcome["folder"])


def _outcome(result: Path) -> dict[str, str]:
    """Reads the file with a run's outcome. Returns an empty dictionary if there is no outcome."""
    try:
        return dict(load_json(result))
    except (OSError, ValueError):
        return {}


def _interrupted(folder: Path, settings: RunSettings) -> str:
    """Describes an interrupted run's progress and cost, and how to resume it."""
    rows = read_rows(folder / METRICS)
    text = f"interrupted after {len(rows)} of {settings.rounds} rounds"
    if settings.privacy is not None and rows and "epsilon" in rows[-1]:
        spent = format_epsilon(rows[-1]["epsilon"])
        text += f". Spent by then: ε = {spent} at δ = {settings.privacy.delta:g}"
    return f"{text}. To resume: fedsynth server --resume {folder}"


@contextmanager
def superlink(settings: SuperLinkSettings, logs: Path) -> Iterator[SuperLink]:
    """Runs a SuperLink, with its nodes' keys registered, during a `with` block.

    Args:
        settings: the settings of the SuperLink.
        logs: the folder for the SuperLink's log.

    Raises:
        FlowerError: if the SuperLink does not start, or a key cannot be registered.
    """
    logs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="fedsynth-server-") as folder:
        home = Path(folder)
        (home / "config.toml").write_text(settings.flwr_config, encoding="utf-8")
        with listening("superlink", settings.arguments, settings.port, home, logs / LOG):
            started = SuperLink(settings, home)
            started.register()
            yield started
