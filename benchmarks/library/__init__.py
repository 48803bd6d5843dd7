"""Shared parts of the benchmarks. Scripts import this and not each other."""

from pathlib import Path

RESULTS = Path(__file__).resolve().parent.parent / "results"
"""Finished rows, as JSON lines."""
