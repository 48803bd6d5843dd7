"""The commands `fedsynth runs | plot | report | sweep`.

They show finished runs as a table, as curves or on an HTML page, and execute a grid of runs.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from fedsynth.cli.application import OptionError, ended_by_signals, note, say, write_text
from fedsynth.cli.options import path_argument, path_option


def runs(
    folders: Annotated[
        list[Path] | None,
        path_argument(
            "Run folders, or folders that contain run folders. Default: runs.", metavar="FOLDERS"
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON.")] = False,
) -> None:
    """Compare finished runs in a table with their results and the settings that differ.

    For methods with a generator, the table also describes how the teacher (or the ensemble of
    teachers) classifies the generated images in the last round. It shows the fraction that is
    classified as the requested class, and the entropy of the predicted classes divided by log C.

    Example: `for mu in 0.01 0.1 1; do fedsynth train --method fedprox --set mu=$mu; done; fedsynth
    runs`.
    """
    from fedsynth.results.finished import Run, aligned, differing, finished_runs, overview

    loaded = list(map(Run.read, finished_runs(folders or [Path("runs")])))
    differences = differing(loaded)
    if as_json:
        rows = [
            {"run": run.name, "settings": settings, **run.summary}
            for run, settings in zip(loaded, differences, strict=True)
        ]
        print(json.dumps(rows, indent=2, ensure_ascii=False, default=str))
        return
    table = overview(loaded)
    table[0] += ["run", "settings that differ"]
    for run, row, settings in zip(loaded, table[1:], differences, strict=True):
        row += [run.name, ", ".join(f"{key}={value}" for key, value in settings.items())]
    print(aligned(table), end="")


Runs = Annotated[
    list[Path],
    path_argument("Run folders, or folders that contain run folders (runs/).", metavar="RUN..."),
]


def plot(
    runs: Runs,
    output: Annotated[Path, path_option("The file to write (.svg, .png or .html).")] = Path(
        "curves.svg"
    ),
    by: Annotated[str, typer.Option(help="The x axis: rounds, bytes, seconds, eps.")] = "rounds",
    metric: Annotated[
        str,
        typer.Option(help="A metric in metrics.jsonl, such as local.amp or generator.agreement."),
    ] = "test_accuracy",
    mean: Annotated[
        bool,
        typer.Option(
            "--mean", help="Show mean ± standard deviation for runs that differ only in seeds."
        ),
    ] = False,
) -> None:
    """Draw learning curves of finished runs.

    A PNG file needs matplotlib (`fedsynth[plots]`). SVG and HTML files need no other package.
    """
    from fedsynth.privacy.report.plots import standalone
    from fedsynth.results.curves import AXES, curves, curves_svg, write_png
    from fedsynth.results.finished import Run, finished_runs
    from fedsynth.results.page import curves_page
    from fedsynth.validation import check_choice

    check_choice(None, "by", by, tuple(AXES))
    suffix = output.suffix.lower()
    if suffix not in (".svg", ".png", ".html"):
        raise OptionError(f"--output must end in .svg, .png or .html, got {output.name!r}")
    loaded = list(map(Run.read, finished_runs(runs)))
    lines = curves(loaded, metric, by, mean=mean, note=note)
    if suffix == ".png":
        write_png(output, lines, metric, by)
    elif suffix == ".svg":
        write_text(output, standalone(curves_svg(lines, metric, by)))
    else:
        write_text(output, curves_page(lines, metric, by))
    print(output)


def report(
    runs: Runs,
    output: Annotated[Path, path_option("The HTML file to write.")] = Path("report.html"),
    simulation_only: Annotated[
        bool,
        typer.Option(
            "--simulation-only",
            help="Also show exact values from the private data of private runs, with a warning "
            "on the page.",
        ),
    ] = False,
) -> None:
    """Write an HTML page about finished runs.

    The page shows learning curves, the class distribution of each client, synthetic images by class
    and round, fairness, generators, privacy and settings. It is self-contained and loads nothing.
    To show the privacy report of one run to others, use `fedsynth privacy report RUN`.
    """
    from fedsynth.results.finished import Run, finished_runs
    from fedsynth.results.page import runs_page

    loaded = list(map(Run.read, finished_runs(runs)))
    write_text(output, runs_page(loaded, simulation_only=simulation_only))
    print(output)


COMMAND = (sys.executable, "-c", "from fedsynth.cli.app import main; main()")


def sweep(
    file: Annotated[Path, path_argument("The TOML file of the sweep.", metavar="FILE")],
    form: Annotated[str, typer.Option("--format", help="table, csv, latex, markdown.")] = "table",
    output: Annotated[
        Path | None, path_option("The folder for the runs. Default: the one in FILE.")
    ] = None,
    table: Annotated[Path | None, path_option("Write the table to this file.")] = None,
    only_table: Annotated[
        bool, typer.Option("--only-table", help="Show finished runs and start none.")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Check all settings and list the runs, without starting them."
        ),
    ] = False,
) -> None:
    """Execute a grid of runs and print a table with mean ± standard deviation over seeds.

    The grid may vary methods, partitions, seeds and any other setting. To resume a sweep that was
    stopped, repeat the command: finished runs are kept, and others are resumed. The file has the
    sections of a run's config.toml, which apply to all runs, and a section `[grid]` with a list of
    values for each setting that varies (docs/sweeps.md).

    Example: `[grid]` with `method = ["fedavg", "feddm"]`, `alpha = [0.1, 1.0]`, `seed = [0, 1, 2]`.
    """
    from fedsynth.results.sweep import finished, run_sweep
    from fedsynth.results.sweep_file import read_sweep
    from fedsynth.results.tables import FORMATS, render, sweep_rows
    from fedsynth.validation import check_choice

    check_choice(None, "format", form, FORMATS)
    plan = read_sweep(file)
    plan = replace(plan, output=output or plan.output)
    if dry_run:
        for cell in plan.cells:
            state = "finished" if finished(plan, cell) else "to do"
            print(f"{state}  {plan.output / cell.key}  {cell.label}")
        return
    failed = []
    if not only_table:
        with ended_by_signals():
            failed = run_sweep(plan, train_command, say).failed
    text = render(plan, sweep_rows(plan), form)
    if table is None:
        print(text, end="")
    else:
        write_text(table, text)
    if failed:
        raise typer.Exit(1)


def train_command(config: Path, output: Path, interrupted: Path | None) -> list[str]:
    """Returns the command line that executes or resumes one run with this installation."""
    if interrupted is not None:
        return [*COMMAND, "train", "--resume", str(interrupted)]
    return [*COMMAND, "train", "--config", str(config), "--output", str(output)]
