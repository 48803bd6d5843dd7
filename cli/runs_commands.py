"""`fedsynth runs | plot | report | sweep`: finished runs as a table, curves or one page; and a grid
of runs."""

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
            "Run folders, or folders that contain run folders; default: runs.", metavar="FOLDERS"
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON.")] = False,
) -> None:
    """Compare finished runs in a table: their differing settings, and their results.

    For methods with a generator it also shows how the teacher (or ensemble) classifies its images
    in the last round: the share of the requested class, and the entropy of the predicted classes,
    over log C.

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
    output: Annotated[Path, path_option("The plot file, ending in .svg, .png or .html.")] = Path(
        "curves.svg"
    ),
    by: Annotated[str, typer.Option(help="rounds, bytes, seconds or eps.")] = "rounds",
    metric: Annotated[
        str,
        typer.Option(help="A metric of metrics.jsonl, such as local.amp or generator.agreement."),
    ] = "test_accuracy",
    mean: Annotated[
        bool,
        typer.Option(
            "--mean", help="Show mean ± standard deviation of runs that differ only in their seeds."
        ),
    ] = False,
) -> None:
    """Draw learning curves of finished runs.

    SVG and HTML need nothing else; PNG needs matplotlib (`fedsynth[plots]`).
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
            help="For private runs, also show simulation_only: exact values from private data; "
            "the page states this.",
        ),
    ] = False,
) -> None:
    """Write one HTML page on finished runs: curves, class distribution per client, synthetic images
    by class and round, fairness, generators, privacy, settings.

    The page is self-contained and loads nothing. (The privacy report of one run, for other parties,
    is `fedsynth privacy report RUN`.)
    """
    from fedsynth.results.finished import Run, finished_runs
    from fedsynth.results.page import runs_page

    loaded = list(map(Run.read, finished_runs(runs)))
    write_text(output, runs_page(loaded, simulation_only=simulation_only))
    print(output)


COMMAND = (sys.executable, "-c", "from fedsynth.cli.app import main; main()")


def sweep(
    file: Annotated[Path, path_argument("The sweep, in TOML.", metavar="FILE")],
    form: Annotated[str, typer.Option("--format", help="table, csv, latex or markdown.")] = "table",
    output: Annotated[
        Path | None, path_option("Folder of the runs; default: the one in the file.")
    ] = None,
    table: Annotated[Path | None, path_option("Write the table to this file.")] = None,
    only_table: Annotated[
        bool, typer.Option("--only-table", help="Start no run; show the finished ones.")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Check all settings and list the runs without starting any."
        ),
    ] = False,
) -> None:
    """Make a grid of runs (methods, partitions, seeds, any setting) and print mean ± standard
    deviation over seeds.

    A sweep that was stopped resumes: finished runs are kept, others resumed. The file has the
    sections of a run's config.toml, which all runs share, and `[grid]`, in which each list is an
    axis: docs/sweeps.md.

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
    """Returns the command line of one run: `fedsynth train`, of this installation."""
    if interrupted is not None:
        return [*COMMAND, "train", "--resume", str(interrupted)]
    return [*COMMAND, "train", "--config", str(config), "--output", str(output)]
