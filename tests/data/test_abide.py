"""`examples/abide.py`, on files that the test writes as the Preprocessed Connectomes Project does."""

from __future__ import annotations

import csv
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import pearsonr

from fedsynth.data.own_data import load_records

SCRIPT: Any = runpy.run_path(f"{Path(__file__).parents[2]}/examples/abide.py")
RNG = np.random.default_rng(0)
Change = Callable[[np.ndarray[Any, Any], list[dict[str, str]]], Any]


def write(folder: Path, change: Change = lambda series, rows: None) -> np.ndarray[Any, Any]:
    """Writes seven subjects of two sites and one of another, and returns the last time series."""
    rows = []
    for number in range(8):
        site = ("NYU", "NYU", "UM_1", "UM_1", "UM_1", "UM_1", "UM_1", "Pitt")[number]
        name = f"{site}_005{number:04}"
        rows.append({"FILE_ID": name, "SITE_ID": site, "DX_GROUP": str(number % 2 + 1)})
        series = RNG.normal(50, 9, (34, 111))
        series[:, 7] = series[:, 3]  # a correlation of 1
        series[:32, 60] *= number != 5  # a constant region
        change(series, rows)
        file = folder / "Outputs" / "rois_ho" / f"{name}_rois_ho.1D"
        file.parent.mkdir(parents=True, exist_ok=True)
        header = "\t".join(f"#{region}" for region in range(2001, 2112))
        np.savetxt(file, series, "%.6f", "\t", header=header, comments="")
        if number == 6:
            last = series
    rows.append({"FILE_ID": "no_filename", "SITE_ID": "NYU", "DX_GROUP": "1"})
    with (folder / "Phenotypic_V1_0b_preprocessed1.csv").open("w", newline="") as table:
        writer = csv.DictWriter(table, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return last


def test_windows_become_records_of_sites(tmp_path: Path) -> None:
    series = write(tmp_path)
    output = tmp_path / "abide.npz"
    SCRIPT["convert"](tmp_path, output)
    with np.load(output) as arrays:
        assert arrays["train_x"].shape == (4 * 3, 6105)  # without the constant region
        assert arrays["test_patient"].tolist() == ["NYU_0050000"] * 3 + ["UM_1_0050002"] * 3
        x = arrays["train_x"][arrays["train_patient"] == "UM_1_0050006"]
    i, j = np.triu_indices(111, 1)
    for position in (0, 3000, 6104):  # the oracle is SciPy
        r = pearsonr(series[2:34, i[position]], series[2:34, j[position]])[0]
        assert x[2, position] == pytest.approx(np.log((1 + r) / (1 - r)) / 2, abs=1e-5)
    assert x.max() == pytest.approx(4)
    owned = load_records(output, bounds="-4,4")
    assert owned.names == ("NYU", "UM")
    assert owned.train.spec.class_names == ("autism", "control")
    assert owned.test is not None
    assert (len(owned.train), len(owned.test), len(owned.train.groups.unique())) == (12, 6, 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda series, rows: series.fill(np.nan), r"32 lines of 111 finite numbers"),
        (lambda series, rows: rows[-1].update(DX_GROUP="-9999"), "DX_GROUP of NYU_0050000"),
        (lambda series, rows: rows[-1].update(SITE_ID="KKI"), "at least two subjects"),
    ],
)
def test_invalid_files_are_refused(change: Change, message: str, tmp_path: Path) -> None:
    write(tmp_path, change)
    with pytest.raises(ValueError, match=message):
        SCRIPT["convert"](tmp_path, tmp_path / "abide.npz")
    assert not (tmp_path / "abide.npz").exists()
