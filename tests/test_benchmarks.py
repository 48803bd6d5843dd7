"""Benchmarks share a library and not each other; finished rows are found again; compare has every
method.
"""

from __future__ import annotations

import ast
import importlib
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fedsynth.methods import METHODS

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
SCRIPTS = sorted(path.stem for path in BENCHMARKS.glob("*.py"))
FOUND = {
    "compare": 55,
    "fedstats_students": 20,
    "fedstats_table": 580,
    "precision": 6,
    "private_baselines": 32,
    "robust_table": 96,
}
"""How many cells of a grid have their row, by the hash of their settings. The rows of fashion_table
and dp_utility are older than today's hash, and audits have none."""


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a module as scripts do: with their folder on the path."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


def test_no_script_is_imported() -> None:
    assert len(SCRIPTS) > 3
    for path in BENCHMARKS.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                assert node.module not in SCRIPTS, path


@pytest.mark.parametrize("name", FOUND)
def test_settings_still_have_the_hash_of_finished_rows(name: str, script: Any) -> None:
    """Catches: a default or a setting that moved without its rows being deleted or made again, and
    a tuned setting that is not the best of its grid."""
    grid, library = script(f"grids.{name}").GRID, script("library.grid")
    path = script("library.machine").rows_file(name, False)
    rows = library.Rows(path, budget=-1.0)
    cells = grid.cells(grid.axes, device="auto", quick=False, cache=Path())
    assert sum(grid.make(cell, rows) is not None for cell in cells) == FOUND[name]


def test_other_settings_have_another_hash(script: Any) -> None:
    cell = script("library.grid").Cell(device="auto", quick=False)
    grid, fingerprint = script("grids.compare"), script("library.grid").fingerprint
    made = {fingerprint(grid.settings_for("real", seed, None, cell)) for seed in (1, 2)}
    assert len(made) == 2


def test_the_private_baseline_is_an_interior_optimum_of_its_grid(script: Any) -> None:
    """Catches: an optimum at the grid's edge."""
    rows = script("library.rows").by_key("private_baselines")
    grid = list(script("grids.private_baselines").candidates())
    tried = {one: rows[f"tune {one.name}"]["accuracy"] for one in grid}
    best = max(tried, key=lambda one: tried[one])
    for field in ("rounds", "lr", "clip"):
        for factor in (0.5, 2):
            neighbour = best._replace(**{field: factor * getattr(best, field)})
            assert tried[neighbour] <= tried[best]


def test_reproduced_rows_are_of_the_presets_as_they_are() -> None:
    """Catches: a preset that changed without its rows being deleted or made again."""
    from fedsynth.reproduction.preset_files import preset
    from fedsynth.reproduction.rows import Rows, run_hash

    rows = Rows(BENCHMARKS / "results" / "reproduction").all()
    assert rows
    for mark, row in rows.items():
        table = preset(row["preset"])
        (cell,) = [one for one in table.cells if one.columns() == row["cell"]]
        assert run_hash(table.settings(cell, row["seed"], row["changes"])) == mark, row["key"]


def test_compare_has_every_method_with_its_familys_settings(script: Any) -> None:
    """Catches: a method that the registry has and the comparison does not."""
    compared, compare = script("library.compared"), script("grids.compare")
    assert {method for method, _ in compared.METHODS.values()} == set(METHODS)
    assert compared.METHODS["feddm"] == ("feddm", compared.CONDENSE)
    assert set(compared.PERSONAL) == {"solo", "fedbn"}
    assert set(compared.SINGLE_ROUND) == {"fedavg, one shot", "feddf", "dense", "fedhydra"}
    assert [compare.knob(name) for name in ("feddm", "moon", "real")] == ["image_lr", "lr", None]
    cell = script("library.grid").Cell(device="cpu", quick=False)
    for name in compared.METHODS:  # FedStats and FedSum have not all of their family's settings
        assert compare.settings_for(name, 0, 0.1, cell).rounds in (1, 5)


def test_rows_are_made_once(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library, compare = script("library.grid"), script("grids.compare")
    cell = library.Cell(device="cpu", quick=True)
    settings = compare.settings_for("real", 0, None, cell)
    made: list[Any] = []

    def one_run(run: Any, data: Any) -> dict[str, Any]:
        made.append(run)
        return {"accuracy": 0.5}

    monkeypatch.setattr(library, "one_run", one_run)
    path = tmp_path / "some.jsonl"

    def row(only: str, budget: float) -> Any:
        return library.Rows(path, only, budget).run("real seed=0", settings, lambda: None)

    assert row("other", math.inf) is None
    assert row("", -1.0) is None
    first = row("seed=0", math.inf)
    assert row("", -1.0) == first
    assert len(made) == 1
    assert first["key"] == f"real seed=0 {library.fingerprint(settings)}"
    assert {"accuracy", "date", "machine", "torch", "commit", "command"} < set(first)
    audits = library.Grid({"name": ("a",)}, "{name}", work=lambda _: {"bound": 1})
    for repeats, rows in ((1, 2), (3, 4), (2, 4)):  # without a hash, a key has several rows
        (one,) = audits.cells(audits.axes)
        assert audits.make(one, library.Rows(path), repeats)["key"] == "a"
        assert len(path.read_text().splitlines()) == rows


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("robust_table", ["run.py", "robust_table", "--alpha", "1", "--only", "median, sign"]),
        ("dp_step", ["dp_step.py", "--device", "cpu", "--only", "residual"]),
    ],
)
def test_a_script_of_each_shape_runs(name: str, words: list[str]) -> None:
    rows = BENCHMARKS / "results" / f"{name}_quick.jsonl"
    rows.unlink(missing_ok=True)
    run = subprocess.run(
        [sys.executable, str(BENCHMARKS / words[0]), *words[1:], "--quick"],
        env={**os.environ, "PYTHONPATH": str(BENCHMARKS.parent)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    made = rows.read_text(encoding="utf-8").splitlines()
    assert len(made) == (3 if name == "robust_table" else 1)
    rows.unlink()
