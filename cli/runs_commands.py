"""The commands `fedsynth runs | plot | report | sweep | reproduce`.

These commands show finished runs as a table, as curves or on an HTML page. They also execute a grid
of runs, and run cells of published tables.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedsynth.cli import options
from fedsynth.cli.application import (
    OptionError,
    keep_large_allocations,
    note,
    say,
)
from fedsynth.files import require_folder, write_output

if TYPE_CHECKING:
    from fedsynth.experiments.comparison import Judgement, Line
    from fedsynth.experiments.presets import Cell, Preset
    from fedsynth.experiments.runner import Outcome
    from fedsynth.experiments.sweep import Sweep
    from fedsynth.results.finished import Run


RUNS = "Run folders, or folders that contain run folders"


def _loaded(folders: list[Path]) -> list[Run]:
    from fedsynth.results.finished import Run, finished_runs

    return list(map(Run.read, finished_runs(folders)))


def runs(
    folders: Annotated[
        list[Path] | None, options.path_argument(f"{RUNS}. Default: runs.", metavar="FOLDERS")
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Compare finished runs in a table of their results and differing settings.

    For methods with a generator, the table also describes how the teacher (or the ensemble of
    teachers) classifies the generated images in the last round. The additional columns show the
    fraction of images that is classified as the requested class, and the entropy of the predicted
    classes divided by log C.

    Example: `for mu in 0.01 0.1 1; do fedsynth train --method fedprox --set mu=$mu; done; fedsynth
    runs`.
    """
    from fedsynth.experiments.overview import differing, overview
    from fedsynth.results.finished import aligned

    loaded = _loaded(folders or [Path("runs")])
    differences = differing(loaded)
    if as_json:
        rows = [
            {**run.summary, "run": run.name, "settings": settings}
            for run, settings in zip(loaded, differences, strict=True)
        ]
        print(json.dumps(rows, indent=2, ensure_ascii=False, default=str))
        return
    table = overview(loaded)
    table[0] += ["run", "settings that differ"]
    for run, row, settings in zip(loaded, table[1:], differences, strict=True):
        row += [run.name, ", ".join(f"{key}={value}" for key, value in settings.items())]
    print(aligned(table), end="")


Runs = Annotated[list[Path], options.path_argument(f"{RUNS}.", metavar="RUN")]


def plot(
    runs: Runs,
    output: Annotated[Path, options.path_option("An SVG, PNG or HTML file.")] = Path("curves.svg"),
    by: Annotated[str, typer.Option(help="The x axis: rounds, bytes, seconds or eps.")] = "rounds",
    metric: Annotated[
        str, typer.Option(help="A metric in metrics.jsonl, such as local.amp.")
    ] = "test_accuracy",
    mean: Annotated[bool, options.flag("--mean", "Show the mean ± std over seeds.")] = False,
) -> None:
    """Draw learning curves of finished runs.

    A PNG file needs matplotlib (`fedsynth[plots]`). SVG and HTML files need no other package.
    """
    from fedsynth.experiments.page import AXES, curves, curves_page, curves_svg, write_png
    from fedsynth.privacy.report.plots import standalone
    from fedsynth.validation import check_choice

    check_choice(None, "--by", by, tuple(AXES))
    suffix = output.suffix.lower()
    if suffix not in (".svg", ".png", ".html"):
        raise OptionError(
            f"--output={output.name!r} does not end in .svg, .png or .html. Rename it"
        )
    lines = curves(_loaded(runs), metric, by, mean=mean, note=note)
    if suffix == ".png":
        write_png(output, lines, metric, by)
    elif suffix == ".svg":
        write_output(output, standalone(curves_svg(lines, metric, by)).encode())
    else:
        write_output(output, curves_page(lines, metric, by).encode())
    print(output)


