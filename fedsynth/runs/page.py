"""Several runs beside each other as one self-contained page: curves, who has what, synthetic
images, fairness, generators, privacy, settings. No script, nothing loaded from elsewhere.

Of private runs it shows what may be shown. What stands in `simulation_only` comes in on request
alone, and the page then says at its top that it must not be handed on.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

from fedsynth.federation.outputs.run_folder import COUNTS, ROUNDS
from fedsynth.privacy.errors import PrivacyError
from fedsynth.privacy.figures import printable, up
from fedsynth.privacy.files import load_json, read_regular
from fedsynth.privacy.first_page import band, odds_factor
from fedsynth.privacy.plots import Line, line_plot
from fedsynth.privacy.report_file import HOSTILE, sound_report
from fedsynth.privacy.report_html import STYLE
from fedsynth.runs.compare import differing, labels
from fedsynth.runs.curves import AXES, curve, curves_svg, is_share, words_of
from fedsynth.runs.folders import Run, RunFolderError, value_at

PICTURES = 5
"""Of a run's rounds."""
MOST_CELLS = 2000
"""Of a partition that is shown as a table; a larger one is a picture."""
MOST_PICTURE = 2**24
SHORT = 12
"""Letters of a cell that is not broken into lines."""
OWN_STYLE = """
td.n,.heat th{white-space:nowrap}.heat td{text-align:center;min-width:2.2rem;print-color-adjust:exact}
.heat td,.heat th{padding:.15rem .35rem}
.plain th,.plain td,.heat th,.heat td{overflow-wrap:normal;min-width:0}
.runs{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(26rem,100%),1fr));gap:0 1.5rem}
figure img{image-rendering:pixelated;background:#fff}
nav ul{display:flex;flex-wrap:wrap;gap:.2rem 1.2rem;padding:0;list-style:none}
@media print{nav{display:none}.runs{grid-template-columns:repeat(2,1fr);gap:0 4mm}}
"""
Section = Callable[[Sequence[Run], Sequence[str], bool], str]


def runs_page(runs: Sequence[Run], *, simulation_only: bool = False) -> str:
    """The page.

    Args:
        runs: finished ones.
        simulation_only: also show what only a simulation may show of private runs.
    """
    names = [printable(one) for one in labels(runs)]
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
    made = {title: section(runs, names, simulation_only) for title, section in sections.items()}
    shown = {title: body for title, body in made.items() if body}
    parts = "\n".join(
        f'<section id="{_id(title)}"><h2>{title}</h2>\n{body}</section>'
        for title, body in shown.items()
    )
    links = "".join(f'<li><a href="#{_id(title)}">{title}</a></li>' for title in shown)
    title = f"fedsynth: {names[0]}" if len(runs) == 1 else f"fedsynth: {len(runs)} runs"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}{OWN_STYLE}</style></head>\n<body>\n"
        f"<main><h1>{escape(title)}</h1>\n{_warning(runs, simulation_only)}"
        f'<nav aria-label="sections"><ul>{links}</ul></nav>\n{parts}\n</main></body></html>\n'
    )


def _warning(runs: Sequence[Run], simulation_only: bool) -> str:
    if simulation_only and any(run.private for run in runs):
        return (
            "<blockquote><strong>Not to be handed on.</strong> This page shows exact figures of "
            "private data, from simulation_only; no guarantee covers them.</blockquote>\n"
        )
    return ""


def _with_hidden(run: Run) -> list[dict[str, Any]]:
    hidden = {row["round"]: row for row in run.hidden}
    return [{**hidden.get(row["round"], {}), **row} for row in run.rows]


# ------------------------------------------------------------------------------------ the sections


def _runs(runs: Sequence[Run], names: Sequence[str], simulation_only: bool) -> str:
    head = ("run", "folder", "data set", "rounds", "test accuracy", "AMP", "WLP", "ε", "MB up", "s")
    keys = ("test_accuracy", "local.amp", "local.wlp")
    body = []
    for run, name in zip(runs, names, strict=True):
        spent = value_at(run.summary, "differential_privacy.epsilon")
        seconds = value_at(run.summary, "seconds")
        sent = value_at(run.summary, "upload_bytes")
        body.append(
            [
                name,
                run.name,
                str(run.summary.get("dataset", "–")),
                str(run.summary.get("rounds", "–")),
                *(_percent(value_at(run.summary, key)) for key in keys),
                "–" if spent is None else up(spent),
                "–" if sent is None else f"{sent / 1e6:.2f}",
                "–" if seconds is None else f"{seconds:.1f}",
            ]
        )
    return _table("runs", head, body)


