"""`fedsynth reproduce`: the papers' tables, what they publish, and runs of their cells."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedsynth.cli import options as given
from fedsynth.cli.errors import OptionError, one_line_errors
from fedsynth.cli.option_names import OptionNames
from fedsynth.cli.paths import PATH, named_path
from fedsynth.cli.settings_options import set_options
from fedsynth.cli.signals import ended_by_signals

if TYPE_CHECKING:
    from fedsynth.federation.observer import Observer
    from fedsynth.federation.terms.settings import RunSettings
    from fedsynth.reproduction.presets import Cell, Preset
    from fedsynth.reproduction.report import Line
    from fedsynth.reproduction.runs import Job, Outcome, Runner

UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
SPEED = ("device", "precision", "compile", "memory_gb")
"""Options that change how fast a run is, and its results by rounding alone."""


def seconds_of(text: str | None) -> float:
    """A time budget: "170m", "2.5h", "90s", or a number of seconds; None: no end.

    Raises:
        OptionError: it is none of these.
    """
    if text is None:
        return math.inf
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text.strip())
    if found is None:
        raise OptionError(f"--time-budget takes 170m, 2h, 90s or seconds, got {text!r}")
    return float(found[1]) * UNITS[found[2]]


def reproduce(
    context: typer.Context,
    preset: Annotated[
        str | None, typer.Argument(help="A published table, as feddm:table2 (--list has all).")
    ] = None,
    listed: Annotated[
        bool, typer.Option("--list", help="Show tables; of one, its settings and cells.")
    ] = False,
    dataset: Annotated[str | None, typer.Option(help="Only cells of this data set.")] = None,
    partition: Annotated[
        str | None, typer.Option(help="Only this partition, in the table's words.")
    ] = None,
    alpha: Annotated[float | None, typer.Option(help="Only Dirichlet partitions with it.")] = None,
    clients: Annotated[int | None, typer.Option(help="Only cells with so many clients.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Only cells with so many rounds.")] = None,
    method: Annotated[
        str | None, typer.Option(help="Only this method, in the table's words or ours.")
    ] = None,
    note: Annotated[str | None, typer.Option(help='Only cells with these words ("ipc 5").')] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each cell: seeds 0, 1, ….")] = 1,
    output: Annotated[
        Path,
        typer.Option(parser=named_path, metavar=PATH, help="Where rows and run folders go."),
    ] = Path("reproduction"),
    time_budget: Annotated[
        str | None,
        typer.Option(help="170m, 2h or seconds: no round is begun that would end later."),
    ] = None,
    scale: Annotated[
        float | None,
        typer.Option(help="0.05: so much of rounds, steps, epochs and data; no result, and said."),
    ] = None,
    estimate: Annotated[
        bool, typer.Option("--estimate", help="Say how long each cell takes here, and stop.")
    ] = False,
    no_estimate: Annotated[
        bool, typer.Option("--no-estimate", help="Begin at once, without timing a few steps.")
    ] = False,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="Another setting than the preset's; rows say so. Repeatable."),
    ] = None,
    device: given.Device = None,
    precision: given.Precision = None,
    compile: given.Compile = None,
    memory_gb: given.MemoryGb = None,
    data_root: given.DataRoot = None,
    download: given.Download = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the comparison as JSON.")] = False,
) -> None:
    """Run cells of a published table, and show published beside reproduced.

    Finished runs are rows of OUTPUT/TABLE.jsonl and are not made again; a call that was stopped, or
    killed, goes on when it is made again. --time-budget 0 shows what is there.

    Example: `fedsynth reproduce feddm:table2 --dataset mnist --alpha 0.1 --method feddm --seeds 3`.
    """
    with one_line_errors(context.command) as names:
        chosen: dict[str, Any] = {
            "dataset": dataset,
            "partition": partition,
            "alpha": alpha,
            "clients": clients,
            "rounds": rounds,
            "method": method,
            "note": note,
        }
        if preset is None:
            if not listed:
                raise OptionError("name a table (feddm:table2), or see them all with --list")
            _list_tables(as_json)
            return
        from fedsynth.reproduction.preset_files import preset as preset_of

        table = preset_of(preset)
        cells = table.select(**chosen)
        if listed:
            _list_cells(table, cells, as_json, data_root)
            return
        _run(
            table,
            cells,
            range(seeds),
            names,
            {
                "output": output,
                "budget": seconds_of(time_budget),
                "scale": scale,
                "estimate": estimate,
                "estimates": not no_estimate,
                "changes": _changes(settings or []),
                "speed": _speed(context, data_root),
                "download": download,
                "as_json": as_json,
            },
        )


def _changes(texts: list[str]) -> dict[str, dict[str, Any]]:
    """What --set says, by section."""
    return {section: values for section, values in set_options(texts).items() if values}


def _speed(context: typer.Context, data_root: Path | None) -> dict[str, dict[str, Any]]:
    """Sections of options that change no result."""
    run = {name: context.params[name] for name in SPEED if context.params[name] is not None}
    return {"run": run, "data": {} if data_root is None else {"data_root": str(data_root)}}


def _run(
    table: Preset,
    cells: Sequence[Cell],
    seeds: Sequence[int],
    names: OptionNames,
    how: dict[str, Any],
) -> None:
    from fedsynth.cli.memory import keep_large_allocations
    from fedsynth.cli.progress import make_observer
    from fedsynth.reproduction.report import lines
    from fedsynth.reproduction.rows import Rows
    from fedsynth.reproduction.runs import Clock, Runner, jobs_of
    from fedsynth.reproduction.scaling import scale_words

    scale = how["scale"]
    changes = how["changes"]
    first = scale_words(scale)
    rows = Rows(how["output"], scale)

    def tell(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    for cell in cells:
        if reason := table.refusal(cell):
            tell(f"{first}{table.name} {cell.method} on {cell.dataset}: not runnable: {reason}")
    jobs = jobs_of(table, cells, seeds, scale=scale, changes=changes, speed=how["speed"])
    if not jobs:
        raise OptionError(f"{table.name}: none of these cells can be run")

    @contextmanager
    def watch(settings: RunSettings) -> Iterator[Observer]:
        with make_observer(settings, names, mark=first) as observer:
            yield observer

    keep_large_allocations()
    clock = Clock(how["budget"])
    runner = Runner(
        rows,
        clock,
        tell=tell,
        watch=watch,
        download=how["download"],
        estimates=how["estimates"],
    )
    if how["estimate"]:
        _estimates(runner, jobs, scale, how["as_json"])
        return
    with ended_by_signals():
        outcomes = list(runner.run(jobs))
    found = lines(table, cells, seeds, rows.all(), scale=scale, changes=changes)
    _show(table, found, outcomes, first, scale, how["as_json"])
    failed = [one.error for one in outcomes if one.error is not None]
    if failed and all(one.what == "failed" for one in outcomes):
        raise failed[0]


def _estimates(runner: Runner, jobs: Sequence[Job], scale: float | None, as_json: bool) -> None:
    """How long each job takes here, and all of them."""
    from fedsynth.reproduction.rows import run_hash
    from fedsynth.reproduction.scaling import scale_words

    first = scale_words(scale)
    found = {job.words: runner.estimate(job) for job in jobs}
    runs = {run_hash(job.settings): found[job.words] for job in jobs}  # cells may share one
    total = sum(one.seconds for one in runs.values())
    if as_json:
        shown = {words: {"seconds": one.seconds, "how": one.words} for words, one in found.items()}
        print(json.dumps({"scaled": scale, "cells": shown, "seconds": total}, indent=2))
        return
    from fedsynth.reproduction.estimate import duration

    for words, one in found.items():
        print(f"{first}{words}: {one.words}")
    print(f"{first}all {len(runs)} runs: about {duration(total)}")


def _show(
    table: Preset,
    found: Sequence[Line],
    outcomes: Sequence[Outcome],
    first: str,
    scale: float | None,
    as_json: bool,
) -> None:
    """Published beside reproduced, on stdout."""
    from fedsynth.reproduction.scaling import NO_RESULT

    left = [one for one in outcomes if one.what in ("stopped", "not begun", "elsewhere", "failed")]
    if as_json:
        shown = {
            "preset": table.name,
            "scaled": scale,
            "note": None if scale is None else NO_RESULT,
            "cells": [line.to_json() for line in found],
            "unfinished": {one.job.words: f"{one.what}: {one.text}" for one in left},
        }
        print(json.dumps(shown, indent=2, ensure_ascii=False, allow_nan=False))
        return
    print(f"{first}{table.name}: {table.title} ({table.source}, {table.table})")
    if scale is not None:
        print(f"{first}{NO_RESULT}")
    _print(_comparison(found))
    if left:
        print(f"{first}{len(left)} of {len(outcomes)} runs are unfinished: call again to go on")


def _comparison(found: Sequence[Line]) -> list[list[str]]:
    from fedsynth.reproduction.report import shown

    head = ["cell", "metric", "published", "reproduced", "seeds", "verdict", "hours", "commit"]
    return [
        head,
        *(
            [
                line.cell + line.reduced,
                line.metric,
                shown(line.number.value, line.number.std),
                shown(line.compared.mean, line.compared.std),
                str(len(line.seeds)),
                line.verdict,
                f"{sum(line.seconds) / 3600:.2f}" if line.seconds else "–",
                ", ".join(line.commits) or "–",
            ]
            for line in found
        ),
    ]


def _print(rows: Sequence[Sequence[str]]) -> None:
    """Aligned columns, as wide as they are."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())


