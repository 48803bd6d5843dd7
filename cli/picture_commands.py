"""`fedsynth plot | report`: finished runs as learning curves, and as one page."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from fedsynth.cli.errors import OptionError, write_text
from fedsynth.cli.paths import path_argument, path_option

Runs = Annotated[
    list[Path], path_argument("Run folders, or folders of such (runs/).", metavar="RUN...")
]


def plot(
    runs: Runs,
    output: Annotated[
        Path,
        path_option("Ends in .svg, .png or .html."),
    ] = Path("curves.svg"),
    by: Annotated[str, typer.Option(help="rounds, bytes, seconds or eps.")] = "rounds",
    metric: Annotated[
        str,
        typer.Option(help="A number of a round's row, such as local.amp or generator.agreement."),
    ] = "test_accuracy",
    mean: Annotated[
        bool,
        typer.Option(
            "--mean", help="Mean ± standard deviation of runs that differ in seeds alone."
        ),
    ] = False,
) -> None:
    """Draw learning curves of finished runs.

    SVG and HTML need nothing else; PNG needs matplotlib (`fedsynth[plots]`).
    """
    from fedsynth.privacy.plots import standalone
    from fedsynth.runs.curves import AXES, curves, curves_svg, write_png
    from fedsynth.runs.folders import Run, finished_runs
    from fedsynth.runs.page import curves_page
    from fedsynth.validation import check_choice

    check_choice(None, "by", by, tuple(AXES))
    ending = output.suffix.lower()
    if ending not in (".svg", ".png", ".html"):
        raise OptionError(f"--output must end in .svg, .png or .html, got {output.name!r}")
    read = [Run.read(folder) for folder in finished_runs(runs)]
    lines = curves(read, metric, by, mean=mean, note=_note)
    if ending == ".png":
        write_png(output, lines, metric, by)
    elif ending == ".svg":
        write_text(output, standalone(curves_svg(lines, metric, by)))
    else:
        write_text(output, curves_page(lines, metric, by))
    print(output)


def _note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)


def report(
    runs: Runs,
    output: Annotated[Path, path_option("The HTML file.")] = Path("report.html"),
    simulation_only: Annotated[
        bool,
        typer.Option(
            "--simulation-only",
            help="Of private runs also show what stands in simulation_only: exact figures of "
            "private data; the page says so.",
        ),
    ] = False,
) -> None:
    """Write one HTML page on finished runs: curves, who has what, synthetic images by class and
    round, fairness, generators, privacy, settings.

    The page has everything in it and loads nothing. (The privacy report of one run, to hand over,
    is `fedsynth privacy report RUN`.)
    """
    from fedsynth.runs.folders import Run, finished_runs
    from fedsynth.runs.page import runs_page

    read = [Run.read(folder) for folder in finished_runs(runs)]
    write_text(output, runs_page(read, simulation_only=simulation_only))
    print(output)
