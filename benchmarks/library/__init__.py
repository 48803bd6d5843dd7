"""Shared parts of the benchmarks. Scripts import this and not each other."""

from pathlib import Path

# Finished rows, as JSON lines.
RESULTS = Path(__file__).resolve().parent.parent / "results"
