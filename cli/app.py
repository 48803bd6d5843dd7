"""The command line of fedsynth.

The commands convert options to settings, call the library, and show progress and results. They
contain no other logic. Each command imports torch only when it runs, so that `fedsynth --help` is
fast.
"""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Annotated

import typer

from fedsynth import rank
from fedsynth.cli import application, options, share_commands
from fedsynth.cli.application import say
from fedsynth.cli.deploy_commands import client, deploy_app, server
from fedsynth.cli.privacy_commands import print_dry_run, privacy_app
from fedsynth.cli.runs_commands import plot, report, reproduce, runs, sweep
from fedsynth.results.file_names import CONFIG
from fedsynth.version import __version__

app = typer.Typer(
    name="fedsynth",
    cls=application.OneLineGroup,
    help="Federated learning with synthetic data and differential privacy accounting.",
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)

app.add_typer(privacy_app, name="privacy")
app.add_typer(share_commands.methods_app, name="methods")
app.add_typer(share_commands.data_app, name="data")
app.add_typer(deploy_app, name="deploy")


def main() -> None:
    """Starts the program `fedsynth`, which executes the given command."""
    for stream in (sys.stdout, sys.stderr):  # an old locale must cost only a Greek letter
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    application.wait_passively()
    app()


def _version(requested: bool) -> None:
    if requested:
        print(__version__)
        raise typer.Exit()


@app.callback()
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())
    elif rank.num_ranks() > 1 and context.invoked_subcommand != "train":
        reason = (
            f"{context.invoked_subcommand} was started with torchrun, but uses only one process. "
            "Start it without torchrun"
        )
        raise application.OptionError(reason)


@app.command()
@options.takes_settings(*options.KEYS)
def train(
    chosen: options.Sections,
    context: typer.Context,
    config: options.Config = None,
    preset: options.Preset = None,
    output: options.Output = Path("runs"),
    resume: options.Resume = None,
    log: options.Log = None,
    as_json: options.AsJson = False,
    dry_run: options.DryRun = False,
    download: options.Download = False,
) -> None:
    """Simulate a federation on this machine, and write a run folder.

    A run that was interrupted (Ctrl-C, SIGTERM) or killed can be resumed with --resume.

    To use N processes, such as one for each GPU: `torchrun --nproc-per-node=N -m fedsynth train …`

    Settings that you do not give have the default values of the method (`fedsynth methods show
    NAME`). For the built-in digits, a preset shortens the run. The file config.toml in the run
    folder contains all settings of the run.
    """
    with application.imports_without_gc():
        from fedsynth.cli.progress import make_observer, show_result
        from fedsynth.config.resolve import resolve
        from fedsynth.results.loggers import Several, make_loggers
        from fedsynth.results.run_folder import require_unfinished
        from fedsynth.simulation.simulate import simulate

    if resume is not None:
        options.refuse_beside_resume(context)
        require_unfinished(resume)
        config = resume / CONFIG
    if preset is not None:
        sections = options.from_table(preset, config, chosen, say)
    else:
        sections = options.merged(options.read_config(config), chosen, say)
    settings = resolve(sections)
    if dry_run:
        if rank.this_rank() == 0:
            print_dry_run(settings, as_json)
        return
    application.keep_large_allocations()
    if rank.this_rank():
        simulate(settings, download=download, quiet=True)
        return
    folder = output if resume is None else resume.parent
    loggers = make_loggers(log or [], folder, private=settings.privacy is not None, note=say)
    with make_observer(settings, options.from_preset(sections)) as display:
        observer = Several([display, *loggers])
        result = simulate(
            settings, output=output, observer=observer, download=download, resume=resume
        )
    show_result(result, as_json)


@app.command()
@options.takes_settings("data", "partition", "run.seed")
def partition(chosen: options.Sections, download: options.Download = False) -> None:
    """Show each client's number of examples by class.

    The `train` command divides the examples in the same way if it has the same options.
    """
    from fedsynth.config.resolve import resolve
    from fedsynth.data.partition import count_matrix
    from fedsynth.data.picture import partition_table
    from fedsynth.federation.run_data import data_of_run
    from fedsynth.simulation.simulate import among_clients

    settings = resolve(options.merged({}, chosen))
    loaded = data_of_run(settings, None, None, application.note, download=download)
    loaded, clients = among_clients(loaded)
    train = loaded.train
    print(partition_table(count_matrix(train.labels.numpy(), clients.parts, train.spec.classes)))


for command in (
    share_commands.distill, server, client, runs, sweep, plot, report, reproduce,
    share_commands.synthesize, share_commands.export, share_commands.student,
    share_commands.fidelity,
):  # fmt: skip
    app.command()(command)
