"""One self-contained page about several runs: learning curves, class distributions per client,
synthetic images, fairness, generators, privacy, settings. It has no script and loads nothing.

For private runs it shows only what may be shared. It includes `simulation_only` only on request,
and then warns at its top that it must not be shared.

A section is a list of parts, which `templates/runs.html.j2` distinguishes by their kind; the
template escapes every text.
"""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from markupsafe import Markup, escape

from fedsynth.privacy.errors import PrivacyError
from fedsynth.privacy.files import load_json, read_regular
from fedsynth.privacy.report.file import HOSTILE, sound_report
from fedsynth.privacy.report.formatting import band, format_epsilon, format_odds, printable
from fedsynth.privacy.report.pages import STYLE, report_sentences
from fedsynth.privacy.report.plots import Line, line_plot, svg_templates
from fedsynth.results.curves import AXES, curve, curves_svg
from fedsynth.results.finished import (
    NONE,
    Run,
    RunFolderError,
    differing,
    is_share,
    labels,
    overview,
    percent,
    value_at,
    words_of,
)
from fedsynth.results.run_folder import COUNTS, ROUNDS

PICTURES = 5
"""Number of rounds of a run whose images are shown."""
MAX_CELLS = 2000
"""Number of cells up to which a partition is shown as a table; a larger one is an image."""
MAX_PICTURE_BYTES = 2**24
Part = dict[str, Any]
Section = Callable[[Sequence[Run], Sequence[str], bool], Iterator[Part]]


def _breakable(text: object) -> Markup:
    """Returns a text in which lines may break after dots and underscores, but not within words."""
    return Markup(re.sub(r"([._=])(?=\w)", r"\1<wbr>", str(escape(printable(str(text))))))


_TEMPLATES = svg_templates(Path(__file__).parent / "templates")
_TEMPLATES.filters["breakable"] = _breakable
_TEMPLATES.finalize = lambda value: printable(value) if type(value) is str else value


def runs_page(runs: Sequence[Run], *, simulation_only: bool = False) -> str:
    """Returns the page.

    Args:
        runs: finished runs.
        simulation_only: also show data of private runs that only a simulation may show.
    """
    names = [printable(label) for label in labels(runs)]
    if simulation_only:
        runs = [replace(run, rows=_with_hidden(run)) for run in runs]
    sections: dict[str, Section] = {
        "Runs": _runs,
        "Learning curves": _curves,
        "Who has what": _partitions,
        "Synthetic images": _images,
        "Fairness": _fairness,
        "Generators": _generators,
        "Privacy": _privacy,
        "Settings": _settings,
    }
    page_sections = {
        title: list(parts(runs, names, simulation_only)) for title, parts in sections.items()
    }
    title = f"fedsynth: {names[0]}" if len(runs) == 1 else f"fedsynth: {len(runs)} runs"
    warn = simulation_only and any(run.private for run in runs)
    return _page(title, {name: parts for name, parts in page_sections.items() if parts}, warn=warn)


def curves_page(lines: Sequence[Line], metric: str, axis: str) -> str:
    """Returns a page with one plot of curves, and their last values as a table."""
    title = f"{words_of(metric)} by {AXES[axis]}"
    head = ("run", AXES[axis], f"{words_of(metric)} there")
    rows = []
    for line in lines:
        across, value = line.points[-1]
        text = percent(value) if is_share(metric) else f"{value:.6g}"
        rows.append([line.name, f"{across:.6g}", text])
    plot = _plot(curves_svg(lines, metric, axis), title)
    return _page(title, {"": [plot, _table("last values", head, rows)]})


def _page(title: str, sections: Mapping[str, Sequence[Part]], *, warn: bool = False) -> str:
    template = _TEMPLATES.get_template("runs.html.j2")
    return template.render(title=title, sections=sections, warn=warn, style=STYLE)


def _with_hidden(run: Run) -> list[dict[str, Any]]:
    hidden = {row["round"]: row for row in run.hidden}
    return [{**hidden.get(row["round"], {}), **row} for row in run.rows]


# ------------------------------------------------------------------------------------ the sections


def _runs(runs: Sequence[Run], names: Sequence[str], simulation_only: bool) -> Iterator[Part]:
    head, *figures = overview(runs)
    rows = []
    for run, name, row in zip(runs, names, figures, strict=True):
        rows.append([name, *row, str(run.summary.get("dataset", NONE)), run.name])
    yield _table("runs", ("run", *head, "data set", "folder"), rows)


