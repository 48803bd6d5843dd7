"""Benchmarks: compare has all methods, rows match the presets, wrong numbers are detected."""

from __future__ import annotations

import importlib
import json
import math
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from fedsynth.data.images import ImageData
from fedsynth.data.partition import partition
from fedsynth.data.registry import custom_spec
from fedsynth.methods import METHODS

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports modules as scripts do, with their folder on the path."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


def test_private_baseline_is_an_interior_optimum(script: Any) -> None:
    rows = script("library.rows").by_key("private_baselines")
    grid = list(script("grids.private_baselines").candidates())
    accuracy = {cell: rows[f"tune {cell.name}"]["accuracy"] for cell in grid}
    best = max(accuracy, key=lambda cell: accuracy[cell])
    for field in ("rounds", "lr", "clip"):
        for factor in (0.5, 2):
            neighbour = best._replace(**{field: factor * getattr(best, field)})
            assert accuracy[neighbour] <= accuracy[best]


def test_reproduced_rows_match_the_presets() -> None:
    """After a change of a preset, its rows must be deleted or repeated."""
    from fedsynth.experiments.comparison import jobs_of
    from fedsynth.experiments.presets import preset
    from fedsynth.experiments.runner import rows_by_hash

    rows = rows_by_hash(BENCHMARKS / "results" / "reproduction")
    assert rows
    for run_digest, row in rows.items():
        name = row["preset"].removesuffix("-small")
        table = preset(name)
        if name != row["preset"]:
            table = table.edition("small")
        (cell,) = [cell for cell in table.cells if cell.columns() == row["cell"]]
        (job,) = jobs_of(table, [cell], [row["seed"]], changes=row["changes"])
        assert job.hash == run_digest, row["key"]


@pytest.mark.parametrize(
    "name", ["feddm:table2", "fedaf:table1", "fedkf:table5", "fedhydra:table1", "fedhydra:table2"]
)
def test_small_editions_have_rows_of_every_seed_in_12_hours(name: str) -> None:
    """If a run is missing, its claims have fewer seeds: make it by `fedsynth reproduce`."""
    from fedsynth.experiments.comparison import jobs_of
    from fedsynth.experiments.presets import preset
    from fedsynth.experiments.runner import rows_by_hash

    rows = rows_by_hash(BENCHMARKS / "results" / "reproduction")
    table = preset(name).edition("small")
    jobs = {job.hash: job.name for job in jobs_of(table, table.cells, range(table.seeds))}
    assert [job for digest, job in jobs.items() if digest not in rows] == []
    assert sum(rows[digest]["seconds"] for digest in jobs) < 12 * 3600


def test_compare_has_all_methods_with_family_settings(script: Any) -> None:
    compare = script("grids.compare")
    assert {method for method, _ in compare.METHODS.values()} == set(METHODS)
    assert compare.METHODS["feddm"] == ("feddm", compare.CONDENSE)
    assert set(compare.PERSONAL) == {"solo", "fedbn"}
    distilling = {"feddf", "dense", "fedhydra", "fedcvae-ens", "fedcvae-kd"}
    assert set(compare.SINGLE_ROUND) == {"fedavg, one shot", *distilling}
    cell = script("library.grid").Cell(device="cpu", quick=False)
    for name in compare.METHODS:  # FedStats and FedSum lack some settings of their family
        assert compare.settings_for(name, 0, 0.1, cell).rounds in (1, 5)


