"""Tests of curves and of the page of several runs."""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from typer.testing import CliRunner

from fedsynth.cli.app import app
from fedsynth.config.resolve import resolve
from fedsynth.errors import OutputError
from fedsynth.results.finished import Run, RunFolderError, by_seed, differing, finished_runs, labels
from fedsynth.results.page import NEEDS_MATPLOTLIB, curve, curves, curves_svg, runs_page, write_png
from fedsynth.simulation.simulate import simulate
from tests.html_page import Page
from tests.quick_runs import folder_of, quick_sections


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    """Returns runs of FedAvg with seeds 0 and 1, of FedDM, and of FedDM with privacy."""
    local: Any = {"partition": {"local_test": 0.2}}
    base, loaded = tmp_path_factory.mktemp("runs"), []
    for sections in (
        quick_sections("fedavg", **local),
        quick_sections("fedavg", run={"seed": 1}, **local),
        quick_sections("feddm"),
        quick_sections("feddm", privacy={"noise_multiplier": 3.0}),
    ):
        loaded.append(Run.read(folder_of(simulate(resolve(sections), output=base))))
    return loaded


def test_curve_points_match_rows(runs: list[Run]) -> None:
    rows = runs[0].rows
    accuracies = [row["test_accuracy"] for row in rows]
    assert curve(runs[0], "test_accuracy", "rounds") == list(zip([1, 2], accuracies, strict=True))
    megabytes = [row["upload_bytes"] / 1e6 for row in rows]
    total = [megabytes[0], megabytes[0] + megabytes[1]]
    assert [a for a, _ in curve(runs[0], "test_accuracy", "bytes")] == pytest.approx(total)
    seconds = [row["seconds"] for row in rows]
    assert curve(runs[0], "local.amp", "seconds")[1][0] == pytest.approx(sum(seconds))
    spent = [row["epsilon"] for row in runs[3].rows]
    assert [a for a, _ in curve(runs[3], "test_accuracy", "eps")] == spent
    for run, metric, by in (
        (runs[3], "test_accuracy", "seconds"),
        (runs[0], "test_accuracy", "eps"),
        (runs[2], "local.amp", "rounds"),
    ):
        assert curve(run, metric, by) == []
    notes: list[str] = []
    assert len(curves(runs, "local.amp", "rounds", note=notes.append)) == 2
    reason = "has no round with both local.amp and rounds"
    omitted = [f"left out: the run {run.name} {reason}" for run in runs[2:]]
    assert [note.partition(". ")[0] for note in notes] == omitted
    with pytest.raises(RunFolderError, match=r"none of these runs has both local\.amp"):
        curves(runs[2:], "local.amp", "rounds")


def test_seeds_are_averaged_with_their_deviation(runs: list[Run]) -> None:
    assert [len(group) for group in by_seed(runs)] == [2, 1, 1]
    (line, *_) = curves(runs, "test_accuracy", "rounds", mean=True)
    a, b = (run.rows[-1]["test_accuracy"] for run in runs[:2])
    across, middle = line.points[-1]
    assert across == 2
    assert middle == pytest.approx((a + b) / 2)
    _, low, high = line.band[-1]
    assert high - low == pytest.approx(2 * abs(a - b) / 2**0.5)


def test_runs_are_labelled_by_differences(runs: list[Run]) -> None:
    """Regression: runs with ε and with σ had the same label."""
    private = runs[3]
    settings = {k: v for k, v in private.settings.items() if k != "privacy.noise_multiplier"}
    by_epsilon = replace(private, settings={**settings, "privacy.epsilon": 8.0})
    assert differing([private, by_epsilon]) == [{"privacy.noise_multiplier": 3.0}, {}]
    assert not any(key.startswith("privacy.") for key in differing(runs)[3])
    starts = ("fedavg seed=0", "fedavg seed=1", "feddm", "feddm private")
    assert all(map(str.startswith, labels(runs), starts))
    assert labels([runs[0], runs[0]]) == ["fedavg #1", "fedavg #2"]
    many = []
    for seed in range(3):
        settings = {**runs[0].settings, "run.seed": seed, "partition.alpha": seed / 7}
        settings |= {"model.name": "x" * 30, "model.width": seed, "method.lr": 0.1 * seed}
        many.append(replace(runs[0], settings=settings))
    names = labels(many)
    assert len(set(names)) == 3
    assert max(map(len, names)) <= 40


