"""A cell of each paper's tables, scaled, from the preset to the comparison.

FedProx's data are its own; elsewhere small files of random pixels stand in, so that accuracies say
nothing here. All of them are used, as a share of a published size would be next to nothing, and
wide networks are narrow.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from fedsynth.federation.protocol import Observer
from fedsynth.reproduction.comparison import lines
from fedsynth.reproduction.presets import preset, preset_names
from fedsynth.reproduction.rows import Rows
from fedsynth.reproduction.runs import Clock, Runner, jobs_of
from tests.families import by_family

Changes = dict[str, dict[str, Any]]
ALL: Changes = {"partition": {"subset": 1.0}}
SMALL: dict[str, Changes] = {  # networks that a test can wait for
    "feddm:table2": {"model": {"width": 8}},
    "fedaf:table1": {"model": {"width": 8}, "method": {"ipc": 2}},
    "fedkf:table5": {"method": {"generator_width": 8}},
    "fedhydra:table1": {
        "method": {"generator_width": 4, "generator_batch": 8, "stratification_batch": 2}
    },
    "fedfm:missing-classes": {"model": {"name": "lenet5"}},
}
CELLS: dict[str, dict[str, Any]] = {
    "fedprox:synthetic": {"dataset": "synthetic(1,1)", "method": "fedprox", "note": "90 %"},
    "feddm:table2": {"dataset": "mnist", "alpha": 0.1, "method": "feddm"},
    "fedaf:table1": {"dataset": "fashion_mnist", "alpha": 0.1, "method": "fedaf"},
    "fedkf:table5": {"alpha": 0.1, "method": "fedkf (oca)"},
    "fedhydra:table1": {"dataset": "mnist", "alpha": 0.5, "method": "fedhydra"},
    "moon:accuracy": {"dataset": "cifar10", "method": "moon"},
    "fedbn:real-world": {"dataset": "office_caltech", "method": "fedbn"},
    "fedfm:missing-classes": {"method": "fedfm", "partition": "2 classes missing per client"},
    "fedfa:images": {"dataset": "office_caltech", "method": "fedfa+"},
}


@pytest.mark.parametrize(
    "name", by_family(CELLS, ("fedprox:synthetic", "feddm:table2", "fedhydra:table1"))
)
def test_a_scaled_cell_runs_end_to_end(name: str, tmp_path: Path, data_root: Path) -> None:
    table = preset(name)
    cells = table.select(**CELLS[name])
    speed = {"data": {"data_root": str(data_root)}}
    changes = {} if name == "fedprox:synthetic" else {**ALL, **SMALL.get(name, {})}
    jobs = jobs_of(table, cells, [0], scale=0.002, changes=changes, speed=speed)
    assert len(jobs) == 1
    told: list[str] = []
    rows = Rows(tmp_path, 0.002)
    runner = Runner(rows, Clock(), report=told.append, watch=lambda _: nullcontext(Observer()))
    (outcome,) = runner.run(jobs)
    assert (outcome.status, outcome.error) == ("finished", None)
    found = lines(table, cells, [0], rows.all(), scale=0.002, changes=changes)
    assert len(found) == len(cells[0].numbers)
    assert all(list(line.values) == [0] and line.verdict == "scaled: no verdict" for line in found)
    assert all(0 <= value <= 100 for line in found for value in line.values.values())
    assert "finished" in told[0]
    assert lines(table, cells, [0], Rows(tmp_path).all())[0].verdict == "not run"


def test_every_paper_has_a_scaled_cell() -> None:
    """Catches: a paper whose presets nothing runs."""
    papers = {name.partition(":")[0] for name in preset_names()}
    assert papers == {name.partition(":")[0] for name in CELLS}