def _curves(runs: Sequence[Run], names: Sequence[str], simulation_only: bool) -> Iterator[Part]:
    metric = "test_accuracy"
    if not any(value_at(row, metric) is not None for run in runs for row in run.rows):
        metric = "private_test.test_accuracy" if simulation_only else "local.amp"
    for axis in AXES:
        yield from _curve(runs, names, metric, axis)


def _curve(runs: Sequence[Run], names: Sequence[str], metric: str, axis: str) -> Iterator[Part]:
    """Yields the plot of the runs that have the metric; nothing if none has it."""
    lines = []
    for number, (run, name) in enumerate(zip(runs, names, strict=True)):
        try:
            lines.append(Line(name, curve(run, metric, axis), colour=number))
        except RunFolderError:
            continue
    missing = len(runs) - len(lines)
    more = f"; {missing} of {len(runs)} runs lack this value" if missing else ""
    if lines:
        caption = f"{words_of(metric)} by {AXES[axis]}{more}"
        yield _plot(curves_svg(lines, metric, axis), caption)


def _partitions(runs: Sequence[Run], names: Sequence[str], simulation_only: bool) -> Iterator[Part]:
    """Yields a heat map for each partition; runs with the same one share it."""
    pictures: list[tuple[Part, list[str]]] = []
    silent = []
    for run, name in zip(runs, names, strict=True):
        if run.private and not simulation_only:
            silent.append(name)
            continue
        picture = _partition(run.folder)
        same = [owners for other, owners in pictures if other == picture]
        if same:
            same[0].append(name)
        elif picture is not None:
            pictures.append((picture, [name]))
    for picture, owners in pictures:
        yield {"kind": "heading", "text": ", ".join(owners)}
        yield picture
    if silent:
        text = "the partition is an exact function of private data and is shown only on request."
        yield {"kind": "text", "text": f"{', '.join(silent)}: {text}"}


def _partition(folder: Path) -> Part | None:
    """Returns the class distribution of one run's clients: a table, or the image that the run
    stored."""
    try:
        stated = load_json(folder / "simulation_only" / COUNTS)
        counts = [[int(n) for n in row] for row in stated["counts"]]
        classes = [str(name) for name in stated["class_names"]]
    except (OSError, *HOSTILE):
        counts = []
    if not counts or sum(map(len, counts)) > MAX_CELLS:
        return _image(folder / "simulation_only" / "partition.png", "partition: heat map", "")
    largest = max((n for row in counts for n in row), default=0) or 1
    # the square root keeps small counts visible next to large ones
    shaded = [[(n, f"{0.7 * math.sqrt(max(0, n) / largest):.2f}") for n in row] for row in counts]
    caption = "partition: examples of each class at each client"
    return {"kind": "heat", "caption": caption, "columns": classes, "rows": shaded}


def _images(runs: Sequence[Run], names: Sequence[str], simulation_only: bool) -> Iterator[Part]:
    """Yields images of some rounds of each run: the first, the last and some between."""
    for run, name in zip(runs, names, strict=True):
        paths = sorted((run.folder / ROUNDS).glob("round-*.png"))
        if len(paths) > PICTURES:
            step = (len(paths) - 1) / (PICTURES - 1)
            paths = [paths[round(number * step)] for number in range(PICTURES)]
        paths = paths or [run.folder / "synthetic.png"]
        images = [image for path in paths if (image := _round_picture(path, name)) is not None]
        if images:
            yield {"kind": "heading", "text": name}
            yield {"kind": "images", "images": images}


def _round_picture(path: Path, name: str) -> Part | None:
    number = path.stem.removeprefix("round-").lstrip("0")
    caption = f"round {number}" if number.isdigit() else "the last round"
    alt = f"{name}: synthetic images sent in {caption}, a row for each class"
    return _image(path, alt, caption)


def _fairness(runs: Sequence[Run], names: Sequence[str], simulation_only: bool) -> Iterator[Part]:
    """Yields AMP, WLP and FM on the clients' own test splits, and each client's final accuracy."""
    for key in ("amp", "wlp", "fm"):
        yield from _curve(runs, names, f"local.{key}", "rounds")
    rows = []
    for run, name in zip(runs, names, strict=True):
        local = run.rows[-1].get("local") if run.rows else None
        values = local.get("client_accuracy") if isinstance(local, Mapping) else None
        if isinstance(values, list):
            rows.append([name, *(percent(value_at({"a": value}, "a")) for value in values)])
    if rows:
        width = max(map(len, rows))
        head = ["accuracy at", *(f"client {number}" for number in range(width - 1))]
        padded = [[*row, *[NONE] * (width - len(row))] for row in rows]
        yield _table("accuracy of each client on its own test split", head, padded)


