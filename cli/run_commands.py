"""`fedsynth runs`: run folders beside each other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedsynth.cli.paths import path_argument, path_option

if TYPE_CHECKING:
    from fedsynth.runs.folders import Run


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
    from fedsynth.runs.compare import differing
    from fedsynth.runs.folders import Run, finished_runs, read_settings, read_summary
    from fedsynth.runs.overview import aligned, overview

    given = [*(folders or []), *([output] if output else [])] or [Path("runs")]
    places = finished_runs(given)
    read = [Run(place, read_summary(place), read_settings(place)) for place in places]
    settings = differing(read)
    if as_json:
        rows = [_as_json(run, differ) for run, differ in zip(read, settings, strict=True)]
        print(json.dumps(rows, indent=2, ensure_ascii=False, default=str))
        return
    head, *figures = overview(read)
    table = [["method", *head, "run", "settings that differ"]]
    for run, row, differ in zip(read, figures, settings, strict=True):
        words = ", ".join(f"{key}={value}" for key, value in differ.items())
        table.append([str(run.summary.get("method")), *row, run.name, words])
    print(aligned(table), end="")


def _as_json(run: Run, settings: dict[str, Any]) -> dict[str, Any]:
    """Returns what came out of a run, and of its settings those that differ."""
    summary = run.summary
    found = {name: summary.get(name) for name in ("method", "dataset", "rounds", "test_accuracy")}
    found |= summary.get("local") or {}
    if summary.get("generator"):
        found["generator"] = summary["generator"]
    if private := summary.get("differential_privacy"):
        found["epsilon"] = private.get("epsilon")
    sent = {name: summary.get(name) for name in ("upload_bytes", "seconds")}
    return {"run": run.name, "settings": settings, **found, **sent}
