"""Sweeps and published tables. The names exported below are stable (docs/sweeps.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedsynth._lazy_import import lazy_exports

if TYPE_CHECKING:
    from fedsynth.experiments.runner import Shard as Shard
    from fedsynth.experiments.runner import run_sweep as run_sweep
    from fedsynth.experiments.selection import select_privately as select_privately
    from fedsynth.experiments.sweep import read_sweep as read_sweep
    from fedsynth.experiments.sweep import render as render
    from fedsynth.experiments.sweep import sweep_rows as sweep_rows
else:
    __all__, __getattr__, __dir__ = lazy_exports(__name__, __file__)