def test_rows_are_computed_once(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library, compare = script("library.grid"), script("grids.compare")
    cell = library.Cell(device="cpu", quick=True)
    settings = compare.settings_for("real", 0, None, cell)
    one_run = Mock(return_value={"accuracy": 0.5})
    monkeypatch.setattr(library, "one_run", one_run)
    path = tmp_path / "some.jsonl"

    def row(only: str, deadline: float) -> Any:
        return library.Rows(path, deadline, only).run("real seed=0", settings, lambda: None)

    assert row("other", math.inf) is None
    assert row("", -1.0) is None
    first = row("seed=0", math.inf)
    assert row("", -1.0) == first
    one_run.assert_called_once()
    assert first["key"] == f"real seed=0 {library.settings_hash(settings)}"
    assert {"accuracy", "date", "machine", "torch", "commit", "command"} < set(first)
    audits = library.Grid({"name": ("a",)}, "{name}", work=lambda _: {"bound": 1})
    for repeats, rows in ((1, 2), (3, 4), (2, 4)):  # without a hash, a key has several rows
        (audit_cell,) = audits.cells(audits.axes)
        assert audits.make(audit_cell, library.Rows(path), repeats)["key"] == "a"
        assert len(path.read_text().splitlines()) == rows


def test_rows_leave_out_folders_of_the_machine(
    script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = script("library.machine")
    for cache in ("--cache /var/kept", "--cache=/var/kept"):
        monkeypatch.setattr("sys.argv", ["/x/run.py", "some", *cache.split(), "--seed", "1"])
        assert library.machine()["command"] == "benchmarks/run.py some --seed 1"
    for path in (BENCHMARKS / "results").rglob("*.jsonl"):
        assert "--cache" not in path.read_text(), path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "line", "rows"),
    [("robust_table", "run.py robust_table --alpha 1 --only 'median, sign'", 3),
     ("dp_step", "dp_step.py --device cpu --only residual", 1)],
)  # fmt: skip
def test_quick_scripts_write_their_rows(name: str, line: str, rows: int) -> None:
    file = BENCHMARKS / "results" / f"{name}_quick.jsonl"
    file.unlink(missing_ok=True)
    script, *arguments = shlex.split(line)
    env = {**os.environ, "PYTHONPATH": str(BENCHMARKS.parent)}
    command = [sys.executable, str(BENCHMARKS / script), *arguments, "--quick"]
    subprocess.run(command, env=env, check=True, timeout=120)
    assert len(file.read_text(encoding="utf-8").splitlines()) == rows
    file.unlink()


def test_images_are_measured_after_a_private_release(script: Any, tmp_path: Path) -> None:
    students = script("grids.fedstats_students")
    axes = {name: values[:1] for name, values in students.GRID.axes.items()}
    axes |= {"dataset": ("digits",), "epsilon": ("8",), "clients": (3,), "features": ("pixels",)}
    [cell] = students.GRID.cells(axes, device="cpu", quick=True, cache=tmp_path)
    cell.settings = students.GRID.settings(cell)
    key = students.GRID.key(cell)
    assert "images=2000 student=convnet features=pixels seed=0" in key
    cell.map = "deskewed-scattering+random-process"
    assert students.GRID.key(cell) == key.replace("pixels", f"pixels map={cell.map}")
    cell.map, cell.steps = "auto", 20_000
    assert students.GRID.key(cell) == key.replace("pixels", "pixels steps=20000")
    cell.steps = 5000
    row = students.work(cell)
    assert row["images"] == 80
    assert 7.9 < row["epsilon"] <= 8
    assert row["noise_multiplier"] > 0
    assert row["fid"]["real"] < row["fid"]["released"]
    assert row["student_taught"] > 0.15  # after 20 steps; guessing has 0.1
    assert row["cpu_seconds"] > 0


def test_simulated_patients_have_one_site_and_one_class(script: Any) -> None:
    students, medical = script("grids.medical_students"), script("grids.medical")
    labels = torch.arange(600) % 2
    spec = custom_spec(
        "pneumonia", (1, 4, 4), medical.CLASSES["pneumonia"], **medical.FACTS["pneumonia"]
    )
    data = ImageData(torch.zeros(600, 1, 4, 4, dtype=torch.uint8), labels, spec)
    axes = {name: values[:1] for name, values in students.GRID.axes.items()}
    axes |= {"each": (2,), "seed": (1,)}
    [cell] = students.GRID.cells(axes, device="cpu", quick=True)
    cell.settings = students.GRID.settings(cell)
    assert cell.settings.privacy.unit == "user"
    assert cell.settings.privacy.nominal_size == 3900 / 2 / 3
    patients = students.with_patients(data, cell).groups
    assert patients is not None
    sites = partition(labels.numpy(), cell.settings.resolved_partition, 2)
    site_of = {image: site for site, images in enumerate(sites) for image in images.tolist()}
    seen: dict[int, set[tuple[int, int]]] = {}
    for image, patient in enumerate(patients.tolist()):
        seen.setdefault(patient, set()).add((site_of[image], int(labels[image])))
    assert all(len(places) == 1 for places in seen.values())
    assert 300 <= len(seen) <= 306  # one patient of each site and class may have a single image
    assert max(patients.bincount().tolist()) == 2


