"""Draws learning curves, and writes self-contained HTML pages about runs.

The page shows learning curves, class distributions per client, synthetic images, fairness,
generators, privacy and settings. It contains no script and loads no other file. For private runs,
it shows only shareable values. `simulation_only` is included only on request, and the page then
begins with a warning that it must not be shared.

Each section is a list of parts, which are macros of `templates/parts.html.j2`. The macros and
`templates/runs.html.j2` escape every text.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from markupsafe import Markup, escape

from fedsynth.data.registry import SEGMENTATION
from fedsynth.errors import HOSTILE, OutputError, PrivacyError
from fedsynth.evaluation import NAMES, TEST_KEYS
from fedsynth.experiments import overview
from fedsynth.files import read_regular, write_output
from fedsynth.formatting import band, format_epsilon, format_odds, printable
from fedsynth.privacy.report.file import sound_report
from fedsynth.privacy.report.pages import STYLE, report_sentences
from fedsynth.privacy.report.plots import COLOURS, Line, line_plot, templates
from fedsynth.results.disclosed import DOMAIN_MEASURES, LOCAL, PRIVATE_TEST
from fedsynth.results.finished import (
    NONE,
    UNDEFINED,
    Run,
    RunFolderError,
    auroc_text,
    is_share,
    percent,
    value_at,
    words_of,
)
from fedsynth.results.run_folder import PARTITION, ROUNDS


class Axis(NamedTuple):
    """A learning curve's x axis.

    Attributes:
        label: the axis label.
        key: the quantity's key in a round's metrics.
        scale: the factor on the values.
        cumulative: whether values are accumulated over rounds.
    """

    label: str
    key: str
    scale: float = 1.0
    cumulative: bool = False


Note = Callable[[str], None]
AXES: Mapping[str, Axis] = {
    "rounds": Axis("round", "round"),
    "bytes": Axis("uploads so far (MB)", "upload_bytes", 1e-6, cumulative=True),
    "seconds": Axis("seconds so far", "seconds", cumulative=True),
    "eps": Axis("ε spent", "epsilon"),
}
LEFT_OUT = (
    "left out: the run {run} has no round with both {metric} and {axis}. Private runs record no "
    "seconds, and runs without a privacy guarantee record no ε"
)
NEEDS_MATPLOTLIB = "PNG plots need matplotlib: pip install 'fedsynth[plots]', or write SVG or HTML"


def curve(run: Run, metric: str, axis: str) -> dict[int, tuple[float, float]]:
    """Returns the points (x, y) of a run's learning curve, by round.

    Rounds without the metric or the quantity on the x axis have no point.

    Args:
        run: a finished run.
        metric: the dotted path of a number in the round's metrics, such as "test_accuracy" or
            "local.amp".
        axis: the quantity on the x axis, one of `AXES`.
    """
    _, key, scale, cumulative = AXES[axis]
    points = {}
    total = 0.0
    for row in run.rows:
        x, y = value_at(row, key), value_at(row, metric)
        if x is None:
            continue
        total = scale * x + total * cumulative
        if y is not None:
            points[row["round"]] = (total, y)
    return points


def curves(
    runs: Sequence[Run], metric: str, axis: str, *, mean: bool = False, note: Note = lambda _: None
) -> list[Line]:
    """Returns the learning curves of several runs.

    With `mean`, runs that differ only in their seeds share one curve, their mean. A band shows one
    sample standard deviation above and below the mean. Runs without the metric or the x values are
    left out, with a message to `note` about each.

    Raises:
        RunFolderError: no run has any points.
    """
    drawn = []
    for run in runs:
        if curve(run, metric, axis):
            drawn.append(run)
        else:
            note(LEFT_OUT.format(run=run.name, metric=metric, axis=axis))
    if not drawn:
        raise RunFolderError(f"no run recorded both {metric} and {axis}. Choose another metric")
    if not mean:
        named = zip(overview.labels(drawn), drawn, strict=True)
        return [Line(name, [*curve(run, metric, axis).values()]) for name, run in named]
    groups = overview.by_seed(drawn)
    seedless = []
    for run, *_ in groups:
        settings = {key: value for key, value in run.settings.items() if key not in overview.SEEDS}
        seedless.append(replace(run, settings=settings))
    means = []
    for name, group in zip(overview.labels(seedless), groups, strict=True):
        points = [curve(run, metric, axis) for run in group]
        if set(points[0]).intersection(*points):
            means.append(_mean_line(name, points))
        else:
            note(f"left out: the runs of {name} have no round in common")
    return means


def _mean_line(name: str, curves: Sequence[Mapping[int, tuple[float, float]]]) -> Line:
    """Averages several runs' learning curves, in the rounds in which all of them have a point."""
    if len(curves) == 1:
        return Line(name, [*curves[0].values()])
    rounds = sorted(set(curves[0]).intersection(*curves))
    values = np.array([[points[number] for number in rounds] for points in curves])
    x, y = values.mean(axis=0).T
    std = values[:, :, 1].std(axis=0, ddof=1)
    band = np.stack([x, y - std, y + std], axis=1).tolist()
    points = list(zip(x.tolist(), y.tolist(), strict=True))
    return Line(f"{name} (mean of {len(curves)} seeds, ± std)", points, band)


