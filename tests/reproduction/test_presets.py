"""Published numbers, the presets of their tables, and the selection of cells."""

from __future__ import annotations

from typing import Any

import pytest

from fedsynth import load_preset, resolve
from fedsynth.config.settings import RunSettings
from fedsynth.errors import UnknownNameError
from fedsynth.reproduction.presets import (
    PresetError,
    main_cell,
    not_covered,
    preset,
    preset_names,
    preset_sections,
    published,
)
from fedsynth.reproduction.rows import run_hash

CHOSEN = "not given in the paper: chosen"
CELLS = [(name, cell) for name in preset_names() for cell in preset(name).cells]


def test_every_table_has_preset_with_all_numbers() -> None:
    """Each table of the file has a preset, and each number a cell."""
    presets = {(preset(name).source, preset(name).table): name for name in preset_names()}
    tables = {(row["source"], row["table"]) for row in published()}
    assert tables <= set(presets)
    for source, table in tables:
        rows = [row for row in published() if (row["source"], row["table"]) == (source, table)]
        cells = preset(presets[source, table]).cells
        numbers = [number.value for cell in cells for number in cell.numbers]
        values = [value for value in numbers if value is not None]
        assert len(values) == len(numbers)
        assert sorted(values) == sorted(float(row["value"]) for row in rows), table


def test_cells_are_valid_runs_or_state_reason() -> None:
    runnable = 0
    for name, cell in CELLS:
        table = preset(name)
        if reason := table.refusal(cell):
            assert len(reason) > 20
            with pytest.raises(PresetError, match="cannot be run"):
                table.settings(cell)
            continue
        settings = table.settings(cell, seed=3)
        assert isinstance(settings, RunSettings)
        assert settings.seed == 3
        if cell.rounds:
            assert settings.rounds == int(cell.rounds)
        if cell.clients:
            assert settings.partition.clients == int(cell.clients)
        runnable += 1
    assert runnable > 700


def test_preset_values_have_sources() -> None:
    blocks = [block for name in preset_names() for block in preset(name).blocks]
    for block in blocks:
        assert block.sections or block.variant
        assert block.source.strip()
        if "chosen" in block.source and not block.source.startswith("not given in the "):
            assert ":" in block.source  # the source, and the choice from it
    reasons = [block for block in blocks if block.source == CHOSEN]
    assert sum(bool(block.why) for block in reasons) > 0.8 * len(reasons)


@pytest.mark.parametrize(
    ("name", "filters", "expected"),
    [
        (
            "feddm:table2",
            {"dataset": "cifar100", "alpha": 0.01, "method": "feddm"},
            {"method.ipc": 5, "method.iterations": 1000, "run.rounds": 20, "model.width": 128},
        ),
        (
            "fedaf:table1",
            {"dataset": "fashion-mnist", "alpha": 0.02, "method": "fedaf"},
            {"method.image_lr": 0.2, "method.global_weight": 2.0, "model.norm": "batch"},
        ),
        (
            "fedprox:synthetic",
            {"dataset": "synthetic(1,1)", "method": "fedprox", "note": "90 %"},
            {"method.mu": 1.0, "method.stragglers": 0.9, "method.local_epochs": 20},
        ),
        ("feddm:sec4.5", {"note": "ipc 3"}, {"method.ipc": 3}),
        ("fedaf:table4", {"method": "fedaf without cdc", "alpha": 0.1}, {"method.local_weight": 0}),
    ],
)
def test_presets_match_papers(name: str, filters: dict[str, Any], expected: dict[str, Any]) -> None:
    (cell,) = preset(name).select(**filters)
    sections = preset(name).settings(cell).to_mapping()
    selected = {key: sections[key.partition(".")[0]][key.partition(".")[2]] for key in expected}
    assert selected == expected


def test_final_models_of_one_training_share_run() -> None:
    """FedKF's two final models need only one training."""
    table = preset("fedkf:table5")
    aca, oca = (table.select(alpha=0.1, method=f"fedkf ({end})")[0] for end in ("aca", "oca"))
    assert run_hash(table.settings(aca)) == run_hash(table.settings(oca))
    assert (table.variant(aca), table.variant(oca)) == ("aca", "oca")
    other = preset("fedkf:table8").select(dataset="emnist-letters", method="fedkf (oca)")[0]
    assert run_hash(preset("fedkf:table8").settings(other)) == run_hash(table.settings(oca))
    assert run_hash(table.settings(aca, 1)) != run_hash(table.settings(aca, 0))


def test_settings_select_or_override_cells() -> None:
    sections, cell = preset_sections(
        preset("feddm:table2"),
        {"run": {"method": "scaffold", "rounds": 3}, "partition": {"alpha": 0.5}},
    )
    assert (cell.method, cell.dataset) == ("scaffold", "mnist")
    assert (sections["run"]["rounds"], sections["partition"]["alpha"]) == (3, 0.5)
    settings = {"data": {"dataset": "cifar10"}, "partition": {"alpha": 0.1}, "run": {"seed": 2}}
    sections, _ = preset_sections(preset("feddm:table2"), settings)
    assert resolve(sections) == load_preset("feddm:table2", dataset="cifar10", alpha=0.1, seed=2)
    with pytest.raises(PresetError, match=r"no results for alpha 0\.3\. Use 0\.1, 0\.01"):
        load_preset("feddm:table2", alpha=0.3)
    with pytest.raises(UnknownNameError, match="did you mean feddm:table2"):
        load_preset("feddm:tabel2")
    with pytest.raises(PresetError, match=r"fedkf:table4 .*cannot be run"):
        load_preset("fedkf:table4")


def test_method_names_select_all_variants() -> None:
    methods = [cell.method for cell in preset("fedkf:table5").select(alpha=0.1, method="fedkf")]
    assert methods == [f"{name} ({end})" for name in ("fedkf-", "fedkf") for end in ("aca", "oca")]
    assert main_cell(preset("fedprox:synthetic")).method == "fedprox"


def test_missing_tables_are_listed() -> None:
    listed = {(paper, table) for paper, table, _ in not_covered()}
    assert ("FedHydra", "Table 10") in listed
    tables = {(row["source"].split()[0], row["table"]) for row in published()}
    assert not listed & tables
