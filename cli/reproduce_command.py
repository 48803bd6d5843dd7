"""`fedsynth reproduce`: lists published tables, runs their cells and compares the numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedsynth.cli import options as given
from fedsynth.cli.application import OptionError, ended_by_signals, say
from fedsynth.cli.options import path_option, takes_settings
from fedsynth.cli.process import keep_large_allocations
from fedsynth.cli.settings_options import Sections, set_options

if TYPE_CHECKING:
    from fedsynth.reproduction.comparison import Line
    from fedsynth.reproduction.presets import Cell, Preset

UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
SCALED = "SCALED to {scale:g}: a test that the cells run, not a result of the published setting"
SPEED = ("run.device", "run.precision", "run.compile", "run.memory_gb", "data.data_root")
"""Settings that affect a run's speed, and its results only by rounding."""


def seconds_of(text: str | None) -> float:
    """Returns the seconds of "170m", "2.5h", "90s" or a plain number; infinity for None.

    Raises:
        OptionError: the text has another form.
    """
    if text is None:
        return math.inf
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text.strip())
    if match is None:
        raise OptionError(
            "--time-budget must be a duration such as 170m, 2h, 90s or a number "
            f"of seconds, got {text!r}"
        )
    return float(match[1]) * UNITS[match[2]]


@takes_settings(*SPEED, set_option=False)
def reproduce(
    chosen: Sections,
    preset: Annotated[
        str | None,
        typer.Argument(help="A published table, such as feddm:table2 (--list prints all)."),
    ] = None,
    listed: Annotated[
        bool, typer.Option("--list", help="List all tables, or the settings and cells of one.")
    ] = False,
    dataset: Annotated[str | None, typer.Option(help="Only cells of this data set.")] = None,
    alpha: Annotated[
        float | None, typer.Option(help="Only Dirichlet partitions with this α.")
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(help="Only this method, as named in the table or in this package."),
    ] = None,
    cell: Annotated[str, typer.Option(help="Only cells with this text, as --list prints it.")] = "",
    seeds: Annotated[
        int, typer.Option(min=1, max=10_000, help="Runs of each cell: seeds 0, 1, ….")
    ] = 1,
    output: Annotated[Path, path_option("The folder for rows and run folders.")] = Path(
        "reproduction"
    ),
    time_budget: Annotated[
        str | None,
        typer.Option(help="170m, 2h or seconds: do not start a round that would end later."),
    ] = None,
    scale: Annotated[
        float | None,
        typer.Option(
            help="Run only this fraction of rounds, steps, epochs and data, such as 0.05: a "
            "test, not a result."
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="Override a setting of the preset; rows record it. Repeatable."),
    ] = None,
    download: given.Download = False,
) -> None:
    """Run cells of a published table and compare the numbers.

    Finished runs are rows of OUTPUT/TABLE.jsonl and are not repeated. A call that was stopped or
    killed resumes when it is repeated. --time-budget 0 only compares the finished runs.

    Example: `fedsynth reproduce feddm:table2 --dataset mnist --alpha 0.1 --method feddm --seeds 3`.
    """
    if preset is None:
        if not listed:
            raise OptionError("name a table, such as feddm:table2; --list prints all tables")
        _list_tables()
        return
    from fedsynth.cli.progress import make_observer
    from fedsynth.reproduction.comparison import lines
    from fedsynth.reproduction.preset_files import preset as preset_of
    from fedsynth.reproduction.presets import cell_words
    from fedsynth.reproduction.rows import Rows
    from fedsynth.reproduction.runs import Clock, Runner, jobs_of

    table = preset_of(preset)
    selected = table.select(dataset=dataset, alpha=alpha, method=method)
    cells = [entry for entry in selected if cell in cell_words(entry, table)]
    if not cells:
        raise OptionError(f"{preset} has no such cell with {cell!r}; --list prints them")
    if listed:
        _list_cells(table, cells)
        return
    overrides = set_options(settings or [])
    changes = {section: values for section, values in overrides.items() if values}
    speed = {"run": chosen["run"], "data": chosen["data"]}
    for entry in cells:
        if reason := table.refusal(entry):
            say(f"{preset} {entry.method} on {entry.dataset}: not runnable: {reason}")
    jobs = jobs_of(table, cells, range(seeds), scale=scale, changes=changes, speed=speed)
    if not jobs:
        raise OptionError(f"{preset}: none of these cells is runnable")
    if scale is not None:
        say(SCALED.format(scale=scale))
    keep_large_allocations()
    rows = Rows(output, scale)
    clock = Clock(seconds_of(time_budget))
    runner = Runner(rows, clock, report=say, watch=make_observer, download=download)
    with ended_by_signals():
        outcomes = list(runner.run(jobs))
    compared = lines(table, cells, range(seeds), rows.all(), scale, changes)
    unfinished = sum(outcome.status not in ("finished", "existing") for outcome in outcomes)
    _print_comparison(table, compared, scale)
    if unfinished:
        say(f"{unfinished} of {len(outcomes)} runs are unfinished; repeat the command")
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    if errors and len(errors) == len(outcomes):
        raise errors[0]


def _print_comparison(table: Preset, lines: Sequence[Line], scale: float | None) -> None:
    """Prints published and reproduced numbers on stdout."""
    from fedsynth.reproduction.comparison import format_number

    _print_title(table)
    if scale is not None:
        print(SCALED.format(scale=scale))
    rows = [["cell", "metric", "published", "reproduced", "seeds", "verdict", "hours", "commit"]]
    for line in lines:
        rows.append(
            [
                line.cell + line.reduced_precision,
                line.number.label,
                format_number(line.number.value, line.number.std),
                format_number(*line.spread),
                str(len(line.values)),
                line.verdict,
                f"{line.hours:.2f}",
                ", ".join(line.commits),
            ]
        )
    _print_table(rows)


def _print_title(table: Preset) -> None:
    print(f"{table.name}: {table.title} ({table.source}, {table.table})")


def _print_table(rows: Sequence[Sequence[str]]) -> None:
    from fedsynth.results.finished import aligned

    print(aligned(rows), end="")


def _list_tables() -> None:
    """Prints all tables, and the published experiments that are not covered."""
    from fedsynth.reproduction.preset_files import not_covered, preset, preset_names

    rows = [["preset", "runnable", "cells", "what it shows"]]
    for table in map(preset, preset_names()):
        runnable = sum(not table.refusal(cell) for cell in table.cells)
        title = f"{table.title} ({table.source}, {table.table})"
        rows.append([table.name, str(runnable), str(len(table.cells)), title])
    _print_table(rows)
    print("\nnot covered, because the package does not include these published values:")
    for paper, item, what in not_covered():
        print(f"  {paper}, {item}: {what}")


def _list_cells(table: Preset, cells: Sequence[Cell]) -> None:
    """Prints a table's settings with their sources, and its cells with the published numbers."""
    from fedsynth.reproduction.comparison import format_number
    from fedsynth.reproduction.presets import cell_words
    from fedsynth.reproduction.runs import changed_settings

    _print_title(table)
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
