"""`fedsynth sweep`: a grid of runs from one file, and their table."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from fedsynth.cli.errors import write_text
from fedsynth.cli.paths import path_argument, path_option
from fedsynth.cli.signals import ended_by_signals

COMMAND = (sys.executable, "-c", "from fedsynth.cli.app import main; main()")


def sweep(
    file: Annotated[Path, path_argument("The sweep, in TOML.", metavar="FILE")],
    form: Annotated[str, typer.Option("--format", help="table, csv, latex or markdown.")] = "table",
    output: Annotated[
        Path | None,
        path_option("Folder of the runs; default: the file's."),
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(help="Runs at once; default: the file's, or 1.")
    ] = None,
    memory_gb: Annotated[
        float | None, typer.Option(help="What all runs at once may take; default: the file's.")
    ] = None,
    table: Annotated[
        Path | None,
        path_option("Write the table there."),
    ] = None,
    only_table: Annotated[
        bool, typer.Option("--only-table", help="Make no run; show what has finished.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check all settings and list the runs.")
    ] = False,
) -> None:
    """Make a grid of runs (methods, partitions, seeds, any setting) and print mean ± standard
    deviation over seeds.

    A sweep that was stopped goes on where it was: finished runs are kept, others resumed. The file
    has sections as a run's config.toml, which all runs share, and `[grid]`, in which each list is
    an axis: docs/sweeps.md.

    Example: `[grid]` with `method = ["fedavg", "feddm"]`, `alpha = [0.1, 1.0]`, `seed = [0, 1, 2]`.
    """
    from fedsynth.runs.sweep import finished, run_sweep
    from fedsynth.runs.sweep_file import read_sweep
    from fedsynth.runs.tables import FORMATS, render, sweep_lines
    from fedsynth.validation import check_choice

    check_choice(None, "format", form, FORMATS)
    plan = read_sweep(file)
    settings = plan.settings
    if jobs is not None:
        settings = replace(settings, jobs=jobs)
    if memory_gb is not None:
        settings = replace(settings, memory_gb=memory_gb)
    plan = replace(plan, settings=settings, output=output or plan.output)
    if dry_run:
        for cell in plan.cells:
            state = "finished" if finished(plan, cell) else "to do"
            print(f"{state}  {plan.output / cell.key}  {cell.words}")
        return
    failed = 0
    if not only_table:
        with ended_by_signals():
            failed = len(run_sweep(plan, train_command, _tell).failed)
    text = render(plan, sweep_lines(plan), form)
    if table is None:
        print(text, end="")
    else:
        write_text(table, text)
    if failed:
        raise typer.Exit(1)


def train_command(config: Path, place: Path, stopped: Path | None) -> list[str]:
    """The command line of one run: `fedsynth train`, of this very installation."""
    if stopped is not None:
        return [*COMMAND, "train", "--resume", str(stopped)]
    return [*COMMAND, "train", "--config", str(config), "--output", str(place)]


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
