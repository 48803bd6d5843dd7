"""`fedsynth reproduce` and `train --preset`, on FedProx's synthetic data, scaled."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedsynth.cli.application import OptionError
from fedsynth.cli.runs_commands import seconds_of

CELL = ("fedprox:synthetic", "--dataset", "synthetic(0,0)", "--cell", "90 %", "--method", "fedprox")
TINY = ("--scale", "0.01")


def test_a_tables_cells_settings_and_sources_are_shown(fedsynth: Callable[..., Any]) -> None:
    shown = fedsynth("reproduce", "--list", "feddm:table2", "--alpha", "0.1").stdout
    assert "method.iterations=1000" in shown
    assert "Sec. 4.1, Hyperparameters" in shown
    assert "not given in the paper: chosen" in shown
    line = next(
        line for line in shown.splitlines() if line.startswith("cifar10 dirichlet(0.1) fedd")
    )
    assert "67.38 ± 0.32" in line


def test_a_cell_runs_and_is_compared_with_the_published_value(
    fedsynth: Callable[..., Any], tmp_path: Path
) -> None:
    output = ("--output", str(tmp_path / "found"))
    first = fedsynth("reproduce", *CELL, *TINY, *output)
    assert first.code == 0, first.stderr
    assert first.stderr.startswith("SCALED to 0.01: ")
    assert "does not reproduce the numbers" in first.stdout
    assert "scaled: no verdict" in first.stdout
    again = fedsynth("reproduce", *CELL, *TINY, *output)
    assert "existing" in again.stderr
    assert "unfinished" not in again.stderr
    whole = fedsynth("reproduce", *CELL, *output, "--time-budget", "0")
    assert "not run" in whole.stdout  # a scaled row is none
    assert "not begun" in whole.stderr


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ((), "name a table, such as feddm:table2. Use --list to show all tables"),
        (("feddm:table9",), "unknown preset 'feddm:table9'; did you mean"),
        (("feddm:table2", "--alpha", "0.5"), "no cell with alpha 0.5; it has 0.1, 0.01"),
        (
            (*CELL, "--time-budget", "soon"),
            "--time-budget must be a duration such as 170m, 2h or 90s",
        ),
        ((*CELL, "--scale", "2"), "scale must be above 0 and below 1, got 2.0"),
        (("fedkf:table4",), "none of these cells can be run"),
        (("feddm:table2", "--dataset", "mnist"), "set its folder with data.data_root"),
        ((*CELL, "--set", "method.nu=1"), "unknown setting of fedprox 'nu'"),
    ],
)
def test_mistakes_are_one_line(
    fedsynth: Callable[..., Any], tmp_path: Path, args: tuple[str, ...], text: str
) -> None:
    shown = fedsynth("reproduce", *args, "--output", str(tmp_path / "out"))
    assert shown.code == 2
    last = shown.stderr.splitlines()[-1]
    assert last.startswith("fedsynth: error: ")
    assert text in last


def test_time_budgets() -> None:
    assert [seconds_of(text) for text in ("170m", "1.5h", "90s", "3600", "0")] == [
        10200.0,
        5400.0,
        90.0,
        3600.0,
        0.0,
    ]
    for wrong in ("-5m", "1d", "m", "1h30m"):
        with pytest.raises(OptionError, match="--time-budget must be"):
            seconds_of(wrong)


def test_train_takes_a_tables_settings(fedsynth: Callable[..., Any], tmp_path: Path) -> None:
    """Catches: another run than the library's preset, and a --method that is no table's."""
    from fedsynth import load_preset, resolve

    out = ("--output", str(tmp_path / "runs"))
    shown = fedsynth(
        *("train", "--preset", "fedprox:synthetic", "--dataset", "synthetic(0,0)", *out),
        *("--rounds", "1", "--set", "local_epochs=1", "--seed", "4"),
    )
    assert shown.code == 0, shown.stderr
    assert shown.stderr.startswith("preset fedprox:synthetic (FedProx (arXiv 1812.06127), Figures")
    (folder,) = (tmp_path / "runs").iterdir()
    made = resolve(tomllib.loads((folder / "config.toml").read_text()))
    changes = {"run": {"rounds": 1}, "method": {"local_epochs": 1}}
    named = {"dataset": "synthetic(0,0)", "method": "fedprox"}
    assert made == load_preset("fedprox:synthetic", **named, seed=4, changes=changes)
    wrong = fedsynth("train", "--preset", "feddm:table2", "--method", "moon", *out)
    assert (wrong.code, "no cell with method moon" in wrong.stderr) == (2, True)
    both = fedsynth("train", "--preset", "feddm:table2", "--config", "c.toml", *out)
    assert (both.code, "use only one of them" in both.stderr) == (2, True)
