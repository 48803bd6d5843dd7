"""How what a private run gives out is covered: by the ledger, because it is public, or not at all."""

from __future__ import annotations

ACCOUNTED = "accounted"
"""A release that went through a charged mechanism."""
RELEASED = "released"
"""Computed from such releases, and public values, alone."""
PUBLIC = "public"
"""The same whatever the private data are."""
SIMULATION_ONLY = "simulation-only"
"""An exact function of private data, which a simulation alone can show."""
UNACCOUNTED = "unaccounted"
"""A release that nothing accounts for."""
