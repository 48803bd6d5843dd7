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
    help="Prepare a federation over machines: its keys, a Flower app folder.", no_args_is_help=True
)
RUN = ("run.method", "run.rounds", "run.seed", "data.dataset", "partition.clients")
"""The settings with an option; `--set` sets the others."""
Spec = Annotated[
    Path | None,
    path_option(
        "A TOML file with the specification of your own data (public); default: the data set's."
    ),
]
Insecure = Annotated[
    bool, typer.Option("--insecure", help="Without TLS: for trials on one machine only.")
]
NewFolder = Annotated[Path, path_argument("The folder to be made.")]


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
        f"{folder} is a Flower app of the run with agreement {proposal.agreement}; what is "
        "next stands in docs/deployment.md"
    )


@deploy_app.command("keys")
def keys(
    folder: NewFolder,
    clients: Annotated[int, typer.Option(help="How many clients.")],
    host: Annotated[
        list[str] | None,
        typer.Option(help="The server's name or address, as clients know it; may be repeated."),
    ] = None,
    days: Annotated[int, typer.Option(help="How long certificates are valid.")] = 365,
) -> None:
    """Make a CA, the server's certificate, and a key for each client."""
    from fedsynth.deployment.flower.keys import make_keys

    make_keys(folder, clients, tuple(host or ()), days)
    print(
        f"{folder}: server.crt, server.key and all client-*.pub are the server's; each client "
        "gets ca.crt and its own client-NNN, and nobody else does"
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
    host: Annotated[str, typer.Option(help="127.0.0.1, or 0.0.0.0 for nodes elsewhere.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(min=1, max=65535, help="Nodes connect there.")] = 9092,
    join_seconds: Annotated[float, typer.Option(help="Seconds that clients have to join.")] = 600.0,
    answer_seconds: Annotated[
        float, typer.Option(help="Seconds that a client has for a step; then it is lost.")
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
            raise OptionError("--resume takes the run's own config.toml, and no other settings")
        config = resume / "config.toml"
    proposal = _proposal(chosen, config, spec)
    if keys is None and not insecure:
        raise OptionError("--keys is needed, or --insecure for a trial on this machine alone")
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
        int, typer.Option("--number", min=0, max=MOST_CLIENTS - 1, help="This client's, from 0.")
    ],
    ledger: Annotated[
        Path, path_option("Folder of your ledgers, kept over all runs on your records.")
    ],
    data: Annotated[
        Path | None, path_option("Your images, in a folder for each class: DIR/CLASS/*.png.")
    ] = None,
    trial: Annotated[
        bool,
        typer.Option("--trial", help="In place of --data: your part of the published data set."),
    ] = False,
    data_root: Annotated[
        Path | None, path_option("Of a trial, the folder of data sets (default: $FEDSYNTH_DATA).")
    ] = None,
    ca: Annotated[Path | None, path_option("The CA's certificate, PEM.")] = None,
    key: Annotated[Path | None, path_option("Your node's private key.")] = None,
    insecure: Insecure = False,
    policy: Annotated[Path | None, path_option("What you allow (docs/deployment.md).")] = None,
    approve: Annotated[
        list[str] | None,
        typer.Option(help="An agreement that you allow, as it is shown; any: all. Repeatable."),
    ] = None,
    identity: Annotated[
        Path | None, path_option("For secure sums, your long-lived private key, Ed25519 in PEM.")
    ] = None,
    identities: Annotated[
        Path | None, path_option("With it, a folder of all clients' public keys, client-NNN.pem.")
    ] = None,
    name: Annotated[str, typer.Option(help="Of your ledger; default client-NNN.")] = "",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    once: Annotated[bool, typer.Option("--once", help="Leave when a run has ended.")] = False,
    wait: Annotated[
        float,
        typer.Option(help="Seconds without a connection to the server after which to give up."),
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
        raise OptionError("--data names your records; or --trial, a published data set's part")
    if ca is None and not insecure:
        raise OptionError("--ca is needed, or --insecure for a trial on this machine alone")
    if (identity is None) != (identities is None):
        raise OptionError("--identity and --identities belong together")
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
        print("note: neither --policy nor --approve: runs are shown, and declined", file=sys.stderr)
    read = None if policy is None else Policy.read(policy)
    return Owner(read, frozenset(approve or ()))


def _proposal(chosen: Sections, config: Path | None, spec: Path | None) -> Proposal:
    """Returns the run of the options, --set and --config."""
    from fedsynth.deployment.proposal import own_proposal

    sections = merged(read_config(config), chosen)
    return own_proposal(sections, spec)
