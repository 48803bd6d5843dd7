"""Shared parts of the benchmarks: rows of results, timing, options, and settings of several tables.

Scripts import this and not each other.
"""

from pathlib import Path

RESULTS = Path(__file__).resolve().parent.parent / "results"
"""Finished rows, as JSON lines."""