def curves_svg(lines: Sequence[Line], metric: str, axis: str) -> str:
    """Returns a plot of learning curves as SVG text, for an HTML page."""
    share = is_share(metric)
    return line_plot(lines, x=AXES[axis].label, y=words_of(metric), from_zero=False, percent=share)


def write_png(path: Path, lines: Sequence[Line], metric: str, axis: str) -> None:
    """Writes a plot of learning curves as a PNG file, with matplotlib.

    Raises:
        OutputError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator, PercentFormatter
    except ImportError:
        raise OutputError(NEEDS_MATPLOTLIB) from None
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot(xlabel=AXES[axis].label, ylabel=words_of(metric))
    for number, line in enumerate(lines):
        colour = COLOURS[number % len(COLOURS)]
        x, y = zip(*line.points, strict=True)
        axes.plot(x, y, "o-", ms=3, color=colour, label=line.name)
        if line.band:
            x, low, high = zip(*line.band, strict=True)
            axes.fill_between(x, low, high, color=colour, alpha=0.18)
    axes.grid(alpha=0.3)
    if is_share(metric):
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    if axis == "rounds":
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(fontsize="small")
    image = BytesIO()
    figure.savefig(image, format="png", dpi=150)
    write_output(path, image.getvalue())


# How often the teachers classify a generated image as the requested class, the entropy of the
# classes that the teachers predict, and how often the student predicts the same class as the
# teachers.
GENERATED = ("generator.agreement", "generator.class_entropy_share", "generator.student")

MAX_ROUNDS = 5  # the number of rounds whose images are shown
MAX_IMAGE_BYTES = 2**24
MAX_CLASSES = 20  # the largest confusion matrix that is shown
MAX_CLIENTS = 100  # the longest table with a row for each client
Section = Callable[[Sequence[Run]], Iterator[Markup]]


def _breakable(text: object) -> Markup:
    """Converts text to HTML that allows line breaks after dots, underscores and equals signs."""
    return Markup(re.sub(r"([._=])(?=\w)", r"\1<wbr>", str(escape(printable(str(text))))))


_TEMPLATES = templates(Path(__file__).parent / "templates")
_TEMPLATES.filters["breakable"] = _breakable
_TEMPLATES.finalize = lambda value: printable(value) if type(value) is str else value
_PARTS: Any = _TEMPLATES.get_template("parts.html.j2").module  # the macros in this file


def runs_page(runs: Sequence[Run], *, simulation_only: bool = False) -> str:
    """Returns the HTML page about several finished runs.

    Args:
        runs: the finished runs.
        simulation_only: whether private runs' simulation-only values are shown.
    """
    labelled = []
    for run, label in zip(runs, overview.labels(runs), strict=True):
        rows = _with_hidden(run) if simulation_only else run.rows
        labelled.append(replace(run, label=label, rows=rows))
    builders: dict[str, Section] = {
        "Runs": _runs,
        "Learning curves": _curves,
        "Who has what": partial(_partitions, simulation_only),
        "Synthetic images": _images,
        "Classification": _classification,
        "Segmentation": _segmentation,
        "Fairness": partial(_by_round, ("local.amp", "local.wlp", "local.fm")),
        "Generators": partial(_by_round, GENERATED),
        "Privacy": _privacy,
        "Settings": _settings,
    }
    sections = {}
    for title, build in builders.items():
        if parts := list(build(labelled)):
            sections[title] = parts
    title = f"fedsynth: {labelled[0].label}" if len(runs) == 1 else f"fedsynth: {len(runs)} runs"
    warn = simulation_only and any(run.private for run in runs)
    return _page(title, sections, warn=warn)


def curves_page(lines: Sequence[Line], metric: str, axis: str) -> str:
    """Returns an HTML page with one plot of learning curves."""
    title = f"{words_of(metric)} by {AXES[axis].label}"
    return _page(title, {"": [_PARTS.plot(curves_svg(lines, metric, axis), title)]})


def _page(title: str, sections: Mapping[str, Sequence[Markup]], *, warn: bool = False) -> str:
    template = _TEMPLATES.get_template("runs.html.j2")
    return template.render(title=title, sections=sections, warn=warn, style=STYLE)


def _with_hidden(run: Run) -> list[dict[str, Any]]:
    hidden = {row["round"]: row for row in run.hidden}
    return [{**hidden.get(row["round"], {}), **row} for row in run.rows]


# ------------------------------------------------------------------------------------ the sections


def _runs(runs: Sequence[Run]) -> Iterator[Markup]:
    head, *figures = overview.overview(runs)
    rows = []
    for run, row in zip(runs, figures, strict=True):
        rows.append([run.label, *row, str(run.summary.get("dataset", NONE)), run.name])
    yield _table("runs", ("run", *head, "data set", "folder"), rows)


def _curves(runs: Sequence[Run]) -> Iterator[Markup]:
    on_test = [f"{prefix}{key}" for prefix in ("", f"{PRIVATE_TEST}.") for key in TEST_KEYS]
    recorded = [m for m in (*on_test, "local.amp") if any(curve(r, m, "rounds") for r in runs)]
    chosen = [metric for metric in recorded if metric in TEST_KEYS] or recorded[:1]
    for metric in chosen:
        for axis in AXES:
            yield from _curve(runs, metric, axis)


def _curve(runs: Sequence[Run], metric: str, axis: str) -> Iterator[Markup]:
    """Yields a plot of a metric, or nothing if no run recorded the metric."""
    lines = []
    for number, run in enumerate(runs):
        if points := [*curve(run, metric, axis).values()]:
            lines.append(Line(run.label, points, colour=number))
    if lines:
        caption = f"{words_of(metric)} by {AXES[axis].label}"
        if len(lines) < len(runs):
            caption += f" ({len(runs) - len(lines)} of {len(runs)} runs have no such value)"
        yield _PARTS.plot(curves_svg(lines, metric, axis), caption)


def _partitions(simulation_only: bool, runs: Sequence[Run]) -> Iterator[Markup]:
    """Yields a plot of each run's partition: the number of examples by client and class.

    Runs with a confidential class distribution are left out.
    """
    for run in runs:
        if run.private and not simulation_only:
            text = "not shown, because the partition is an exact function of private data"
            yield _PARTS.text(f"{run.label}: {text}")
        elif picture := _image(run.folder / PARTITION, f"{run.label}: examples of each class", ""):
            yield _PARTS.heading(run.label)
            yield picture


def _images(runs: Sequence[Run]) -> Iterator[Markup]:
    """Yields each run's synthetic images from the first, the last and some other rounds."""
    for run in runs:
        paths = sorted((run.folder / ROUNDS).glob("round-*.png")) or [run.folder / "synthetic.png"]
        positions = np.linspace(0, len(paths) - 1, min(MAX_ROUNDS, len(paths))).round()
        images: list[Markup] = []
        for path in (paths[int(position)] for position in positions):
            caption = re.sub("round-0*", "round ", path.stem)
            alt = f"{run.label}: synthetic images of {caption}, a row for each class"
            images += filter(None, [_image(path, alt, caption)])
        if images:
            yield _PARTS.heading(run.label)
            yield _PARTS.images(images)


