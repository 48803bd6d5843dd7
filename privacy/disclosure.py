"""How what a private run gives out is covered: by the ledger, because it is public, or not at all.

The code that makes a value declares it, with the reason and its shape. A value that nobody
declared, or of another shape, does not leave a private run.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

ACCOUNTED = "accounted"
"""A release that went through a charged mechanism."""
RELEASED = "released"
"""Computed only from such releases and public values."""
PUBLIC = "public"
"""The same whatever the private data are."""
SIMULATION_ONLY = "simulation-only"
"""A function of private data, which only a simulation can show; outside every guarantee."""
UNACCOUNTED = "unaccounted"
"""A release that nothing accounts for."""

NUMBER = bool | int | float
COUNT = Annotated[int, Field(ge=0)]
SHARE = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True)
class Disclosure:
    """What a value is.

    Args:
        kind: `RELEASED`, `PUBLIC` or `SIMULATION_ONLY`.
        reason: why.
        shape: the value's type, as pydantic checks it strictly.
    """

    kind: str
    reason: str
    shape: Any = NUMBER

    @property
    def shown(self) -> bool:
        """Whether it may be shown to anybody."""
        return self.kind in (RELEASED, PUBLIC)

    def fits(self, value: object) -> bool:
        """Returns whether a value has the declared shape.

        >>> shares = released("shares of released counts", list[SHARE])
        >>> shares.fits([0.5, 0.5]), shares.fits([312.0]), released("a count").fits({"n": 1})
        (True, False, False)
        """
        try:
            _adapter(self.shape).validate_python(value)
        except (ValidationError, RecursionError):
            return False
        return True


@lru_cache
def _adapter(shape: Any) -> TypeAdapter[Any]:
    return TypeAdapter(shape, config=ConfigDict(strict=True, allow_inf_nan=False))


def released(reason: str, shape: Any = NUMBER) -> Disclosure:
    """Returns the disclosure of a value that is computed only from released and public values.

    Args:
        reason: why it is.
        shape: its type.

    >>> released("the accuracy of a released model").shown
    True
    """
    return Disclosure(RELEASED, reason, shape)


def public(reason: str, shape: Any = NUMBER) -> Disclosure:
    """Returns the disclosure of a value that is the same whatever the private data are.

    A method gives such facts in `Method.planned_facts`, where verification computes them again.
    """
    return Disclosure(PUBLIC, reason, shape)


def simulation_only(reason: str) -> Disclosure:
    """Returns the disclosure of a function of private data, which only the operator of a
    simulation may see.

    >>> simulation_only("how long it took").shown
    False
    """
    return Disclosure(SIMULATION_ONLY, reason, Any)