def _curves(runs: Sequence[Run], names: Sequence[str], simulation_only: bool) -> str:
    metric = "test_accuracy"
    if not any(value_at(row, metric) is not None for run in runs for row in run.rows):
        metric = "private_test.test_accuracy" if simulation_only else "local.amp"
    return "".join(_curve(runs, names, metric, axis) for axis in AXES)


def _curve(runs: Sequence[Run], names: Sequence[str], metric: str, axis: str) -> str:
    """Of the runs that have it; empty where none has."""
    lines = []
    for number, (run, name) in enumerate(zip(runs, names, strict=True)):
        try:
            lines.append(Line(name, curve(run, metric, axis), colour=number))
        except RunFolderError:
            continue
    if not lines:
        return ""
    missing = len(runs) - len(lines)
    more = f"; {missing} of {len(runs)} runs have no such figure" if missing else ""
    caption = f"{words_of(metric)} by {AXES[axis]}{more}"
    return _figure(curves_svg(lines, metric, axis), caption)


def _partitions(runs: Sequence[Run], names: Sequence[str], simulation_only: bool) -> str:
    """A heat map for each partition; runs with the same one share it."""
    groups: dict[str, list[str]] = {}
    silent = []
    for run, name in zip(runs, names, strict=True):
        if run.private and not simulation_only:
            silent.append(name)
            continue
        groups.setdefault(_partition(run.folder), []).append(name)
    parts = [
        f"<h3>{escape(', '.join(whose))}</h3>{picture}"
        for picture, whose in groups.items()
        if picture
    ]
    if silent:
        parts.append(
            f"<p>{escape(', '.join(silent))}: who has what is an exact function of private data "
            "and is shown on request alone.</p>"
        )
    return "\n".join(parts)


def _partition(folder: Path) -> str:
    """Who has what of one run: a table, or the picture that the run left."""
    try:
        said = load_json(folder / "simulation_only" / COUNTS)
        counts = [[int(n) for n in row] for row in said["counts"]]
        classes = [printable(str(name)) for name in said["class_names"]]
    except (OSError, *HOSTILE):
        return _image(folder / "simulation_only" / "partition.png", "who has what: heat map")
    if sum(map(len, counts)) > MOST_CELLS:
        return _image(folder / "simulation_only" / "partition.png", "who has what: heat map")
    return _heat_map("who has what: examples of each class at each client", classes, counts)


def _heat_map(caption: str, columns: Sequence[str], rows: Sequence[Sequence[float]]) -> str:
    most = max((value for row in rows for value in row), default=0) or 1
    heads = "".join(f'<th scope="col">{escape(name)}</th>' for name in columns)
    lines = []
    for number, row in enumerate(rows):
        cells = "".join(_heat(value, most) for value in row)
        lines.append(f'<tr><th scope="row">client {number}</th>{cells}</tr>')
    return (
        f'<div class="scroll heat" tabindex="0" role="region" aria-label="{escape(caption)}">'
        f"<table><caption>{escape(caption)}</caption>"
        f'<thead><tr><th scope="col">client</th>{heads}</tr>'
        f"</thead><tbody>{''.join(lines)}</tbody></table></div>"
    )


def _heat(value: float, most: float) -> str:
    """A cell; the square root keeps small counts visible beside large ones."""
    share = 0.7 * math.sqrt(max(0.0, value) / most)
    return f'<td style="background:rgba(47,127,209,{share:.2f})">{value:.4g}</td>'


