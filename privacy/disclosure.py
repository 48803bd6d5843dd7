"""The classes of values that a private run outputs: accounted for by the ledger, public, or
unprotected.

The code that computes a value declares its class, the reason and its shape. A private run does not
output a value that is undeclared or has another shape.

The guarantee of each mechanism, or the reasons why it has none; defined only here.

Every private step releases through `GaussianSumMechanism`, whose theorem gives the guarantee for any
per-example vector. A mechanism that is not listed here (such as a custom method's) therefore has a
guarantee; one without a guarantee must be listed, with the reasons.
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
"""Independent of the private data."""
SIMULATION_ONLY = "simulation-only"
"""A function of private data that only a simulation can show; no guarantee covers it."""
UNACCOUNTED = "unaccounted"
"""A release that the ledger does not account for."""

NUMBER = bool | int | float
COUNT = Annotated[int, Field(ge=0)]
SHARE = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True)
class Disclosure:
    """The declared class and shape of a value.

    Args:
        kind: `RELEASED`, `PUBLIC` or `SIMULATION_ONLY`.
        reason: why it is of this kind.
        shape: the value's type, which pydantic checks strictly.
    """

    kind: str
    reason: str
    shape: Any = NUMBER

    @property
    def may_be_shown(self) -> bool:
        """True if the value may be shown publicly."""
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
        reason: why it depends on nothing else.
        shape: its type.

    >>> released("the accuracy of a released model").may_be_shown
    True
    """
    return Disclosure(RELEASED, reason, shape)


def public(reason: str, shape: Any = NUMBER) -> Disclosure:
    """Returns the disclosure of a value that does not depend on the private data.

    A method returns such values in `Method.planned_facts`; verification recomputes them.
    """
    return Disclosure(PUBLIC, reason, shape)


def simulation_only(reason: str) -> Disclosure:
    """Returns the disclosure of a function of private data, which only the operator of a
    simulation may see.

    >>> simulation_only("how long it took").may_be_shown
    False
    """
    return Disclosure(SIMULATION_ONLY, reason, Any)


@dataclass(frozen=True)
class MechanismFacts:
    """The facts about a mechanism that reports, ledgers and refusals state.

    Attributes:
        name: as in `PrivacySettings.mechanism`.
        reasons: why it has no guarantee; empty: its guarantee follows from its ledger rows.
        unaccounted: the short reason in those rows; None if it has a guarantee.
        accesses: other private data that its clients use, and how; no mechanism protects them.
        randomness: the source of its noise and samples, if it is not `fedsynth.privacy.randomness`.
    """

    name: str
    reasons: tuple[str, ...] = ()
    unaccounted: str | None = None
    accesses: tuple[tuple[str, str], ...] = ()
    randomness: str | None = None

    @property
    def guaranteed(self) -> bool:
        """True if its releases have an ε."""
        return not self.reasons

    @property
    def status(self) -> str:
        """The status of its releases in the report: accounted or unaccounted."""
        return ACCOUNTED if self.guaranteed else UNACCOUNTED


PAPER = MechanismFacts(
    name="paper",
    reasons=(
        "FedDM's Algorithm 1 clips the gradient of a batch, not of an example: the sensitivity is "
        "up to 2·clip instead of clip/|B|, and the effective noise multiplier is σ/(2|B|)",
        "the synthetic images start from real images, which is an unaccounted release",
        "only the classes that a client has are sent, which reveals these classes",
        "batches have a fixed size, a fraction of the private n_c, and are not Poisson "
        "samples; noise is divided by their sizes",
    ),
    unaccounted="FedDM's Algorithm 1 as printed",
    accesses=(
        ("real images as the start of the synthetic ones", "released as they are"),
        ("which classes a client has", "only those are sent"),
    ),
    randomness="noise from the operating system's entropy; batches from the run's seed",
)
_LISTED = {facts.name: facts for facts in (PAPER,)}


def mechanism_facts(name: str) -> MechanismFacts:
    """Returns the facts of the mechanism with this name.

    >>> mechanism_facts("residual").guaranteed, mechanism_facts("paper").guaranteed
    (True, False)
    """
    return _LISTED.get(name, MechanismFacts(name))