def report(
    runs: Runs,
    output: Annotated[Path, options.path_option("The HTML file to write.")] = Path("report.html"),
    simulation_only: Annotated[
        bool, options.flag("--simulation-only", "Also show exact values from the private data.")
    ] = False,
) -> None:
    """Write an HTML page about finished runs.

    The page shows learning curves, the class distribution of each client, synthetic images by class
    and round, fairness, generators, privacy and settings. It is self-contained and loads nothing.
    To show the privacy report of one run to others, use `fedsynth privacy report RUN`.
    """
    from fedsynth.experiments.page import runs_page

    page = runs_page(_loaded(runs), simulation_only=simulation_only)
    write_output(output, page.encode())
    print(output)


def sweep(
    file: Annotated[Path, options.path_argument("The TOML file of the sweep.", metavar="FILE")],
    form: Annotated[str, typer.Option("--format", help="table, csv or markdown.")] = "table",
    output: Annotated[Path | None, options.path_option("Default: sweep.output in FILE.")] = None,
    only_table: Annotated[bool, options.flag("--only-table", "Only show the table.")] = False,
    dry_run: Annotated[bool, options.flag("--dry-run", "Check and list the runs.")] = False,
    shard: Annotated[
        str | None,
        typer.Option(help="Execute only part i of n, as 1/8. Default: a Slurm array's task."),
    ] = None,
) -> None:
    """Execute a grid of runs and print a table with mean ± standard deviation over seeds.

    The grid may vary methods, partitions, seeds and any other setting. To resume a sweep that was
    stopped, repeat the command: finished runs are kept, and interrupted runs are resumed. The file
    has the sections of a run's config.toml, which apply to all runs, and a section `[grid]` with a
    list of values for each setting that varies (docs/sweeps.md). With a section `[selection]`, a
    random number of runs is tried on private data, and only the best one by a noisy score is kept.

    Example: `[grid]` with `method = ["fedavg", "feddm"]`, `alpha = [0.1, 1.0]`, `seed = [0, 1, 2]`.
    """
    from fedsynth.experiments.runner import Shard, run_sweep
    from fedsynth.experiments.sweep import FORMATS, read_sweep, render, sweep_rows
    from fedsynth.validation import check_choice

    check_choice(None, "--format", form, FORMATS)
    plan = read_sweep(file)
    plan = replace(plan, output=output or plan.output)
    part = Shard() if only_table else Shard.of(shard, os.environ)
    if dry_run:
        require_folder(plan.output)
        for cell in part.cells(plan):
            state = "finished" if plan.finished(cell) else "to do"
            print(f"{state}  {plan.folder(cell)}  {cell.label}")
        if plan.selection is not None:
            from fedsynth.experiments.selection import describe, plan_selection

            print(describe(plan_selection(plan)))
        return
    if plan.selection is not None and shard is not None:
        raise OptionError("--shard has no effect on a private selection. Remove it")
    if plan.selection is not None:
        _select(plan, only_result=only_table)
        return
    failed = []
    if not only_table:
        failed = run_sweep(plan, say, part)
    rows = sweep_rows(plan)
    missing = sum(row.planned - row.finished for row in rows)
    if part.count > 1 and missing and not only_table:
        say(f"{missing} runs of the sweep have no result. Show the table with --only-table")
    else:
        print(render(plan, rows, form), end="")
    if failed:
        raise typer.Exit(1)


def _select(plan: Sweep, *, only_result: bool) -> None:
    """Executes a sweep's private selection, unless it is finished, and prints the result."""
    from fedsynth.experiments.selection import RESULT, result_folder, select_privately
    from fedsynth.formatting import format_epsilon

    folder = result_folder(plan)
    if only_result and not (folder / RESULT).exists():
        raise OptionError(f"{folder} contains no {RESULT}. Repeat the command without --only-table")
    result = select_privately(plan, say)
    if result["run"] is None:
        say("no run was selected, because no trial was drawn or all diverged. The charge remains")
        raise typer.Exit(1)
    values = ", ".join(f"{name}={value}" for name, value in result["values"].items())
    print(f"selected: {values or 'the only run'}")
    print(f"score: {result['score']:.3f} (noise ± {result['score_noise']:.3f})")
    print("the score is the highest of the trials, so it is too high on average")
    print(
        f"privacy: ε = {format_epsilon(result['epsilon'])} at δ = {result['delta']:g}, with the "
        "selection"
    )
    print(folder / result["run"])


