"""The commands `fedsynth server`, `fedsynth client` and `fedsynth deploy …`.

These commands run a federation over several machines, with Flower."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedsynth.cli import options
from fedsynth.cli.application import OptionError, note
from fedsynth.data.partition_settings import MAX_CLIENTS
from fedsynth.files import write_output

if TYPE_CHECKING:
    from fedsynth.deployment.policy import Owner
    from fedsynth.deployment.proposal import Proposal

deploy_app = typer.Typer(help="Prepare a run over several machines.", no_args_is_help=True)
# The settings that have an option. `--set` sets all others.
RUN = (
    "run.method", "run.rounds", "run.seed", "data.dataset", "partition.clients", "privacy.epsilon",
)  # fmt: skip

OptionalPath = Path | None
Spec = Annotated[OptionalPath, options.path_option("The public specification of the data (TOML).")]
Insecure = Annotated[bool, options.flag("--insecure", "Use no TLS, for local trials only.")]
NewFolder = Annotated[Path, options.path_argument("The folder to create.")]


@deploy_app.command("init")
@options.takes_settings(*RUN)
def init(
    chosen: options.Sections, folder: NewFolder, config: options.Config = None, spec: Spec = None
) -> None:
    """Write a run as a Flower app, for `flwr run` and Flower's own simulation."""
    from fedsynth.deployment.flower.serving import write_app

    proposal = _proposal(chosen, config, spec)
    places = {"output": str(Path("runs").absolute()), "home": str(Path("homes").absolute())}
    write_app(folder, proposal, places)
    print(f"{folder} contains the Flower app. The agreement of the run is {proposal.agreement}")


@deploy_app.command("settings")
@options.takes_settings(*RUN)
def settings_file(
    chosen: options.Sections,
    file: Annotated[Path, options.path_argument("The TOML file to write, such as run.toml.")],
    spec: Spec = None,
) -> None:
    """Write a file with all settings of a run, for `fedsynth server --config`.

    Settings that you do not give have the default values of the method. You can edit the file.
    """
    from fedsynth.validation import to_toml

    if file.exists():
        raise OptionError(f"{file} already exists. Remove it, or name a new file")
    write_output(file, to_toml(_proposal(chosen, None, spec).settings.to_mapping()).encode())
    print(f"written: {file}")


@deploy_app.command("keys")
def keys(
    folder: NewFolder,
    clients: Annotated[int, typer.Option(help="The number of clients.")],
    host: Annotated[list[str] | None, typer.Option(help="The server's name. Repeatable.")] = None,
) -> None:
    """Create a key and a certificate for the server, and a key for each client."""
    from fedsynth.deployment.flower.processes import require_flower

    require_flower()
    from fedsynth.deployment.flower.keys import make_keys

    make_keys(folder, clients, host or ())
    print(f"give the server the files server.crt, server.key and client-*.pub in {folder}")
    print("give each client the file server.crt and only the key client-NNN with its number")


