"""The command line: it turns options into settings, calls the library and shows what happens. No logic of its own.

torch is imported by the commands, not here, so that `fedsynth --help` answers at once.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from fedsynth import __version__
from fedsynth.cli.method_commands import distill, methods_app
from fedsynth.cli.privacy_commands import privacy_app
from fedsynth.cli.settings_options import merged, read_config, with_set_options
from fedsynth.errors import FedsynthError
from fedsynth.privacy.errors import PrivacyError

# The parser's own errors (an unknown option, text in place of a number). Where they live depends on typer's version.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]


class _OneLineGroup(TyperGroup):
    """Like every other mistake of a user, a mistyped option is one line and exit code 2, not a box of several."""

    def main(self, *args: Any, **options: Any) -> Any:
        standalone = options.pop("standalone_mode", True)
        try:
            code = super().main(*args, **options, standalone_mode=False)  # type: ignore[misc]  # nobody gives it by position
        except _UsageError as error:
            where = getattr(getattr(error, "ctx", None), "command_path", self.name)
            _fail(f"{error.format_message().rstrip('.')} (see {where} --help)")  # type: ignore[attr-defined]
        if standalone:
            sys.exit(code)
        return code


def _fail(text: str) -> NoReturn:
    print(f"fedsynth: error: {' '.join(text.split())}", file=sys.stderr)
    sys.exit(2)


app = typer.Typer(
    name="fedsynth",
    cls=_OneLineGroup,
    help="Federated learning by synthetic data, with differential privacy that is accounted for.",
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

app.add_typer(privacy_app, name="privacy")
app.add_typer(methods_app, name="methods")
app.command()(distill)

PARTITIONS = "iid, dirichlet, dirichlet-plain, classes, missing, dominant, quantity, domain or natural (as the data come)."
DATA, PRIVACY, MODEL = "Data and partition", "Differential privacy", "Model"


def main() -> None:
    """Entry point of the `fedsynth` command."""
    for stream in (sys.stdout, sys.stderr):  # an old locale shall cost a Greek letter, not the run
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    app()


@contextmanager
def one_line_errors() -> Iterator[None]:
    """A user's mistake is one line on stderr and exit code 2; a mistake of ours keeps its traceback."""
    try:
        yield
    except (FedsynthError, PrivacyError) as error:
        _fail(str(error))
    except KeyboardInterrupt:
        print("fedsynth: interrupted; the run folder keeps its .incomplete ending", file=sys.stderr)
        raise typer.Exit(130) from None


def _version(asked: bool) -> None:
    if asked:
        print(__version__)
        raise typer.Exit()


