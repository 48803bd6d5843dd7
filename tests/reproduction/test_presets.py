"""Published numbers, the presets of their tables, and which cell a call means."""

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


def test_every_table_has_a_preset_with_all_its_numbers() -> None:
    """Catches: a table of the file without a preset, and a number that no cell has."""
    own = {(preset(name).source, preset(name).table): name for name in preset_names()}
    tables = {(row["source"], row["table"]) for row in published()}
    assert tables <= set(own)
    for source, table in tables:
        rows = [row for row in published() if (row["source"], row["table"]) == (source, table)]
        cells = preset(own[source, table]).cells
        numbers = [number.value for cell in cells for number in cell.numbers]
        known = [value for value in numbers if value is not None]
        assert len(known) == len(numbers)
        assert sorted(known) == sorted(float(row["value"]) for row in rows), table


def test_every_cell_is_a_valid_run_or_states_the_reason() -> None:
    made = 0
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
        made += 1
    assert made > 700


def test_every_value_has_its_source() -> None:
    blocks = [block for name in preset_names() for block in preset(name).blocks]
    for block in blocks:
        assert block.sections or block.variant
        assert block.source.strip()
        if "chosen" in block.source and not block.source.startswith("not given in the "):
            assert ":" in block.source  # what is named, and what is chosen of it
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
def test_settings_of_papers(name: str, filters: dict[str, Any], expected: dict[str, Any]) -> None:
    (cell,) = preset(name).select(**filters)
    made = preset(name).settings(cell).to_mapping()
    found = {key: made[key.partition(".")[0]][key.partition(".")[2]] for key in expected}
    assert found == expected


def test_both_final_models_of_one_training_are_one_run() -> None:
    """Catches: a training for each of FedKF's two final models."""
    table = preset("fedkf:table5")
    aca, oca = (table.select(alpha=0.1, method=f"fedkf ({one})")[0] for one in ("aca", "oca"))
    assert run_hash(table.settings(aca)) == run_hash(table.settings(oca))
    assert (table.variant(aca), table.variant(oca)) == ("aca", "oca")
    other = preset("fedkf:table8").select(dataset="emnist-letters", method="fedkf (oca)")[0]
    assert run_hash(preset("fedkf:table8").settings(other)) == run_hash(table.settings(oca))
    assert run_hash(table.settings(aca, 1)) != run_hash(table.settings(aca, 0))


def test_what_is_given_chooses_the_cell_or_wins_over_it() -> None:
    sections, cell = preset_sections(
        preset("feddm:table2"),
        {"run": {"method": "scaffold", "rounds": 3}, "partition": {"alpha": 0.5}},
    )
    assert (cell.method, cell.dataset) == ("scaffold", "mnist")
    assert (sections["run"]["rounds"], sections["partition"]["alpha"]) == (3, 0.5)
    given = {"data": {"dataset": "cifar10"}, "partition": {"alpha": 0.1}, "run": {"seed": 2}}
    sections, _ = preset_sections(preset("feddm:table2"), given)
    assert resolve(sections) == load_preset("feddm:table2", dataset="cifar10", alpha=0.1, seed=2)
    with pytest.raises(PresetError, match=r"no cell with alpha 0\.3\. Use 0\.1, 0\.01"):
        load_preset("feddm:table2", alpha=0.3)
    with pytest.raises(UnknownNameError, match="did you mean feddm:table2"):
        load_preset("feddm:tabel2")
    with pytest.raises(PresetError, match=r"fedkf:table4 .*cannot be run"):
        load_preset("fedkf:table4")


def test_a_name_here_means_all_variants_of_a_method() -> None:
    found = [cell.method for cell in preset("fedkf:table5").select(alpha=0.1, method="fedkf")]
    assert found == [f"{name} ({end})" for name in ("fedkf-", "fedkf") for end in ("aca", "oca")]
    assert main_cell(preset("fedprox:synthetic")).method == "fedprox"


def test_what_the_file_lacks_is_listed() -> None:
    listed = {(paper, where) for paper, where, _ in not_covered()}
    assert ("FedHydra", "Table 10") in listed
    tables = {(row["source"].split()[0], row["table"]) for row in published()}
    assert not listed & tables
