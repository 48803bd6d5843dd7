"""`fedsynth server`, `fedsynth client` and `fedsynth deploy …`: a federation over machines, on
Flower."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedsynth.cli import options as given
from fedsynth.cli.errors import OptionError, one_line_errors
from fedsynth.cli.option_names import OptionNames, sections_of
from fedsynth.cli.paths import PATH, named_path
from fedsynth.cli.settings_options import merged, read_config, with_set_options
from fedsynth.cli.signals import ended_by_signals

if TYPE_CHECKING:
    from fedsynth.federation.nodes.policy import Owner
    from fedsynth.federation.nodes.proposal import Proposal

deploy_app = typer.Typer(
    help="Prepare a federation over machines: its keys, a Flower app folder.", no_args_is_help=True
)


def _file(help: str, *names: str) -> Any:
    return typer.Option(*names, parser=named_path, metavar=PATH, help=help)


Spec = Annotated[
    Path | None,
    _file("A TOML file with the specification of your own data (public); default: the data set's."),
]
Insecure = Annotated[
    bool, typer.Option("--insecure", help="Without TLS: for trials on one machine alone.")
]


@deploy_app.command("init")
def init(
    context: typer.Context,
    folder: Annotated[
        Path, typer.Argument(parser=named_path, metavar=PATH, help="The folder; made.")
    ],
    method: given.Method = None,
    config: given.Config = None,
    settings: given.Set = None,
    rounds: given.Rounds = None,
    seed: given.Seed = None,
    dataset: given.Dataset = None,
    clients: given.Clients = None,
    spec: Spec = None,
) -> None:
    """Write a Flower app folder of a run, for `flwr run` and Flower's own simulation."""
    with one_line_errors(context.command) as names:
        from fedsynth.federation.flower.app_folder import write_app

        proposal = _proposal(context, names, config, settings, spec)
        options = {"output": str(Path("runs").absolute()), "home": str(Path("homes").absolute())}
        write_app(folder, proposal, options)
        print(
            f"{folder} is a Flower app of the run with agreement {proposal.agreement}; what is "
            "next stands in docs/deployment.md"
        )


@deploy_app.command("keys")
def keys(
    context: typer.Context,
    folder: Annotated[
        Path, typer.Argument(parser=named_path, metavar=PATH, help="The folder; made.")
    ],
    clients: Annotated[int, typer.Option(help="How many clients.")],
    host: Annotated[
        list[str] | None,
        typer.Option(help="The server's name or address, as clients know it; may be repeated."),
    ] = None,
    days: Annotated[int, typer.Option(help="How long certificates are valid.")] = 365,
) -> None:
    """Make a CA, the server's certificate, and a key for each client."""
    with one_line_errors(context.command):
        from fedsynth.federation.flower.keys import make_keys

        make_keys(folder, clients, tuple(host or ()), days)
        print(
            f"{folder}: server.crt, server.key and all client-*.pub are the server's; each client "
            "gets ca.crt and its own client-NNN, and nobody else does"
        )


def server(
    context: typer.Context,
    method: given.Method = None,
    config: given.Config = None,
    settings: given.Set = None,
    rounds: given.Rounds = None,
    seed: given.Seed = None,
    dataset: given.Dataset = None,
    clients: given.Clients = None,
    spec: Spec = None,
    keys: Annotated[
        Path | None,
        _file("Folder with server.crt, server.key, ca.crt, client-NNN.pub (fedsynth deploy keys)."),
    ] = None,
    insecure: Insecure = False,
    host: Annotated[str, typer.Option(help="127.0.0.1, or 0.0.0.0 for nodes elsewhere.")] = (
        "127.0.0.1"
    ),
    port: Annotated[int, typer.Option(help="Nodes connect there.")] = 9092,
    join_seconds: Annotated[float, typer.Option(help="Seconds that clients have to join.")] = 600.0,
    answer_seconds: Annotated[
        float, typer.Option(help="Seconds that a client has for a step; then it is lost.")
    ] = 3600.0,
    output: given.Output = Path("runs"),
    resume: given.Resume = None,
) -> None:
    """Serve one run to data owners' nodes, over Flower, and leave a run folder."""
    with one_line_errors(context.command) as names:
        from fedsynth.federation.flower.processes import require_flower

        require_flower()
        from fedsynth.federation.flower.serving import Link, Tls, key_files, superlink
        from fedsynth.federation.nodes.to_nodes import Patience

        if resume is not None:
            if config is not None or settings:
                raise OptionError("--resume goes on with the run's own config.toml")
            config = resume / "config.toml"
        proposal = _proposal(context, names, config, settings, spec)
        tls = None
        files: list[Path] = []
        if keys is not None:
            tls = Tls(keys / "server.crt", keys / "server.key", keys / "ca.crt")
            files = key_files(keys, proposal.settings.partition.clients)
        elif not insecure:
            raise OptionError("--keys is needed, or --insecure for a trial on this machine alone")
        patience = Patience(join_seconds, answer_seconds)
        print(f"the run's agreement is {proposal.agreement}", flush=True)
        with ended_by_signals(), superlink(Link(port, tls, host, files), output) as started:
            print(f"nodes connect to port {port}", flush=True)
            folder = started.run(
                proposal, output, patience, resume, lambda line: print(line, flush=True)
            )
        print(f"run folder: {folder}")


