"""Benchmarks share a library and not each other; finished rows are found again; compare has every
method.
"""

from __future__ import annotations

import ast
import importlib
import json
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


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a script as it imports itself: with its own folder on the path."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


def test_no_script_is_imported() -> None:
    assert len(SCRIPTS) > 15
    for path in (*BENCHMARKS.glob("*.py"), *(BENCHMARKS / "library").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                assert node.module not in SCRIPTS, path


def keys(name: str) -> set[str]:
    """Of finished rows."""
    lines = (BENCHMARKS / "results" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return {json.loads(line)["key"] for line in lines}


def test_settings_still_have_the_hash_of_finished_rows(script: Any) -> None:
    """Catches: a default or a setting that moved without its rows being deleted or made again."""
    fingerprint = script("library.results").fingerprint
    compare, fedkf = script("compare"), script("fedkf_table")
    for name, rate in (("fedavg", 0.3), ("fedavg", 0.003)):
        made = fingerprint(compare.settings_for(name, 0, "auto", False, rate))
        assert f"rate {name} {rate:g} {made}" in keys("compare")
    made = fingerprint(compare.settings_for("real", 1, "cuda", False, None))
    assert f"real seed=1 {made}" in keys("compare")
    made = fingerprint(fedkf.settings_for("FedAvg", 0.1, 0, "auto", False))
    assert f"FedAvg alpha=0.1 seed=0 {made}" in keys("fedkf_table")
    one_shot, where = script("one_shot_table"), ("fashion-mnist", "Dir(0.1)")
    for name in ("DENSE", "FedHydra", "FedHydra (momentum)"):  # a default that changed (`FIRST`)
        made = fingerprint(one_shot.settings_for(*where, 0, "auto", *one_shot.METHODS[name]))
        assert f"{', '.join(where)}, {name}, seed=0 {made}" in keys("one_shot_table")
    other = fingerprint(compare.settings_for("real", 2, "auto", False, None))
    assert f"real seed=1 {other}" not in keys("compare")


def test_the_private_baseline_is_the_best_of_a_grid_that_goes_on_around_it(script: Any) -> None:
    """Catches: rows of other settings than the grid's, and an optimum at its edge."""
    baselines, fingerprint = script("library.baselines"), script("library.results").fingerprint
    rows = script("library.rows").by_key("private_baselines")
    grid = list(baselines.candidates())
    tried = {one: rows[f"tune {one.name}"]["accuracy"] for one in grid}
    best = max(tried, key=lambda one: tried[one])
    for field in ("rounds", "lr", "clip"):
        for factor in (0.5, 2):
            neighbour = best._replace(**{field: factor * getattr(best, field)})
            assert tried[neighbour] <= tried[best]
    made = fingerprint(baselines.linear_settings("mnist", best, 0.5, 0, "auto", False))
    assert f"mnist linear alpha=0.5 seed=0 {made}" in keys("private_baselines")


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
    compared = script("library.compared")
    assert {method for method, _ in compared.METHODS.values()} == set(METHODS)
    assert compared.METHODS["feddm"] == ("feddm", compared.CONDENSE)
    assert set(compared.PERSONAL) == {"solo", "fedbn"}
    assert set(compared.SINGLE_ROUND) == {"fedavg, one shot", "feddf", "dense", "fedhydra"}
    compare = script("compare")
    assert [compare.knob(name) for name in ("feddm", "moon", "real")] == ["image_lr", "lr", None]
    for name in compared.METHODS:  # FedStats and FedSum have not all of their family's settings
        assert compare.settings_for(name, 0, "cpu", False, 0.1).rounds in (1, 5)


def test_rows_are_made_once(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = script("library.results")
    settings = script("compare").settings_for("real", 0, "cpu", True, None)
    made: list[Any] = []

    def one_run(run: Any, data: Any) -> dict[str, Any]:
        made.append(run)
        return {"accuracy": 0.5}

    monkeypatch.setattr(results, "one_run", one_run)
    path = tmp_path / "some.jsonl"
    data: Any = (None, None)
    assert results.Results(path, "other").get("real seed=0", settings, data) is None
    assert results.Results(path, "", budget=-1.0).get("real seed=0", settings, data) is None
    first = results.Results(path, "seed=0").get("real seed=0", settings, data)
    again = results.Results(path, "", math.inf).get("real seed=0", settings, data)
    assert again == first
    assert len(made) == 1
    assert first["key"] == f"real seed=0 {results.fingerprint(settings)}"
    assert {"accuracy", "date", "machine", "torch", "commit", "command"} < set(first)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("robust_table", ["--alphas", "1", "--seeds", "0", "--only", "median, sign"]),
        ("server_step", ["--json", "--device", "cpu"]),
    ],
)
def test_a_script_of_each_shape_runs(name: str, words: list[str]) -> None:
    rows = BENCHMARKS / "results" / f"{name}_quick.jsonl"
    rows.unlink(missing_ok=True)
    run = subprocess.run(
        [sys.executable, str(BENCHMARKS / f"{name}.py"), "--quick", *words],
        env={**os.environ, "PYTHONPATH": str(BENCHMARKS.parent)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    made = rows.read_text(encoding="utf-8").splitlines()
    assert len(made) == (1 if name == "robust_table" else 2)
    rows.unlink()