@app.callback()
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command()
def train(
    method: Annotated[str | None, typer.Option(help="feddm, fedaf, fedkf, … (see `fedsynth methods`).")] = None,
    config: Annotated[
        Path | None, typer.Option(help="A config.toml of an earlier run, or your own; options given here win.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="A setting of the method, KEY=VALUE, or of another section, model.projection=256; may be repeated."
        ),
    ] = None,
    ipc: Annotated[int | None, typer.Option(help="Synthetic images per class (same as --set ipc=N).")] = None,
    matching: Annotated[
        str | None,
        typer.Option(
            help="mean (the papers'), gaussian, energy or sinkhorn: what condensation matches (same as --set matching=…)."
        ),
    ] = None,
    rounds: Annotated[int | None, typer.Option(help="Communication rounds.")] = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed of everything but privacy's noise and masks (a config's own partition seed stays).")
    ] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda.")] = None,
    precision: Annotated[str | None, typer.Option(help="fp32 or bf16, of condensation's passes over real images.")] = None,
    compile_passes: Annotated[
        bool | None,
        typer.Option(
            "--compile/--no-compile", help="Let torch.compile make the passes over real images (long runs gain; not with DP)."
        ),
    ] = None,
    memory_gb: Annotated[
        float | None,
        typer.Option(help="Memory that steps stay within, by letting fewer clients share one; default 4, on a GPU half of it."),
    ] = None,
    output: Annotated[Path, typer.Option(help="Where run folders go.")] = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON on stdout.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what the run would cost in privacy, touch no data, and stop.")
    ] = False,
    dataset: Annotated[
        str | None,
        typer.Option(
            help="digits (embedded), mnist, fashion-mnist, emnist-letters, cifar10, cifar100, svhn, cinic10, tiny-imagenet, femnist, "
            "office-caltech-10, domainnet-10, 'synthetic(1,1)'.",
            rich_help_panel=DATA,
        ),
    ] = None,
    data_root: Annotated[
        Path | None, typer.Option(help="Folder of the data sets; else $FEDSYNTH_DATA.", rich_help_panel=DATA)
    ] = None,
    download: Annotated[
        bool, typer.Option("--download", help="Let torchvision fetch the data set.", rich_help_panel=DATA)
    ] = False,
    partition: Annotated[str | None, typer.Option(help=PARTITIONS, rich_help_panel=DATA)] = None,
    clients: Annotated[int | None, typer.Option(help="Number of clients.", rich_help_panel=DATA)] = None,
    alpha: Annotated[
        float | None, typer.Option(help="Concentration of dirichlet and quantity; small is skewed.", rich_help_panel=DATA)
    ] = None,
    classes_per_client: Annotated[int | None, typer.Option(help="For --partition classes.", rich_help_panel=DATA)] = None,
    min_size: Annotated[
        int | None, typer.Option(help="Fewest examples of a client (dirichlet, quantity).", rich_help_panel=DATA)
    ] = None,
    subset: Annotated[
        float | None, typer.Option(help="Share of each class's examples that is used at all.", rich_help_panel=DATA)
    ] = None,
    local_test: Annotated[
        float | None,
        typer.Option(help="Share of each client's examples that tests: AMP, FM and WLP.", rich_help_panel=DATA),
    ] = None,
    participation: Annotated[
        float | None, typer.Option(help="Share of the clients that takes part in a round.", rich_help_panel=DATA)
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "--server-model",
            help="convnet, linear, lenet5, cnn1, cnn2, resnet8, resnet18, resnet50, alexnet or googlenet.",
            rich_help_panel=MODEL,
        ),
    ] = None,
    client_models: Annotated[
        str | None,
        typer.Option(
            help="The clients' own architectures, comma-separated, dealt out in turn (one-shot methods).", rich_help_panel=MODEL
        ),
    ] = None,
    width: Annotated[int | None, typer.Option(help="Channels of a block.", rich_help_panel=MODEL)] = None,
    depth: Annotated[int | None, typer.Option(help="Number of blocks.", rich_help_panel=MODEL)] = None,
    norm: Annotated[
        str | None, typer.Option(help="instance, group, batch or none; the model's own if not given.", rich_help_panel=MODEL)
    ] = None,
    dp_epsilon: Annotated[
        float | None,
        typer.Option(
            help="Budget ε of each client. Alone: σ is found for the run. With --dp-sigma: a hard cap.", rich_help_panel=PRIVACY
        ),
    ] = None,
    dp_sigma: Annotated[float | None, typer.Option(help="Noise multiplier σ of each release.", rich_help_panel=PRIVACY)] = None,
    dp_clip: Annotated[
        float | None, typer.Option(help="L2 bound of one example's contribution.", rich_help_panel=PRIVACY)
    ] = None,
    dp_delta: Annotated[
        float | None, typer.Option(help="δ, a constant (default 1e-5), at most 1 / max-records.", rich_help_panel=PRIVACY)
    ] = None,
    dp_max_records: Annotated[
        int | None,
        typer.Option(
            help="Public bound on all clients' records; default: the data set's published size.", rich_help_panel=PRIVACY
        ),
    ] = None,
    dp_mechanism: Annotated[
        str | None,
        typer.Option(
            help="residual (default), gradient, features, or paper (no guarantee); dp-sgd for methods that send models.",
            rich_help_panel=PRIVACY,
        ),
    ] = None,
    dp_sample_rate: Annotated[
        float | None, typer.Option(help="Public rate q of Poisson sampling.", rich_help_panel=PRIVACY)
    ] = None,
    dp_nominal_size: Annotated[
        float | None, typer.Option(help="Public nominal records of a client, for divisors.", rich_help_panel=PRIVACY)
    ] = None,
    dp_adjacency: Annotated[
        str | None, typer.Option(help="add-remove (default), zero-out or replace-one.", rich_help_panel=PRIVACY)
    ] = None,
    dp_four_sums: Annotated[
        bool | None,
        typer.Option(
            "--dp-four-sums/--no-dp-four-sums", help="Each noise value from four Gaussians: hardens it.", rich_help_panel=PRIVACY
        ),
    ] = None,
    dp_ledger: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the clients' ledgers, kept over runs; else the simulated data count as public.",
            rich_help_panel=PRIVACY,
        ),
    ] = None,
) -> None:
    """Simulate a federation on this machine and leave a run folder.

    Defaults are the method's (`fedsynth methods`), but for the embedded digits, which have a short preset; the run folder's config.toml
    shows what was used.
    """
    with one_line_errors():
        given: dict[str, dict[str, Any]] = {
            "run": {
                "method": method,
                "rounds": rounds,
                "seed": seed,
                "device": device,
                "precision": precision,
                "compile": compile_passes,
                "memory_gb": memory_gb,
                "participation": participation,
            },
            "data": {"dataset": dataset, "data_root": str(data_root) if data_root else None},
            "partition": {
                "kind": partition,
                "clients": clients,
                "alpha": alpha,
                "classes_per_client": classes_per_client,
                "min_size": min_size,
                "subset": subset,
                "local_test": local_test,
            },
            "model": {"name": model, "clients": client_models, "width": width, "depth": depth, "norm": norm},
            "method": {"ipc": ipc, "matching": matching},
            "privacy": {
                "noise_multiplier": dp_sigma,
                "epsilon": dp_epsilon,
                "clip": dp_clip,
                "delta": dp_delta,
                "max_records": dp_max_records,
                "mechanism": dp_mechanism,
                "sample_rate": dp_sample_rate,
                "nominal_size": dp_nominal_size,
                "adjacency": dp_adjacency,
                "four_sums": dp_four_sums,
                "ledger": str(dp_ledger) if dp_ledger else None,
            },
        }
        flags = {"kind": "partition", "name": "model", "noise_multiplier": "dp-sigma", "epsilon": "dp-epsilon"}
        sections = merged(read_config(config), with_set_options(given, settings or [], flags))
        if dry_run:
            _dry_run(sections, as_json)
        else:
            _run(sections, output, download, as_json)