# Settings that affect the speed of a run. They affect the results only by rounding errors.
SPEED = ("run.device", "run.precision", "run.compile", "run.memory_gb", "data.data_root")


@options.takes_settings(*SPEED, set_option=False)
def reproduce(
    chosen: options.Sections,
    preset: Annotated[
        str | None, typer.Argument(metavar="TABLE", help="A table. Default: list all tables.")
    ] = None,
    listed: Annotated[bool, options.flag("--list", "List the cells of the table.")] = False,
    dataset: Annotated[str | None, typer.Option(help="Select cells with this data set.")] = None,
    alpha: Annotated[float | None, typer.Option(help="Select partitions with this α.")] = None,
    method: Annotated[str | None, typer.Option(help="Select cells with this method.")] = None,
    cell: Annotated[str, typer.Option(help="Select cells with this text in --list.")] = "",
    edition: Annotated[
        str | None, typer.Option(help="Run a smaller edition of the table, such as small.")
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(min=1, max=10_000, help="Seeds for each cell."),
    ] = None,
    output: Annotated[Path, options.path_option("For the results.")] = Path("reproduction"),
    time_budget: Annotated[
        float, typer.Option(min=0, help="Stop after this number of minutes.", show_default=False)
    ] = math.inf,
    settings: options.Set = None,
    download: options.Download = False,
) -> None:
    """Run cells of a published table and compare the results with the published numbers.

    The results of finished runs are in OUTPUT/TABLE.jsonl, and these runs are not repeated. To
    resume after an interruption, repeat the command. With --time-budget 0, only finished runs are
    compared. Claims about the order of methods are judged by the finished runs of the whole table,
    unless a method's settings are changed. A table has one seed by default, and a smaller edition
    several. If a run fails, the others continue, and the exit code is 1.

    Example: `fedsynth reproduce feddm:table2 --dataset mnist --alpha 0.1 --method feddm --seeds 3`.
    """
    overrides = options.set_options(settings or [])
    changes = {section: values for section, values in overrides.items() if values}
    if preset is None:
        selection = (dataset, alpha, method, edition, seeds)
        if cell or changes or any(value is not None for value in selection):
            raise OptionError("the options select cells of a TABLE. Name one of the tables")
        _list_tables()
        return
    from fedsynth.cli.progress import make_observer
    from fedsynth.experiments.comparison import jobs_of, judgements, lines
    from fedsynth.experiments.presets import cell_words
    from fedsynth.experiments.presets import preset as preset_of
    from fedsynth.experiments.runner import Runner, rows_by_hash

    table = preset_of(preset)
    if edition is not None:
        table = table.edition(edition)
    if seeds is not None:
        table = replace(table, seeds=seeds)
    selected = table.select(dataset=dataset, alpha=alpha, method=method)
    cells = [entry for entry in selected if cell in cell_words(entry, table)]
    if not cells:
        raise OptionError(
            f"{cell!r} is not a selected table cell of {preset}. Choose one from --list"
        )
    if listed:
        _list_cells(table, cells)
        return
    speed = {"run": chosen["run"], "data": chosen["data"]}
    for entry in cells:
        if reason := table.refusal(entry):
            say(f"{preset}: {entry.method} on {entry.dataset} cannot be run: {reason}")
    jobs = jobs_of(table, cells, range(table.seeds), changes=changes, speed=speed)
    if not jobs:
        raise OptionError(
            f"none of the selected table cells of {preset} can run. Select others from --list"
        )
    keep_large_allocations()
    deadline = time.monotonic() + 60 * time_budget
    runner = Runner(output, deadline, report=say, watch=make_observer, download=download)
    outcomes = list(runner.run(jobs))
    rows = rows_by_hash(output)
    compared = lines(table, cells, range(table.seeds), rows, changes)
    _print_comparison(table, compared)
    if "method" not in changes:  # the methods of a claim have different settings
        _print_judgements(judgements(table, rows, changes))
    elif table.claims:
        say("the paper's claims are not judged, because a method's settings are changed")
    _report(outcomes)