def test_older_rows_are_shown_until_newer_ones_exist(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = script("documents.private_images")
    monkeypatch.setattr(script("library.rows"), "RESULTS", tmp_path)

    def cells(value: str, factor: float = 100) -> list[str]:
        return images._measured("fedstats_students", images.OWN, value, factor)  # type: ignore[no-any-return]

    key = "mnist eps=1 own alpha=0.5 K=10"
    rows = [{"key": f"{key} seed=0 aa", "student_taught": 0.5}]
    for count in (0, 1, 5):
        for seed in range(count):
            newer = f"{key}{images.NETWORK} seed={seed} bb"
            rows.append({"key": newer, "student_taught": 0.75, "fid": {"released": 12.0}})
        text = "\n".join(map(json.dumps, rows))
        (tmp_path / "fedstats_students.jsonl").write_text(f"{text}\n")
        taught, fid = cells("student_taught")[0], cells("fid.released", 1)[0]
        assert (taught, fid) == {
            0: ("50.0 (1) / –", "–"),
            1: ("75.0 (1) / –", "12.0 (1) / –"),
            5: ("75.0 / –", "12.0 / –"),
        }[count]
        del rows[1:]


@pytest.fixture
def tables(script: Any) -> Any:
    return script("tables")


def _read(tables: Any, document: str) -> str:
    return (tables.ROOT / document).read_text(encoding="utf-8")  # type: ignore[no-any-return]


def test_tables_have_documents_and_scripts(
    tables: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = "\n".join(_read(tables, document) for document in tables.DOCUMENTS)
    assert {name for name, _ in tables.BLOCK.findall(texts)} == set(tables.TABLES)
    assert {sentence.document for sentence in tables.SENTENCES} <= set(tables.DOCUMENTS)
    monkeypatch.setattr(sys, "argv", ["tables.py", "--list"])
    assert tables.main() == 0
    listed = [re.split("  +", line) for line in capsys.readouterr().out.splitlines()]
    assert {name for name, *_ in listed} == set(tables.TABLES)
    for name, _, rows, script in listed:
        if script.startswith("benchmarks/") and "run.py" not in script:
            assert f'"{Path(rows).stem}' in _read(tables, script), name


@pytest.mark.parametrize(
    ("old", "new"), [("81.57 ± 0.69", "81.58 ± 0.69"), ("79.6 and 79.4 %", "79.6 and 79.5 %")]
)
def test_wrong_numbers_are_detected(tables: Any, old: str, new: str) -> None:
    text = _read(tables, "docs/results.md")
    changed = text.replace(old, new)
    _, _, _, removed, added = tables.differences("docs/results.md", changed)
    assert new in removed
    assert old in added
    assert tables.written("docs/results.md", changed) == text


def test_unknown_numbers_and_changed_sentences_are_detected(tables: Any) -> None:
    text = _read(tables, "docs/results.md")
    changed = text.replace("averages of ten give", "averages give")
    changed = changed.replace("# Results\n", "# Results\n\nIt is 1.75 times as fast.\n")
    first, *others = tables.differences("docs/results.md", changed)
    assert "does not have the sentence 'averages of ten give" in first
    assert "docs/results.md:3: from no row, and not given: 1.75" in others


def test_free_numbers_are_detected(tables: Any) -> None:
    for text in (
        "ipc 10, 5 rounds and 64 images",
        "`lr=0.25`",
        "```\n0.25\n```",
        "<!-- given -->The paper has 86.65 ± 0.31.<!-- end -->",
        "Dir(0.1) at rates of 0.01, 0.03 and 0.1, λ_glob = 2.0",
        "grid {0.003, 0.01}",
        "Apache-2.0",
    ):
        assert tables.free_numbers("README.md", text) == []
    for text in ("it reaches 71.4", "0.5 points", "rates of 0.01 reach 71.4 %", "−1.8"):
        assert len(tables.free_numbers("README.md", text)) == 1


def test_rows_of_other_settings_are_errors(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = script("library.rows")
    monkeypatch.setattr(rows, "RESULTS", tmp_path)
    rows_written = [{"key": f"fedavg seed=0 {digest}", "accuracy": 0.5} for digest in ("aa", "bb")]
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, rows_written)) + "\n")
    with pytest.raises(rows.RowsError, match="two rows of other settings for 'fedavg seed=0'"):
        rows.by_key("x")
    (tmp_path / "x.jsonl").write_text(json.dumps(rows_written[0]) + "\n")
    assert rows.percents("x", "fedavg", range(3)) == [50.0]


def test_differences_whose_interval_excludes_zero_are_bold(script: Any) -> None:
    """Student's t for three seeds is 4.303: intervals are ±1.43 and ±3.79."""
    rows = script("library.rows")
    assert rows.paired([2.0, 2.0, 3.0], 3) == "**+2.3 ± 0.6**"
    assert rows.paired([1.0, 2.0, 4.0], 3) == "+2.3 ± 1.5"
    assert rows.paired([2.0], 3) == "+2.0 (1)"
