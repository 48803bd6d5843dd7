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
Spec = Annotated[
    Path | None,
    path_option("A TOML file with the public specification of your data. Default: the data set's."),
]
Insecure = Annotated[
    bool, typer.Option("--insecure", help="Without TLS: for trials on one machine only.")
]
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
    print(
        f"{folder} is a Flower app of the run with agreement {proposal.agreement}; see "
        "docs/deployment.md for the next steps"
    )


@deploy_app.command("keys")
def keys(
    folder: NewFolder,
    clients: Annotated[int, typer.Option(help="The number of clients.")],
    host: Annotated[
        list[str] | None,
        typer.Option(help="The server's name or address that clients connect to; may be repeated."),
    ] = None,
    days: Annotated[int, typer.Option(help="Validity of the certificates in days.")] = 365,
) -> None:
    """Make a CA, the server's certificate, and a key for each client."""
    from fedsynth.deployment.flower.keys import make_keys

    make_keys(folder, clients, tuple(host or ()), days)
    print(
        f"{folder}: keep server.crt, server.key and all client-*.pub on the server; send "
        "each client ca.crt and only its own client-NNN"
    )


@takes_settings(*RUN)
def server(
    chosen: Sections,
    spec: Spec = None,
    keys: Annotated[
        Path | None,
        path_option(
            "Folder with server.crt, server.key, ca.crt, client-NNN.pub (fedsynth deploy keys)."
        ),
    ] = None,
    insecure: Insecure = False,
    host: Annotated[
        str, typer.Option(help="127.0.0.1, or 0.0.0.0 for nodes on other machines.")
    ] = ("127.0.0.1"),
    port: Annotated[
        int, typer.Option(min=1, max=65535, help="The port that nodes connect to.")
    ] = 9092,
    join_seconds: Annotated[
        float, typer.Option(help="Seconds within which clients must join.")
    ] = 600.0,
    answer_seconds: Annotated[
        float,
        typer.Option(
            help="Seconds within which a client must finish a step; a slower client drops out."
        ),
    ] = 3600.0,
    config: given.Config = None,
    output: given.Output = Path("runs"),
    resume: given.Resume = None,
) -> None:
    """Serve one run to data owners' nodes, over Flower, and leave a run folder."""
    from fedsynth.deployment.flower.processes import require_flower

    require_flower()
    from fedsynth.deployment.carrier import Timeouts
    from fedsynth.deployment.flower.serving import Link, superlink

    if resume is not None:
        if config is not None or any(chosen.values()):
            raise OptionError("--resume uses the run's config.toml: leave out all other settings")
        config = resume / "config.toml"
    proposal = _proposal(chosen, config, spec)
    if keys is None and not insecure:
        raise OptionError("--keys is required (or --insecure for a trial on this machine only)")
    link = Link(port, keys, proposal.settings.partition.clients, host)
    timeouts = Timeouts(join_seconds, answer_seconds)
    print(f"the run's agreement is {proposal.agreement}", flush=True)
    with ended_by_signals(), superlink(link, output) as started:
        print(f"nodes connect to port {port}", flush=True)
        folder = started.run(
            proposal, output, timeouts, resume, lambda line: print(line, flush=True)
        )
    print(f"run folder: {folder}")


def client(
    server: Annotated[str, typer.Option(help="The server, HOST:PORT.")],
    number: Annotated[
        int,
        typer.Option("--number", min=0, max=MOST_CLIENTS - 1, help="This client's index, from 0."),
    ],
    ledger: Annotated[
        Path,
        path_option("Folder of your ledgers. Use the same folder for all runs on your records."),
    ],
    data: Annotated[
        Path | None, path_option("Your images, with one folder per class: DIR/CLASS/*.png.")
    ] = None,
    trial: Annotated[
        bool,
        typer.Option("--trial", help="Instead of --data: use your part of the published data set."),
    ] = False,
    data_root: Annotated[
        Path | None, path_option("The folder of data sets for --trial (default: $FEDSYNTH_DATA).")
    ] = None,
    ca: Annotated[Path | None, path_option("The CA's certificate, PEM.")] = None,
    key: Annotated[Path | None, path_option("Your node's private key.")] = None,
    insecure: Insecure = False,
    policy: Annotated[
        Path | None,
        path_option("Your consent policy: the runs that you allow (docs/deployment.md)."),
    ] = None,
    approve: Annotated[
        list[str] | None,
        typer.Option(
            help="An agreement that you allow, as printed by the node; any: all of "
            "them. Repeatable."
        ),
    ] = None,
    identity: Annotated[
        Path | None,
        path_option("Your long-lived private key for secure aggregation, Ed25519 in PEM."),
    ] = None,
    identities: Annotated[
        Path | None,
        path_option("With --identity: a folder of all clients' public keys, client-NNN.pem."),
    ] = None,
    name: Annotated[str, typer.Option(help="The name of your ledger; default: client-NNN.")] = "",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    once: Annotated[bool, typer.Option("--once", help="Exit after one run.")] = False,
    wait: Annotated[
        float,
        typer.Option(help="Exit after this many seconds without a connection to the server."),
    ] = 600.0,
) -> None:
    """Take part in a federation with your own records, your own ledger, and by your own rules.

    Before it joins a run, it prints what it is asked to release and what that costs. It joins what
    --policy allows or --approve names, and nothing else.
    """
    from fedsynth.deployment.flower.processes import require_flower

    require_flower()
    from fedsynth.deployment.flower.joining import Door, join
    from fedsynth.deployment.node import Node
    from fedsynth.deployment.record_source import ClassFolders, PartOf, Source
    from fedsynth.deployment.secure_aggregation.client import read_identities
    from fedsynth.privacy.ledger.folder import check_names

    if (data is None) != trial:
        raise OptionError(
            "--data (your records) or --trial (your part of a published data set) is required"
        )
    if ca is None and not insecure:
        raise OptionError("--ca is required (or --insecure for a trial on this machine only)")
    if (identity is None) != (identities is None):
        raise OptionError("--identity and --identities must be used together")
    check_names([name or f"client-{number:03d}"], 1)
    source: Source = PartOf(data_root) if data is None else ClassFolders(data)
    door = Door(server, ca, key)
    node = Node(number, ledger, source, _owner(policy, approve), name, device, _say)
    if identity is not None and identities is not None:
        node.identities = read_identities(identity, identities)
    with ended_by_signals():
        join(node, door, once=once, wait=wait)


def _say(text: str) -> None:
    print(text, flush=True)


def _owner(policy: Path | None, approve: list[str] | None) -> Owner:
    from fedsynth.deployment.policy import Owner, Policy

    if policy is None and not approve:
        print(
            "note: neither --policy nor --approve is set: runs are printed and declined",
            file=sys.stderr,
        )
    read = None if policy is None else Policy.read(policy)
    return Owner(read, frozenset(approve or ()))


def _proposal(chosen: Sections, config: Path | None, spec: Path | None) -> Proposal:
    """Returns the run of the options, --set and --config."""
    from fedsynth.deployment.proposal import own_proposal

    sections = merged(read_config(config), chosen)
    return own_proposal(sections, spec)