def test_curves_are_drawn_as_svg_and_png(runs: list[Run], tmp_path: Path, monkeypatch: Any) -> None:
    lines = curves(runs, "test_accuracy", "rounds")
    svg = ElementTree.fromstring(curves_svg(lines, "test_accuracy", "rounds"))
    assert len([element for element in svg.iter() if element.tag.endswith("polyline")]) == 4
    legend = [element for element in svg if element.tag.endswith("}text")]
    assert len(legend) == 4
    assert min(float(element.get("y", 0)) for element in legend) >= 14  # not cut off at the top
    write_png(tmp_path / "c.png", lines, "test_accuracy", "rounds")
    with Image.open(tmp_path / "c.png") as picture:
        assert picture.size[0] > 800
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(OutputError, match=re.escape(NEEDS_MATPLOTLIB)):
        write_png(tmp_path / "c.png", lines, "test_accuracy", "rounds")


def test_page_is_self_contained(runs: list[Run]) -> None:
    text = runs_page(runs)
    page = Page(text)
    assert not re.search(r"<script|https?://(?!www\.w3\.org/2000/svg)|<link|@import|url\(", text)
    for heading in ("Learning curves", "Who has what", "Synthetic images", "Fairness", "Privacy"):
        assert f">{heading}</h2>" in text
    assert "Generators" not in page.text  # no run has one
    assert all(run.name in page.text for run in runs)
    amp = runs[0].rows[-1]["local"]["amp"]
    assert f"{100 * amp:.2f} %" in page.text
    assert all(image["alt"] and str(image["src"]).startswith("data:") for image in page.images)
    synthetic = [image for image in page.images if "synthetic images" in str(image["alt"])]
    assert len(synthetic) == 4  # two rounds of the two runs with images
    assert all("col" in heads and "row" in heads for heads in page.tables)


def test_page_has_measures_by_domain_and_client(runs: list[Run]) -> None:
    """An AUROC that is undefined is stated in words. Damaged rows are left out."""
    run = runs[0]
    text = runs_page([run])
    last = run.rows[-1]
    shares = [last["auroc"], last["f1"], *last["local"]["client_accuracy"]]
    assert [share for share in shares if f"{100 * share:.2f} %" not in text] == []
    assert "AUROC is undefined" not in text
    matrix = run.summary["confusion_matrix"]
    assert Page(text).text.count("true classes (rows)") == 1
    assert f'<td data-head="0">{matrix[0][0]}</td>' in text
    within = {"north": {"auroc": None, "f1": 0.125}}
    for domain, shown in (({"north": 0.5}, True), ([1], False), ({"south": "x"}, False)):
        row = {**last, "domain_accuracy": domain, "domain_measures": within}
        changed = runs_page([replace(run, rows=[row])])
        assert ("AUROC is undefined" in changed, "12.50 %" in changed) == (shown, shown)
    private = Page(runs_page([runs[3]])).text
    assert ("client 0" in private, "AUROC" in private) == (False, True)


def test_pages_hide_private_partitions_and_escape_texts(runs: list[Run], tmp_path: Path) -> None:
    run, private = runs[0], runs[3]
    for shown_all in (False, True):
        page = runs_page([private], simulation_only=shown_all)
        assert ("examples of each class" in page) == shown_all
        assert ("Do not share this page" in page) == shown_all
    markup = "<script>alert(1)</script>\u202e"
    summary = {**run.summary, "method": markup, "dataset": markup}
    settings = {**run.settings, markup: markup}
    text = runs_page([replace(run, folder=tmp_path / "<b>x", summary=summary, settings=settings)])
    assert not any(part in text for part in ("<script", "<b>", "\u202e"))


def test_commands_write_pages_and_plots(runs: list[Run], tmp_path: Path) -> None:
    folders = [str(run.folder) for run in runs[:2]]
    for command, name in (
        ("report", "r"),
        ("plot", "c.svg"),
        ("plot", "c.html"),
        ("plot", "c.png"),
    ):
        out = CliRunner().invoke(app, [command, *folders, "--output", str(tmp_path / name)])
        assert out.exit_code == 0, out.stderr
        assert (tmp_path / name).stat().st_size > 1000
    for options in (["--output", "c.pdf"], ["--by", "hours"], ["--metric", "speed"]):
        out = CliRunner().invoke(app, ["plot", *folders, *options])
        assert out.exit_code == 2
        assert "fedsynth: error: " in out.stderr


def test_finished_runs_are_found_through_links(runs: list[Run], tmp_path: Path) -> None:
    assert len(finished_runs([runs[0].folder.parent])) == 4
    (tmp_path / "sweep").mkdir()
    (tmp_path / "sweep" / "cell").symlink_to(runs[0].folder.parent)
    assert len(finished_runs([tmp_path / "sweep"])) == 4
    with pytest.raises(RunFolderError, match="does not exist"):
        finished_runs([tmp_path / "nothing"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(RunFolderError, match="no finished run"):
        finished_runs([tmp_path / "empty"])
