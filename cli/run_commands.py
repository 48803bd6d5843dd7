"""`fedsynth runs`: run folders beside each other."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from fedsynth.cli.paths import path_argument, path_option


def runs(
    folders: Annotated[
        list[Path] | None,
        path_argument("Run folders, or folders of such; default: runs.", metavar="FOLDERS"),
    ] = None,
    output: Annotated[
        Path | None,
        path_option("The folder of run folders, as `train --output` names it."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON.")] = False,
) -> None:
    """Finished runs beside each other: in what their settings differ, and what came out.

    Of methods with a generator also what the teacher (or ensemble) says of its images in the last
    round: the share that it gives the class asked for, and the entropy of the classes that it
    gives, over log C.

    Example: `for mu in 0.01 0.1 1; do fedsynth train --method fedprox --set mu=$mu; done; fedsynth
    runs`.
    """
    from fedsynth.runs.folders import finished_runs

    given = [*(folders or []), *([output] if output else [])] or [Path("runs")]
    rows = compared(finished_runs(given))
    if as_json:
        print(json.dumps(rows, indent=2, ensure_ascii=False, default=str))
    else:
        _print(rows)


def compared(folders: list[Path]) -> list[dict[str, Any]]:
    """A row for each run. Of its settings those that differ: the method's between runs of the same
    method, all others between all runs.
    """
    from fedsynth.runs.compare import differing
    from fedsynth.runs.folders import Run, read_settings, read_summary

    read = [Run(folder, read_summary(folder), read_settings(folder)) for folder in folders]
    rows = []
    for run, differ in zip(read, differing(read), strict=True):
        summary = run.summary
        local = summary.get("local")
        private = summary.get("differential_privacy")
        rows.append(
            {
                "run": run.name,
                "method": summary.get("method"),
                "dataset": summary.get("dataset"),
                "settings": differ,
                "rounds": summary.get("rounds"),
                "test_accuracy": summary.get("test_accuracy"),
                **({"amp": local["amp"], "wlp": local["wlp"]} if local else {}),
                **({"generator": summary["generator"]} if summary.get("generator") else {}),
                **({"epsilon": private.get("epsilon")} if private else {}),
                "upload_bytes": summary.get("upload_bytes"),
                "seconds": summary.get("seconds"),
            }
        )
    return rows


def _print(rows: list[dict[str, Any]]) -> None:
    """Aligned columns, as wide as they are: nothing is cut. A column that no run has something in
    is left out.
    """
    from fedsynth.privacy.report_text import up

    columns: list[tuple[str, Callable[[dict[str, Any]], str | None]]] = [
        ("method", lambda row: str(row["method"])),
        ("accuracy", lambda row: _percent(row.get("test_accuracy"))),
        ("AMP", lambda row: _percent(row.get("amp"))),
        ("WLP", lambda row: _percent(row.get("wlp"))),
        ("as asked", lambda row: _percent(_generated(row, "agreement"))),
        ("class entropy", lambda row: _fraction(_generated(row, "class_entropy_share"))),
        ("ε", lambda row: None if row.get("epsilon") is None else up(row["epsilon"])),
        ("MB up", lambda row: f"{(row['upload_bytes'] or 0) / 1e6:.2f}"),
        ("s", lambda row: None if row["seconds"] is None else f"{row['seconds']:.1f}"),
        ("run", lambda row: str(row["run"])),
        (
            "settings that differ",
            lambda row: ", ".join(f"{key}={value}" for key, value in row["settings"].items()),
        ),
    ]
    table = []
    for name, value in columns:
        cells = [value(row) for row in rows]
        if any(cell is not None for cell in cells):
            table.append([name, *("–" if cell is None else cell for cell in cells)])
    widths = [max(map(len, column)) for column in table]
    for line in zip(*table, strict=True):
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        )


def _generated(row: dict[str, Any], name: str) -> float | None:
    """A fact of a run's last generated images, of methods with a generator."""
    facts: dict[str, float] = row.get("generator", {})
    return facts.get(name)


def _percent(value: float | None) -> str | None:
    return None if value is None else f"{100 * value:.2f} %"


def _fraction(value: float | None) -> str | None:
    return None if value is None else f"{value:.2f}"