def _generators(runs: Sequence[Run], names: Sequence[str], simulation_only: bool) -> Iterator[Part]:
    """Yields how often the teachers' and the student's predictions on generated images match the
    requested class."""
    for key in ("agreement", "class_entropy_share", "student"):
        yield from _curve(runs, names, f"generator.{key}", "rounds")
    for run, name in zip(runs, names, strict=True):
        for key in _artefacts(run.folder):
            title = f"{name}: {key.replace('_', ' ')} (classes are rows, clients columns)"
            image = _image(run.folder / f"{key}.png", title, title)
            if image is not None:
                yield image


def _artefacts(folder: Path) -> list[str]:
    try:
        stated = load_json(folder / "artefacts.json")
    except (OSError, *HOSTILE):
        return []
    return [key for key in stated if key.isidentifier()] if isinstance(stated, dict) else []


def _privacy(runs: Sequence[Run], names: Sequence[str], simulation_only: bool) -> Iterator[Part]:
    if not any(run.private for run in runs):
        text = "No run had differential privacy: the clients' uploads are not protected."
        yield {"kind": "text", "text": text}
        return
    head = ("run", "guarantee", "δ", "unit", "that is", "factor on the odds", "worst client")
    rows = []
    lines = []
    for number, (run, name) in enumerate(zip(runs, names, strict=True)):
        if run.private:
            row, points = _promise(run)
        else:
            row, points = ["no differential privacy", *[NONE] * 5], []
        rows.append([name, *row])
        if points:
            lines.append(Line(name, points, colour=number))
    yield _table("privacy", head, rows)
    if lines:
        spent = line_plot(lines, x="round", y="ε")
        yield _plot(spent, "ε of the worst client after each round")
    text = (
        "privacy_report.html in each private run's folder is the report to share; fedsynth "
        "privacy verify RUN computes it again."
    )
    yield {"kind": "text", "text": text}


def _promise(run: Run) -> tuple[list[str], list[tuple[float, float]]]:
    """Returns what a run's report promises, and ε by round."""
    try:
        report = sound_report(run.folder)
    except (PrivacyError, *HOSTILE) as error:
        return [f"the report cannot be read: {error!s:.200}", *[NONE] * 5], []
    promise = report["guarantee"]
    if promise is None:
        return [report_sentences(report).verdict(), *[NONE] * 5], []
    epsilon = promise["epsilon"]
    row = [
        f"ε = {format_epsilon(epsilon)}",
        f"{promise['delta']:g}",
        report_sentences(report).protected(),
        band(epsilon),
        format_odds(epsilon),
        promise["worst_client"],
    ]
    return row, [(float(point["round"]), point["worst"]) for point in promise["epsilon_by_round"]]


def _settings(runs: Sequence[Run], names: Sequence[str], simulation_only: bool) -> Iterator[Part]:
    """Yields all settings of all runs, those that differ first. A method's settings are compared
    only between runs of this method."""
    titles = ("Settings that differ", "All other settings")
    tables: dict[str, list[list[str]]] = {title: [] for title in titles}
    differing_keys = {key for difference in differing(runs) for key in difference}
    for key in dict.fromkeys(key for run in runs for key in run.settings):
        values = [run.settings.get(key) for run in runs]
        short = key.removeprefix("method.").removeprefix("run.")
        differs = short in differing_keys or (key == "run.method" and len(set(values)) > 1)
        row = [key, *(NONE if value is None else str(value) for value in values)]
        tables[titles[0] if differs else titles[1]].append(row)
    for title, rows in tables.items():
        if rows:
            yield {"kind": "heading", "text": title}
            yield _table(title.lower(), ("setting", *names), rows)


# ------------------------------------------------------------------------------------------- parts


def _table(label: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> Part:
    """Returns a table without empty columns; a row's first cell is its heading."""
    columns = [0]
    columns += [i for i in range(1, len(head)) if any(row[i] not in (NONE, "") for row in rows)]
    return {
        "kind": "table",
        "label": label,
        "head": [head[i] for i in columns],
        "rows": [[row[i] for i in columns] for row in rows],
    }


def _plot(svg: str, caption: str) -> Part:
    return {"kind": "plot", "svg": svg, "caption": caption}


def _image(path: Path, alt: str, caption: str) -> Part | None:
    """Returns a PNG file as a part of the page, or None if there is none."""
    try:
        content = read_regular(path, MAX_PICTURE_BYTES)
    except OSError:
        return None
    if not content.startswith(b"\x89PNG"):
        return None
    data = base64.b64encode(content).decode()
    return {"kind": "image", "alt": alt, "data": data, "caption": caption}
