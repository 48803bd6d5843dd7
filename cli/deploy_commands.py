"""`fedsynth server`, `fedsynth client` and `fedsynth deploy …`: a federation over machines, on
Flower."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedsynth.cli import options as given
from fedsynth.cli.application import Application, OptionError, ended_by_signals
from fedsynth.cli.options import path_argument, path_option, takes_settings
from fedsynth.cli.settings_options import Sections, merged, read_config
from fedsynth.data.partition_settings import MOST_CLIENTS

if TYPE_CHECKING:
    from fedsynth.deployment.policy import Owner
    from fedsynth.deployment.proposal import Proposal

deploy_app = Application(
    help="Prepare a deployment: its keys and a Flower app folder.", no_args_is_help=True
)
RUN = ("run.method", "run.rounds", "run.seed", "data.dataset", "partition.clients")
"""The settings with an option; `--set` sets the others."""
OptionalPath = Path | None
Spec = Annotated[OptionalPath, path_option("TOML file: the public specification of your data.")]
Insecure = Annotated[bool, typer.Option("--insecure", help="Without TLS: only for local trials.")]
NewFolder = Annotated[Path, path_argument("The folder to create.")]


@deploy_app.command("init")
@takes_settings(*RUN)
def init(
    chosen: Sections, folder: NewFolder, config: given.Config = None, spec: Spec = None
) -> None:
    """Write a Flower app folder of a run, for `flwr run` and Flower's own simulation."""
    from fedsynth.deployment.flower.serving import write_app

    proposal = _proposal(chosen, config, spec)
    options = {"output": str(Path("runs").absolute()), "home": str(Path("homes").absolute())}
    write_app(folder, proposal, options)
    print(f"{folder} is a Flower app; the run's agreement is {proposal.agreement}")


@deploy_app.command("keys")
def keys(
    folder: NewFolder,
    clients: Annotated[int, typer.Option(help="The number of clients.")],
    host: Annotated[
        list[str] | None, typer.Option(help="A name or address of the server. Repeatable.")
    ] = None,
) -> None:
    """Make a CA, the server's certificate, and a key for each client."""
    from fedsynth.deployment.flower.keys import make_keys

    make_keys(folder, clients, host or ())
    print(f"{folder}: server.crt, server.key and client-*.pub belong to the server")
    print("each client gets ca.crt and only its own client-NNN")


@takes_settings(*RUN)
def server(
    chosen: Sections,
    spec: Spec = None,
    keys: Annotated[OptionalPath, path_option("The folder of `fedsynth deploy keys`.")] = None,
    insecure: Insecure = False,
    host: Annotated[str, typer.Option(help="0.0.0.0 for nodes elsewhere.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="The port for nodes.")] = 9092,
    join_seconds: Annotated[float, typer.Option(help="How long clients may join.")] = 600.0,
    answer_seconds: Annotated[float, typer.Option(help="How long a step may take.")] = 3600.0,
    config: given.Config = None,
    output: given.Output = Path("runs"),
    resume: given.Resume = None,
) -> None:
    """Serve one run to data owners' nodes, over Flower, and leave a run folder."""
    from fedsynth.deployment.flower.processes import require_flower

    require_flower()
    from fedsynth.deployment.connection import Timeouts
    from fedsynth.deployment.flower.serving import SuperLinkSettings, superlink

    if resume is not None:
        if config is not None or any(chosen.values()):
            raise OptionError("--resume uses the run's config.toml: leave out all other settings")
        config = resume / "config.toml"
    proposal = _proposal(chosen, config, spec)
    if keys is None and not insecure:
        raise OptionError("--keys is required (or --insecure for a trial on this machine only)")
    settings = SuperLinkSettings(port, keys, proposal.settings.partition.clients, host)
    timeouts = Timeouts(join_seconds, answer_seconds)
    print(f"the run's agreement is {proposal.agreement}", flush=True)
    with ended_by_signals(), superlink(settings, output) as started:
        print(f"nodes connect to port {port}", flush=True)
        folder = started.run(proposal, output, timeouts, resume, _say)
    print(f"run folder: {folder}")


def client(
    server: Annotated[str, typer.Option(help="The server, HOST:PORT.")],
    number: Annotated[
        int,
        typer.Option("--number", min=0, max=MOST_CLIENTS - 1, help="This client's index, from 0."),
    ],
    ledger: Annotated[Path, path_option("Your folder of ledgers, the same for all runs.")],
    data: Annotated[OptionalPath, path_option("Your images: DIR/CLASS/*.png.")] = None,
    trial: Annotated[
        bool, typer.Option("--trial", help="Instead of --data: a part of the published data set.")
    ] = False,
    ca: Annotated[OptionalPath, path_option("The CA's certificate, PEM.")] = None,
    key: Annotated[OptionalPath, path_option("Your node's private key.")] = None,
    insecure: Insecure = False,
    policy: Annotated[OptionalPath, path_option("Your policy: the runs that you allow.")] = None,
    approve: Annotated[
        list[str] | None,
        typer.Option(help="An agreement that you allow, or any: all of them. Repeatable."),
    ] = None,
    identity: Annotated[
        OptionalPath, path_option("Your Ed25519 key for secure aggregation, PEM.")
    ] = None,
    identities: Annotated[
        OptionalPath, path_option("The folder of all clients' public keys, client-NNN.pem.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    once: Annotated[bool, typer.Option("--once", help="Exit after one run.")] = False,
    wait: Annotated[float, typer.Option(help="Exit after this time without a server, s.")] = 600.0,
) -> None:
    """Take part in a federation with your own records, your own ledger, and by your own rules.

    Before it joins a run, it prints what it is asked to release and what that costs. It joins what
    --policy allows or --approve names, and nothing else.
    """
    from fedsynth.deployment.flower.processes import require_flower

    require_flower()
    from fedsynth.deployment.flower.joining import ServerConnection, join
    from fedsynth.deployment.node import Node
    from fedsynth.deployment.record_source import ClassFolders, DatasetPart
    from fedsynth.deployment.secure_aggregation.client import read_identities

    if (data is None) != trial:
        raise OptionError("--data or --trial is required, and not both")
    if ca is None and not insecure:
        raise OptionError("--ca is required (or --insecure for a trial on this machine only)")
    if (identity is None) != (identities is None):
        raise OptionError("--identity and --identities must be used together")
    source = DatasetPart() if data is None else ClassFolders(data)
    connection = ServerConnection(server, ca, key)
    node = Node(number, ledger, source, _owner(policy, approve), device, _say)
    if identity is not None and identities is not None:
        node.identities = read_identities(identity, identities)
    with ended_by_signals():
        join(node, connection, once=once, wait=wait)


def _say(text: str) -> None:
    print(text, flush=True)


def _owner(policy: Path | None, approve: list[str] | None) -> Owner:
    from fedsynth.deployment.policy import Owner, Policy

    approved = frozenset(approve or ())
    if policy is not None:
        return Owner(Policy.read(policy), approved)
    if not approved:
        print("note: without --policy and --approve, all runs are declined", file=sys.stderr)
    return Owner(None, approved)


def _proposal(chosen: Sections, config: Path | None, spec: Path | None) -> Proposal:
    """Returns the run of the options, --set and --config."""
    from fedsynth.deployment.proposal import new_proposal

    return new_proposal(merged(read_config(config), chosen), spec)
