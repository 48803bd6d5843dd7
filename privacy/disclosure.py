"""How what a private run gives out is covered: by the ledger, because it is public, or not at all.

Whoever makes a value declares it, with the reason. What nobody declared does not leave a private run.
"""

from __future__ import annotations

from dataclasses import dataclass

ACCOUNTED = "accounted"
"""A release that went through a charged mechanism."""
RELEASED = "released"
"""Computed from such releases, and public values, alone."""
PUBLIC = "public"
"""The same whatever the private data are."""
SIMULATION_ONLY = "simulation-only"
"""A function of private data, which a simulation alone can show; outside every guarantee."""
UNACCOUNTED = "unaccounted"
"""A release that nothing accounts for."""


@dataclass(frozen=True)
class Disclosure:
    """What a value is.

    Args:
        kind: `RELEASED`, `PUBLIC` or `SIMULATION_ONLY`.
        reason: why.
    """

    kind: str
    reason: str

    @property
    def shown(self) -> bool:
        """Whether it may be shown to anybody."""
        return self.kind in (RELEASED, PUBLIC)


def released(reason: str) -> Disclosure:
    """Of a value that is computed from released and public values alone.

    >>> released("the accuracy of a released model").shown
    True
    """
    return Disclosure(RELEASED, reason)


def public(reason: str) -> Disclosure:
    """Of a value that is the same whatever the private data are."""
    return Disclosure(PUBLIC, reason)


def simulation_only(reason: str) -> Disclosure:
    """Of a function of private data, which nobody but whoever runs a simulation may see.

    >>> simulation_only("how long it took").shown
    False
    """
    return Disclosure(SIMULATION_ONLY, reason)
