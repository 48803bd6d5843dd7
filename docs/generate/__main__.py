"""Writes the generated pages and prints their number: `python docs/generate`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # docs/, for `generate`

from generate import GENERATED, write_all

print(f"{len(write_all())} pages in {GENERATED}")