def _images(runs: Sequence[Run], names: Sequence[str], simulation_only: bool) -> str:
    """Of each run pictures of some rounds: the first, the last and some between."""
    parts = []
    for run, name in zip(runs, names, strict=True):
        found = sorted((run.folder / ROUNDS).glob("round-*.png"))
        if len(found) > PICTURES:
            step = (len(found) - 1) / (PICTURES - 1)
            found = [found[round(number * step)] for number in range(PICTURES)]
        if not found:
            found = [path for path in [run.folder / "synthetic.png"] if path.is_file()]
        figures = "".join(_round_picture(path, name) for path in found)
        if figures:
            parts.append(f'<h3>{escape(name)}</h3><div class="runs">{figures}</div>')
    return "\n".join(parts)


def _round_picture(path: Path, name: str) -> str:
    number = path.stem.removeprefix("round-").lstrip("0")
    caption = f"round {number}" if number.isdigit() else "the last round"
    image = _image(path, f"{name}: synthetic images sent in {caption}, a row for each class")
    return f"<figure>{image}<figcaption>{caption}</figcaption></figure>" if image else ""


def _fairness(runs: Sequence[Run], names: Sequence[str], simulation_only: bool) -> str:
    """AMP, WLP and FM of the clients' own test splits, and each client's accuracy at the end."""
    curves = [_curve(runs, names, f"local.{key}", "rounds") for key in ("amp", "wlp", "fm")]
    accuracies = []
    for run, name in zip(runs, names, strict=True):
        local = run.rows[-1].get("local") if run.rows else None
        values = local.get("client_accuracy") if isinstance(local, Mapping) else None
        if isinstance(values, list):
            accuracies.append([name, *(_percent(v if _number(v) else None) for v in values)])
    table = ""
    if accuracies:
        most = max(map(len, accuracies))
        head = ["accuracy at", *(f"client {k}" for k in range(most - 1))]
        body = [[*row, *["–"] * (most - len(row))] for row in accuracies]
        table = _table("accuracy of each client on its own test split", head, body)
    return "".join(curves) + table


def _generators(runs: Sequence[Run], names: Sequence[str], simulation_only: bool) -> str:
    """Whether the teachers give generated images the class that was asked for, and the student
    theirs."""
    parts = [
        _curve(runs, names, f"generator.{key}", "rounds")
        for key in ("agreement", "class_entropy_share", "student")
    ]
    for run, name in zip(runs, names, strict=True):
        for key in _artefacts(run.folder):
            title = f"{name}: {key.replace('_', ' ')} (classes are rows, clients columns)"
            image = _image(run.folder / f"{key}.png", title)
            if image:
                parts.append(f"<figure>{image}<figcaption>{escape(title)}</figcaption></figure>")
    return "".join(parts)


def _artefacts(folder: Path) -> list[str]:
    try:
        said = load_json(folder / "artefacts.json")
    except (OSError, ValueError):
        return []
    return [key for key in said if key.isidentifier()] if isinstance(said, dict) else []


def _privacy(runs: Sequence[Run], names: Sequence[str], simulation_only: bool) -> str:
    if not any(run.private for run in runs):
        return "<p>No run had differential privacy: what clients sent is not protected.</p>"
    head = ("run", "guarantee", "δ", "unit", "that is", "factor on the odds", "worst client")
    body = []
    lines = []
    for number, (run, name) in enumerate(zip(runs, names, strict=True)):
        if not run.private:
            body.append([name, "no differential privacy", *["–"] * 5])
            continue
        row, points = _promise(run)
        body.append([name, *row])
        if points:
            lines.append(Line(name, points, colour=number))
    plot = ""
    if lines:
        spent = line_plot(lines, x="round", y="ε")
        plot = _figure(spent, "ε of the worst client after each round")
    words = (
        "<p>privacy_report.html in each private run's folder is the report to hand over; "
        "<code>fedsynth privacy verify RUN</code> makes it again.</p>"
    )
    return _table("privacy", head, body) + plot + words