@app.command()
def partition(
    dataset: Annotated[str | None, typer.Option(help="Which data set; default: the embedded digits.")] = None,
    data_root: Annotated[Path | None, typer.Option(help="Folder of the data sets; else $FEDSYNTH_DATA.")] = None,
    kind: Annotated[str | None, typer.Option("--partition", help=PARTITIONS)] = None,
    clients: Annotated[int | None, typer.Option(help="Number of clients.")] = None,
    alpha: Annotated[float | None, typer.Option(help="Concentration of dirichlet and quantity; small is skewed.")] = None,
    classes_per_client: Annotated[int | None, typer.Option(help="For --partition classes.")] = None,
    min_size: Annotated[int | None, typer.Option(help="Fewest examples of a client (dirichlet, quantity).")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the partition; default 0.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="Another setting, as partition.dominant_share=0.7; may be repeated.")
    ] = None,
    ipc: Annotated[int | None, typer.Option(help="Images per class, for FedDM's upload volume below the table.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Also write the picture to this PNG file.")] = None,
) -> None:
    """Show who has what: examples of each class at each client, as `train` with the same options divides them."""
    with one_line_errors():
        chosen = {
            "kind": kind,
            "clients": clients,
            "alpha": alpha,
            "classes_per_client": classes_per_client,
            "min_size": min_size,
        }
        given: dict[str, dict[str, Any]] = {
            "run": {"seed": seed},
            "data": {"dataset": dataset, "data_root": str(data_root) if data_root else None},
            "partition": chosen,
            "method": {"ipc": ipc},
        }
        _show_partition(merged({}, with_set_options(given, settings or [])), picture)