def client(
    context: typer.Context,
    server: Annotated[str, typer.Option(help="The server, HOST:PORT.")],
    number: Annotated[int, typer.Option("--number", min=0, help="This client's, from 0.")],
    ledger: Annotated[Path, _file("Folder of your ledgers, kept over all runs on your records.")],
    data: Annotated[
        Path | None, _file("Your images, in a folder for each class: DIR/CLASS/*.png.")
    ] = None,
    trial: Annotated[
        bool,
        typer.Option("--trial", help="In place of --data: your part of the published data set."),
    ] = False,
    data_root: Annotated[
        Path | None, _file("Of a trial, the folder of data sets (default: $FEDSYNTH_DATA).")
    ] = None,
    ca: Annotated[Path | None, _file("The CA's certificate, PEM.")] = None,
    key: Annotated[Path | None, _file("Your node's private key.")] = None,
    insecure: Insecure = False,
    policy: Annotated[Path | None, _file("What you allow (docs/deployment.md).")] = None,
    approve: Annotated[
        list[str] | None,
        typer.Option(help="An agreement that you allow, as it is shown; any: all. Repeatable."),
    ] = None,
    identity: Annotated[
        Path | None, _file("For secure sums, your long-lived private key, Ed25519 in PEM.")
    ] = None,
    identities: Annotated[
        Path | None, _file("With it, a folder of all clients' public keys, client-NNN.pem.")
    ] = None,
    name: Annotated[str, typer.Option(help="Of your ledger; default client-NNN.")] = "",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    once: Annotated[bool, typer.Option("--once", help="Leave when a run has ended.")] = False,
    wait: Annotated[
        float, typer.Option(help="Seconds to ask a server again that does not know you yet.")
    ] = 0.0,
) -> None:
    """Take part in a federation with your own records, your own ledger, and by your own rules.

    Before it joins a run, it prints what it is asked to release and what that costs. It joins what
    --policy allows or --approve names, and nothing else.
    """
    with one_line_errors(context.command):
        from fedsynth.federation.flower.processes import require_flower

        require_flower()
        from fedsynth.federation.flower.joining import Door, join
        from fedsynth.federation.nodes.identities import read_identities
        from fedsynth.federation.nodes.node import Node
        from fedsynth.federation.nodes.own_data import ClassFolders, PartOf, Source
        from fedsynth.privacy.ledger_folder import check_names

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
    from fedsynth.federation.nodes.policy import Owner, Policy

    if policy is None and not approve:
        print("note: neither --policy nor --approve: runs are shown, and declined", file=sys.stderr)
    read = None if policy is None else Policy.read(policy)
    return Owner(read, frozenset(approve or ()))


def _proposal(
    context: typer.Context,
    names: OptionNames,
    config: Path | None,
    settings: list[str] | None,
    spec: Path | None,
) -> Proposal:
    """The run that the options say."""
    from fedsynth.federation.nodes.proposal import own_proposal

    chosen = with_set_options(sections_of(context.params), settings or [], names)
    sections = merged(read_config(config), chosen)
    return own_proposal(sections, spec)