_MEASURES = ("accuracy", "balanced accuracy", "AUROC", "F1", "calibration error")


def _mapping(values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Returns the dictionary at a key, or an empty one if there is none."""
    value = values.get(key)
    return value if isinstance(value, Mapping) else {}


def _number(value: Any) -> float | None:
    return value_at({"": value}, "")


def _measured(values: Mapping[str, Any], accuracy: Any) -> list[str]:
    """Returns the cells of a table for the columns in `_MEASURES`."""
    shares = [percent(value_at(values, key)) for key in ("f1", "calibration_error")]
    balanced = percent(value_at(values, "balanced_accuracy"))
    return [percent(_number(accuracy)), balanced, auroc_text(values), *shares]


def _classification(runs: Sequence[Run]) -> Iterator[Markup]:
    """Yields tables of the runs' test results, and their confusion matrices."""
    rows, clients = [], []
    for run in runs:
        last = run.rows[-1] if run.rows else {}
        measures = run.summary
        if _mapping(last, PRIVATE_TEST):
            last = measures = {**_mapping(last, PRIVATE_TEST), LOCAL: last.get(LOCAL)}
        rows.append([run.label, *_measured(measures, measures.get("test_accuracy"))])
        accuracies = _mapping(last, "domain_accuracy")
        for domain in accuracies:
            within = _mapping(_mapping(last, DOMAIN_MEASURES), domain)
            rows.append([f"{run.label}, {domain}", *_measured(within, accuracies[domain])])
        local = _mapping(last, LOCAL)
        shares = next((local[n.clients] for n in NAMES.values() if n.clients in local), None)
        for number, share in enumerate(shares if isinstance(shares, list) else ()):
            clients.append([f"{run.label}, client {number}", percent(_number(share))])
    if any(cell != NONE for _, *cells in rows for cell in cells):
        yield _table("measures on the test set", ("run", *_MEASURES), rows)
    if any(UNDEFINED in row for row in rows):
        text = "AUROC is undefined if all test examples have one class, or an output is not finite."
        yield _PARTS.text(text)
    if 0 < len(clients) <= MAX_CLIENTS:
        heads = ("client", "accuracy or Dice on its own test split")
        yield _table("accuracy by client", heads, clients)
    for run in runs:
        yield from _confusion(run)


def _segmentation(runs: Sequence[Run]) -> Iterator[Markup]:
    """Yields a table of each run's Dice coefficient on the test set, also by domain."""
    names = NAMES[SEGMENTATION]
    rows = []
    for run in runs:
        last = run.rows[-1] if run.rows else {}
        last = _mapping(last, PRIVATE_TEST) or last
        if names.test in last:
            rows.append([run.label, percent(_number(last[names.test]))])
        for domain, value in _mapping(last, names.domains).items():
            rows.append([f"{run.label}, {domain}", percent(_number(value))])
    if rows:
        yield _table("Dice coefficient on the test set", ("run", "mean over images"), rows)


def _confusion(run: Run) -> Iterator[Markup]:
    """Yields a run's confusion matrix with at most `MAX_CLASSES` classes, as a table."""
    matrix = run.summary.get("confusion_matrix") or []
    if 0 < len(matrix) <= MAX_CLASSES:
        yield _PARTS.heading(f"{run.label}: true classes (rows) and predicted classes")
        rows = [[str(label), *map(str, counts)] for label, counts in enumerate(matrix)]
        if all(len(row) == len(matrix) + 1 for row in rows):
            yield _table("confusion matrix", ("class", *map(str, range(len(matrix)))), rows)


def _by_round(metrics: Sequence[str], runs: Sequence[Run]) -> Iterator[Markup]:
    """Yields plots of several metrics by round."""
    for metric in metrics:
        yield from _curve(runs, metric, "rounds")


def _privacy(runs: Sequence[Run]) -> Iterator[Markup]:
    if not any(run.private for run in runs):
        text = "No run had differential privacy: the clients' uploads are not protected."
        yield _PARTS.text(text)
        return
    head = ("run", "guarantee", "δ", "unit", "that is", "factor on the odds", "worst client")
    rows = []
    lines = []
    for number, run in enumerate(runs):
        row, points = _guarantee(run)
        rows.append([run.label, *row, *[NONE] * (len(head) - 1 - len(row))])
        if points:
            lines.append(Line(run.label, points, colour=number))
    yield _table("privacy", head, rows)
    if lines:
        plot = line_plot(lines, x="round", y="ε")
        yield _PARTS.plot(plot, "ε of the worst client after each round")
    text = (
        "To share the guarantee of a private run, use the privacy_report.html in its folder. The "
        "command fedsynth privacy verify RUN checks this report."
    )
    yield _PARTS.text(text)


def _guarantee(run: Run) -> tuple[list[str], list[tuple[float, float]]]:
    """Returns a run's privacy guarantee, as a table row and as a curve.

    The curve consists of points (round, ε).
    """
    if not run.private:
        return ["no differential privacy"], []
    try:
        report = sound_report(run.folder)
    except (PrivacyError, *HOSTILE) as error:
        return [f"the report cannot be read: {error!s:.200}"], []
    guarantee = report["guarantee"]
    if guarantee is None:
        return [report_sentences(report).verdict()], []
    epsilon = guarantee["epsilon"]
    row = [
        f"ε = {format_epsilon(epsilon)}",
        f"{guarantee['delta']:g}",
        report_sentences(report).protected(),
        band(epsilon),
        format_odds(epsilon),
        guarantee["worst_client"],
    ]
    return row, [(float(point["round"]), point["worst"]) for point in guarantee["epsilon_by_round"]]


def _settings(runs: Sequence[Run]) -> Iterator[Markup]:
    """Yields a table of all runs' settings. Settings that differ between runs come first."""
    keys = dict.fromkeys(key for run in runs for key in run.settings)
    rows = [[key, *(str(run.settings.get(key, NONE)) for run in runs)] for key in keys]
    rows.sort(key=lambda row: len(set(row[1:])) == 1)
    yield _table("settings", ("setting", *(run.label for run in runs)), rows)


# ------------------------------------------------------------------------------------------- parts


def _table(label: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> Markup:
    """Renders a table as HTML, without empty columns. A row's first cell is its heading."""
    columns: list[tuple[str, ...]] = []
    for column in zip(head, *rows, strict=True):
        if not columns or not {NONE, ""}.issuperset(column[1:]):
            columns.append(column)
    shown_head, *shown_rows = zip(*columns, strict=True)
    table: Markup = _PARTS.table(label, shown_head, shown_rows)
    return table


def _image(path: Path, alt: str, caption: str) -> Markup | None:
    """Embeds a PNG file in HTML, or returns None if there is no valid PNG file."""
    with suppress(OSError):
        content = read_regular(path, MAX_IMAGE_BYTES)
        if content.startswith(b"\x89PNG"):
            figure: Markup = _PARTS.image(alt, base64.b64encode(content).decode(), caption)
            return figure
    return None