# ------------------------------------------------------------------------------------ what there is


def _list_tables(as_json: bool) -> None:
    """All tables, and the published experiments that are not among them."""
    from fedsynth.reproduction.preset_files import not_covered, preset, preset_names

    tables = [preset(name) for name in preset_names()]
    facts = [
        {
            "preset": one.name,
            "title": one.title,
            "source": f"{one.source}, {one.table}",
            "cells": len(one.cells),
            "runnable": sum(not one.refusal(cell) for cell in one.cells),
            "numbers": sum(number.value is not None for c in one.cells for number in c.numbers),
        }
        for one in tables
    ]
    if as_json:
        missing = [{"paper": p, "where": w, "what": t} for p, w, t in not_covered()]
        print(json.dumps({"tables": facts, "not_covered": missing}, indent=2, ensure_ascii=False))
        return
    head = ["preset", "runnable", "cells", "numbers", "what it shows"]
    body = [
        [f["preset"], f["runnable"], f["cells"], f["numbers"], f"{f['title']} ({f['source']})"]
        for f in facts
    ]
    _print([head, *([str(cell) for cell in row] for row in body)])
    print("\nnot covered, as the published numbers at hand lack them:")
    for paper, where, what in not_covered():
        print(f"  {paper}, {where}: {what}")