def _report(outcomes: Sequence[Outcome]) -> None:
    """Reports unfinished and failed runs.

    Raises:
        FedsynthError: all runs failed.
        typer.Exit: some runs failed.
    """
    unfinished = sum(outcome.status in ("stopped", "not begun") for outcome in outcomes)
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    if unfinished:
        count = f"{unfinished} of {len(outcomes)}"
        say(f"{count} runs are unfinished. Repeat the command to finish them")
    if errors and len(errors) == len(outcomes):
        raise errors[0]
    if errors:
        say(f"{len(errors)} of {len(outcomes)} runs failed, as stated above")
        raise typer.Exit(1)


def _print_comparison(table: Preset, lines: Sequence[Line]) -> None:
    """Prints a table on stdout that compares published and reproduced numbers."""
    from fedsynth.experiments.comparison import format_number

    print(f"{table.name}: {table.heading}")
    # a column for students with averaged weights, if there are any
    averaged = ["averaged"] if any(line.averaged.mean is not None for line in lines) else []
    rows = [["cell", "metric", "published", "reproduced", *averaged]]
    rows[0] += ["seeds", "verdict", "hours", "commit"]
    for line in lines:
        row = [line.cell + line.reduced_precision, line.number.label]
        row += [format_number(line.number.value, line.number.std), format_number(*line.spread)]
        row += [format_number(*line.averaged)] * len(averaged)
        row += [str(len(line.values)), line.verdict, f"{line.hours:.2f}", ", ".join(line.commits)]
        rows.append(row)
    _print_table(rows)


def _print_judgements(judged: Sequence[Judgement]) -> None:
    """Prints a table on stdout that gives the verdict on each claim of the paper."""
    rows = [["claim", "data", "published", "deciding difference", "seeds", "verdict"]]
    for entry in judged:
        seeds = len(entry.differences[entry.closest])
        if seeds:
            row = [entry.claim.text, entry.data, entry.published_difference]
            rows.append([*row, entry.deciding_difference, str(seeds), entry.verdict])
    if len(rows) > 1:
        print()
        _print_table(rows)


def _print_table(rows: Sequence[Sequence[str]]) -> None:
    from fedsynth.results.finished import aligned

    print(aligned(rows), end="")


def _list_tables() -> None:
    """Prints all tables, and lists the published results that are not part of fedsynth."""
    from fedsynth.experiments.presets import not_covered, preset, preset_names

    rows = [["preset", "runnable", "cells", "what it shows"]]
    for table in map(preset, preset_names()):
        runnable = sum(not table.refusal(cell) for cell in table.cells)
        rows.append([table.name, str(runnable), str(len(table.cells)), table.heading])
    _print_table(rows)
    print("\nThe following published results are not part of fedsynth:")
    for paper, item, what in not_covered():
        print(f"  {paper}, {item}: {what}")


def _list_cells(table: Preset, cells: Sequence[Cell]) -> None:
    """Describes a published table on stdout.

    The description contains the settings with their sources, and the cells with their published
    numbers.
    """
    from fedsynth.experiments.comparison import changed_settings, format_number
    from fedsynth.experiments.presets import cell_words

    print(f"{table.name}: {table.heading}")
    for block in table.blocks:
        if any(cell.fits(block.when) for cell in cells):
            texts = [f"{column} {', '.join(values)}" for column, values in block.when.items()]
            texts += filter(None, [changed_settings(block.sections), block.variant])
            print("; ".join(texts))
            print(f"    {block.source}", *filter(None, [block.why]), sep=": ")
    print()
    rows = [["cell", "metric", "published", "not runnable, because"]]
    for cell in cells:
        for number in cell.numbers:
            published = format_number(number.value, number.std)
            rows.append([cell_words(cell, table), number.label, published, table.refusal(cell)])
    _print_table(rows)
