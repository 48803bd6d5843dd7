"""Which cell of a published table a call means, and the settings of its run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedsynth.federation.terms.settings import RunSettings
from fedsynth.reproduction.preset_files import preset
from fedsynth.reproduction.presets import Cell, Preset, over
from fedsynth.reproduction.words import PresetError, Sections


def load_preset(
    name: str,
    *,
    dataset: str | None = None,
    partition: str | None = None,
    alpha: float | None = None,
    clients: int | None = None,
    rounds: int | None = None,
    method: str | None = None,
    note: str | None = None,
    seed: int = 0,
    changes: Mapping[str, Mapping[str, Any]] | None = None,
) -> RunSettings:
    """The settings of a published table's run, as `fedsynth train --preset` has them.

    Args:
        name: the table's preset ("feddm:table2"; `fedsynth reproduce --list` names them).
        dataset, partition, alpha, clients, rounds, method, note: which cell of the table, see
            `Preset.select`; of several that fit, the first of the paper's own method, or else the
            first.
        seed: of everything that is reproducible.
        changes: sections of settings over the preset's, as `resolve` takes them.

    Raises:
        UnknownNameError: no such preset.
        PresetError: no cell fits, or the cell cannot be run here.

    >>> settings = load_preset("feddm:table2", dataset="cifar10", alpha=0.1)
    >>> settings.method.name, settings.method.ipc, settings.rounds, settings.partition.alpha
    ('feddm', 10, 20, 0.1)
    >>> load_preset("feddm:table2", method="scaffold", changes={"run": {"rounds": 5}}).rounds
    5
    """
    table = preset(name)
    cell = chosen_cell(
        table,
        dataset=dataset,
        partition=partition,
        alpha=alpha,
        clients=clients,
        rounds=rounds,
        method=method,
        note=note,
    )
    return table.settings(cell, seed, changes)


def chosen_cell(table: Preset, **filters: Any) -> Cell:
    """The first of the table's cells that fit: of the paper's own method, if it is among them."""
    fitting = table.select(**filters)
    own = table.name.partition(":")[0]
    runnable = [cell for cell in fitting if not table.refusal(cell)] or list(fitting)
    named = [cell for cell in runnable if cell.method == own]
    variants = [cell for cell in runnable if cell.method.startswith(own)]
    return (named or variants or runnable)[0]


def sections_over(
    name: str, given: Mapping[str, Mapping[str, Any]]
) -> tuple[Sections, Preset, Cell]:
    """A preset's settings under those that are given, and which cell they are of.

    What is given selects the cell as far as it can: the data set and the method have to be the
    table's, and are its words or names here; alpha, the number of clients and that of rounds
    select if a cell has them. Whatever is given wins over the cell's own.

    Args:
        name: the table's preset.
        given: sections of settings, without None.

    Raises:
        UnknownNameError: no such preset.
        PresetError: the table has no such data set or method, or the cell cannot be run.
    """
    table = preset(name)
    places = {
        "dataset": ("data", "dataset"),
        "method": ("run", "method"),
        "alpha": ("partition", "alpha"),
        "clients": ("partition", "clients"),
        "rounds": ("run", "rounds"),
    }
    filters: dict[str, Any] = {}
    for column, (section, key) in places.items():
        value = given.get(section, {}).get(key)
        if value is None:
            continue
        try:
            table.select(**{**filters, column: value})
        except PresetError:
            if column in ("dataset", "method"):
                raise
        else:
            filters[column] = value
    cell = chosen_cell(table, **filters)
    words = {("data", "dataset"), ("run", "method")}  # the cell's own, by their names here
    rest = {
        section: {k: v for k, v in values.items() if (section, k) not in words}
        for section, values in given.items()
    }
    return over(table.sections(cell), rest), table, cell
