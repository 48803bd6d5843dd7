"""Does bf16 cost accuracy? FedDM in fp32 and with `--precision bf16`, the same seeds in pairs, on
Fashion-MNIST at the size of `fashion_table`: real passes and the server's training.

Two runs that differ by rounding are soon as different as two seeds, so a difference between
precisions is to be compared with its own spread. The rows of FedKF and FedHydra are those of
`git show 04719c52:benchmarks/precision.py`.
"""

from __future__ import annotations

from dataclasses import replace

from grids.fashion_table import settings_for
from library.grid import Grid

GRID = Grid(
    axes={"seed": (0, 1, 2), "precision": ("fp32", "bf16")},
    key="FedDM {precision} seed={seed}",
    settings=lambda cell: replace(settings_for("feddm", cell.seed, cell), precision=cell.precision),
)