@options.takes_settings(*RUN)
def server(
    chosen: options.Sections,
    spec: Spec = None,
    keys: Annotated[OptionalPath, options.path_option("From `fedsynth deploy keys`.")] = None,
    insecure: Insecure = False,
    host: Annotated[str, typer.Option(help="Use 0.0.0.0 for remote clients.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="The port for the clients.")] = 9092,
    join_seconds: Annotated[
        float, typer.Option(help="Seconds in which all clients must join.")
    ] = 600.0,
    answer_seconds: Annotated[float, typer.Option(help="Seconds that a step may take.")] = 3600.0,
    config: options.Config = None,
    output: options.Output = Path("runs"),
    resume: options.Resume = None,
) -> None:
    """Start the server for one run. Data owners' nodes connect to it through Flower.

    The server writes a run folder.
    """
    from fedsynth.deployment.flower.processes import require_flower

    require_flower()
    from fedsynth.deployment.flower.serving import SuperLinkSettings, superlink
    from fedsynth.deployment.frames import Timeouts
    from fedsynth.deployment.proposal import new_proposal, served_proposal

    if resume is None:
        proposal = _proposal(chosen, config, spec)
    else:
        if config is not None or spec is not None or any(chosen.values()):
            raise OptionError(
                "--resume cannot change settings. Remove --config, --spec and all settings"
            )
        sections = options.read_config(resume / "config.toml")
        proposal = new_proposal(sections, served_proposal(resume).spec)
    if keys is None and not insecure:
        raise OptionError("--keys is required. For a trial on one machine, use --insecure instead")
    settings = SuperLinkSettings(port, keys, proposal.settings.partition.clients, host)
    timeouts = Timeouts(join_seconds, answer_seconds)
    print(f"the agreement of the run is {proposal.agreement}", flush=True)
    with superlink(settings, output) as started:
        print(f"clients can now connect to port {port}", flush=True)
        folder = started.run(proposal, output, timeouts, resume, _say)
    print(f"run folder: {folder}")


def client(
    server: Annotated[str, typer.Option(help="The address of the server, as HOST:PORT.")],
    number: Annotated[int, typer.Option(min=0, max=MAX_CLIENTS - 1, help="The client's index.")],
    ledger: Annotated[Path, options.path_option("Your ledger folder, the same for all runs.")],
    data: Annotated[OptionalPath, options.path_option("Your images, as DIR/CLASS/*.png.")] = None,
    trial: Annotated[bool, options.flag("--trial", "Use part of a published data set.")] = False,
    ca: Annotated[OptionalPath, options.path_option("The trusted certificate, server.crt.")] = None,
    key: Annotated[OptionalPath, options.path_option("Your private key, client-NNN.")] = None,
    insecure: Insecure = False,
    policy: Annotated[OptionalPath, options.path_option("Rules for allowed runs.")] = None,
    approve: Annotated[
        list[str] | None, typer.Option(help="A run's agreement, or 'any'. May be repeated.")
    ] = None,
    identity: Annotated[
        OptionalPath, options.path_option("Your Ed25519 key for secure aggregation, in PEM format.")
    ] = None,
    identities: Annotated[
        OptionalPath, options.path_option("The folder with all public keys, client-NNN.pem.")
    ] = None,
    device: Annotated[str, typer.Option(help="The device: auto, cpu or cuda.")] = "auto",
    once: Annotated[bool, options.flag("--once", "Exit after one run.")] = False,
    wait: Annotated[
        float, typer.Option(help="Seconds without a server after which the client exits.")
    ] = 600.0,
) -> None:
    """Take part in a federation with your own data, your own ledger and your own rules.

    Before joining a run, the client prints what the run asks it to release, and the privacy cost.
    The client joins only runs that --policy or --approve allows.
    """
    from fedsynth.deployment.flower.processes import require_flower

    require_flower()
    from fedsynth.data.tables import is_record_file
    from fedsynth.deployment.flower.joining import ServerConnection, join
    from fedsynth.deployment.node import ClassFolders, DatasetPart, Node
    from fedsynth.deployment.secure_aggregation.client import read_identities

    if (data is None) != trial:
        state = "missing" if data is None else "set"
        raise OptionError(f"--data and --trial are both {state}. Set exactly one of them")
    if data is not None and is_record_file(data):
        raise OptionError(f"--data={data} is not a folder of images. Convert the data to images")
    if ca is None and not insecure:
        raise OptionError("--ca is required. For a trial on one machine, use --insecure instead")
    if (identity is None) != (identities is None):
        raise OptionError("only one of --identity and --identities is set. Set both options")
    source = DatasetPart() if data is None else ClassFolders(data)
    connection = ServerConnection(server, ca, key)
    node = Node(number, ledger, _owner(policy, approve), device, _say, source=source)
    if identity is not None and identities is not None:
        node.identities = read_identities(identity, identities)
    join(node, connection, once=once, wait=wait)


_say = partial(print, flush=True)


def _owner(policy: Path | None, approve: list[str] | None) -> Owner:
    from fedsynth.deployment.policy import Owner, Policy

    approved = frozenset(approve or ())
    if policy is not None:
        return Owner(Policy.read(policy), approved)
    if not approved:
        note("without --policy or --approve, this client declines all runs")
    return Owner(None, approved)


def _proposal(chosen: options.Sections, config: Path | None, spec: Path | None) -> Proposal:
    """Creates the proposal for a run from the options, --set and --config.

    It prints a note if the run has no differential privacy.
    """
    from fedsynth.config.loading import code_options
    from fedsynth.deployment.proposal import new_proposal, read_spec
    from fedsynth.results.run_messages import UNPROTECTED

    sections = options.merged(options.read_config(config), chosen)
    proposal = new_proposal(sections, None if spec is None else read_spec(spec))
    if code := code_options(proposal.settings):
        raise OptionError(
            f"the custom code {code[1]} cannot be used in a deployment, because owners run only "
            "the installed package. Use a built-in method or model"
        )
    if proposal.settings.privacy is None:
        note(UNPROTECTED)
    return proposal