def _show_partition(sections: dict[str, dict[str, Any]], picture: Path | None) -> None:
    from fedsynth.data.load import load_dataset
    from fedsynth.data.partition import count_matrix
    from fedsynth.data.partition import partition as divide
    from fedsynth.data.picture import partition_png, partition_table
    from fedsynth.evaluation.volume import condensation_floats
    from fedsynth.federation.settings import resolve
    from fedsynth.methods.feddm import FedDM

    settings = resolve(sections)
    data, _ = load_dataset(settings.dataset, settings.data_root)
    labels = data.labels.numpy()
    parts = divide(labels, settings.resolved_partition, data.spec.classes, *data.origins())
    counts = count_matrix(labels, parts, data.spec.classes)
    feddm = settings.method
    print(partition_table(counts))
    if isinstance(feddm, FedDM):
        floats = condensation_floats(counts, feddm.ipc, data.spec.image_shape, feddm.min_examples)
        print(f"\nFedDM with ipc {feddm.ipc} and min_examples {feddm.min_examples} uploads {floats:,} floats a round")
    if picture is not None:
        partition_png(counts, picture)


def _dry_run(sections: dict[str, dict[str, Any]], as_json: bool) -> None:
    from fedsynth.cli.privacy_commands import print_plans
    from fedsynth.federation.devices import check_compiler, resolve_device
    from fedsynth.federation.planning import Plan, private_run
    from fedsynth.federation.settings import resolve

    settings = resolve(sections)
    device = resolve_device(settings.device)
    if settings.compile:
        check_compiler(device)
    if settings.privacy is None:
        if as_json:
            print(json.dumps({"guarantee": False}))
            return
        print("no differential privacy: what clients send is not protected (--dp-epsilon protects it)")
        return
    run = private_run(settings)
    if run.guaranteed:
        run.check_round(1)  # as the run itself would
    if as_json:
        plan = {"epsilon": run.planned_epsilon_by_round(), "delta": run.privacy.delta} if run.guaranteed else {}
        print(json.dumps({"guarantee": run.guaranteed, "noise_multiplier": run.privacy.noise_multiplier, **plan}, indent=2))
        return
    for line in run.headline():
        print(line)
    if run.guaranteed:
        releases = sum(plan.steps for plan in run.plans)
        spent, sigma = run.planned_epsilon_by_round(), run.privacy.noise_multiplier or 0.0
        chief, privacy = run.plan, run.privacy
        rows = [Plan(chief.mechanism, sigma, chief.clip, chief.sample_rate, releases, spent, privacy.delta, privacy.epsilon)]
        print_plans(rows)


def _run(sections: dict[str, dict[str, Any]], output: Path, download: bool, as_json: bool) -> None:
    from fedsynth.cli.memory import keep_large_allocations
    from fedsynth.cli.progress import make_observer, print_summary
    from fedsynth.federation.settings import resolve
    from fedsynth.federation.simulation import simulate

    settings = resolve(sections)
    keep_large_allocations()
    with make_observer(settings) as observer:
        result = simulate(settings, output=output, observer=observer, download=download)
    if as_json:
        print(json.dumps(result.summary, indent=2, allow_nan=False))
    else:
        print_summary(result)
