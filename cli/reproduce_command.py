"""`fedsynth reproduce`: lists published tables, runs their cells and compares the numbers."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedsynth.cli import options as given
from fedsynth.cli.application import OptionError, ended_by_signals, say
from fedsynth.cli.options import path_option, takes_settings
from fedsynth.cli.process import keep_large_allocations
from fedsynth.cli.settings_options import Sections, set_options

if TYPE_CHECKING:
    from fedsynth.config.settings import RunSettings
    from fedsynth.federation.observer import Observer
    from fedsynth.reproduction.comparison import Line
    from fedsynth.reproduction.presets import Block, Cell, Preset
    from fedsynth.reproduction.runs import Outcome

UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
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


@takes_settings(*SPEED, others=False)
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
    partition: Annotated[
        str | None, typer.Option(help="Only this partition, as named in the table.")
    ] = None,
    alpha: Annotated[
        float | None, typer.Option(help="Only Dirichlet partitions with this α.")
    ] = None,
    clients: Annotated[
        int | None, typer.Option(help="Only cells with this number of clients.")
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(help="Only cells with this number of rounds.")
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(help="Only this method, as named in the table or in this package."),
    ] = None,
    note: Annotated[str | None, typer.Option(help='Only cells with these words ("ipc 5").')] = None,
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
    as_json: given.AsJson = False,
) -> None:
    """Run cells of a published table and compare the numbers.

    Finished runs are rows of OUTPUT/TABLE.jsonl and are not repeated. A call that was stopped or
    killed resumes when it is repeated. --time-budget 0 only compares the finished runs.

    Example: `fedsynth reproduce feddm:table2 --dataset mnist --alpha 0.1 --method feddm --seeds 3`.
    """
    if preset is None:
        if not listed:
            raise OptionError("name a table, such as feddm:table2; --list prints all tables")
        _list_tables(as_json)
        return
    from fedsynth.reproduction.preset_files import preset as preset_of

    table = preset_of(preset)
    cells = table.select(
        dataset=dataset,
        partition=partition,
        alpha=alpha,
        clients=clients,
        rounds=rounds,
        method=method,
        note=note,
    )
    if listed:
        _list_cells(table, cells, as_json, chosen["data"].get("data_root"))
        return
    given_changes = set_options(settings or [])
    _run(
        table,
        cells,
        range(seeds),
        output=output,
        budget=seconds_of(time_budget),
        scale=scale,
        changes={section: values for section, values in given_changes.items() if values},
        speed={"run": chosen["run"], "data": chosen["data"]},
        download=download,
        as_json=as_json,
    )


def _run(
    table: Preset,
    cells: Sequence[Cell],
    seeds: Sequence[int],
    *,
    output: Path,
    budget: float,
    scale: float | None,
    changes: dict[str, dict[str, Any]],
    speed: dict[str, dict[str, Any]],
    download: bool,
    as_json: bool,
) -> None:
    from fedsynth.cli.progress import make_observer
    from fedsynth.reproduction.comparison import lines
    from fedsynth.reproduction.rows import Rows
    from fedsynth.reproduction.runs import Clock, Runner, jobs_of, scale_words

    mark = scale_words(scale)
    rows = Rows(output, scale)

    for cell in cells:
        if reason := table.refusal(cell):
            say(f"{mark}{table.name} {cell.method} on {cell.dataset}: not runnable: {reason}")
    jobs = jobs_of(table, cells, seeds, scale=scale, changes=changes, speed=speed)
    if not jobs:
        raise OptionError(f"{table.name}: none of these cells is runnable")

    @contextmanager
    def watch(settings: RunSettings) -> Iterator[Observer]:
        with make_observer(settings, mark=mark) as observer:
            yield observer

    keep_large_allocations()
    runner = Runner(rows, Clock(budget), tell=say, watch=watch, download=download)
    with ended_by_signals():
        outcomes = list(runner.run(jobs))
    compared = lines(table, cells, seeds, rows.all(), scale=scale, changes=changes)
    _print_comparison(table, compared, outcomes, scale, as_json)
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    if errors and len(errors) == len(outcomes):
        raise errors[0]


def _print_comparison(
    table: Preset,
    lines: Sequence[Line],
    outcomes: Sequence[Outcome],
    scale: float | None,
    as_json: bool,
) -> None:
    """Prints published and reproduced numbers on stdout."""
    from fedsynth.reproduction.comparison import format_number
    from fedsynth.reproduction.runs import NO_RESULT, scale_words

    complete = ("finished", "existing")
    unfinished = [outcome for outcome in outcomes if outcome.status not in complete]
    if as_json:
        document = {
            "preset": table.name,
            "scaled": scale,
            "note": None if scale is None else NO_RESULT,
            "cells": [line.to_json() for line in lines],
            "unfinished": {o.job.words: f"{o.status}: {o.text}" for o in unfinished},
        }
        _print_json(document)
        return
    mark = scale_words(scale)
    print(f"{mark}{table.name}: {table.title} ({table.source}, {table.table})")
    if scale is not None:
        print(f"{mark}{NO_RESULT}")
    body = [["cell", "metric", "published", "reproduced", "seeds", "verdict", "hours", "commit"]]
    for line in lines:
        hours = f"{sum(line.seconds) / 3600:.2f}" if line.seconds else "–"
        body.append(
            [
                line.cell + line.reduced,
                line.number.label,
                format_number(line.number.value, line.number.std),
                format_number(line.mean, line.std),
                str(len(line.seeds)),
                line.verdict,
                hours,
                ", ".join(line.commits) or "–",
            ]
        )
    _print_table(body)
    if unfinished:
        print(
            f"{mark}{len(unfinished)} of {len(outcomes)} runs are unfinished; run the same "
            "command again to resume"
        )


def _print_json(document: dict[str, Any]) -> None:
    print(json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False))


def _print_table(rows: Sequence[Sequence[str]]) -> None:
    from fedsynth.results.finished import aligned

    print(aligned(rows), end="")


def _list_tables(as_json: bool) -> None:
    """Prints all tables, and the published experiments that are not covered."""
    from fedsynth.reproduction.preset_files import not_covered, preset, preset_names

    tables = [preset(name) for name in preset_names()]
    facts = [
        {
            "preset": table.name,
            "title": table.title,
            "source": f"{table.source}, {table.table}",
            "cells": len(table.cells),
            "runnable": sum(not table.refusal(cell) for cell in table.cells),
            "numbers": sum(n.value is not None for cell in table.cells for n in cell.numbers),
        }
        for table in tables
    ]
    if as_json:
        missing = [{"paper": p, "where": w, "what": t} for p, w, t in not_covered()]
        _print_json({"tables": facts, "not_covered": missing})
        return
    rows = [["preset", "runnable", "cells", "numbers", "what it shows"]]
    for fact in facts:
        numbers = [str(fact[name]) for name in ("preset", "runnable", "cells", "numbers")]
        rows.append([*numbers, f"{fact['title']} ({fact['source']})"])
    _print_table(rows)
    print("\nnot covered, because the package does not include these published values:")
    for paper, item, what in not_covered():
        print(f"  {paper}, {item}: {what}")


def _list_cells(table: Preset, cells: Sequence[Cell], as_json: bool, data_root: str | None) -> None:
    """Prints a table's settings with their sources, and its cells with the published numbers."""
    from fedsynth.reproduction.comparison import format_number
    from fedsynth.reproduction.presets import cell_words

    states = _states(table, cells, data_root)
    if as_json:
        facts = [
            {
                **cell.columns(),
                "runnable": not table.refusal(cell),
                "state": state,
                "published": [vars(number) for number in cell.numbers],
            }
            for cell, state in zip(cells, states, strict=True)
        ]
        _print_json({"preset": table.name, "cells": facts})
        return
    print(f"{table.name}: {table.title} ({table.source}, {table.table})\n")
    for block in table.blocks:
        if any(cell.fits(block.when) for cell in cells):
            _print_block(block)
    print()
    rows = [["cell", "metric", "published", "state"]]
    for cell, state in zip(cells, states, strict=True):
        for number in cell.numbers:
            published = format_number(number.value, number.std)
            if number.value is None:
                published = "a curve"
            rows.append([cell_words(cell, table), number.label, published, state])
    _print_table(rows)


def _print_block(block: Block) -> None:
    from fedsynth.reproduction.runs import changed_settings

    settings = changed_settings(block.sections)
    if block.variant:
        settings += f", measured: {block.variant}"
    if block.when:
        when = "; ".join(f"{column} {', '.join(values)}" for column, values in block.when.items())
        settings = f"{when}: {settings}"
    print(settings)
    print(f"    {block.source}: {block.why}" if block.why else f"    {block.source}")


def _states(table: Preset, cells: Sequence[Cell], data_root: str | None) -> list[str]:
    """Returns for each cell a text that states whether it can be run here."""
    from fedsynth.data.load import ROOT_VARIABLE, missing_files
    from fedsynth.reproduction.presets import dataset_of

    root = Path(data_root or os.environ.get(ROOT_VARIABLE) or "/nowhere")
    states = []
    for cell in cells:
        name = dataset_of(cell.dataset)
        if reason := table.refusal(cell):
            states.append(f"not runnable: {reason}")
        elif missing_files(name, root):
            states.append(f"runnable; the files of {name} are not on this machine")
        else:
            states.append("runnable")
    return states