def _list_cells(
    table: Preset, cells: Sequence[Cell], as_json: bool, data_root: Path | None
) -> None:
    """A table's settings with their sources, and its cells with what is published of them."""
    from fedsynth.reproduction.presets import cell_words
    from fedsynth.reproduction.report import shown

    state = _states(table, cells, data_root)
    if as_json:
        facts = [
            {
                **cell.columns(),
                "runnable": not table.refusal(cell),
                "state": state(cell),
                "published": [
                    {"metric": n.metric, "domain": n.domain, "value": n.value, "std": n.std}
                    for n in cell.numbers
                ],
            }
            for cell in cells
        ]
        print(json.dumps({"preset": table.name, "cells": facts}, indent=2, ensure_ascii=False))
        return
    print(f"{table.name}: {table.title} ({table.source}, {table.table})\n")
    for block in table.blocks:
        if any(block.fits(cell) for cell in cells):
            _print_block(block)
    body = [["cell", "metric", "published", "state"]]
    for cell in cells:
        for number in cell.numbers:
            metric = f"{number.metric} ({number.domain})" if number.domain else number.metric
            published = "a curve" if number.value is None else shown(number.value, number.std)
            body.append([cell_words(cell, table), metric, published, state(cell)])
    print()
    _print(body)


def _print_block(block: Any) -> None:
    values = [
        f"{section}.{key}={value}"
        for section, pairs in block.sections.items()
        for key, value in pairs.items()
    ]
    values += [f"measured: {block.variant}"] if block.variant else []
    when = "; ".join(f"{column} {', '.join(words)}" for column, words in block.when.items())
    print(f"{when + ': ' if when else ''}{', '.join(values)}")
    print(f"    {block.source}{': ' + block.why if block.why else ''}")


def _states(table: Preset, cells: Sequence[Cell], data_root: Path | None) -> Callable[[Cell], str]:
    """Whether a cell can be run here, in words."""
    import os

    from fedsynth.data.load import ROOT_VARIABLE, missing_files
    from fedsynth.reproduction.words import dataset_of

    root = str(data_root or os.environ.get(ROOT_VARIABLE) or "")
    there: dict[str, bool] = {}
    for name in {dataset_of(cell.dataset) for cell in cells if not table.refusal(cell)}:
        needs = missing_files(name, Path(root)) if root else missing_files(name, Path("/nowhere"))
        there[name] = not needs

    def state(cell: Cell) -> str:
        if reason := table.refusal(cell):
            return f"not runnable: {reason}"
        name = dataset_of(cell.dataset)
        return "runnable" if there[name] else f"runnable; no files of {name} here"

    return state
