"""Converts the preprocessed time series of ABIDE to vectors of correlations, as FedBN uses them.

    python examples/abide.py ABIDE abide.npz
    fedsynth train --data abide.npz --bounds=-4,4 --model mlp --method fedavg --rounds 20

The folder ABIDE contains `Phenotypic_V1_0b_preprocessed1.csv` and, in any subfolders, the files
`*_rois_ho.1D` of the Preprocessed Connectomes Project (pipeline cpac, strategy filt_noglobal). Its
download_abide_preproc.py and nilearn's `fetch_abide_pcp(derivatives=["rois_ho"])` write them.

As in Li et al., 2020 (arXiv 2001.05647), a record is a window of 32 time points of a subject: the
Pearson correlations of 111 regions of the Harvard-Oxford atlas, Fisher-transformed, of which the
upper triangle has 6105 values. Subjects with a region that is constant in a window are left out. The
four sites NYU, UM, USM and UCLA become clients. A fifth of each site's subjects is for testing.

The authors' public code (xxlya/Fed_ABIDE) shrinks the correlations (Ledoit-Wolf) and sets negative
ones to 0. This script does neither.

All windows of the four sites make a file of about 1.6 GB. With `--step 32`, windows do not overlap.
Records of a subject are alike: for differential privacy, set `--dp-unit user`.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

PHENOTYPES = "Phenotypic_V1_0b_preprocessed1.csv"
SITES = {"NYU": "NYU", "UM_1": "UM", "USM": "USM", "UCLA_1": "UCLA"}
DIAGNOSES = {"1": "autism", "2": "control"}
REGIONS = 111
WINDOW = 32  # time points
BOUND = 4.0  # of the transformed correlations: a correlation of 0.9993
FOLDS = 5


def vectors(series: npt.NDArray[np.float64], step: int = 1) -> Floats:
    """Returns the vectors [windows, 6105] of a time series [time points, 111].

    The result has no rows if a region is constant in a window.
    """
    upper = np.triu_indices(REGIONS, 1)
    windows = np.lib.stride_tricks.sliding_window_view(series, WINDOW, axis=0)[::step]
    if (np.ptp(windows, axis=2) == 0).any():
        return np.empty((0, len(upper[0])), np.float32)
    correlations = np.stack([np.corrcoef(window)[upper] for window in windows])
    limit = np.tanh(BOUND)
    return np.arctanh(correlations.clip(-limit, limit)).astype(np.float32)


def read_series(path: Path) -> npt.NDArray[np.float64]:
    """Reads the time series [time points, 111] of a file .1D, whose first line names the regions.

    Raises:
        ValueError: the file does not have finite numbers of 111 regions for a window.
    """
    series = np.loadtxt(path, ndmin=2)
    if series.shape[1] != REGIONS or len(series) < WINDOW or not np.isfinite(series).all():
        raise ValueError(
            f"{path} must have at least {WINDOW} lines of {REGIONS} finite numbers, got "
            f"{list(series.shape)}"
        )
    return series


def convert(folder: Path, output: Path, *, step: int = 1, fold: int = 0) -> None:
    """Writes the windows of all subjects to an .npz file with a training and a test split.

    Args:
        folder: the folder with the table of subjects and the time series.
        output: the file to write.
        step: the distance of two windows of a subject, in time points.
        fold: the fifth of each site's subjects that is for testing, 0 to 4.

    Raises:
        OSError: the table is missing, or a file cannot be read.
        ValueError: a file is invalid, the table does not have the published form, or there are too
            few subjects for a test split.
    """
    files = {path.name: path for path in sorted(folder.rglob("*_rois_ho.1D"))}
    subjects: dict[str, list[tuple[npt.NDArray[Any], ...]]] = {"train": [], "test": []}
    seen = dict.fromkeys(SITES, 0)
    with (folder / PHENOTYPES).open(encoding="utf-8", newline="") as table:
        for row in csv.DictReader(table):
            site, label, subject = (row.get(key, "") for key in ("SITE_ID", "DX_GROUP", "FILE_ID"))
            path = files.get(f"{subject}_rois_ho.1D")
            if site not in SITES or path is None:
                continue
            if label not in DIAGNOSES:
                raise ValueError(f"DX_GROUP of {subject} must be 1 or 2, got {label!r}")
            x = vectors(read_series(path), step)
            if not len(x):
                print(f"left out, because a region is constant: {subject}")
                continue
            facts = (DIAGNOSES[label], SITES[site], subject)
            split = "test" if seen[site] % FOLDS == fold else "train"
            subjects[split].append((x, *(np.full(len(x), fact) for fact in facts)))
            seen[site] += 1
    if not (subjects["train"] and subjects["test"]):
        raise ValueError(f"{folder} must have at least two subjects of a site, with their files")
    arrays: dict[str, Any] = {}
    for split, rows in subjects.items():
        columns = zip(*rows, strict=True)
        for name, parts in zip(("x", "y", "site", "patient"), columns, strict=True):
            arrays[f"{split}_{name}"] = np.concatenate(parts)
    np.savez(output, **arrays)
    print(f"subjects: {', '.join(f'{SITES[site]} {n}' for site, n in seen.items())}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Converts ABIDE to vectors.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--step", type=int, default=1, choices=range(1, WINDOW + 1))
    parser.add_argument("--fold", type=int, default=0, choices=range(FOLDS))
    arguments = parser.parse_args()
    convert(arguments.folder, arguments.output, step=arguments.step, fold=arguments.fold)