def _promise(run: Run) -> tuple[list[str], list[tuple[float, float]]]:
    """What a run's report promises, and ε by round."""
    try:
        report = sound_report(run.folder)
    except (PrivacyError, *HOSTILE) as error:
        return [f"the report cannot be read: {printable(str(error))[:200]}", *["–"] * 5], []
    promise = report["guarantee"]
    if promise is None:
        return [report["verdict"]["text"], *["–"] * 5], []
    epsilon = promise["epsilon"]
    row = [
        f"ε = {up(epsilon)}",
        f"{promise['delta']:g}",
        printable(report["unit"]["one"]),
        band(epsilon),
        odds_factor(epsilon),
        printable(promise["worst_client"]),
    ]
    return row, [(float(one["round"]), one["worst"]) for one in promise["epsilon_by_round"]]


def _settings(runs: Sequence[Run], names: Sequence[str], simulation_only: bool) -> str:
    """All settings of all runs, those that differ first. A method's are compared between its own
    runs alone."""
    different: dict[bool, list[str]] = {True: [], False: []}
    apart = {key for some in differing(runs) for key in some}
    for key in dict.fromkeys(key for run in runs for key in run.settings):
        values = [run.settings.get(key) for run in runs]
        cells = "".join(
            f"<td>{'–' if value is None else escape(printable(str(value)))}</td>"
            for value in values
        )
        short = key.removeprefix("method.").removeprefix("run.")
        differs = key == "run.method" and len(set(values)) > 1
        line = f'<tr><th scope="row">{escape(printable(key))}</th>{cells}</tr>'
        different[differs or short in apart].append(line)
    heads = "".join(f'<th scope="col">{escape(name)}</th>' for name in names)
    head = f'<thead><tr><th scope="col">setting</th>{heads}</tr></thead>'
    tables = {"settings that differ": different[True], "all other settings": different[False]}
    return "".join(
        f"<h3>{title[0].upper()}{title[1:]}</h3>{_settings_table(head, rows, title)}"
        for title, rows in tables.items()
        if rows
    )


def _settings_table(head: str, rows: Sequence[str], label: str) -> str:
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{label}"><table>{head}'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def curves_page(lines: Sequence[Line], metric: str, axis: str) -> str:
    """A page of one picture of curves, with their last values as a table."""
    title = f"{words_of(metric)} by {AXES[axis]}"
    last = [
        [printable(line.name), f"{line.points[-1][0]:.6g}", _shown(line, metric)] for line in lines
    ]
    head = ("run", AXES[axis], f"{words_of(metric)} there")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}{OWN_STYLE}</style></head>\n<body><main>"
        f"<h1>{escape(title)}</h1>{_figure(curves_svg(lines, metric, axis), title)}"
        f"{_table('last values', head, last)}</main></body></html>\n"
    )


def _shown(line: Line, metric: str) -> str:
    value = line.points[-1][1]
    return _percent(value) if is_share(metric) else f"{value:.6g}"


# ------------------------------------------------------------------------------------------- pieces


def _table(label: str, head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """Columns in which no row has anything are left out; a row's first cell is its heading."""
    kept = [i for i in range(len(head)) if i == 0 or any(row[i] not in ("–", "") for row in body)]
    heads = "".join(f'<th scope="col">{escape(head[i])}</th>' for i in kept)
    lines = "".join("<tr>" + "".join(_cells(row, kept)) + "</tr>" for row in body)
    return (
        f'<div class="scroll plain" tabindex="0" role="region" aria-label="{escape(label)}"><table>'
        f"<thead><tr>{heads}</tr></thead><tbody>{lines}</tbody></table></div>"
    )


def _cells(row: Sequence[str], kept: Sequence[int]) -> Iterator[str]:
    for i in kept:
        text = escape(printable(row[i]))
        short = ' class="n"' if len(text) <= SHORT else ""
        yield f'<th scope="row">{text}</th>' if i == 0 else f"<td{short}>{text}</td>"


def _figure(svg: str, caption: str) -> str:
    return f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>"


def _image(path: Path, alt: str) -> str:
    """A PNG file within the page; empty where there is none."""
    try:
        content = read_regular(path, MOST_PICTURE)
    except OSError:
        return ""
    if not content.startswith(b"\x89PNG"):
        return ""
    text = base64.b64encode(content).decode()
    return f'<img alt="{escape(alt)}" src="data:image/png;base64,{text}">'


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.2f} %"


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _id(title: str) -> str:
    return title.lower().replace(" ", "-")
